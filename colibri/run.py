"""The command line: python -m colibri.run --model model.bin ..."""

import os
import sys

from colibri.errors import ColibriError
from colibri.program import Parser, choice, guard_imports, integer, number, of_system, writing_stdout

if __name__ == "__main__":  # during the imports
    guard_imports("python -m colibri.run")
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # numpy's threads have no work here, and take memory

import json

import numpy as np

from colibri import __version__, build, program, report, score, serve
from colibri.arrays import check_output, check_regular, check_rows, read_array, write_array
from colibri.capacity import MAX_CONTEXT
from colibri.checkpoint import Checkpoint
from colibri.dialogue import Dialogue
from colibri.engine import Engine
from colibri.library import BACKENDS, DISPATCH
from colibri.opened import MAX_SLOTS
from colibri.sampling import Sampler, check_sampler
from colibri.text import Pieces, codec
from colibri.tool_formats import FORMATS
from colibri.weights import most_threads

USAGE = """python -m colibri.run --model FILE [options]
       python -m colibri.run --doctor [--model FILE]"""

DESCRIPTION = """\
Runs a model. Five kinds of run, each ending in a table of its figures:
  --prompt TEXT    text: the continuation streams to stdout (--prompt-ids: token
                   numbers, in and out)
  --chat           a conversation: a line is a message, its answer streams to
                   stdout
  --score FILE     the log-likelihood, perplexity and bits a byte of a text, in
                   pieces of the context
  --input X.npy --output Y.npy
                   a bare stack of MoE layers: hidden states in and out
  neither          latency: random tokens, prefilled, then decoded, timed
and a service: --serve and --http answer requests until a signal"""

EXAMPLES = """\
examples:
  python -m colibri.run --model moe-32.bin --prompt "It was the custom of "
  python -m colibri.run --model moe-32.bin --prompt @chapter.txt \\
      --temperature 0.8 --top-p 0.9 --seed 7
  python -m colibri.run --model qwen3.bin --chat --system "Answer briefly."
  python -m colibri.run --model moe-32.bin --batch-size 8 --seq-len 256 --json
  python -m colibri.run --model moe-32.bin --score chapter.txt
  python -m colibri.run --model stack.bin --input x.npy --output y.npy
  python -m colibri.run --model moe-32.bin --serve :8041 --http :8042"""

TEXT_OPTIONS = ("temperature", "top_k", "top_p")
CHAT_OPTIONS = ("chat", "system")
LATENCY_OPTIONS = ("batch_size", "seq_len", "warmup", "repeat")
NEW_TOKENS = {"text": 200, "latency": 16}
PROMPT_BYTES = 16 << 20  # that are read, so that an endless pipe does not take all memory; no context is as long


def parse(arguments):
    parser = Parser("colibri.run", usage=USAGE, description=DESCRIPTION, epilog=EXAMPLES)
    _add_options(parser)
    _add_text_options(parser.add_argument_group("text run").add_argument)
    _add_latency_options(parser.add_argument_group("latency run").add_argument)
    _add_stack_options(parser.add_argument_group("stack run").add_argument)
    serve.add_options(parser)
    options = parser.parse_args(arguments)
    if options.doctor:
        _check_doctor(options, parser)
        from colibri import doctor
        text, is_ready = doctor.report(options.model)
        _print(text)
        parser.exit(0 if is_ready else 2)
    if options.model is None:
        parser.error("the following arguments are required: --model")
    is_text = options.prompt is not None or options.prompt_ids is not None
    options.kind = ("score" if options.score is not None else "chat" if options.chat else "text" if is_text else
                    "latency")
    if options.kind == "latency" and (options.input, options.output) != (None, None):
        options.kind = "stack"
    if options.serve is not None or options.http is not None:
        options.kind = "serve"
    _check_kind(options)
    _check_sampling(options)
    if options.kind == "serve":
        serve.check_options(options)
    return options


