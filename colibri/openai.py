"""The shapes of OpenAI's API: a request of ours from a body, and the bodies and events that answer it."""

import itertools
import json
import re
import time

from colibri import constraints, conversation
from colibri.choices import Asked, Choice
from colibri.fields import drawn_seed, integer
from colibri.messages import FIELDS, transcript
from colibri.refused import CODES, HIDDEN, Refused, shown, wrong
from colibri.requests import Terms
from colibri.sampling import MAX_CHOICES
from colibri.tools import check_possible

# OpenAI's and vLLM's names of our fields, and what else a body may have. OF_ANSWER: read here. NEUTRAL: only with a
# value that asks for nothing.
COMMON = {"max_tokens": "max_new_tokens", **{name: name for name in (
    "temperature", "top_p", "top_k", "min_p", "seed", "stream", "stop", "stop_token_ids", "ignore_eos", "min_tokens",
    "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "include_stop_str_in_output",
    "skip_special_tokens", "deadline_ms", "add_special_tokens", *constraints.FIELDS)}}
RENAMED = {"/v1/completions": {**COMMON, "logprobs": "logprobs", "prompt_logprobs": "prompt_logprobs"},
           "/v1/chat/completions": {**COMMON, "max_completion_tokens": "max_new_tokens", "top_logprobs": "logprobs"}}
INPUT = {"/v1/completions": "prompt", "/v1/chat/completions": "messages"}
OF_ANSWER = {"/v1/completions": ("n", "best_of", "echo"), "/v1/chat/completions": ("n", "logprobs")}
NEUTRAL = {"best_of": (1,), "echo": (False,), "suffix": ("",), "logprobs": (False,), "top_logprobs": (0,),
           "tools": ([],), "tool_choice": ("none", "auto"), "functions": ([],), "function_call": ("none", "auto"),
           "modalities": (["text"],)}
HARMLESS = {  # what changes no answer: notes of a client's own, and hints
    "user": str, "store": bool, "metadata": dict, "service_tier": str, "parallel_tool_calls": bool,
    "reasoning_effort": str, "verbosity": str, "prompt_cache_key": str, "prompt_cache_retention": str,
    "safety_identifier": str}
KINDS = {str: "a string", bool: "true or false", dict: "an object"}
STREAM_OPTIONS = ("include_usage", "continuous_usage_stats", "include_obfuscation")
BODY = {"model", "stream_options", "tokens", *INPUT.values(), *itertools.chain(*OF_ANSWER.values()), *NEUTRAL,
        *HARMLESS, *conversation.FIELDS, *itertools.chain(*RENAMED.values())}
OF_TOOLS = ("type", "function", "parameters", "tool_call_id")
PARTS = "|".join(("role", "content", *FIELDS, *OF_TOOLS, *STREAM_OPTIONS, *constraints.PARTS, r"\d+"))
PARAM = re.compile(fr"(\w+)(?:\[\d+\]|\.(?:{PARTS}))*")  # what an error names a field by


