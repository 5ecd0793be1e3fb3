"""A request: what a client may ask for, checked field by field; the one definition that lines and HTTP share."""

import contextlib
import copy
import functools
import json
import math
import os
import re
import time
from dataclasses import dataclass, field

from colibri.arrays import Rows, check_replaceable
from colibri.chat import Conversation, NotRendered
from colibri.errors import ColibriError, sentence
from colibri.report import counted, percentile
from colibri.sampling import Sampler, check_sampler
from colibri.text import Pieces, codec

MAX_ID = 128           # characters; a number as an id has 64 bits
MAX_NAME = 1000        # characters of a file's name
MAX_NEW_TOKENS = 64    # unless a request says how many
MAX_DEADLINE_MS = 1 << 40
OTHER_BYTES = 1 << 16  # of a line beside the text or the token numbers of its prompt
ESCAPED = 6            # bytes of JSON that a byte of text may take: \\u and four digits
START = 16             # characters for each token of the context, by which a text is seen to be far too long
SPACED = 16            # bytes that may stand around a token number: a comma and blanks
INPUTS = ("prompt", "prompt_ids", "input")
FIELDS = ("id", *INPUTS, "output", "max_new_tokens", "temperature", "top_k", "top_p", "seed", "stream", "deadline_ms",
          "add_special_tokens")
GREEDY = Sampler()
HIDDEN = {"got": "..."}  # from the log: what a client has sent
FINISHES = ("length", "stop", "deadline", "cancelled", "shutdown", "error")
CODES = {  # of errors, with the HTTP status that says the same
    "bad_request": 400, "too_long": 400, "invalid_api_key": 401, "forbidden": 403, "not_found": 404, "queue_full": 429,
    "internal": 500, "shutdown": 503, "too_many_connections": 503, "deadline": 504}


LEADING_ID = re.compile(rb'\s*\{\s*"id"\s*:\s*(-?[0-9]{1,19}|"(?:[^"\\]|\\.){0,128}")\s*,', re.DOTALL)
ID_NAME = re.compile(rb'"id"\s*:')


