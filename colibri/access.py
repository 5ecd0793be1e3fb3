"""Who may use HTTP: keys, the names that a server of this machine alone is called by, and pages of other origins."""

import hashlib
import hmac
import json
import re

from colibri.errors import ColibriError
from colibri.listen import is_loopback
from colibri.refused import HIDDEN, Refused

MAX_KEY_BYTES = 1 << 20  # of a file of keys
OPEN = ("/health", "/ready")  # to everybody: probes have no key
KEY = re.compile(rb"[!-~]+")
HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[\w.-]+)(:[0-9]*)?", re.ASCII)
ORIGIN = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[^/?#@\s]+", re.IGNORECASE)
PREFLIGHT_SECONDS = 600  # that a browser may keep what it was told of an origin


class Access:
    """keys: digests of the keys one of which a request needs, () for none. origins: those of --cors. host: of --http"""

    def __init__(self, keys=(), origins=(), host=None):
        self.has_keys = bool(keys)
        self._keys, self._origins = keys, {origin.lower() for origin in origins}
        self._names = {"localhost", "localhost.", *([host.lower()] if host else [])}

    def check(self, path, headers, is_local):
        """Checks that a request may be answered.

        headers: [(name, value)] in bytes. is_local: the server listens for this machine alone
        """
        if self._keys:
            if path not in OPEN:
                self._check_key([value for name, value in headers if name == b"authorization"])
        elif is_local:
            hosts = [value.decode("ascii", "replace") for name, value in headers if name == b"host"]
            if hosts and not self._is_ours(hosts[0]):
                raise Refused("Host", json.dumps(hosts[0][:100]),
                              "localhost or a loopback address of a server without keys",
                              "use one, or start it with --api-key-file", code="forbidden", logged=HIDDEN)

    def _check_key(self, values):
        """Compares a key with all keys, in a time that says nothing of them."""
        scheme, _, key = (values[0] if len(values) == 1 else b"").partition(b" ")
        given, is_good = digest(key.strip()), False
        for good in self._keys:
            is_good |= hmac.compare_digest(given, good)
        if scheme.lower() != b"bearer" or not is_good:
            got = "missing" if not values else "no key of this server" if scheme.lower() == b"bearer" else "no Bearer"
            raise Refused("Authorization", got, "Bearer and one of the server's keys", "ask whoever runs it for one",
                          code="invalid_api_key")

    def _is_ours(self, value):
        """Returns whether a Host header names this machine: what a page of somebody else cannot make a browser send."""
        found = HOST.fullmatch(value)
        name = found[1].lower() if found else ""
        try:
            return is_loopback(name.strip("[]"))
        except ValueError:
            return name in self._names or name.endswith(".localhost")

    def cors(self, headers):
        """Returns the headers by which a browser lets a page of an origin that --cors names read an answer."""
        if not self._origins:
            return []
        origin = self._allowed(headers)
        return ([("access-control-allow-origin", origin)] if origin else []) + (
            [] if "*" in self._origins else [("vary", "Origin")])

    def _allowed(self, headers):
        """Returns what an allowed origin is told of itself, or None."""
        origin = dict(headers).get(b"origin", b"").decode("ascii", "replace")
        if "*" in self._origins:
            return "*" if origin else None
        return origin if origin.lower() in self._origins else None

    def preflight(self, headers, methods):
        """Returns what a browser is told before it sends a page's request, beside cors(), which is in every answer."""
        if not self._allowed(headers) or b"access-control-request-method" not in dict(headers):
            return []
        wanted = dict(headers).get(b"access-control-request-headers", b"").decode("ascii", "ignore")
        return [("access-control-allow-methods", ", ".join(methods)),
                *([("access-control-allow-headers", wanted)] if wanted else []),
                ("access-control-max-age", str(PREFLIGHT_SECONDS))]


def digest(key):
    """Returns a key's digest: digests take the same time to compare, whatever the keys' lengths."""
    return hashlib.sha256(key).digest()


def check_origin(origin):
    """Checks a value of --cors: * or what a browser sends as Origin."""
    if not ORIGIN.fullmatch(origin):
        raise ColibriError("--cors", origin, "* or an origin such as http://localhost:3000, without a path",
                           "correct it")


def read_keys(path):
    """Returns the digests of the keys in a file, one a line."""
    option = f"--api-key-file: {path}"
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_KEY_BYTES + 1)
    except (OSError, ValueError) as error:
        raise ColibriError(option, getattr(error, "strerror", "a name with NUL"), "a file with a key a line",
                           "name another") from None
    if len(data) > MAX_KEY_BYTES:
        raise ColibriError(option, f"more than {MAX_KEY_BYTES} bytes", "a file with a key a line", "name another")
    keys = [(number, line.strip()) for number, line in enumerate(data.split(b"\n"), 1) if line.strip()]
    if not keys:
        raise ColibriError(option, "no key", "at least one, a line each", "write one, or leave the option out")
    for number, key in keys:
        if not KEY.fullmatch(key):
            raise ColibriError(option, f"a blank or another character than ASCII's in line {number}",
                               "one key a line, of visible ASCII characters", "correct it")
    return tuple(digest(key) for _, key in keys)
