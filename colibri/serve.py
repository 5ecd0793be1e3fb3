"""The options of a server, and its start. What they start is imported when it is wanted: other runs do without."""

from colibri import build
from colibri.errors import ColibriError
from colibri.program import choice, integer

QUEUE_SIZE = 64
MAX_QUEUE_SIZE = 1 << 20
DRAIN_SECONDS = 30
MAX_DRAIN_SECONDS = 86400
FORMATS = ("text", "json")
OPTIONS = ("queue_size", "prefill_chunk", "drain", "log_format", "log_prompts", "api_key_file",
           "cors")  # only with --serve or --http


def add_options(parser):
    """Adds the service's options."""
    add = parser.add_argument_group("service").add_argument
    add("--serve", metavar="-|HOST:PORT|unix:PATH",
        help="answer requests, JSON a line, of stdin or of a socket's clients")
    add("--http", metavar="HOST:PORT", help="GET /health /ready /metrics, POST /v1/completions /v1/chat/completions")
    add("--api-key-file", metavar="FILE", help="keys, one a line: --http answers only to who has one of them")
    add("--cors", metavar="ORIGIN", action="append",
        help="web pages of this origin may use --http; * for any, several times for several")
    add("--queue-size", type=integer(0, MAX_QUEUE_SIZE), metavar="N",
        help=f"requests that may wait for a slot (default {QUEUE_SIZE}); there are --batch-size slots")
    add("--prefill-chunk", type=integer(1), metavar="N",
        help="tokens of a prompt between two steps of the others (default: 4 on the host, 256 on a GPU); up to 64, "
             "more of them where many decode")
    add("--drain", type=integer(0, MAX_DRAIN_SECONDS), metavar="SECONDS",
        help=f"to finish what runs after SIGTERM or Ctrl-C (default {DRAIN_SECONDS})")
    add("--log-format", type=choice(FORMATS), metavar="|".join(FORMATS),
        help="of stderr, a line a request")
    add("--log-prompts", action="store_true", default=None, help="show the prompts in the log")


def check_options(options):
    """Puts the defaults in place of what was left out."""
    from colibri.access import check_origin, read_keys
    from colibri.listen import split
    if options.serve not in (None, "-") and not options.serve.startswith("unix:"):
        split("--serve", options.serve)
    if options.http is not None:
        split("--http", options.http)
        import colibri.http  # noqa: F401 - that what it needs is installed
    for name in ("api_key_file", "cors", "tool_format"):
        if getattr(options, name) is not None and options.http is None:
            raise ColibriError(f"--{name.replace('_', '-')}", "given", "only with --http", "leave it out")
    for origin in options.cors or ():
        check_origin(origin)
    options.keys = read_keys(options.api_key_file) if options.api_key_file is not None else ()
    for name, default in (("queue_size", QUEUE_SIZE), ("drain", DRAIN_SECONDS), ("log_format", FORMATS[0]),
                          ("log_prompts", False), ("cors", ())):
        if getattr(options, name) is None:
            setattr(options, name, default)


def serve(engine, options):
    """Serves until a signal, or the end of stdin with --serve -."""
    import asyncio

    from colibri.sampling import draw
    from colibri.scheduler import PREFILL_CHUNK
    from colibri.server import Server
    if options.prefill_chunk is None:
        options.prefill_chunk = min(PREFILL_CHUNK["host" if engine.path.startswith("host") else "cuda"],
                                    engine.max_tokens)
    if options.prefill_chunk > engine.max_tokens:
        raise ColibriError("--prefill-chunk", options.prefill_chunk,
                           f"at most {engine.max_tokens}, "
                           f"{build.raise_limit('MAX_STEP_TOKENS', options.prefill_chunk)}")
    draw(0, 0)  # imports numpy.random, which would hold up the first step that samples
    main = Server(engine, options).main()
    try:
        asyncio.run(main)
    except RuntimeError as error:  # Python has no kind of its own for it
        if "new thread" not in str(error):
            raise
        raise ColibriError("service", "no thread to start", "a few",
                           "raise the limits of processes and memory (ulimit -u and -v)") from None
    finally:
        main.close()  # where there was no loop for it