class Refused(ColibriError):
    """A request that cannot be served.

    code: one of CODES. id: the request's, where it could be read. logged: {part: what the log has in its place}, where
    a part holds what the client has sent, which may be of a prompt. field: the name of a field that is not known.
    """

    def __init__(self, where, got=None, expected=None, fix=None, code="bad_request", id=None, logged=None, field=None):
        super().__init__(where, got, expected, fix)
        self.code, self.id, self.field, self._logged = code, id, field, logged or {}

    @classmethod
    def of(cls, error, **more):
        """Returns a Refused of the parts of an error."""
        return cls(*error.parts, **more)

    def without_content(self):
        """Returns the message without what the client has sent."""
        return sentence(**{**dict(zip(("where", "got", "expected", "fix"), self.parts)), **self._logged})


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
    rows: Rows = None                 # of a bare stack, in place of a prompt
    encode: object = None             # returns (prompt, max_new_tokens), on any thread; None: they are set
    size: float = 0                   # of what it encodes: characters or numbers; inf: a template's
    max_new_tokens: int = MAX_NEW_TOKENS
    sampler: Sampler = GREEDY
    stream: bool = False
    deadline: float = math.inf
    arrived: float = field(default_factory=time.monotonic)
    pieces: Pieces = None             # of its text, as far as it was told
    told: int = 0                     # tokens
    is_over: bool = False             # seen to have a finish
    cancelled: str = ""               # the finish that it shall have, as soon as that may be
    session: object = None
    prefilled: int = 0                # tokens of the prompt, or rows
    tokens: list = field(default_factory=list)
    times: list = field(default_factory=list)  # when each token was there
    error: Refused = None
    finish: str = None

    def news(self):
        """Returns [(token, piece of text)] since the last call; the piece is "" within a character and without text."""
        tokens = self.tokens[self.told:]
        self.told += len(tokens)
        if self.used is None:
            return [(token, "") for token in tokens]
        self.pieces = self.pieces or Pieces(self.used, self.prompt)
        return [(token, self.pieces.add(token)) for token in tokens]

    def rest(self):
        """Returns the text that news() kept back, after the last token."""
        return self.pieces.rest() if self.pieces else ""

    def text(self):
        """Returns the whole text: the pieces that were told, and those that were not."""
        self.news()
        return self.pieces.text()

    def figures(self):
        """Returns how it went, as the final line and the log say it."""
        gaps = sorted(1e3 * (after - before) for before, after in zip(self.times, self.times[1:]))
        return {"prompt_tokens": len(self.prompt) if self.rows is None else len(self.rows),
                "completion_tokens": len(self.tokens),
                "ttft_ms": round(1e3 * (self.times[0] - self.arrived), 3) if self.times else None,
                "itl_p50_ms": round(percentile(gaps, 50), 3) if gaps else None,
                "itl_p99_ms": round(percentile(gaps, 99), 3) if gaps else None}


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
        digits = len(str(self._checkpoint.header["vocab_size"]))
        self.max_text_bytes = engine.context * (self._codec.longest if self._codec else 0)
        self.max_bare_bytes = OTHER_BYTES + engine.context * (digits + SPACED)  # outside of strings
        self.max_bytes = max(OTHER_BYTES + ESCAPED * self.max_text_bytes, self.max_bare_bytes)

    def codec(self):
        """Returns the text's Codec; raises ColibriError for a model without text."""
        if self._codec is None:
            raise ColibriError(*self._no_codec.parts)
        return self._codec

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

    def request(self, values, arrived=None, labels=None):
        """Returns a Request of a dict of FIELDS, with all that takes time left to its encode().

        arrived: when its message had, of time.monotonic(); now unless it is given
        labels: {field: the name that the client knows it by}, for errors
        """
        label = {**dict(zip(FIELDS, FIELDS)), **(labels or {})}
        identity = _checked_id(values)
        with _refusing(identity):
            return self._request(values, time.monotonic() if arrived is None else arrived, label)

    def _request(self, values, arrived, label):
        _check_names(values, FIELDS)
        given = [name for name in INPUTS if name in values]
        if len(given) != 1:
            got = "missing" if not given else f"given with {given[1]}"
            raise Refused(given[0] if given else "prompt", got, f"exactly one of {', '.join(INPUTS)}")
        request = Request(values["id"], stream=_boolean(values, "stream", label), arrived=arrived)
        if "deadline_ms" in values:
            request.deadline = request.arrived + 1e-3 * _integer(values, "deadline_ms", 1, MAX_DEADLINE_MS, label)
        self._check_model(given[0], label)
        if given == ["input"]:
            return self._stack(request, values)
        if "output" in values:
            raise Refused("output", "given", "only with input", "leave it out")
        count = _integer(values, "max_new_tokens", 1, None, label) if "max_new_tokens" in values else None
        request.sampler = _sampler(values, label, self._checkpoint.settings.sampling)
        special = _boolean(values, "add_special_tokens", label, not isinstance(values.get("prompt"), Conversation))
        self._prompt(request, values[given[0]], given[0], label, count, special)
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

    def _prompt(self, request, prompt, name, label, count, special):
        """Leaves what is to be checked of a prompt, and its way into tokens, to request.encode()."""
        text = functools.partial(self._text, special=special)
        kind, expected, convert = (((str, Conversation), "a string", text) if name == "prompt" else
                                   (list, "a list of integers", self._numbers))
        if not isinstance(prompt, kind):
            raise wrong(label[name], prompt, expected)
        request.used = self.codec() if name == "prompt" else None
        request.size = math.inf if isinstance(prompt, Conversation) else len(prompt)
        request.encode = functools.partial(self._encode, request.id, convert, prompt, label[name],
                                           label["max_new_tokens"], count)

    def _encode(self, identity, convert, prompt, name, count_name, count):
        """Returns (the prompt's tokens, how many may follow)."""
        with _refusing(identity):
            tokens, unit = convert(prompt, name)
            if not tokens:
                raise Refused(name, f"0 {unit}s", "at least 1", "the model needs something to continue")
            if len(tokens) > self._engine.context:
                raise Refused(name, f"{len(tokens)} {unit}s", f"at most {self._engine.context_rule(len(tokens))}",
                              code="too_long")
            return tokens, self._count(len(tokens), count, count_name)

    def tokens(self, text, name, special):
        """Returns the tokens of a string or a Conversation, which may be more than the context holds."""
        with _refusing(None):
            used = copy.copy(self.codec())
            used.most = math.inf
            return self._encoded(used, self._utf8(text, name)[1], name, special)

    def text(self, numbers, name):
        """Returns the text of tokens."""
        with _refusing(None):
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

    def _count(self, prompt_tokens, count, name):
        room = self._engine.room(prompt_tokens)
        if count is None:
            return min(MAX_NEW_TOKENS, room)
        if count > room:
            rule = self._engine.context_rule(prompt_tokens + count - 1)
            raise Refused(name, shown(count),
                          f"at most {room} after a prompt of {counted(prompt_tokens, 'token')} in a context of {rule}",
                          code="too_long", logged=HIDDEN)
        return count

    def _stack(self, request, values):
        for name in ("max_new_tokens", "temperature", "top_k", "top_p", "seed", "stream", "add_special_tokens"):
            if name in values:
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
            with _hiding(f"output: {output}", "output: ..."):
                check_replaceable(output, f"output: {output}")
            os.close(os.open(os.path.dirname(output) or ".", os.O_PATH | os.O_DIRECTORY))  # the folder is there
        except OSError as error:
            raise Refused("output", f"{output}, {error.strerror}", "a file's name",
                          logged={"got": f"..., {error.strerror}"}) from None
        with _hiding(name):
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