def _add_options(parser):
    """Adds the options of every kind of run."""
    add = parser.add_argument
    add("--model", metavar="FILE", help="the .bin that python -m converter wrote")
    add("--doctor", action="store_true", help="what this machine has and lacks, for the model or for any, then exit")
    add("--version", action="version", version=f"colibri {__version__}")
    add("--backend", type=choice(BACKENDS), default="auto", metavar="|".join(BACKENDS),
        help="auto takes a GPU where there is one, and says why not otherwise")
    add("--dispatch", type=choice(DISPATCH), metavar="|".join(DISPATCH),
        help="how a GPU's steps are launched: one graph a size (default), one a combination of experts, or no graphs")
    add("--context", type=integer(1, MAX_CONTEXT), metavar="N",
        help="the most tokens of a sequence (default: the model's own positions, or as many as memory holds)")
    add("--precapture", action="store_true", help="make a GPU's graphs for decoding ahead, not when first needed")
    add("--threads", type=integer(1, most_threads()), metavar="N",
        help="host threads (default: all processors; at most 4 for each of them)")
    add("--num-experts", type=integer(1), metavar="N", help="check: the model must have so many experts")
    add("--k", type=integer(1), metavar="N", help="check: the model must use so many experts a token")
    add("--no-build", action="store_true", help="never run make: a library that is not there is an error")
    add("--json", action="store_true", help="the figures (and the text) as JSON on stdout, nothing else there")
    add("--seed", type=integer(0), metavar="N", help="of sampling and of random input (default 0)")
    add("--max-new-tokens", type=integer(1), metavar="N",
        help=f"tokens to generate (default {NEW_TOKENS['text']}, or {NEW_TOKENS['latency']} in a latency run, "
             "or what fits the context)")


def _add_text_options(add):
    add("--prompt", metavar="TEXT|@FILE|-", help="the text to continue, a file of it, or - for stdin")
    add("--prompt-ids", metavar="17,4,25|@FILE|-", help="the same as token numbers, in and out")
    add("--score", metavar="FILE|-", help="a text whose tokens' natural log-probabilities are added up; - for stdin")
    add("--chat", action="store_true", default=None, help="a conversation: lines of the terminal, or of stdin")
    add("--system", metavar="TEXT", help="what a conversation begins with: who the model is, how it answers")
    add("--tool-format", type=choice(FORMATS), metavar="NAME",
        help=f"how the model writes calls of tools, with --chat or --http: {', '.join(FORMATS)} (default: as its chat "
             "template has it)")
    add("--temperature", type=number(), metavar="X",
        help="0 is greedy (default: as the model's authors set it, else 0)")
    add("--top-k", type=integer(-1), metavar="N", help="draw from the N likeliest; 0 or -1: all")
    add("--top-p", type=number(), metavar="X", help="draw from the likeliest that together reach X; 1: all")


def _add_latency_options(add):
    add("--batch-size", type=integer(1, MAX_SLOTS), metavar="N", help="sequences at once (default 1)")
    add("--seq-len", type=integer(2), metavar="N",
        help="tokens of a sequence, of which the last --max-new-tokens are generated (default 128)")
    add("--warmup", type=integer(0), metavar="N", help="rounds not counted (default 1)")
    add("--repeat", type=integer(1), metavar="N", help="rounds counted (default 10)")


def _add_stack_options(add):
    add("--input", metavar="X.npy", help="float32 or float16 [tokens, hidden]")
    add("--output", metavar="Y.npy", help="float32 of the same shape, written when complete")


def _check_doctor(options, parser):
    for name, value in vars(options).items():
        if name not in ("doctor", "model") and value != parser.get_default(name):
            raise ColibriError(f"--{name.replace('_', '-')}", "given with --doctor",
                               "nothing but --doctor and --model", "leave it out")


