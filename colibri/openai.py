"""The shapes of OpenAI's API: a request of ours from a body, and the bodies and events that answer it."""

import itertools
import json
import re
import time

from colibri import conversation
from colibri.messages import FIELDS, transcript
from colibri.requests import CODES, HIDDEN, Refused, shown, wrong

# OpenAI's names of our fields, and what else a body may have. NEUTRAL: only with a value that asks for nothing.
COMMON = {"temperature": "temperature", "top_p": "top_p", "top_k": "top_k", "seed": "seed", "stream": "stream",
          "deadline_ms": "deadline_ms", "max_tokens": "max_new_tokens", "add_special_tokens": "add_special_tokens"}
RENAMED = {"/v1/completions": COMMON, "/v1/chat/completions": {**COMMON, "max_completion_tokens": "max_new_tokens"}}
INPUT = {"/v1/completions": "prompt", "/v1/chat/completions": "messages"}
NEUTRAL = {"n": (1,), "best_of": (1,), "echo": (False,), "stop": ([],), "suffix": ("",), "logprobs": (False,),
           "top_logprobs": (0,), "logit_bias": ({},), "presence_penalty": (0,), "frequency_penalty": (0,),
           "tools": ([],), "tool_choice": ("none", "auto"), "functions": ([],), "function_call": ("none", "auto"),
           "response_format": ({"type": "text"},), "modalities": (["text"],)}
HARMLESS = {  # what changes no answer: notes of a client's own, and hints
    "user": str, "store": bool, "metadata": dict, "service_tier": str, "parallel_tool_calls": bool,
    "reasoning_effort": str, "verbosity": str, "prompt_cache_key": str, "prompt_cache_retention": str,
    "safety_identifier": str}
KINDS = {str: "a string", bool: "true or false", dict: "an object"}
STREAM_OPTIONS = ("include_usage", "continuous_usage_stats", "include_obfuscation")
BODY = {"model", "stream_options", "tokens", *INPUT.values(), *NEUTRAL, *HARMLESS, *conversation.FIELDS,
        *itertools.chain(*RENAMED.values())}
PARTS = "|".join(("role", "content", *FIELDS, *STREAM_OPTIONS))
PARAM = re.compile(fr"(\w+)(?:\[\d+\]|\.(?:{PARTS}))*")  # what an error names a field by


class Answer:
    """A completion in OpenAI's shape: the request of a body, and the objects that answer it."""

    numbers = itertools.count(1)

    def __init__(self, path, server, body, arrived):
        check_model(body, server.name)
        self._is_chat = path == "/v1/chat/completions"
        self.id = f"{'chatcmpl' if self._is_chat else 'cmpl'}-{next(self.numbers)}"
        self._path, self._server, self._has_begun = path, server, False
        self._with_usage = self._counts = False  # usage in the last event, and in all events
        self._created = int(time.time())
        labels = {new: old for old, new in RENAMED[path].items()} | dict.fromkeys(("prompt", "prompt_ids"), INPUT[path])
        self.request = server.reader.request(self._values(body), arrived, labels)
        self._fields = {"id": self.id, "object": "text_completion", "created": self._created, "model": server.name}
        if self._is_chat:
            self._fields["object"] = "chat.completion.chunk" if self.request.stream else "chat.completion"
        mark = "\0"  # where a piece of text goes in an event that is made once
        self._event = self._chunk(mark, None).split(json.dumps(mark))

    def _values(self, body):
        """Returns the fields of a request; null is a field left out."""
        values, renamed, source = {"id": self.id}, RENAMED[self._path], INPUT[self._path]
        of_template = conversation.FIELDS if self._is_chat and self._server.chat else ()
        known = ("model", source, "stream_options", *renamed, *NEUTRAL, *HARMLESS, *of_template)
        for name, value in body.items():
            if value is None or name in ("model", *of_template):
                continue
            if name not in known:
                raise Refused(shown(name), "unsupported field",
                              f"one of {', '.join(('model', source, 'stream_options', *renamed))}",
                              logged={"where": "..."}, field=name[:100])
            if name in NEUTRAL:
                check_neutral(name, value, NEUTRAL[name])
            elif name in HARMLESS and not isinstance(value, HARMLESS[name]):
                raise wrong(name, value, KINDS[HARMLESS[name]])
            elif name in renamed:
                if renamed[name] in values:
                    raise Refused(name, "given twice", "max_tokens or max_completion_tokens", "leave one out")
                values[renamed[name]] = value
        if "stream_options" in body and body["stream_options"] is not None:
            options = _stream_options(body)
            self._with_usage = options["include_usage"]
            self._counts = self._with_usage and options["continuous_usage_stats"]
        if body.get(source) is None:
            raise Refused(source, "missing", "a list of messages" if self._is_chat else "a string")
        if self._is_chat:
            values["prompt"] = chat_prompt(body, self._server.chat)
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

    def _usage(self, completion):
        prompt = len(self.request.prompt)
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}

    def _text(self):
        request = self.request
        return request.text() if request.used else " ".join(map(str, request.tokens))

    def whole(self):
        return {**self._fields, "choices": [self._choice(self._text(), self.request.finish)],
                "usage": self._usage(len(self.request.tokens))}

    def events(self):
        """Yields the data of the server-sent events that are due, JSON as bytes: one a token, with what it adds."""
        request, is_first, self._has_begun = self.request, not self._has_begun, True
        if is_first and self._is_chat and not request.error:
            yield self._chunk("", None, {"delta": {"role": "assistant", "content": ""}}).encode()
        count = request.told
        for token, piece in request.news():
            count += 1
            text = piece if request.used else f"{' ' if count > 1 else ''}{token}"  # numbers as in a text run
            event = self._chunk(text, None, count=count) if self._counts else json.dumps(text).join(self._event)
            yield event.encode()
        if request.is_over and request.error:
            yield json.dumps(error_body(request.error)).encode()
        elif request.is_over:
            rest = request.rest() if request.used else ""
            yield self._chunk(rest, request.finish, count=count).encode()
            if self._with_usage:
                yield json.dumps({**self._fields, "choices": [], "usage": self._usage(count)}).encode()
            yield b"[DONE]"

    def _chunk(self, text, finish, more=(), count=0):
        """Returns the JSON of an event. count: tokens so far."""
        usage = {"usage": self._usage(count) if self._counts else None} if self._with_usage else {}
        return json.dumps({**self._fields, "choices": [{**self._choice(text, finish), **dict(more)}], **usage})