class Answer:
    """A completion in OpenAI's shape: the requests of a body, and the objects that answer it.

    requests: of each prompt in turn, as many as choices are asked for
    """

    numbers = itertools.count(1)

    def __init__(self, path, server, body, arrived):
        check_model(body, server.name)
        is_chat = path == "/v1/chat/completions"
        self.id = f"{'chatcmpl' if is_chat else 'cmpl'}-{next(self.numbers)}"
        self._path, self._asked = path, Asked(is_chat)
        self._with_usage = self._counts = False  # usage in the last event, and in all events
        self.requests, self._choices, self._events = [], {}, {}
        self._make(server, body, arrived)
        first = self.requests[0]
        self._asked.stream, self._unfinished = first.stream, set(self._choices)
        kind = "text_completion" if not is_chat else f"chat.completion{'.chunk' if first.stream else ''}"
        self._fields = {"id": self.id, "object": kind, "created": int(time.time()), "model": server.name}
        if first.seed is not None:
            self._fields["seed"] = first.seed
        if first.stream and self._asked.prompt_logprobs is not None:
            raise Refused("prompt_logprobs", "given with stream", "one of them", "leave one out")

    def _make(self, server, body, arrived):
        """Makes the requests."""
        self._of_template = conversation.FIELDS if self._asked.is_chat and server.chat else ()
        values, reader = self._values(body), server.reader
        count = self._count(body, server.engine.num_slots)
        if self._asked.is_chat:
            prompts = [("prompt", "messages", chat_prompt(body, server.chat))]
            self._set_parts(body, server, prompts[0][2])
        else:
            prompts = _prompts(body["prompt"])
        if count * len(prompts) > server.scheduler.most:
            raise Refused(INPUT[self._path], f"{len(prompts)} prompts with {count * len(prompts)} choices",
                          f"at most {server.scheduler.most}, which run and wait at once",
                          "send fewer at a time, or raise --queue-size")
        terms = Terms({new: old for old, new in RENAMED[self._path].items()}, drawn_seed(), self._asked.is_chat,
                      has_text=True, has_echo=self._asked.echo, has_marks=self._asked.reading is not None)
        for field, label, prompt in prompts:
            terms.labels |= {"prompt": label, "prompt_ids": label}
            request = reader.request({**values, field: prompt}, arrived, terms)
            for number in range(count):
                index = len(self.requests)
                identity = self.id if count * len(prompts) == 1 else f"{self.id}-{index}"
                choice = request.choice(identity, number)
                self.requests.append(choice)
                self._choices[choice.id] = Choice(index, choice, prompt, self._asked)

    def _set_parts(self, body, server, conversation):
        """Sets how the answer to a Conversation is taken apart."""
        if not server.chat:
            return
        check_possible(body.get("tool_choice"))
        if server.reading.has_parts(conversation):
            self._asked.reading = server.reading
        if body.get("parallel_tool_calls") is False:
            self._asked.most_calls = 1

    def _values(self, body):
        """Returns the fields that all requests have; null is a field left out."""
        values, renamed, source = {"id": self.id}, RENAMED[self._path], INPUT[self._path]
        known = ("model", source, "stream_options", *OF_ANSWER[self._path], *renamed, *NEUTRAL, *HARMLESS,
                 *self._of_template)
        for name, value in body.items():
            if value is None or name in ("model", *self._of_template):
                continue
            if name not in known:
                raise Refused(shown(name), "unsupported field", "one of " + ", ".join((
                    "model", source, "stream_options", *OF_ANSWER[self._path], *renamed)),
                              logged={"where": "..."}, field=name[:100])
            if name in renamed and not (name == "logprobs" and value is False):
                if renamed[name] in values:
                    raise Refused(name, "given twice", "max_tokens or max_completion_tokens", "leave one out")
                values[renamed[name]] = value
            elif name in NEUTRAL and name not in OF_ANSWER[self._path]:
                check_neutral(name, value, NEUTRAL[name])
            elif name in HARMLESS and not isinstance(value, HARMLESS[name]):
                raise wrong(name, value, KINDS[HARMLESS[name]])
        if body.get("stream_options") is not None:
            options = _stream_options(body)
            self._with_usage = options["include_usage"]
            self._counts = self._with_usage and options["continuous_usage_stats"]
        if body.get(source) is None:
            raise Refused(source, "missing", "a list of messages" if self._asked.is_chat else "a string")
        return self._chat_values(body, values) if self._asked.is_chat else self._completion_values(body, values)

    def _chat_values(self, body, values):
        if type(values.get("max_new_tokens")) is int and values["max_new_tokens"] == -1:
            del values["max_new_tokens"]
        if _flag(body, "logprobs"):
            self._asked.logprobs = values.setdefault("logprobs", 0)
        elif values.pop("logprobs", 0) != 0:
            raise Refused("top_logprobs", "given", 'only with "logprobs": true', "leave it out")
        return values

    def _completion_values(self, body, values):
        asked = self._asked
        asked.echo, asked.logprobs, asked.prompt_logprobs = (_flag(body, "echo"), values.get("logprobs"),
                                                             values.get("prompt_logprobs"))
        if asked.echo and asked.logprobs is not None:
            given = [value for value in (asked.prompt_logprobs, asked.logprobs) if value is not None]
            values["prompt_logprobs"] = max(given) if all(type(value) is int for value in given) else given[0]
        return values

    def _count(self, body, num_slots):
        """Returns how many choices each prompt has."""
        given = {name: body[name] for name in ("n", "best_of") if body.get(name) is not None}
        most = min(MAX_CHOICES, num_slots)
        count = integer({"n": 1, **given}, "n", 1, most, {"n": "n"})
        if not self._asked.is_chat and given.get("best_of", count) != count:
            raise wrong("best_of", given["best_of"], f"{count}, as n")
        return count

    def _event(self, choice):
        """Returns the JSON of an event that has nothing but text, before and after that: it is made once."""
        if choice.index not in self._events:
            mark = "\0"
            self._events[choice.index] = self._chunk(choice.piece(mark)).split(json.dumps(mark))
        return self._events[choice.index]

    def _chunk(self, choice, count=0):
        """Returns the JSON of an event. count: tokens so far"""
        usage = {"usage": self._usage(count) if self._counts else None} if self._with_usage else {}
        return json.dumps({**self._fields, "choices": [choice], **usage})

    def _usage(self, completion=None):
        """completion: tokens of the choices, if not all that there are"""
        prompts = {id(request.prompt): len(request.prompt) for request in self.requests}
        prompt = sum(prompts.values())
        completion = sum(len(request.tokens) for request in self.requests) if completion is None else completion
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}

    def whole(self):
        return {**self._fields, "choices": [choice.whole() for choice in self._choices.values()],
                "usage": self._usage()}

    def events(self, request):
        """Yields the data of the server-sent events that are due of a request, JSON as bytes."""
        of = self._choices[request.id]
        for choice, count in of.events():
            if isinstance(choice, str) and not self._counts:
                yield json.dumps(choice).join(self._event(of)).encode()
                continue
            others = sum(other.told for other in self.requests if other is not request)
            yield self._chunk(of.piece(choice) if isinstance(choice, str) else choice, others + count).encode()
        if request.is_over and request.error:
            yield json.dumps(error_body(request.error)).encode()
        elif request.is_over:
            self._unfinished.discard(request.id)
            if self._unfinished:
                return
            if self._with_usage:
                yield json.dumps({**self._fields, "choices": [], "usage": self._usage()}).encode()
            yield b"[DONE]"


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


def _flag(body, name):
    """Returns a field that is true or false; null and a field left out are false."""
    value = body.get(name)
    if value is not None and type(value) is not bool:
        raise wrong(name, value, "true or false")
    return bool(value)


def _prompts(prompt):
    """Returns [(field, label for errors, value)] of OpenAI's prompt: text, tokens, or a list of such."""
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], (str, list)):
        prompt = prompt[0]
    if not isinstance(prompt, list) or not prompt or not isinstance(prompt[0], (str, list)):
        return [("prompt_ids" if isinstance(prompt, list) else "prompt", "prompt", prompt)]
    for index, each in enumerate(prompt):
        if not isinstance(each, (str, list)):
            raise wrong(f"prompt[{index}]", each, "a string, or a list of integers")
    return [("prompt_ids" if isinstance(each, list) else "prompt", f"prompt[{index}]", each)
            for index, each in enumerate(prompt)]


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