def _check_kind(options):
    """Refuses an option that the kind of run would ignore."""
    if options.kind == "stack" and not (options.input and options.output):
        given, missing = ("--input", "--output") if options.input else ("--output", "--input")
        raise ColibriError(missing, "missing", f"with {given}", "hidden states go from --input to --output")
    if options.prompt is not None and options.prompt_ids is not None:
        raise ColibriError("--prompt-ids", "given", "only without --prompt", "leave one of them out")
    if options.kind == "stack" and os.path.realpath(options.input) == os.path.realpath(options.output):
        raise ColibriError("--output", options.output, "another file than --input", "choose another name")
    other = ("prompt", "prompt_ids", "input", "output")
    read = (*TEXT_OPTIONS, "max_new_tokens")
    foreign = {"text": LATENCY_OPTIONS + ("input", "output"), "latency": TEXT_OPTIONS,
               "chat": LATENCY_OPTIONS + other, "stack": LATENCY_OPTIONS + read,
               "score": LATENCY_OPTIONS + other + read,
               "serve": (*other, "score", *CHAT_OPTIONS, *read, "seed", "json", *LATENCY_OPTIONS[1:])}
    places = {"text": "without --prompt", "latency": "with --prompt or --chat", "chat": "without --chat",
              "score": "without --score", "stack": "without --input", "serve": "without --serve and --http"}
    for names, place in ((foreign[options.kind], places[options.kind]),
                         (CHAT_OPTIONS if options.kind not in ("chat", "serve") else (), "with --chat"),
                         (("tool_format",) if options.kind not in ("chat", "serve") else (), "with --chat or --http"),
                         (serve.OPTIONS if options.kind != "serve" else (), "with --serve or --http")):
        for name in names:
            if getattr(options, name) not in (None, False):
                raise ColibriError(f"--{name.replace('_', '-')}", "given", f"only {place}", "leave it out")


def _check_sampling(options):
    """Checks the options of sampling, and makes the seed of it and of random input."""
    options.seed = options.seed or 0
    given = {name: getattr(options, name) for name in TEXT_OPTIONS if getattr(options, name) is not None}
    check_sampler(Sampler(**given, seed=options.seed), "--")


def choose_sampler(options, checkpoint):
    """Makes options.sampler: of the options, else as the model's authors set it, else greedy; and sampling_is, in
    words. Refuses --top-k and --top-p where output is greedy.
    """
    given = {name: getattr(options, name) for name in TEXT_OPTIONS if getattr(options, name) is not None}
    options.sampler = Sampler(**{**checkpoint.settings.sampling, **given}, seed=options.seed)
    for name in TEXT_OPTIONS[1:]:
        if name in given and not options.sampler.temperature:
            raise ColibriError(f"--{name.replace('_', '-')}", "given",
                               "only with --temperature above 0, without which the likeliest token is taken",
                               "give --temperature 1, or leave it out")
    words = [f"{name} {value:g}{'' if name in given else ' (the model)'}"
             for name, value in options.sampler._asdict().items() if name in {**checkpoint.settings.sampling, **given}]
    options.sampling_is = ", ".join([*words, f"seed {options.seed}"]) if options.sampler.temperature else "greedy"


def main(arguments=None):
    if sys.stdout is None:
        raise ColibriError("stdout", "closed", "open for the results")
    options = parse(arguments)
    try:
        run(options)
    except (ColibriError, OSError) as error:
        error = error if isinstance(error, ColibriError) else of_system(error)
        if options.log_format == "json":
            from colibri.log import in_json
            error = ColibriError(in_json("fault", error=str(error)))
        raise error from None


def run(options):
    checkpoint = Checkpoint(options.model)
    for name in ("num_experts", "k"):
        wanted = getattr(options, name)
        if wanted is not None and wanted != checkpoint.header[name]:
            raise ColibriError(f"--{name.replace('_', '-')}", wanted,
                               f"{checkpoint.header[name]} as in {options.model}",
                               "the model decides, leave the option out")
    process_seconds = report.process_age()
    if options.kind == "serve":
        serve_model(options, checkpoint)
        return
    run_kind = {"text": run_text, "chat": run_chat, "score": run_score, "stack": run_stack,
                "latency": run_latency}[options.kind]
    prepared = prepare(options, checkpoint)
    with Engine(checkpoint, options.backend, options.threads, options.batch_size or 1, not options.no_build,
                dispatch=options.dispatch, context=options.context) as engine:
        if options.precapture:
            engine.precapture()
        meter = report.Meter(engine, process_seconds)
        extra = run_kind(engine, options, meter, prepared)
        if not meter.ttft:  # a conversation without a word
            return
        figures = {**extra, **meter.figures()}
    _print(json.dumps(figures) if options.json else report.table(figures))


