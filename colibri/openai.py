"""The shapes of OpenAI's API: a request of ours from a body, and the bodies and events that answer it."""

import itertools
import json
import re
import time

from colibri import chat, conversation
from colibri.requests import CODES, HIDDEN, Refused, shown, wrong

# OpenAI's names of our fields, and what else a body may have. NEUTRAL: only with a value that asks for nothing.
COMMON = {"temperature": "temperature", "top_p": "top_p", "top_k": "top_k", "seed": "seed", "stream": "stream",
          "deadline_ms": "deadline_ms", "max_tokens": "max_new_tokens", "add_special_tokens": "add_special_tokens"}
RENAMED = {"/v1/completions": COMMON, "/v1/chat/completions": {**COMMON, "max_completion_tokens": "max_new_tokens"}}
INPUT = {"/v1/completions": "prompt", "/v1/chat/completions": "messages"}
NEUTRAL = {"n": (1,), "best_of": (1,), "echo": (False,), "stop": ([],), "suffix": ("",), "logprobs": (False,),
           "top_logprobs": (0,), "logit_bias": ({},), "presence_penalty": (0,), "frequency_penalty": (0,),
           "tools": ([],), "tool_choice": ("none",), "response_format": ({"type": "text"},)}
BODY = {"model", "user", "stream_options", *INPUT.values(), *NEUTRAL, *conversation.FIELDS,
        *itertools.chain(*RENAMED.values())}
PARAM = re.compile(r"(\w+)(?:\[\d+\]|\.(?:role|content|tool_calls|include_usage))*")  # what an error names a field by
ROLES = ("system", "developer", "user", "assistant")


class Answer:
    """A completion in OpenAI's shape: the request of a body, and the objects that answer it."""

    numbers = itertools.count(1)

    def __init__(self, path, server, body, arrived):
        _check_model(body, server.name)
        self._is_chat = path == "/v1/chat/completions"
        self.id = f"{'chatcmpl' if self._is_chat else 'cmpl'}-{next(self.numbers)}"
        self._path, self._server, self._with_usage, self.has_begun = path, server, False, False
        self._created = int(time.time())
        labels = {new: old for old, new in RENAMED[path].items()} | dict.fromkeys(("prompt", "prompt_ids"), INPUT[path])
        self.request = server.reader.request(self._values(body), arrived, labels)
        self._fields = {"id": self.id, "object": "text_completion", "created": self._created, "model": server.name}
        if self._is_chat:
            self._fields["object"] = "chat.completion.chunk" if self.request.stream else "chat.completion"
        mark = "\0"  # where a piece of text goes in an event that is made once
        self._event = json.dumps({**self._fields, "choices": [self._choice(mark, None)]}).split(json.dumps(mark))

    def _values(self, body):
        """Returns the fields of a request; null is a field left out."""
        values, renamed, source = {"id": self.id}, RENAMED[self._path], INPUT[self._path]
        of_template = conversation.FIELDS if self._is_chat and self._server.chat else ()
        known = ("model", source, "stream_options", "user", *renamed, *NEUTRAL, *of_template)
        for name, value in body.items():
            if name not in known:
                raise Refused(shown(name), "unsupported field",
                              f"one of {', '.join(('model', source, 'stream_options', *renamed))}",
                              logged={"where": "..."}, field=name[:100])
            if value is None or name in ("model", "user", *of_template):
                continue
            if name in NEUTRAL:
                _check_neutral(name, value)
            elif name in renamed:
                if renamed[name] in values:
                    raise Refused(name, "given twice", "max_tokens or max_completion_tokens", "leave one out")
                values[renamed[name]] = value
        if "stream_options" in body and body["stream_options"] is not None:
            self._with_usage = _include_usage(body)
        if body.get(source) is None:
            raise Refused(source, "missing", "a list of messages" if self._is_chat else "a string")
        if self._is_chat:
            made = self._server.chat
            values["prompt"] = conversation.conversation(made, body) if made else transcript(body["messages"])
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
        """Yields the data of the server-sent events that are due, JSON as bytes."""
        request, is_first, self.has_begun = self.request, not self.has_begun, True
        if is_first and self._is_chat:
            choice = {**self._choice("", None), "delta": {"role": "assistant", "content": ""}}
            yield json.dumps({**self._fields, "choices": [choice]}).encode()
        text = self._piece()
        if text:
            yield json.dumps(text).join(self._event).encode()
        if request.is_over and request.error:
            yield json.dumps(error_body(request.error)).encode()
        elif request.is_over:
            yield json.dumps({**self._fields, "choices": [self._choice("", request.finish)]}).encode()
            if self._with_usage:
                yield json.dumps({**self._fields, "choices": [], "usage": self._usage()}).encode()
            yield b"[DONE]"

    def _piece(self):
        """Returns the text that is new; token numbers stand in it with a blank between two, as in a text run."""
        request, is_first = self.request, not self.request.told
        news = request.news()
        if request.used:
            return "".join(piece for _, piece in news) + (request.rest() if request.is_over else "")
        text = " ".join(str(token) for token, _ in news)
        return text if is_first or not text else " " + text


