"""HTTP: how the server is, what it has counted, and completions in the shape that OpenAI's clients speak."""

import itertools
import json
import re
import select
import time

from colibri.connection import Connection
from colibri.errors import ColibriError
from colibri.metrics import CONTENT_TYPE
from colibri.requests import CODES, Refused

try:
    import h11
except ImportError:
    raise ColibriError("h11: not installed, expected it for --http; run pip install h11 (the extra `serve`)") from None

MAX_HEAD_BYTES = 16 << 10
PATHS = {"/health": "GET", "/ready": "GET", "/metrics": "GET", "/v1/models": "GET",
         "/v1/completions": "POST", "/v1/chat/completions": "POST"}
# OpenAI's names of our fields, and what else a body may have. NEUTRAL: only with a value that asks for nothing.
COMMON = {"temperature": "temperature", "top_p": "top_p", "top_k": "top_k", "seed": "seed", "stream": "stream",
          "deadline_ms": "deadline_ms", "max_tokens": "max_new_tokens", "add_special_tokens": "add_special_tokens"}
RENAMED = {"/v1/completions": COMMON, "/v1/chat/completions": {**COMMON, "max_completion_tokens": "max_new_tokens"}}
INPUT = {"/v1/completions": "prompt", "/v1/chat/completions": "messages"}
NEUTRAL = {"n": (1,), "best_of": (1,), "echo": (False,), "stop": ([],), "suffix": ("",), "logprobs": (False,),
           "top_logprobs": (0,), "logit_bias": ({},), "presence_penalty": (0,), "frequency_penalty": (0,),
           "tools": ([],), "tool_choice": ("none",), "response_format": ({"type": "text"},)}
ORIGIN = re.compile(rb"^https?://[^/?]*", re.IGNORECASE)  # that a target has before its path where a proxy is spoken to
ROLES = ("system", "developer", "user", "assistant")


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
                    break
            except h11.RemoteProtocolError as error:
                refused = Refused(f"HTTP: {error}, expected an HTTP/1.1 request", content=str(error))
                self.refuse(refused, error.error_status_hint)
            except Refused as error:
                self.refuse(error)
        self.is_sated = len(self._input) > self.server.reader.max_bytes  # of further requests, while one runs
        self.flush()
        return count == 0

    def check(self, now):
        """Also notices a client that leaves while no more of its requests are read."""
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

    def _handle(self, method, path, body):
        if path not in PATHS:
            raise Refused(f"path: {path[:100]}, expected one of {', '.join(PATHS)}", "not_found")
        if method != PATHS[path]:
            self._respond(405, _error_body(Refused(f"method: {method}, expected {PATHS[path]} for {path}")),
                          headers=[("allow", PATHS[path])])
        elif path == "/health":
            wrong = self.server.health()
            self._respond(503 if wrong else 200, {"status": wrong or "ok"})
        elif path == "/ready":
            wrong = "shutting down" if self.server.is_draining else self.server.health()
            self._respond(503 if wrong else 200, {"status": wrong or "ready"})
        elif path == "/metrics":
            self._task = self.server.loop.create_task(self._metrics())
        elif path == "/v1/models":
            self._respond(200, {"object": "list", "data": [{"id": self.server.name, "object": "model", "created": 0,
                                                            "owned_by": "colibri"}]})
        elif self.is_spare:
            raise self.too_many()
        else:
            self._path = path
            self.read(body)

    async def _metrics(self):
        self._respond(200, await self.server.exposition(), CONTENT_TYPE)
        self.pump()

    def understand(self, data):
        """An _Answer, which has its request."""
        body = self.server.reader.parse(data, "body")
        model = body.get("model")
        if model != self.server.name:
            got = "missing" if "model" not in body else json.dumps(model)[:100]
            raise Refused(f"model: {got}, expected {self.server.name}", "not_found" if model else "bad_request")
        return _Answer(self._path, self.server, body)

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

    def refuse(self, error, status=None):
        self.server.refused(error)
        self._error(error, status)

    def _error(self, error, status=None):
        """Answers with an error; a request that was not read whole is the connection's last."""
        status = status or CODES[error.code]
        headers = [("retry-after", "1")] if error.code == "queue_full" else []
        self._respond(status, _error_body(error), headers=headers)

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
        names = [name for name, _ in self._head.headers] if self._head else ()
        is_ambiguous = b"content-length" in names and b"transfer-encoding" in names  # a proxy may see another end of it
        must_close = self.server.is_draining or self.is_spare or is_ambiguous or self._h11.their_state is not h11.DONE
        return [("connection", "close")] if must_close else []

    def _end(self):
        """The response is whole: the next request's turn."""
        self.write(self._h11.send(h11.EndOfMessage()))
        if self._h11.our_state is h11.DONE and self._h11.their_state is h11.DONE:
            self._h11.start_next_cycle()
            self._head, self._is_busy = None, False
            self.flush()
        else:
            self.close()