def serve_model(options, checkpoint):
    with Engine(checkpoint, options.backend, options.threads, options.batch_size, not options.no_build,
                dispatch=options.dispatch, context=options.context) as engine:
        _check_batch_size(engine.num_slots, engine)
        if options.precapture:
            engine.precapture()
        serve.serve(engine, options)


def _check_batch_size(batch_size, engine):
    max_batch = engine.library.baked["max_batch"]
    if batch_size > max_batch:
        raise ColibriError("--batch-size", batch_size,
                           f"at most {max_batch}, {build.raise_limit('MAX_BATCH', batch_size, engine.max_tokens)}")


def prepare(options, checkpoint):
    """Returns (codec, tokens), a Dialogue or the array: wrong input is found before a library is built."""
    if options.kind in ("text", "chat"):
        choose_sampler(options, checkpoint)
    if options.kind == "chat":
        return Dialogue(checkpoint, options)
    if options.kind == "text":
        is_numbers = options.prompt is None
        used = codec(checkpoint, is_numbers)
        option = "--prompt-ids" if is_numbers else "--prompt"
        return used, used.encode(read_prompt(option, options.prompt_ids if is_numbers else options.prompt))
    if options.kind == "score":
        name = options.score
        return score.tokens_of(codec(checkpoint, False), read_prompt("--score", name if name == "-" else f"@{name}"))
    if options.kind != "stack":
        return None
    check_output(options.output, "--output")
    return read_array(options.input, checkpoint)


def read_prompt(option, prompt):
    """Returns the bytes that an option's TEXT, @FILE or - stands for; --score's is a FILE, in errors too."""
    shown, limit = ((prompt.removeprefix("@"), "fewer; score it in parts") if option == "--score" else
                    (prompt, "what fits the context; use fewer"))
    try:
        if prompt == "-" and sys.stdin is None:
            raise ColibriError(option, "-: stdin is closed", "text there")
        if prompt == "-":
            text = sys.stdin.buffer.read(PROMPT_BYTES + 1)
        elif prompt.startswith("@"):
            check_regular(prompt[1:], f"{option}: {shown}", f"of text, or {option} - for what comes through a pipe")
            with open(prompt[1:], "rb") as file:
                text = file.read(PROMPT_BYTES + 1)
        else:
            text = os.fsencode(prompt)
    except OSError as error:
        raise ColibriError(option, f"{shown}: {error.strerror}", "a file of text") from None
    if len(text) > PROMPT_BYTES:
        raise ColibriError(option, f"more than {PROMPT_BYTES} bytes", *limit.split("; "))
    if not text:
        raise ColibriError(option, "0 bytes", "at least 1", "the model needs something to continue")
    return text


def run_text(engine, options, meter, prepared):
    used, prompt = prepared
    sampler = options.sampler
    if len(prompt) > engine.context:
        raise ColibriError("--prompt", used.count(prompt), f"at most {engine.context_rule(len(prompt))}")
    room = engine.room(len(prompt))
    count = options.max_new_tokens or min(NEW_TOKENS["text"], room)
    if count > room:
        raise ColibriError("--max-new-tokens", count,
                           f"at most {room} after a prompt of {used.count(prompt)} in a context of "
                           f"{engine.context_rule(len(prompt) + count - 1)}")
    pieces, new_tokens = Pieces(used, prompt), 0
    with engine.session() as session:
        tokens = meter.prefill(len(prompt), engine.step, [(session, prompt)], [sampler])
        while tokens[0] not in engine.checkpoint.eos:
            _show(pieces.add(tokens[0]), options)
            new_tokens += 1
            if new_tokens == count:
                break
            tokens = meter.decode(1, engine.step, [(session, tokens)], [sampler])
    _show(pieces.rest(), options)
    if not options.json:
        _print("\n")
    return {"text": pieces.text(), "prompt_tokens": len(prompt), "new_tokens": new_tokens, **_drawn(sampler),
            "sampling_is": options.sampling_is}


def _drawn(sampler):
    """Returns what options say of it."""
    return {name: getattr(sampler, name) for name in (*TEXT_OPTIONS, "seed")}


