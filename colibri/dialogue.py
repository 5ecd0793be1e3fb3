"""A conversation with a model: a line of the terminal, or of stdin, is a message, and its answer streams to stdout."""

import contextlib
import signal
import sys

from colibri.chat import Chat, Conversation, transcript
from colibri.errors import ColibriError
from colibri.parts import CONTENT, REASONING, Parts
from colibri.program import writing_stdout
from colibri.reading import Reading
from colibri.stops import Stops
from colibri.text import codec

LINE_BYTES = 16 << 20  # that are read of a line, which no context holds
PLAIN_TOKENS = 200     # of an answer where the model has no template, and need not know where to end
PROMPT = "> "
DIM, PLAIN = "\x1b[2m", "\x1b[0m"  # how a terminal shows what the model thinks, and all else


class Dialogue:
    """Keeps what was said, how it becomes a prompt, and the session that has computed it."""

    def __init__(self, checkpoint, options):
        self._options, self._codec = options, codec(checkpoint, False)
        self._eos, self._name = checkpoint.eos, checkpoint.path
        self._reading = Reading(checkpoint.settings.chat_templates, options.tool_format)
        self._chat = Chat(checkpoint.settings, checkpoint.path) if checkpoint.settings.chat_templates else None
        self.messages = [{"role": "system", "content": options.system}] if options.system else []
        self._session, self._computed = None, []  # the tokens in its cache
        self._is_stopped = False  # by Ctrl-C, of an answer
        self._is_terminal = self._is_dim = False
        self.counts = {"turns": 0, "prompt_tokens": 0, "computed_tokens": 0, "new_tokens": 0}

    def run(self, engine, meter, sampler):
        """Answers lines until they end."""
        is_terminal = self._is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
        if not self._chat:
            _say(f"{self._name}: no chat template; messages become lines, role: content")
        if is_terminal:
            _say("Ctrl-C ends an answer, Ctrl-D the conversation")
        try:
            for line in _lines(is_terminal):
                if line.strip():
                    with self._stopping():
                        self._turn(engine, meter, sampler, line)
        finally:
            if self._chat:
                self._chat.close()

    def _turn(self, engine, meter, sampler, line):
        """Answers one message. What Ctrl-C leaves without an answer was not said."""
        self.messages.append({"role": "user", "content": line})
        prompt, parts = self._prompt()
        if len(prompt) > engine.context:
            raise ColibriError("--chat", f"{self._codec.count(prompt)} of conversation",
                               f"at most {engine.context_rule(len(prompt))}")
        room = engine.room(len(prompt))
        most = self._options.max_new_tokens or (room if self._chat else PLAIN_TOKENS)
        text = Stops(self._codec.with_marks(), prompt)
        finish = self._generate(engine, meter, sampler, prompt, min(most, room),
                                lambda token: self._show_parts(parts.add(text.add(token), text.hidden)))
        self._show_parts(parts.rest(text.rest(), text.hidden))
        self._show(PLAIN * self._is_dim + "\n")
        self._is_dim = False
        if finish == "length" and room <= most:
            _say(f"--chat: cut, since the context of {engine.context} tokens is full")
        self.counts["turns"] += 1
        self.counts["prompt_tokens"] += len(prompt)
        if finish == "unanswered":
            self.messages.pop()
        else:
            self.messages.append(parts.message())

    def _prompt(self):
        """Returns (the tokens of what was said, up to where the answer begins, the Parts of that)."""
        if not self._chat:
            return self._codec.encode(transcript(self.messages).encode(errors="surrogatepass"), "--chat"), Parts()
        conversation = Conversation(self._chat, self.messages, adapts=True)
        text = conversation.text(where="--chat")
        return (self._codec.encode(text.encode(errors="surrogatepass"), "--chat", special=False),
                self._reading.parts(conversation))

    def _generate(self, engine, meter, sampler, prompt, most, show):
        """Calls show(token) for an answer's tokens, at most so many. Returns stop, length, or unanswered for none."""
        self._continue_from(engine, prompt)
        left = prompt[len(self._computed):]
        self.counts["computed_tokens"] += len(left)
        tokens = meter.prefill(len(left), self._compute, engine, left, sampler)
        if tokens is None:
            return "unanswered"
        for count in range(1, most + 1):
            if tokens[0] in self._eos:
                return "stop"
            self.counts["new_tokens"] += 1
            show(tokens[0])
            if self._is_stopped:
                return "stop"
            if count < most:
                fed, tokens = tokens, meter.decode(1, engine.step, [(self._session, tokens)], [sampler])
                self._computed += fed
        return "length"

    def _continue_from(self, engine, prompt):
        """Keeps the session where all that it has computed begins the prompt, else begins another."""
        count = len(self._computed)
        if self._session and (self._computed != prompt[:count] or count >= len(prompt)):
            self._session.close()
            self._session = None
        if not self._session:
            self._session, self._computed = engine.session(), []

    def _compute(self, engine, tokens, sampler):
        """Appends a prompt's tokens to the session. Returns [the next token], or None where Ctrl-C came before."""
        self._session.expect(len(tokens))
        for start in range(0, len(tokens), engine.max_tokens):
            piece = tokens[start:start + engine.max_tokens]
            is_last = start + len(piece) == len(tokens)
            drawn = engine.step([(self._session, piece)], [sampler if is_last else None])
            self._computed += piece
            if self._is_stopped:
                return None
        return drawn

    @contextlib.contextmanager
    def _stopping(self):
        """Makes Ctrl-C end an answer, and a second one the program."""
        def stop(*_):
            if self._is_stopped:
                raise KeyboardInterrupt
            self._is_stopped = True
        self._is_stopped = False
        before = signal.signal(signal.SIGINT, stop)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    def _show_parts(self, deltas):
        """Shows what an answer says; on a terminal also what the model thinks, in dim letters."""
        for delta in deltas:
            is_dim = REASONING in delta
            if self._is_terminal and is_dim != self._is_dim:
                self._show(DIM if is_dim else f"{PLAIN}\n\n")
                self._is_dim = is_dim
            self._show(delta.get(CONTENT) or delta.get(REASONING, "") * self._is_terminal)

    @writing_stdout()
    def _show(self, piece):
        if piece and not self._options.json:
            sys.stdout.buffer.write(piece.encode())
            sys.stdout.buffer.flush()


def _say(text):
    """Prints a line on stderr, beside the conversation."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def _lines(is_terminal):
    """Yields lines without their ends: what is typed, or what stdin holds."""
    if is_terminal:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 - input() then edits lines and has a history
    while True:
        try:
            if is_terminal:
                line = input(PROMPT)
            else:
                data = sys.stdin.buffer.readline(LINE_BYTES + 1)
                if not data:
                    return
                if len(data) > LINE_BYTES:
                    raise ColibriError("--chat", f"a line of more than {LINE_BYTES} bytes", "what fits the context",
                                       "use fewer")
                line = data.decode().rstrip("\r\n")
        except EOFError:
            _say("")
            return
        except UnicodeDecodeError:
            raise ColibriError("--chat", "a line that is not UTF-8", "text", "convert it first") from None
        except OSError as error:
            raise ColibriError("--chat", f"stdin: {error.strerror}", "lines of text there") from None
        yield line
