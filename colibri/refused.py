"""Refused: the error of a request that cannot be served, and what it shows of a client's values."""

import contextlib
import json

from colibri.errors import ColibriError, sentence

HIDDEN = {"got": "..."}  # from the log: what a client has sent
CODES = {  # of errors, with the HTTP status that says the same
    "bad_request": 400, "too_long": 400, "invalid_api_key": 401, "forbidden": 403, "not_found": 404, "queue_full": 429,
    "internal": 500, "shutdown": 503, "too_many_connections": 503, "deadline": 504}


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


@contextlib.contextmanager
def refusing(identity):
    """Makes what is wrong with a request a Refused that has its id."""
    try:
        yield
    except Refused as error:
        error.id = identity
        raise
    except ColibriError as error:
        raise Refused.of(error, id=identity) from None


@contextlib.contextmanager
def hiding(where, logged="..."):
    """Makes an error a Refused. where: of an error, a client's name of a file. logged: what the log has in its place"""
    try:
        yield
    except ColibriError as error:
        raise Refused.of(error, logged={"where": logged} if error.where == where else None) from None


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