class _Answer:
    """A completion in OpenAI's shape: the request of a body, and the objects that answer it."""

    numbers = itertools.count(1)

    def __init__(self, path, server, body):
        self._is_chat = path == "/v1/chat/completions"
        self.id = f"{'chatcmpl' if self._is_chat else 'cmpl'}-{next(self.numbers)}"
        self._path, self._server, self._with_usage, self.has_begun = path, server, False, False
        self._created = int(time.time())
        labels = {new: old for old, new in RENAMED[path].items()} | dict.fromkeys(("prompt", "prompt_ids"), INPUT[path])
        self.request = server.reader.request(self._values(body), labels)
        self._fields = {"id": self.id, "object": "text_completion", "created": self._created, "model": server.name}
        if self._is_chat:
            self._fields["object"] = "chat.completion.chunk" if self.request.stream else "chat.completion"
        mark = "\0"  # where a piece of text goes in an event that is made once
        self._event = json.dumps({**self._fields, "choices": [self._choice(mark, None)]}).split(json.dumps(mark))

    def _values(self, body):
        """The fields of a request; null is a field left out."""
        values, renamed, source = {"id": self.id}, RENAMED[self._path], INPUT[self._path]
        known = ("model", source, "stream_options", "user", *renamed, *NEUTRAL)
        for name, value in body.items():
            if name not in known:
                raise Refused(f"{json.dumps(name)[:100]}: unsupported field, expected one of "
                              f"{', '.join(('model', source, 'stream_options', *renamed))}")
            if value is None or name in ("model", "user"):
                continue
            if name in NEUTRAL:
                _check_neutral(name, value)
            elif name in renamed:
                if renamed[name] in values:
                    raise Refused(f"{name}: given twice, expected max_tokens or max_completion_tokens; leave one out")
                values[renamed[name]] = value
        if "stream_options" in body and body["stream_options"] is not None:
            self._with_usage = _include_usage(body)
        if body.get(source) is None:
            raise Refused(f"{source}: missing, expected {'a list of messages' if self._is_chat else 'a string'}")
        if self._is_chat:
            values["prompt"] = transcript(body["messages"])
        else:
            name, value = _prompt(body["prompt"])
            values[name] = value
        return values

    def _choice(self, text, finish):
        choice = {"index": 0}
        if not self._is_chat:
            choice["text"] = text
        elif self.request.stream:
            choice["delta"] = {} if finish and not text else {"content": text}
        else:
            choice["message"] = {"role": "assistant", "content": text}
        return {**choice, "logprobs": None, "finish_reason": finish}

    def _usage(self):
        prompt, completion = len(self.request.prompt), len(self.request.tokens)
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}

    def _text(self):
        request = self.request
        return request.text() if request.used else " ".join(map(str, request.tokens))

    def whole(self):
        return {**self._fields, "choices": [self._choice(self._text(), self.request.finish)], "usage": self._usage()}

    def events(self):
        """The data of the server-sent events that are due, JSON as bytes."""
        request, is_first, self.has_begun = self.request, not self.has_begun, True
        if is_first and self._is_chat:
            choice = {**self._choice("", None), "delta": {"role": "assistant", "content": ""}}
            yield json.dumps({**self._fields, "choices": [choice]}).encode()
        text = self._piece()
        if text:
            yield json.dumps(text).join(self._event).encode()
        if request.is_over and request.error:
            yield json.dumps(_error_body(request.error)).encode()
        elif request.is_over:
            yield json.dumps({**self._fields, "choices": [self._choice("", request.finish)]}).encode()
            if self._with_usage:
                yield json.dumps({**self._fields, "choices": [], "usage": self._usage()}).encode()
            yield b"[DONE]"

    def _piece(self):
        """The text that is new; token numbers stand in it with a blank between two, as in a text run."""
        request, is_first = self.request, not self.request.told
        news = request.news()
        if request.used:
            return "".join(piece for _, piece in news) + (request.rest() if request.is_over else "")
        text = " ".join(str(token) for token, _ in news)
        return text if is_first or not text else " " + text


def _check_neutral(name, value):
    if not any(type(value) in (type(good), float) and value == good for good in NEUTRAL[name]):
        got, neutral = json.dumps(value)[:60], NEUTRAL[name][0]
        raise Refused(f"{name}: {got}, not supported, expected {json.dumps(neutral) if neutral else 'none'}; leave it "
                      "out", content=got)


def _include_usage(body):
    options = body["stream_options"]
    if not isinstance(options, dict) or set(options) - {"include_usage"} or not body.get("stream"):
        raise Refused("stream_options: expected {\"include_usage\": true} and \"stream\": true")
    value = options.get("include_usage", False)
    if type(value) is not bool:
        raise Refused("stream_options.include_usage: expected true or false")
    return value


def _prompt(prompt):
    """(field, value) of OpenAI's prompt, which may be text, tokens, or a list of one of these."""
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], (str, list)):
        prompt = prompt[0]
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], (str, list)):
        raise Refused(f"prompt: {len(prompt)} prompts, expected one; send a request for each")
    return ("prompt_ids" if isinstance(prompt, list) else "prompt"), prompt


def transcript(messages):
    """The messages as a prompt, `role: content` a line: a .bin holds no template of a chat."""
    if not isinstance(messages, list) or not messages:
        raise Refused("messages: expected a list of at least one message")
    lines = []
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if not isinstance(message, dict) or set(message) - {"role", "content"}:
            raise Refused(f"{where}: expected an object with role and content alone")
        if message.get("role") not in ROLES:
            got = json.dumps(message.get("role"))[:60]
            raise Refused(f"{where}.role: {got}, expected one of {', '.join(ROLES)}", content=got)
        lines.append(f"{message['role']}: {_content(message.get('content'), where)}\n")
    return "".join(lines) + "assistant:"


def _content(content, where):
    """Text, or a list of parts that are text."""
    if isinstance(content, list) and all(
            isinstance(part, dict) and part.keys() == {"type", "text"} and part["type"] == "text"
            and isinstance(part["text"], str) for part in content):
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise Refused(f"{where}.content: expected a string, or a list of {{\"type\": \"text\", \"text\": ...}}")
    return content


def _error_body(error):
    kind = "invalid_request_error" if CODES[error.code] < 500 and error.code != "queue_full" else error.code
    return {"error": {"message": str(error), "type": kind, "param": None, "code": error.code}}