def chat_prompt(body, chat):
    """Returns the prompt of a body's messages: a Conversation where the model has a template, else their text."""
    return conversation.conversation(chat, body) if chat else transcript(body["messages"])


def check_model(body, name):
    """Checks that the body asks for the model that is served."""
    model = body.get("model")
    if model != name:
        got = "missing" if "model" not in body else json.dumps(model)[:100]
        raise Refused("model", got, name, code="not_found" if model else "bad_request", logged=HIDDEN)


def check_neutral(name, value, neutral):
    """Checks that a field has one of the values that ask for nothing."""
    if isinstance(value, dict):
        value = {key: inner for key, inner in value.items() if inner is not None}
    if not any(type(value) in (type(good), float) and value == good for good in neutral):
        raise Refused(name, f"{json.dumps(value)[:60]}, not supported",
                      json.dumps(neutral[0]) if neutral[0] else "none", "leave it out",
                      logged={"got": "..., not supported"}, field=name)


def _stream_options(body):
    """Returns {name: bool} of STREAM_OPTIONS."""
    options = body["stream_options"]
    if not isinstance(options, dict):
        raise wrong("stream_options", options, "an object such as {\"include_usage\": true}")
    given = {name: value for name, value in options.items() if value is not None}
    for name, value in given.items():
        if name not in STREAM_OPTIONS:
            raise Refused("stream_options", f"{shown(name)}: unknown field", f"one of {', '.join(STREAM_OPTIONS)}",
                          logged={"got": "...: unknown field"})
        if type(value) is not bool:
            raise wrong(f"stream_options.{name}", value, "true or false")
    if not body.get("stream"):
        raise Refused("stream_options", "given", "only with \"stream\": true", "leave it out")
    if given.get("include_obfuscation"):
        raise Refused("stream_options.include_obfuscation", "true, not supported", "false", "leave it out")
    return {**dict.fromkeys(STREAM_OPTIONS, False), **given}


def _prompt(prompt):
    """Returns (field, value) of OpenAI's prompt, which may be text, tokens, or a list of one of these."""
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], (str, list)):
        prompt = prompt[0]
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], (str, list)):
        raise Refused("prompt", f"{len(prompt)} prompts", "one", "send a request for each")
    return ("prompt_ids" if isinstance(prompt, list) else "prompt"), prompt


def models(name):
    """Returns the body of /v1/models: the one model that is served."""
    return {"object": "list", "data": [model(name, name)]}


def model(asked, name):
    """Returns the body of /v1/models/ID."""
    check_model({"model": asked}, name)
    return {"id": name, "object": "model", "created": 0, "owned_by": "colibri"}


def error_body(error):
    """Returns the body of an error. Its param is the field that the error is about, or None."""
    kind = "invalid_request_error" if CODES[error.code] < 500 and error.code != "queue_full" else error.code
    found = PARAM.fullmatch(str(error.where))
    param = error.where if found and found[1] in BODY else error.field
    return {"error": {"message": str(error), "type": kind, "param": param, "code": error.code}}
