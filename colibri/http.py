"""HTTP/1.1 on a connection: heads, paths and statuses. openai.py and tokens.py have the bodies, access.py the rules."""

import json
import re
import select
from email.utils import formatdate
from http import HTTPStatus
from urllib.parse import unquote

from colibri.coding import CODINGS, decoded
from colibri.connection import Connection
from colibri.errors import ColibriError
from colibri.intake import LARGE
from colibri.metrics import CONTENT_TYPE
from colibri.openai import Answer, error_body, model, models
from colibri.refused import CODES, HIDDEN, Refused
from colibri.tokens import TOKENS

try:
    import h11
except ImportError:
    raise ColibriError("h11", "not installed", "it for --http", "run pip install h11 (the extra `serve`)") from None

MAX_HEAD_BYTES = 16 << 10
COMMENT_SECONDS = 5  # of a stream without a token, after which a comment shows that it goes on
COMMENT = b":\n\n"   # of server-sent events, which clients pass over
GET, POST = ("GET", "HEAD"), ("POST",)
PATHS = {"/health": GET, "/ready": GET, "/metrics": GET, "/v1/models": GET, "/v1/models/ID": GET,
         "/v1/completions": POST, "/v1/chat/completions": POST, **dict.fromkeys(TOKENS, POST)}
MODEL = "/v1/models/"
OTHERS = re.compile("/v1/(responses|messages)(/.*)?", re.DOTALL)  # of OpenAI's newer interface, and of Anthropic's
ORIGIN = re.compile(rb"^https?://[^/?]*", re.IGNORECASE)  # that a target has before its path where a proxy is spoken to
REPR = re.compile(r"(.*?): bytearray\(b(['\"])(.*?)(?:\\r\\n)?\2\)")  # what h11's errors have of a client's bytes


