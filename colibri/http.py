"""HTTP/1.1 on a connection: heads, paths and statuses. colibri/openai.py has the bodies of completions."""

import json
import re
import select

from colibri.connection import Connection
from colibri.errors import ColibriError
from colibri.metrics import CONTENT_TYPE
from colibri.openai import Answer, error_body, models
from colibri.requests import CODES, HIDDEN, Refused

try:
    import h11
except ImportError:
    raise ColibriError("h11", "not installed", "it for --http", "run pip install h11 (the extra `serve`)") from None

MAX_HEAD_BYTES = 16 << 10
GET, POST = ("GET", "HEAD"), ("POST",)
PATHS = {"/health": GET, "/ready": GET, "/metrics": GET, "/v1/models": GET, "/v1/completions": POST,
         "/v1/chat/completions": POST}
ORIGIN = re.compile(rb"^https?://[^/?]*", re.IGNORECASE)  # that a target has before its path where a proxy is spoken to
REPR = re.compile(r"(.*?): bytearray\(b(['\"])(.*?)(?:\\r\\n)?\2\)")  # what h11's errors have of a client's bytes


class Http(Connection):
    """HTTP/1.1, one request at a time on a connection."""

    kind = "http"
    spare_places = 8  # for /health, /ready and /metrics

    def __init__(self, server):
        super().__init__(server)
        self._h11 = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEAD_BYTES)
        self._head, self._body = None, bytearray()
        self._is_busy = False  # a response is due: the next request is not read yet
        self._path = None      # of the body that is read
        self._answer = None    # of the completion that runs
        self._task = None      # of /metrics: the loop alone would not keep it

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
        """Checks as others do, and notices a client that leaves while no more of its requests are read."""
        super().check(now)
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
                self.write(self._h11.send(h11.InformationalResponse(status_code=100, headers=[])))
        elif isinstance(event, h11.Data):
            if len(self._body) <= self.server.reader.max_bytes:  # the rest is read, not kept: then the client hears why
                self._body += event.data
        elif isinstance(event, h11.EndOfMessage):
            body, self._body = bytes(self._body), bytearray()
            self._is_busy = True
            if len(body) > self.server.reader.max_bytes:
                raise self.server.reader.too_long(body, "body")
            path = ORIGIN.sub(b"", self._head.target).partition(b"?")[0].decode("ascii", "replace")
            self._handle(self._head.method.decode(), path, body)

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
        if path not in PATHS:
            raise Refused("path", path[:100], f"one of {', '.join(PATHS)}", code="not_found", logged=HIDDEN)
        if method not in PATHS[path]:
            expected = f"{' or '.join(PATHS[path])} for {path}"
            headers = [("allow", ", ".join(PATHS[path]))]
            self.refuse(Refused("method", method[:100], expected, logged=HIDDEN), 405, headers)
        elif path == "/health":
            wrong = self.server.health()
            self._respond(503 if wrong else 200, {"status": wrong or "ok"})
        elif path == "/ready":
            wrong = "shutting down" if self.server.is_draining else self.server.health()
            self._respond(503 if wrong else 200, {"status": wrong or "ready"})
        elif path == "/metrics":
            self._task = self.server.loop.create_task(self._metrics())
        elif path == "/v1/models":
            self._respond(200, models(self.server.name))
        elif self.is_spare and not self.server.settle(self):
            raise self.too_many()
        else:
            self._path = path
            self.read(body)

    async def _metrics(self):
        self._respond(200, await self.server.exposition(), CONTENT_TYPE)
        self.pump()

    def understand(self, data):
        """Returns an Answer, which has its request."""
        return Answer(self._path, self.server, self.server.reader.parse(data, "body"), self.arrived)

    def take(self, made):
        request = made.request
        request.owner = self
        self.server.submit(request)
        self.running[request.id], self._answer = request, made

    def progress(self, request):
        answer = self._answer
        if request.is_over and request.error and not answer.has_begun:
            del self.running[request.id]
            self._error(request.error)
        elif not request.stream:
            del self.running[request.id]
            self._respond(200, answer.whole())
        else:
            self._stream(request, answer)
        if not self.running:
            self._answer = None
            self.server.loop.call_soon(self.pump)

    def _stream(self, request, answer):
        if not answer.has_begun:
            self.write(self._h11.send(h11.Response(status_code=200, headers=[
                ("content-type", "text/event-stream; charset=utf-8"), ("cache-control", "no-cache"),
                *self._connection_header()])))
        for data in answer.events():
            self.write(self._h11.send(h11.Data(b"data: " + data + b"\n\n")))
        if request.is_over:
            del self.running[request.id]
            self._end()

    def refuse(self, error, status=None, headers=()):
        self.server.refused(error)
        self._error(error, status, headers)

    def _error(self, error, status=None, headers=()):
        """Answers with an error; a request that was not read whole is the connection's last."""
        status = status or CODES[error.code]
        headers = [("retry-after", "1")] if error.code == "queue_full" else headers
        self._respond(status, error_body(error), headers=headers)

    def _respond(self, status, content, kind="application/json", headers=()):
        data = (content if isinstance(content, str) else json.dumps(content) + "\n").encode()
        if self._h11.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self.write(self._h11.send(h11.Response(status_code=status, headers=[
                ("content-type", kind), ("content-length", str(len(data))), *headers, *self._connection_header()])))
            if self._head is None or self._head.method != b"HEAD":
                self.write(self._h11.send(h11.Data(data)))
            self._end()
        else:
            self.close()

    def _connection_header(self):
        must_close = self.server.is_draining or self.is_spare or self._h11.their_state is not h11.DONE
        return [("connection", "close")] if must_close else []

    def _end(self):
        """Ends the response: it is the next request's turn."""
        self.write(self._h11.send(h11.EndOfMessage()))
        if self._h11.our_state is h11.DONE and self._h11.their_state is h11.DONE:
            self._h11.start_next_cycle()
            self._head, self._is_busy = None, False
            self.flush()
        else:
            self.close()


def _refused(error):
    """Returns a Refused of what h11 says of bytes that are no HTTP: in its words, but as text, and with the limit."""
    text = str(error)
    if error.error_status_hint == 431:
        text = f"more than {MAX_HEAD_BYTES} bytes of a head or of a chunk's size"
    found = REPR.match(text)
    if not found:
        return Refused("HTTP", text, "an HTTP/1.1 request")
    return Refused("HTTP", f'{found[1]} "{found[3][:100]}"', "an HTTP/1.1 request", logged={"got": f"{found[1]} ..."})