def _check_model(body, name):
    """Checks that the body asks for the model that is served."""
    model = body.get("model")
    if model != name:
        got = "missing" if "model" not in body else json.dumps(model)[:100]
        raise Refused("model", got, name, code="not_found" if model else "bad_request", logged=HIDDEN)


def _check_neutral(name, value):
    if not any(type(value) in (type(good), float) and value == good for good in NEUTRAL[name]):
        got, neutral = json.dumps(value)[:60], NEUTRAL[name][0]
        raise Refused(name, f"{got}, not supported", json.dumps(neutral) if neutral else "none", "leave it out",
                      logged={"got": "..., not supported"})


def _include_usage(body):
    options = body["stream_options"]
    if not isinstance(options, dict):
        raise wrong("stream_options", options, "an object such as {\"include_usage\": true}")
    _check_keys("stream_options", options, ("include_usage",))
    value = options.get("include_usage", False)
    if type(value) is not bool:
        raise wrong("stream_options.include_usage", value, "true or false")
    if not body.get("stream"):
        raise Refused("stream_options", "given", "only with \"stream\": true", "leave it out")
    return value


def _check_keys(where, values, known):
    """Checks that an object has no other fields than those that are known."""
    for name in values:
        if name not in known:
            raise Refused(where, f"{shown(name)}: unknown field", f"{' and '.join(known)} alone",
                          logged={"got": "...: unknown field"})


def _prompt(prompt):
    """Returns (field, value) of OpenAI's prompt, which may be text, tokens, or a list of one of these."""
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], (str, list)):
        prompt = prompt[0]
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], (str, list)):
        raise Refused("prompt", f"{len(prompt)} prompts", "one", "send a request for each")
    return ("prompt_ids" if isinstance(prompt, list) else "prompt"), prompt


def transcript(messages):
    """Returns the messages as a prompt for a model without a chat template: `role: content` a line."""
    if not isinstance(messages, list) or not messages:
        got = "no message" if messages == [] else shown(messages)
        raise Refused("messages", got, "a list of at least one message", logged=HIDDEN)
    plain = []
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if not isinstance(message, dict):
            raise wrong(where, message, "an object with role and content alone")
        _check_keys(where, message, ("role", "content"))
        for name, expected in (("role", f"one of {', '.join(ROLES)}"), ("content", "a string, or a list of parts")):
            if name not in message:
                raise Refused(f"{where}.{name}", "missing", expected)
        if message["role"] not in ROLES:
            raise wrong(f"{where}.role", message["role"], f"one of {', '.join(ROLES)}")
        plain.append({"role": message["role"], "content": _content(message["content"], f"{where}.content")})
    return chat.transcript(plain)


def _content(content, where):
    """Returns text, of which content may be a list of parts."""
    part = "{\"type\": \"text\", \"text\": ...}"
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise wrong(where, content, f"a string, or a list of {part}")
    for index, value in enumerate(content):
        is_text = isinstance(value, dict) and value.keys() == {"type", "text"} and value["type"] == "text"
        if not is_text or not isinstance(value["text"], str):
            raise wrong(f"{where}[{index}]", value, f"{part}, a string and nothing else")
    return "".join(value["text"] for value in content)


def models(name):
    """Returns the body of /v1/models: the one model that is served."""
    return {"object": "list", "data": [{"id": name, "object": "model", "created": 0, "owned_by": "colibri"}]}


def error_body(error):
    """Returns the body of an error. Its param is the field that the error is about, or None."""
    kind = "invalid_request_error" if CODES[error.code] < 500 and error.code != "queue_full" else error.code
    found = PARAM.fullmatch(str(error.where))
    param = error.where if found and found[1] in BODY else error.field
    return {"error": {"message": str(error), "type": kind, "param": param, "code": error.code}}
