"""A request: what a client may ask for, checked field by field; the one definition that lines and HTTP share."""

import contextlib
import copy
import functools
import json
import math
import os
import re
import time
from dataclasses import dataclass, field, replace

from colibri import constraints, fields
from colibri.arrays import Rows, check_replaceable
from colibri.chat import Conversation, NotRendered
from colibri.errors import ColibriError
from colibri.fields import boolean, integer
from colibri.grammars import Grammars
from colibri.refused import HIDDEN, Refused, hiding, refusing, shown, wrong
from colibri.report import counted, percentile
from colibri.sampling import PLAIN, History, Sampler, is_plain
from colibri.stops import Stops
from colibri.text import codec

MAX_ID = 128           # characters; a number as an id has 64 bits
MAX_NAME = 1000        # characters of a file's name
MAX_NEW_TOKENS = 64    # unless a request says how many
MAX_DEADLINE_MS = 1 << 40
OTHER_BYTES = 1 << 16  # of a line beside the text or the token numbers of its prompt
ESCAPED = 6            # bytes of JSON that a byte of text may take: \\u and four digits
START = 16             # characters for each token of the context, by which a text is seen to be far too long
SPACED = 16            # bytes that may stand around a token number: a comma and blanks
INPUTS = ("prompt", "prompt_ids", "input")
FIELDS = ("id", *INPUTS, "output", "max_new_tokens", "stream", "deadline_ms", "add_special_tokens", *fields.OF_TEXT,
          *constraints.FIELDS)
FINISHES = ("length", "stop", "deadline", "cancelled", "shutdown", "error")


LEADING_ID = re.compile(rb'\s*\{\s*"id"\s*:\s*(-?[0-9]{1,19}|"(?:[^"\\]|\\.){0,128}")\s*,', re.DOTALL)
ID_NAME = re.compile(rb'"id"\s*:')


@dataclass(slots=True, eq=False)
class Request:
    """One request and how it goes. Times are time.monotonic()'s seconds.

    The thread that made it sets the fields up to `cancelled`. The scheduler's sets those from `session` on, and
    `finish` last: one of FINISHES, "error" where there is an `error`. Meanwhile the first thread tells of tokens. It
    goes by `finish` only where `is_over` is set, and then once. It ends what the scheduler never gets.
    """

    id: object
    owner: object = None              # has progress(requests): told when there are new tokens, or the end
    prompt: list = field(default_factory=list)
    used: object = None               # the Codec of its text; None: token numbers in and out
    stop: tuple = ()                  # strings that end the text
    includes_stop: bool = False       # the text ends after what ended it, not before
    rows: Rows = None                 # of a bare stack, in place of a prompt
    encode: object = None             # returns (prompt, max_new_tokens, grammar), on any thread; None: they are set
    size: float = 0                   # of what it encodes: characters or numbers; inf: a template's
    compiles: bool = False            # a grammar
    max_new_tokens: int = MAX_NEW_TOKENS
    sampler: Sampler = PLAIN
    seed: int = None                  # that was drawn for it; None: it had one, or needs none
    stream: bool = False
    deadline: float = math.inf
    arrived: float = field(default_factory=time.monotonic)
    told: int = 0                     # tokens
    last: str = None                  # the text after them, once it is asked for
    is_over: bool = False             # seen to have a finish
    cancelled: str = ""               # the finish that it shall have, as soon as that may be
    session: object = None
    prefilled: int = 0                # tokens of the prompt, or rows
    history: History = None           # where a step's own sampling does not do
    stops: Stops = None               # its text, up to a stop string
    pieces: list = field(default_factory=list)  # of its text: where it has stop strings, as many as tokens
    tokens: list = field(default_factory=list)
    ending: int = None                # the token that ended it, which is not among them
    times: list = field(default_factory=list)  # when each token was there
    error: Refused = None
    finish: str = None

    def choice(self, identity, number):
        """Returns a request of the same, with draws of its own: one of several choices. The prompt is encoded once."""
        return replace(self, id=identity, sampler=self.sampler._replace(choice=number), prompt=[], pieces=[], tokens=[],
                       times=[])

    def begin(self, eos):
        """Makes what its tokens are drawn by. eos: the tokens that end a text of the model"""
        if not is_plain(self.sampler):
            self.history = History(self.sampler, self.prompt, eos)

    def take(self, token):
        """Adds a token that was drawn; returns whether the text has come to a stop string, or to a grammar's end."""
        if self.history is not None:
            self.history.add(token)
        if self.stop:
            self.pieces.append(self._text().add(token))
        self.tokens.append(token)  # last: from now on it can be told
        return bool(self.stop) and self.stops.is_stopped or self.history is not None and self.history.is_complete

    def _text(self):
        if self.stops is None:
            self.stops = Stops(self.used, self.prompt, self.stop, self.includes_stop, self.sampler.min_tokens)
        return self.stops

    def news(self):
        """Returns [(token, piece of text)] since the last call; the piece is "" within a character and without text."""
        before, self.told = self.told, len(self.tokens)
        tokens = self.tokens[before:self.told]
        if self.used is None:
            return [(token, "") for token in tokens]
        for token in self.tokens[len(self.pieces):self.told]:  # none where there are stop strings
            self.pieces.append(self._text().add(token))
        return list(zip(tokens, self.pieces[before:self.told]))

    def rest(self):
        """Returns the text after the last token: what news() kept back, and that of the token that ended it."""
        if self.last is None:
            text = self._text() if self.used is not None else None
            self.last = text.rest() if text else ""
            if text and self.ending is not None and self.includes_stop:
                self.last += text.add(self.ending) + text.rest()
        return self.last

    def text(self):
        """Returns the whole text: the pieces that were told, and those that were not."""
        self.news()
        return "".join(self.pieces) + self.rest()

    def score(self, index):
        """Returns the Score of the answer's token of that index; one more than all is that of the one that ended it."""
        return self.history.scores[self.history.end + index]

    def figures(self):
        """Returns how it went, as the final line and the log say it."""
        gaps = sorted(1e3 * (after - before) for before, after in zip(self.times, self.times[1:]))
        return {"prompt_tokens": len(self.prompt) if self.rows is None else len(self.rows),
                "completion_tokens": len(self.tokens),
                "ttft_ms": round(1e3 * (self.times[0] - self.arrived), 3) if self.times else None,
                "itl_p50_ms": round(percentile(gaps, 50), 3) if gaps else None,
                "itl_p99_ms": round(percentile(gaps, 99), 3) if gaps else None}