class Http(Connection):
    """HTTP/1.1, one request at a time on a connection. is_local: it came to a socket of a loopback address."""

    kind = "http"
    spare_places = 8  # for /health, /ready and /metrics

    def __init__(self, server, is_local):
        super().__init__(server)
        self._is_local = is_local
        self._h11 = self._new_h11()
        self._head, self._body = None, bytearray()
        self._is_busy = False  # a response is due: the next request is not read yet
        self._path = self._coding = None  # of the body that is read
        self._answer = None    # of the completion that runs
        self._streams = False  # the head of its stream is sent
        self._stays = False    # after this response, although the client speaks HTTP/1.0
        self._task = None      # of /metrics: the loop alone would not keep it

    def _new_h11(self):
        return h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEAD_BYTES)

    def consume(self, count):
        while count and not (self._is_busy or self.is_closing):
            try:
                event = self._h11.next_event()
                if event is not h11.NEED_DATA:
                    self._event(event)
                    count -= isinstance(event, h11.EndOfMessage)
                elif self._input:
                    data = bytes(self._input)
                    self._input.clear()
                    self._h11.receive_data(data)
                else:
                    self._check_is_http()
                    break
            except h11.RemoteProtocolError as error:
                self.refuse(_refused(error), error.error_status_hint)
            except Refused as error:
                self.refuse(error)
        self.is_sated = len(self._input) > self.server.reader.max_bytes  # of further requests, while one runs
        self.flush()
        return count == 0

    def check(self, now):
        """Checks as others do, shows a client that its stream goes on, and notices one that leaves while no more of its
        requests are read.
        """
        super().check(now)
        if self._streams and now - self.active >= COMMENT_SECONDS:
            self.write(self._h11.send(h11.Data(COMMENT)))
            self.flush()
        if self.is_sated and not self.is_closing:
            poll = select.poll()
            poll.register(self.transport.get_extra_info("socket"), select.POLLRDHUP)
            if poll.poll(0):
                self.close()

    def is_idle(self):
        return not self._is_busy and super().is_idle()

    def is_within_message(self):
        return self._h11.their_state is h11.SEND_BODY or bool(self._h11.trailing_data[0])

    def _event(self, event):
        if isinstance(event, h11.Request):
            self._head = event
            self._check_length(dict(event.headers))
            if self._h11.they_are_waiting_for_100_continue:
                self._check_access()
                self.write(self._h11.send(h11.InformationalResponse(status_code=100, headers=[], reason=b"Continue")))
        elif isinstance(event, h11.Data):
            if len(self._body) <= self.server.reader.max_bytes:  # the rest is read, not kept: then the client hears why
                self._body += event.data
        elif isinstance(event, h11.EndOfMessage):
            body, self._body = bytes(self._body), bytearray()
            self._is_busy = True
            self._check_access()
            if len(body) > self.server.reader.max_bytes:
                raise self.server.reader.too_long(body, "body")
            self._handle(self._head.method.decode(), _path(self._head.target), body)

    def _check_access(self):
        if self._head.method != b"OPTIONS":  # of which a browser sends no key: it asks whether it may send one
            self.server.access.check(_path(self._head.target), self._head.headers, self._is_local)

    def _check_is_http(self):
        """Refuses a JSON line at once: no head begins so, and its end would not come."""
        if self._h11.their_state is h11.IDLE and self._h11.trailing_data[0][:1] == b"{":
            raise Refused("HTTP", "a JSON object", "an HTTP/1.1 request", "lines are spoken at --serve")

    def _check_length(self, headers):
        """Refuses a body of two lengths, of which a proxy may see the other, and one that need not come at all."""
        length = headers.get(b"content-length")
        if length is not None and b"transfer-encoding" in headers:
            raise Refused("HTTP", "Content-Length and Transfer-Encoding", "one of them", "leave one out")
        if length is not None and int(length) > self.server.reader.max_bytes \
                and self._h11.they_are_waiting_for_100_continue:
            raise self.server.reader.too_long(b"", "body")

    def _handle(self, method, path, body):
        if (method, path) == ("OPTIONS", "*"):
            self._respond(204, None, headers=[("allow", "GET, HEAD, POST, OPTIONS")])
            return
        route = _route(path)
        methods = PATHS[route]
        if method == "OPTIONS":
            headers = self.server.access.preflight(self._head.headers, methods)
            self._respond(204, None, headers=[("allow", ", ".join((*methods, "OPTIONS"))), *headers])
        elif method not in methods:
            headers = [("allow", ", ".join(methods))]
            self.refuse(Refused("method", method[:100], f"{' or '.join(methods)} for {route}", logged=HIDDEN), 405,
                        headers)
        elif methods == POST:
            self._take_in(path, body)
        else:
            self._tell(route, path)

    def _tell(self, route, path):
        """Answers a GET."""
        if route == "/health":
            wrong = self.server.health()
            self._respond(503 if wrong else 200, {"status": wrong or "ok"})
        elif route == "/ready":
            wrong = "shutting down" if self.server.is_draining else self.server.health()
            self._respond(503 if wrong else 200, {"status": wrong or "ready"})
        elif route == "/metrics":
            self._task = self.server.loop.create_task(self._metrics())
        elif route == "/v1/models":
            self._respond(200, models(self.server.name))
        else:
            self._respond(200, model(path.removeprefix(MODEL), self.server.name))

    def _take_in(self, path, body):
        """Reads a body; on another thread where it may be long once it is decoded, or in tokens."""
        if self.is_spare and not self.server.settle(self):
            raise self.too_many()
        coding = b",".join(value for name, value in self._head.headers if name == b"content-encoding").lower()
        if coding not in CODINGS:
            expected = ", ".join(name.decode() for name in CODINGS if name)
            self.refuse(Refused("Content-Encoding", coding.decode("ascii", "replace")[:100], f"one of {expected}",
                                "send it without", logged=HIDDEN), 415, [("accept-encoding", expected)])
            return
        self._path, self._coding = path, coding
        self.read(body, LARGE + 1 if CODINGS[coding] or path in TOKENS else None)

    async def _metrics(self):
        self._respond(200, await self.server.exposition(), CONTENT_TYPE)
        self.pump()

    def understand(self, data):
        """Returns an Answer, which has its request, or the whole answer where that needs no steps of the model."""
        reader = self.server.reader
        body = reader.parse(decoded(data, self._coding, reader), "body")
        if self._path in TOKENS:
            return json.dumps(TOKENS[self._path](body, self.server)) + "\n"
        return Answer(self._path, self.server, body, self.arrived)

    def take(self, made):
        if not isinstance(made, Answer):
            self._respond(200, made)
            return
        for request in made.requests:
            request.owner = self
        self.server.submit(*made.requests)
        self.running.update((request.id, request) for request in made.requests)
        self._answer = made

    def accepted(self, request):
        """Begins a stream: its client knows then that it is not lost."""
        if request.stream and not (self._streams or self.is_closing):
            self._streams = True
            self._begin(200, [("content-type", "text/event-stream; charset=utf-8"), ("cache-control", "no-cache"),
                              ("x-accel-buffering", "no")])
            self.flush()

    def progress(self, request):
        if request.id not in self.running:  # another of its answer has failed, and ended that
            return
        answer = self._answer
        if request.is_over:
            del self.running[request.id]
        if request.is_over and request.error:
            self._abandon()
        if self._streams:
            self._stream(request, answer)
        elif request.is_over and request.error:
            self._error(request.error)
        elif not self.running:
            self._respond(200, answer.whole())
        if not self.running:
            self._answer = None
            self.server.loop.call_soon(self.pump)

    def _abandon(self):
        """Cancels what still runs of an answer."""
        others = list(self.running.values())
        self.running.clear()
        for other in others:
            self.server.cancel(other)

    def _stream(self, request, answer):
        for data in answer.events(request):
            self.write(self._h11.send(h11.Data(b"data: " + data + b"\n\n")))
        if not self.running:
            self._streams = False
            self._end()

    def refuse(self, error, status=None, headers=()):
        self.server.refused(error)
        self._error(error, status, headers)

    def _error(self, error, status=None, headers=()):
        """Answers with an error; a request that was not read whole is the connection's last."""
        status = status or CODES[error.code]
        headers = {"queue_full": [("retry-after", "1")],
                   "invalid_api_key": [("www-authenticate", "Bearer")]}.get(error.code, headers)
        self._respond(status, error_body(error), headers=headers)

    def _respond(self, status, content, kind="application/json", headers=()):
        """Answers with a whole body: text, what is to be JSON, or nothing for None."""
        if self._h11.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.close()
            return
        data = b""
        if content is not None:
            data = (content if isinstance(content, str) else json.dumps(content) + "\n").encode()
            headers = [("content-type", kind), ("content-length", str(len(data))), *headers]
        self._begin(status, headers, is_whole=True)
        if data and not (self._head is not None and self._head.method == b"HEAD"):
            self.write(data if self._stays else self._h11.send(h11.Data(data)))
        self._end()

    def _begin(self, status, headers, is_whole=False):
        """Writes a response's head. is_whole: its length is known."""
        head = self._head.headers if self._head is not None else ()
        headers = [("date", formatdate(usegmt=True)), *headers, *self.server.access.cors(head)]
        must_close = self.server.is_draining or self.is_spare or self._h11.their_state not in (h11.DONE, h11.MUST_CLOSE)
        self._stays = is_whole and not must_close and _is_kept_alive(self._head)
        reason = HTTPStatus(status).phrase
        if self._stays:  # h11 would end it
            headers.append(("connection", "keep-alive"))
            self.write("".join([f"HTTP/1.1 {status} {reason}\r\n", *(f"{name}: {value}\r\n" for name, value in headers),
                                "\r\n"]).encode())
        else:
            headers += [("connection", "close")] if must_close else []
            self.write(self._h11.send(h11.Response(status_code=status, reason=reason.encode(), headers=headers)))

    def _end(self):
        """Ends the response: it is the next request's turn."""
        if self._stays:
            rest, self._h11 = self._h11.trailing_data[0], self._new_h11()
            if rest:
                self._h11.receive_data(rest)
        else:
            self.write(self._h11.send(h11.EndOfMessage()))
            if not self._h11.our_state is self._h11.their_state is h11.DONE:
                self.close()
                return
            self._h11.start_next_cycle()
        self._head, self._is_busy = None, False
        self.flush()