def run_chat(engine, options, meter, dialogue):
    if sys.stdin is None:
        raise ColibriError("--chat", "stdin is closed", "lines of text there")
    dialogue.run(engine, meter, options.sampler)
    if not options.json and dialogue.counts["turns"]:
        _print("")
    return {"messages": dialogue.messages, **dialogue.counts, **_drawn(options.sampler),
            "sampling_is": options.sampling_is}


def run_score(engine, options, meter, prepared):
    tokens, num_bytes = prepared
    return score.figures(score.scores(engine, tokens, meter, lambda pieces: _progress(pieces, "piece")), num_bytes)


def _print(text, end="\n"):
    with writing_stdout():
        print(text, end=end)


@writing_stdout()
def _show(piece, options):
    if piece and not options.json:
        sys.stdout.buffer.write(piece.encode())
        sys.stdout.buffer.flush()


def run_latency(engine, options, meter, _):
    header = engine.checkpoint.header
    batch_size, seq_len = options.batch_size or 1, options.seq_len or 128
    new_tokens = options.max_new_tokens or min(NEW_TOKENS["latency"], seq_len - 1)
    _check_batch_size(batch_size, engine)
    if seq_len > engine.context:
        raise ColibriError("--seq-len", seq_len, f"at most {engine.context_rule(seq_len)}")
    if new_tokens >= seq_len:
        raise ColibriError("--max-new-tokens", new_tokens, f"fewer than --seq-len {seq_len}, which counts them",
                           "lower it")
    warmup = 1 if options.warmup is None else options.warmup
    repeat = options.repeat or 10
    generator = np.random.default_rng(options.seed)
    one_round = _token_round if header["vocab_size"] else _stack_round
    for index in _progress(range(warmup + repeat), "round"):
        if index == warmup:
            meter.restart()
        one_round(engine, meter, generator, batch_size, seq_len - new_tokens, new_tokens)
    return {"batch_size": batch_size, "seq_len": seq_len, "new_tokens": new_tokens, "warmup": warmup, "repeat": repeat,
            "seed": options.seed}


def _token_round(engine, meter, generator, batch_size, prompt_len, new_tokens):
    """Prefills random prompts at once, then generates one token a step for every sequence."""
    sessions = [engine.session() for _ in range(batch_size)]
    prompts = generator.integers(0, engine.checkpoint.header["vocab_size"], (batch_size, prompt_len), dtype=np.int32)
    samplers = [Sampler()] * batch_size
    tokens = meter.prefill(prompts.size, engine.step, list(zip(sessions, prompts)), samplers)
    for _ in range(new_tokens - 1):
        work = [(session, [token]) for session, token in zip(sessions, tokens)]
        tokens = meter.decode(batch_size, engine.step, work, samplers)
    for session in sessions:
        session.close()


def _stack_round(engine, meter, generator, batch_size, prompt_len, new_tokens):
    """Does the same with hidden states: random rows of the same counts."""
    hidden = engine.checkpoint.header["hidden"]
    x = generator.standard_normal((batch_size * prompt_len, hidden), dtype=np.float32)
    meter.prefill(len(x), engine.stack, x)
    for _ in range(new_tokens - 1):
        x = generator.standard_normal((batch_size, hidden), dtype=np.float32)
        meter.decode(batch_size, engine.stack, x)


def _progress(items, unit):
    """Returns the items, with a bar on a terminal when they take longer than two seconds."""
    if not sys.stderr.isatty():
        return items
    from tqdm import tqdm  # 30 ms that a run without a terminal does not need
    return tqdm(items, delay=2, leave=False, unit=unit)


def run_stack(engine, options, meter, x):
    engine.library.watch(options.input, x)
    try:
        y = np.empty(x.shape, np.float32)
    except MemoryError:
        raise ColibriError(options.input, f"shape={x.shape}", "a result that fits the memory", "split it") from None
    for start in range(0, len(x), engine.max_tokens):
        rows = x[start:start + engine.max_tokens]
        check_rows(options.input, rows, start)
        y[start:start + len(rows)] = meter.prefill(len(rows), engine.stack, rows)
    write_array(options.output, y)
    return {"tokens": len(x)}


def command():
    """Runs main() as a program and returns its exit status."""
    return program.run(main)


if __name__ == "__main__":
    sys.exit(command())