@dataclass(slots=True)
class Terms:
    """Holds what requests of one kind have of their own."""

    labels: dict = field(default_factory=dict)  # {field: the name that the client knows it by}, for errors
    seed: int = None             # for a request without one; None: 0
    fills_context: bool = False  # with an answer as long as there is room, and one that would be longer is cut
    has_text: bool = False       # also after a prompt of token numbers, where the model has text
    constraint: object = None    # the Constraint of the answer; None: the one that the fields ask for
    has_marks: bool = False      # in the text: special tokens are marks of its parts, and hidden
    has_echo: bool = False       # of the prompt: the answer need not have a token


class Reader:
    """Makes requests for one engine out of what clients send."""

    def __init__(self, engine):
        self._engine, self._checkpoint = engine, engine.checkpoint
        self._codec = self._no_codec = None
        try:
            self._codec = codec(self._checkpoint, False)
            self._codec.most = engine.context
        except ColibriError as error:
            if self._checkpoint.tokenizer:  # the model has text: known at the start, not when somebody sends some
                raise
            self._no_codec = error
        self._grammars = Grammars(self._codec, self._checkpoint.header["vocab_size"], self._checkpoint.eos)
        digits = len(str(self._checkpoint.header["vocab_size"]))
        self.max_text_bytes = engine.context * (self._codec.longest if self._codec else 0)
        self.max_bare_bytes = OTHER_BYTES + engine.context * (digits + SPACED)  # outside of strings
        self.max_bytes = max(OTHER_BYTES + ESCAPED * self.max_text_bytes, self.max_bare_bytes)

    def codec(self):
        """Returns the text's Codec; raises ColibriError for a model without text."""
        if self._codec is None:
            raise ColibriError(*self._no_codec.parts)
        return self._codec

    def prepare(self):
        """Makes what would hold requests up that run: see Grammars.prepare."""
        self._grammars.prepare()

    def close(self):
        self._grammars.close()

    def parse(self, data, where="line"):
        """Returns the JSON object in bytes, as a dict. One that no prompt needs is not read: that would take long."""
        most = self.max_text_bytes + self.max_bare_bytes
        if len(data) > most and len(data) - (ESCAPED - 1) * data.count(b"\\") > most:
            raise self.too_long(data, where, most)
        if len(data) > self.max_bare_bytes and _has_bare(data, self.max_bare_bytes):
            raise Refused(where, f"more than {self.max_bare_bytes} bytes outside of strings", "fewer",
                          "no list of token numbers that fits the context is as long",
                          code="too_long", id=leading_id(data, where))
        return parse(data, where)

    def too_long(self, data, where, most=None):
        """Returns a Refused for data that is, or begins, a line of more bytes than `most`, or than max_bytes."""
        return Refused(where, f"more than {most or self.max_bytes} bytes", "fewer",
                       "no prompt that fits the context is as long", code="too_long", id=leading_id(data, where))

    def request(self, values, arrived=None, terms=None):
        """Returns a Request of a dict of FIELDS, with all that takes time left to its encode().

        arrived: when its message had, of time.monotonic(); now unless it is given
        terms: those of lines unless they are given
        """
        identity = _checked_id(values)
        with refusing(identity):
            return self._request(values, time.monotonic() if arrived is None else arrived, terms or Terms())

    def _request(self, values, arrived, terms):
        label = {**dict(zip(FIELDS, FIELDS)), **terms.labels}
        _check_names(values, FIELDS)
        given = [name for name in INPUTS if name in values]
        if len(given) != 1:
            got = "missing" if not given else f"given with {given[1]}"
            raise Refused(given[0] if given else "prompt", got, f"exactly one of {', '.join(INPUTS)}")
        request = Request(values["id"], stream=boolean(values, "stream", label), arrived=arrived)
        if "deadline_ms" in values:
            request.deadline = request.arrived + 1e-3 * integer(values, "deadline_ms", 1, MAX_DEADLINE_MS, label)
        self._check_model(given[0], label)
        if given == ["input"]:
            return self._stack(request, values)
        if "output" in values:
            raise Refused("output", "given", "only with input", "leave it out")
        values, seed = fields.with_seed(values, terms.seed)
        request.sampler = fields.sampler({**self._checkpoint.settings.sampling, **values}, label, self._checkpoint)
        request.seed = seed if request.sampler.temperature > 0 else None
        least = 0 if terms.has_echo or request.sampler.prompt_logprobs is not None else 1
        count = integer(values, "max_new_tokens", least, None, label) if "max_new_tokens" in values else None
        constraint = terms.constraint or constraints.constraint_of(values, label)
        if constraint and self._codec is None:
            raise Refused(constraint.where, "given", "only where the model has text", "leave it out")
        request.compiles = constraint is not None
        self._prompt(request, values, given[0], label, functools.partial(
            self._count, count, label["max_new_tokens"], terms.fills_context), constraint)
        self._set_text(request, values, label, terms)
        return request

    def _check_model(self, name, label):
        """Checks that the model takes what is given."""
        path, vocab_size = self._checkpoint.path, self._checkpoint.header["vocab_size"]
        if name == "input" and vocab_size:
            raise Refused(path, f"vocab_size={vocab_size}", "0 for input, a bare stack of MoE layers",
                          "give this model a prompt")
        if name != "input" and not vocab_size:
            raise Refused(path, "vocab_size=0", f"tokens for {label[name]}",
                          "this is a bare stack of MoE layers, give it an input over --serve")

    def _prompt(self, request, values, name, label, count, constraint):
        """Leaves what is to be checked of a prompt, and its way into tokens, to request.encode()."""
        prompt = values[name]
        special = boolean(values, "add_special_tokens", label, not isinstance(prompt, Conversation))
        text = functools.partial(self._text, special=special)
        kind, expected, convert = (((str, Conversation), "a string", text) if name == "prompt" else
                                   (list, "a list of integers", self._numbers))
        if not isinstance(prompt, kind):
            raise wrong(label[name], prompt, expected)
        request.used = self.codec() if name == "prompt" else None
        request.size = math.inf if isinstance(prompt, Conversation) else len(prompt)
        request.encode = functools.cache(functools.partial(self._encode, request.id, convert, prompt, label[name],
                                                           count, constraint))

    def _set_text(self, request, values, label, terms):
        """Sets what the answer's text is, and where it ends."""
        if request.used is None and terms.has_text:
            request.used = self._codec
        skips_special = boolean(values, "skip_special_tokens", label, True)
        request.stop = fields.stops(values, label)
        request.includes_stop = boolean(values, "include_stop_str_in_output", label)
        if request.stop and request.used is None:
            raise Refused(label["stop"], "given", "only with a prompt of text, whose answer is text",
                          "give stop_token_ids")
        if request.used is not None and not skips_special:
            request.used = request.used.with_special()
        elif request.used is not None and terms.has_marks:
            request.used = request.used.with_marks()

    def _encode(self, identity, convert, prompt, name, count, constraint):
        """Returns (the prompt's tokens, how many may follow, the Grammar that these follow or None)."""
        with refusing(identity):
            tokens, unit = convert(prompt, name)
            if not tokens:
                raise Refused(name, f"0 {unit}s", "at least 1", "the model needs something to continue")
            if len(tokens) > self._engine.context:
                raise Refused(name, f"{len(tokens)} {unit}s", f"at most {self._engine.context_rule(len(tokens))}",
                              code="too_long")
            found = count(len(tokens))
            return tokens, found, self._grammar(constraint) if constraint else None

    def _grammar(self, constraint):
        try:
            return self._grammars.compile(constraint)
        except ColibriError as error:
            raise Refused.of(error, logged=HIDDEN) from None

    def tokens(self, text, name, special):
        """Returns the tokens of a string or a Conversation, which may be more than the context holds."""
        with refusing(None):
            used = copy.copy(self.codec())
            used.most = math.inf
            return self._encoded(used, self._utf8(text, name)[1], name, special)

    def text(self, numbers, name):
        """Returns the text of tokens."""
        with refusing(None):
            used = self.codec()
            self._check_numbers(numbers, name)
            return used.decode(numbers)

    def _text(self, text, name, special):
        """Returns (tokens, what one is called). text: a string, or a Conversation, whose template says all of them."""
        text, data = self._utf8(text, name)
        used = self.codec()
        if len(data) > self.max_text_bytes and used.unit != "byte":  # of bytes, the number is that of the tokens
            rule = self._engine.context_rule(-(-len(data) // used.longest))
            raise Refused(name, f"{len(data)} bytes",
                          f"at most {self.max_text_bytes}, {used.longest} for each token of a context of {rule}",
                          code="too_long")
        self._check_start(text, name, special)
        return self._encoded(used, data, name, special), used.unit

    def _utf8(self, text, name):
        """Returns a string, or a Conversation's prompt, and its bytes."""
        try:
            text = text if isinstance(text, str) else text.text(self.max_text_bytes, name)
            return text, text.encode()
        except NotRendered as error:
            raise Refused.of(error, code=error.code, logged=HIDDEN) from None
        except UnicodeEncodeError:
            raise Refused(name, "half a surrogate pair", "text", "send whole characters") from None

    def _encoded(self, used, data, name, special):
        try:
            return used.encode(data, name, special)
        except ColibriError as error:
            raise Refused.of(error, logged=HIDDEN) from None

    def _check_start(self, text, name, special):
        """Refuses a text of which a part is too many tokens by far, whatever follows: the whole may take seconds."""
        context = self._engine.context
        start = text[:START * context]
        if len(start) < len(text) and len(self._encoded(self.codec(), start.encode(), name, special)) > 2 * context:
            raise Refused(name, f"more than {2 * context} {self.codec().unit}s",
                          f"at most {self._engine.context_rule(2 * context)}", code="too_long")

    def _numbers(self, numbers, name):
        if len(numbers) <= self._engine.context:  # else their number alone is wrong enough
            self._check_numbers(numbers, name)
        return numbers, "token"

    def _check_numbers(self, numbers, name):
        vocab_size = self._checkpoint.header["vocab_size"]
        for index, token in enumerate(numbers):
            if type(token) is not int:
                raise wrong(f"{name}[{index}]", token, "an integer")
            if not 0 <= token < vocab_size:
                raise wrong(f"{name}[{index}]", token, f"0 to {vocab_size - 1}")

    def _count(self, count, name, fills_context, prompt_tokens):
        room = self._engine.room(prompt_tokens)
        if fills_context:
            return room if count is None else min(count, room)
        if count is None:
            return min(MAX_NEW_TOKENS, room)
        if count > room:
            rule = self._engine.context_rule(prompt_tokens + count - 1)
            raise Refused(name, shown(count),
                          f"at most {room} after a prompt of {counted(prompt_tokens, 'token')} in a context of {rule}",
                          code="too_long", logged=HIDDEN)
        return count

    def _stack(self, request, values):
        for name in FIELDS:
            if name in values and name not in ("id", "input", "output", "deadline_ms"):
                raise Refused(name, "given", "only with prompt or prompt_ids", "leave it out")
        for name in ("input", "output"):
            value = values.get(name)
            if name not in values:
                raise Refused(name, "missing", "the name of an .npy file")
            if not isinstance(value, str) or not 0 < len(value) <= MAX_NAME or not value.isprintable():
                raise wrong(name, value, "the name of an .npy file")
        name, output = values["input"], values["output"]
        if os.path.realpath(name) == os.path.realpath(output):
            raise Refused("output", output, "another file than input", "choose another name", logged=HIDDEN)
        try:
            with hiding(f"output: {output}", "output: ..."):
                check_replaceable(output, f"output: {output}")
            os.close(os.open(os.path.dirname(output) or ".", os.O_PATH | os.O_DIRECTORY))  # the folder is there
        except OSError as error:
            raise Refused("output", f"{output}, {error.strerror}", "a file's name",
                          logged={"got": f"..., {error.strerror}"}) from None
        with hiding(name):
            request.rows = Rows(name, output, self._checkpoint)
        return request


def parse(data, where="line"):
    """Returns the JSON object in bytes, as a dict. where: what they are, for errors, which have the id that it begins
    with.
    """
    try:
        return _parse(data, where)
    except Refused as error:
        error.id = leading_id(data, where) if len(ID_NAME.findall(data)) == 1 else None
        raise


def _parse(data, where):
    def constant(name):
        raise Refused(where, name, "numbers that JSON has", "leave it out", logged=HIDDEN)

    def pairs(pairs):
        values = dict(pairs)
        if len(values) < len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise Refused(where, f"{shown(twice)} twice", "each field once", "leave one out",
                          logged={"got": "... twice"})
        return values

    try:
        values = json.loads(data.decode(), parse_constant=constant, object_pairs_hook=pairs)
    except UnicodeDecodeError as error:
        raise Refused(where, f"byte 0x{data[error.start]:02x} at {error.start}", "UTF-8", "encode it so",
                      logged={"got": f"byte ... at {error.start}"}) from None
    except json.JSONDecodeError as error:
        raise Refused(where, f"not JSON from character {error.pos} on", "one JSON object") from None
    except RecursionError:
        raise Refused(where, "nested too deeply", "a JSON object of plain fields") from None
    except ValueError:  # of an integer with thousands of digits
        raise Refused(where, "a number too long to read", "fewer digits") from None
    if not isinstance(values, dict):
        raise wrong(where, values, "a JSON object")
    return values


def leading_id(data, where="line"):
    """Returns the id with which the bytes of a line begin, or None, also where they are no line."""
    found = LEADING_ID.match(data[:1000]) if where == "line" else None
    with contextlib.suppress(ValueError):  # of an escape that is none
        return json.loads(found[1]) if found else None


def _has_bare(data, count):
    """Returns whether more than count bytes of JSON stand outside of strings."""
    start = bare = 0
    while bare <= count and start < len(data):
        opening = data.find(b'"', start)
        opening = len(data) if opening < 0 else opening
        bare, start = bare + opening - start, _string_end(data, opening + 1)
    return bare > count


def _string_end(data, start):
    """Returns where a JSON string ends whose first character is at start."""
    while (quote := data.find(b'"', start)) >= 0:
        piece = data[start:quote]
        start = quote + 1
        if (len(piece) - len(piece.rstrip(b"\\"))) % 2 == 0:
            return start
    return len(data)


def cancelled_id(values):
    """Returns the id in {"cancel": id}, or None where it is a request."""
    if "cancel" not in values:
        return None
    _check_names(values, ("cancel",))
    return _checked_id(values, "cancel")


def _check_names(values, known):
    for name in values:
        if name not in known:
            raise Refused(shown(name), "unknown field", f"one of {', '.join(known)}", logged={"where": "..."})


def _checked_id(values, name="id"):
    """Returns a request's id, or that in another field."""
    value = values.get(name)
    good = isinstance(value, str) and len(value) <= MAX_ID or type(value) is int and abs(value) < 1 << 63
    rule = f"a string of at most {MAX_ID} characters or an integer of 64 bits"
    if name not in values:
        raise Refused(name, "missing", rule)
    if not good:
        raise wrong(name, value, rule)
    return value