def _path(target):
    """Returns the path of a target, without its escapes and a slash at its end."""
    path = ORIGIN.sub(b"", target).partition(b"?")[0].decode("ascii", "replace")
    return unquote(path.rstrip("/")) or "/"


def _route(path):
    """Returns which of PATHS a path is."""
    route = "/v1/models/ID" if path.startswith(MODEL) else path
    if OTHERS.fullmatch(path):
        raise Refused("path", path[:100], "/v1/chat/completions", "send a conversation there, in OpenAI's form",
                      code="not_found", logged=HIDDEN)
    if route not in PATHS:
        raise Refused("path", path[:100], f"one of {', '.join(PATHS)}", code="not_found", logged=HIDDEN)
    return route


def _is_kept_alive(head):
    """Returns whether a client of HTTP/1.0 asks for the connection to stay, which it otherwise does not."""
    if head is None or head.http_version != b"1.0":
        return False
    values = b",".join(value for name, value in head.headers if name == b"connection")
    return b"keep-alive" in re.split(rb"\s*,\s*", values.lower())


def _refused(error):
    """Returns a Refused of what h11 says of bytes that are no HTTP: in its words, but as text, and with the limit."""
    text = str(error)
    if error.error_status_hint == 431:
        text = f"more than {MAX_HEAD_BYTES} bytes of a head or of a chunk's size"
    found = REPR.match(text)
    if not found:
        return Refused("HTTP", text, "an HTTP/1.1 request")
    return Refused("HTTP", f'{found[1]} "{found[3][:100]}"', "an HTTP/1.1 request", logged={"got": f"{found[1]} ..."})
