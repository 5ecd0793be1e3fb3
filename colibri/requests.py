"""A request: what a client may ask for, checked field by field; the one definition that lines and HTTP share."""

import json
import math
import os
import time
from dataclasses import dataclass, field

from colibri.arrays import Rows, check_replaceable
from colibri.engine import Sampler, check_sampler
from colibri.errors import ColibriError
from colibri.report import counted, percentile
from colibri.text import Pieces, codec

MAX_ID = 128           # characters; a number as an id has 64 bits
MAX_NAME = 1000        # characters of a file's name
MAX_NEW_TOKENS = 64    # unless a request says how many
MAX_DEADLINE_MS = 1 << 40
MIN_LINE_BYTES = 1 << 16
TOKEN_BYTES = 64       # a token may take in a line: a long word, escaped as \\u and four digits a character
INPUTS = ("prompt", "prompt_ids", "input")
FIELDS = ("id", *INPUTS, "output", "max_new_tokens", "temperature", "top_k", "top_p", "seed", "stream", "deadline_ms",
          "add_special_tokens")
GREEDY = Sampler()
FINISHES = ("length", "stop", "deadline", "cancelled", "shutdown", "error")
CODES = {  # of errors, with the HTTP status that says the same
    "bad_request": 400, "too_long": 400, "not_found": 404, "queue_full": 429, "internal": 500, "shutdown": 503,
    "too_many_connections": 503, "deadline": 504}


class Refused(ColibriError):
    """A request that cannot be served. code: one of CODES. id: the request's, where it could be read."""

    def __init__(self, message, code="bad_request", id=None):
        super().__init__(message)
        self.code, self.id = code, id


@dataclass(slots=True, eq=False)
class Request:
    """One request and how it goes. Times are time.monotonic()'s seconds.

    The thread that made it sets the fields up to `cancelled`, later those from `pieces` on, too; the scheduler's sets
    the others, and `finish` last of all: one of FINISHES, "error" where there is an `error`. It does so while the first
    thread tells of tokens before: only where `is_over` is set, that one goes by `finish`, and then once.
    """

    id: object
    owner: object = None              # has progress(requests): told when there are new tokens, or the end
    prompt: list = field(default_factory=list)
    used: object = None               # the Codec of its text; None: token numbers in and out
    rows: Rows = None                 # of a bare stack, in place of a prompt
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
        """[(token, piece of text)] since the last call; the piece is "" within a character and without text."""
        tokens = self.tokens[self.told:]
        self.told += len(tokens)
        if self.used is None:
            return [(token, "") for token in tokens]
        self.pieces = self.pieces or Pieces(self.used, self.prompt)
        return [(token, self.pieces.add(token)) for token in tokens]

    def rest(self):
        """The text that news() kept back, after the last token."""
        return self.pieces.rest() if self.pieces else ""

    def text(self):
        """The whole text: the pieces that were told, and those that were not."""
        self.news()
        return self.pieces.text()

    def figures(self):
        """How it went, as the final line and the log say it."""
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
        self.max_bytes = max(MIN_LINE_BYTES, TOKEN_BYTES * engine.context)
        self._codec = None

    def codec(self):
        """The text's; raises ColibriError for a model without text."""
        self._codec = self._codec or codec(self._checkpoint, False)
        return self._codec

    def request(self, values, labels=None):
        """A Request of a dict of FIELDS. labels: {field: the name that the client knows it by}, for errors."""
        label = {**dict(zip(FIELDS, FIELDS)), **(labels or {})}
        identity = values.get("id")
        _check_id(identity)
        try:
            return self._request(values, label)
        except Refused as error:
            error.id = identity
            raise
        except ColibriError as error:
            raise Refused(str(error), id=identity) from None

    def _request(self, values, label):
        _check_names(values, FIELDS)
        given = [name for name in INPUTS if name in values]
        if len(given) != 1:
            got = "missing" if not given else f"given with {given[1]}"
            raise Refused(f"{given[0] if given else 'prompt'}: {got}, expected exactly one of {', '.join(INPUTS)}")
        request = Request(values["id"], stream=_boolean(values, "stream", label))
        if "deadline_ms" in values:
            request.deadline = request.arrived + 1e-3 * _integer(values, "deadline_ms", 1, MAX_DEADLINE_MS, label)
        self._check_model(given[0], label)
        if given == ["input"]:
            return self._stack(request, values)
        if "output" in values:
            raise Refused("output: given, expected only with input; leave it out")
        self._prompt(request, values, given[0], label)
        request.max_new_tokens = self._count(request, values, label)
        request.sampler = _sampler(values, label)
        return request

    def _check_model(self, name, label):
        """That the model takes what is given."""
        path, vocab_size = self._checkpoint.path, self._checkpoint.header["vocab_size"]
        if name == "input" and vocab_size:
            raise Refused(f"{path}: vocab_size={vocab_size}, expected 0 for input, a bare stack of MoE layers; give "
                          "this model a prompt")
        if name != "input" and not vocab_size:
            raise Refused(f"{path}: vocab_size=0, expected tokens for {label[name]}; this is a bare stack of MoE "
                          "layers, give it an input over --serve")

    def _prompt(self, request, values, name, label):
        prompt, vocab_size = values[name], self._checkpoint.header["vocab_size"]
        special = _boolean(values, "add_special_tokens", label, True)
        if name == "prompt":
            if not isinstance(prompt, str):
                raise Refused(f"{label[name]}: {_shown(prompt)}, expected a string")
            request.used, unit = self.codec(), self.codec().unit
            try:
                request.prompt = request.used.encode(prompt.encode(), label[name], special)
            except UnicodeEncodeError:
                raise Refused(f"{label[name]}: half a surrogate pair, expected text; send whole characters") from None
        else:
            if not isinstance(prompt, list) or not all(type(token) is int for token in prompt):
                raise Refused(f"{label[name]}: {_shown(prompt)}, expected a list of integers")
            wrong = next((token for token in prompt if not 0 <= token < vocab_size), None)
            if wrong is not None:
                raise Refused(f"{label[name]}: {_shown(wrong)}, expected 0 to {vocab_size - 1}")
            request.prompt, unit = prompt, "token"
        if not request.prompt:
            raise Refused(f"{label[name]}: 0 {unit}s, expected at least 1; the model needs something to continue")
        if len(request.prompt) > self._engine.context:
            raise Refused(f"{label[name]}: {len(request.prompt)} {unit}s, expected at most "
                          f"{self._engine.context_rule(len(request.prompt))}", "too_long")

    def _count(self, request, values, label):
        room = self._engine.room(len(request.prompt))
        if "max_new_tokens" not in values:
            return min(MAX_NEW_TOKENS, room)
        count = _integer(values, "max_new_tokens", 1, None, label)
        if count > room:
            raise Refused(f"{label['max_new_tokens']}: {_shown(count)}, expected at most {room} after a prompt of "
                          f"{counted(len(request.prompt), 'token')} in a context of {self._engine.context}; lower it",
                          "too_long")
        return count

    def _stack(self, request, values):
        for name in ("max_new_tokens", "temperature", "top_k", "top_p", "seed", "stream", "add_special_tokens"):
            if name in values:
                raise Refused(f"{name}: given, expected only with prompt or prompt_ids; leave it out")
        for name in ("input", "output"):
            value = values.get(name)
            if not isinstance(value, str) or not 0 < len(value) <= MAX_NAME or not value.isprintable():
                got = _shown(value) if name in values else "missing"
                raise Refused(f"{name}: {got}, expected the name of an .npy file")
        if os.path.realpath(values["input"]) == os.path.realpath(values["output"]):
            raise Refused(f"output: {values['output']}, expected another file than input; choose another name")
        try:
            check_replaceable(values["output"], f"output: {values['output']}")
        except OSError as error:
            raise Refused(f"output: {values['output']}, {error.strerror}, expected a file's name") from None
        request.rows = Rows(values["input"], values["output"], self._checkpoint)
        return request