@contextlib.contextmanager
def _refusing(identity):
    """Makes what is wrong with a request a Refused that has its id."""
    try:
        yield
    except Refused as error:
        error.id = identity
        raise
    except ColibriError as error:
        raise Refused.of(error, id=identity) from None


@contextlib.contextmanager
def _hiding(where, logged="..."):
    """Makes an error a Refused. where: of an error, a client's name of a file. logged: what the log has in its place"""
    try:
        yield
    except ColibriError as error:
        raise Refused.of(error, logged={"where": logged} if error.where == where else None) from None


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


def _boolean(values, name, label, default=False):
    value = values.get(name, default)
    if type(value) is not bool:
        raise wrong(label[name], value, "true or false")
    return value


def _integer(values, name, low, high, label):
    value = values[name]
    limit = f"{low} to {high}" if high else f"{low} or more"
    if type(value) is not int or value < low or (high and value > high):
        raise wrong(label[name], value, f"an integer, {limit}")
    return value


def _sampler(values, label, model):
    """Returns a Sampler of JSON numbers; check_sampler knows their ranges. model: its authors' values, for others."""
    fields = {}
    for name, default in {**GREEDY._asdict(), **model}.items():
        value = fields[name] = values.get(name, default)
        if type(value) not in (int, float):
            raise wrong(label[name], value, "a number")
    try:
        return check_sampler(Sampler(**fields))
    except ColibriError as error:
        name, expected = error.where, error.expected
        if name == "top_p" and 0 < fields[name] < 1:
            expected = "at least 1e-45, which is more than 0 as a float32, and at most 1"
        raise wrong(label[name], fields[name], expected) from None


def wrong(where, value, expected):
    """Returns a Refused for a value of the client's."""
    return Refused(where, shown(value), expected, logged=HIDDEN)


def shown(value):
    """Returns a value for an error: short, on one line, in ASCII."""
    if isinstance(value, (list, dict)):
        return "a list" if isinstance(value, list) else "an object"
    if type(value) is int and abs(value) >> 64:
        return "a number of more than 64 bits"
    text = json.dumps(value[:41] if isinstance(value, str) else value)
    return text if len(text) <= 40 else text[:40] + "..."