def parse(data, where="line"):
    """The JSON object in bytes, as a dict. where: what they are, for errors."""
    def constant(name):
        raise Refused(f"{where}: {name}, expected numbers that JSON has; leave it out")

    def pairs(pairs):
        values = dict(pairs)
        if len(values) < len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise Refused(f"{where}: {_shown(twice)} twice, expected each field once; leave one out")
        return values

    try:
        values = json.loads(data.decode(), parse_constant=constant, object_pairs_hook=pairs)
    except UnicodeDecodeError as error:
        got = f"byte 0x{data[error.start]:02x} at {error.start}"
        raise Refused(f"{where}: {got}, expected UTF-8; encode it so") from None
    except json.JSONDecodeError as error:
        raise Refused(f"{where}: not JSON from character {error.pos} on, expected one JSON object") from None
    except RecursionError:
        raise Refused(f"{where}: nested too deeply, expected a JSON object of plain fields") from None
    except ValueError:  # of an integer with thousands of digits
        raise Refused(f"{where}: a number too long to read, expected fewer digits") from None
    if not isinstance(values, dict):
        raise Refused(f"{where}: {_shown(values)}, expected a JSON object")
    return values


def cancelled_id(values):
    """The id in {"cancel": id}, or None where it is a request."""
    if "cancel" not in values:
        return None
    _check_names(values, ("cancel",))
    _check_id(values["cancel"], "cancel")
    return values["cancel"]


def _check_names(values, known):
    for name in values:
        if name not in known:
            raise Refused(f"{_shown(name)}: unknown field, expected one of {', '.join(known)}")


def _check_id(value, name="id"):
    good = isinstance(value, str) and len(value) <= MAX_ID or type(value) is int and abs(value) < 1 << 63
    if not good:
        got = "missing" if value is None else _shown(value)
        raise Refused(f"{name}: {got}, expected a string of at most {MAX_ID} characters or an integer of 64 bits")


def _boolean(values, name, label, default=False):
    value = values.get(name, default)
    if type(value) is not bool:
        raise Refused(f"{label[name]}: {_shown(value)}, expected true or false")
    return value


def _integer(values, name, low, high, label):
    value = values[name]
    limit = f"{low} to {high}" if high else f"{low} or more"
    if type(value) is not int or value < low or (high and value > high):
        raise Refused(f"{label[name]}: {_shown(value)}, expected an integer, {limit}")
    return value


def _sampler(values, label):
    """Its values as JSON numbers; check_sampler knows their ranges."""
    fields = {}
    for name, default in GREEDY._asdict().items():
        value = fields[name] = values.get(name, default)
        if type(value) not in (int, float):
            raise Refused(f"{label[name]}: {_shown(value)}, expected a number")
    try:
        return check_sampler(Sampler(**fields))
    except ColibriError as error:
        name, expected = str(error).partition(": ")[0], str(error).rpartition(", expected ")[2]
        raise Refused(f"{label[name]}: {_shown(fields[name])}, expected {expected}") from None


def _shown(value):
    """A value in an error: short, on one line, in ASCII."""
    if isinstance(value, (list, dict)):
        return "a list" if isinstance(value, list) else "an object"
    if type(value) is int and abs(value) >> 64:
        return "a number of more than 64 bits"
    text = json.dumps(value)
    return text if len(text) <= 40 else text[:40] + "..."
