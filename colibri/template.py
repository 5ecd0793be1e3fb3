"""Renders chat templates as transformers does, in a process of its own, which chat.py starts: a JSON line a rendering.

A template is the model's and is not trusted: it may loop for ever or make text without end. jinja2's sandbox keeps it
from everything but its input. A rendering has seconds of CPU time, after which the process ends, and bounded memory.
"""

import contextlib
import datetime
import functools
import json
import re

import jinja2
import jinja2.ext
import jinja2.sandbox

from colibri.processes import answer

REASONING = ("reasoning_content", "thinking", "reasoning")  # fields of a message, the one that templates read first
TAG = "CONTINUE_FINAL_MESSAGE_TAG "  # where the message ends that goes on; as in transformers
PROBE = "c1probe"
PROBE_SIZE = 1 << 20


class Generation(jinja2.ext.Extension):
    """{% generation %} ... {% endgeneration %}, which marks what the assistant said: its body."""

    tags = frozenset(("generation",))

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller):
        return caller()


class Namespace(jinja2.utils.Namespace):
    """namespace(), without the names of Python's own attributes."""

    def __init__(*arguments, **values):  # so that a value may be called self
        self, values = arguments[0], dict(*arguments[1:], **values)
        for name in values:
            _check_name(name)
        jinja2.utils.Namespace.__init__(self, values)

    def __setitem__(self, name, value):
        _check_name(name)
        jinja2.utils.Namespace.__setitem__(self, name, value)


def _check_name(name):
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace's {name!r}, expected no underscore before a name")


class Dict:
    """dict(), and nothing else of it but fromkeys."""

    def __call__(self, *arguments, **values):
        return dict(*arguments, **values)

    def fromkeys(self, *arguments):
        return dict.fromkeys(*arguments)


def _to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    """Returns JSON with its characters as they are, where jinja2's own filter escapes those of HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message):
    raise jinja2.TemplateError(message)


def _strftime_now(form):
    return datetime.datetime.now().strftime(form)


def environment():
    """Returns the jinja2 environment of chat templates."""
    made = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols])
    made.filters["tojson"] = _to_json
    made.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now, "dict": Dict(),
                     "namespace": Namespace}
    return made


class Templates:
    """A model's templates, each compiled once."""

    def __init__(self, texts, special_tokens):
        """texts: {name: Jinja's text}. special_tokens: {"bos_token": "<s>", ...}, which the templates see."""
        self._texts, self._special_tokens, self._environment = texts, special_tokens, environment()
        self._compiled = functools.cache(lambda name: self._environment.from_string(texts[name]))
        self._forms = functools.cache(self._find_forms)

    def render(self, request):
        """Returns {"text": ...} of a conversation, or {"error": ..., "kind": ...}; see chat.Chat.render."""
        name = "tool_use" if request["tools"] is not None and "tool_use" in self._texts else "default"
        if name not in self._texts:
            return {"kind": "name", "error": ", ".join(sorted(self._texts))}
        try:
            self._compiled(name)
        except Exception as error:  # noqa: BLE001 - Python's compiler raises of its own, too
            return {"kind": "broken", "error": f"{name}: {_words(error)}"}
        try:
            return self._render(name, request)
        except Exception as error:  # noqa: BLE001 - a template may raise anything
            return {"kind": "raised", "error": _words(error)}

    def _render(self, name, request):
        messages = [_normal(message) for message in request["messages"]]
        if request["adapts"]:
            messages = [self._adapted(name, message) for message in messages]
        goes_on = _mark_end(messages[-1], self._texts[name]) if request["continue_final_message"] else None
        values = {**self._special_tokens, **request["values"], "messages": messages, "tools": request["tools"],
                  "documents": request["documents"], "add_generation_prompt": request["add_generation_prompt"]}
        text = self._written(name, values, request["most"])
        if text is None:
            return {"kind": "long", "error": ""}
        return {"text": text if goes_on is None else _cut(text, goes_on)}

    def _written(self, name, values, most):
        """Returns the text, or None where it has more than `most` characters."""
        pieces, size = [], 0
        for piece in self._compiled(name).generate(values):
            pieces.append(piece)
            size += len(piece)
            if size > most:
                return None
        return "".join(pieces)

    def _adapted(self, name, message):
        """Returns a message of OpenAI's API in the form that the template reads."""
        if calls := message.get("tool_calls"):  # beside which OpenAI's clients send null
            message = {"content": "", **message}
        content = message.get("content")
        if isinstance(content, list) and not self._forms(name).parts:
            message = {**message, "content": "".join(part["text"] for part in content)}
        elif isinstance(content, str) and not self._forms(name).strings:
            message = {**message, "content": [{"type": "text", "text": content}]}
        if calls and self._forms(name).objects:
            message = {**message, "tool_calls": [_with_object(call) for call in calls]}
        return message

    def _find_forms(self, name):
        return Forms(self, name)

    def probe(self, name, messages):
        """Returns the text of some messages, or None where the template raises."""
        values = {**self._special_tokens, "messages": messages, "tools": None, "documents": None,
                  "add_generation_prompt": False}
        with contextlib.suppress(Exception):
            return self._written(name, values, PROBE_SIZE)
        return None


class Forms:
    """The forms of a message that a template takes, found out by rendering.

    strings, parts: its content is text; is a list of {"type": "text", "text": ...}. Strings are taken where neither
    shows. objects: a tool call's arguments are an object, not JSON's text, which it would raise for or write as Python.
    """

    def __init__(self, templates, name):
        def shows(content, *quoted):
            text = templates.probe(name, [{"role": "user", "content": content}]) or ""
            return PROBE in text and not any(each in text for each in quoted)

        def calls(arguments):
            call = {"id": "call00000", "type": "function", "function": {"name": "f", "arguments": arguments}}
            return templates.probe(name, [{"role": "user", "content": "x"},
                                          {"role": "assistant", "content": "", "tool_calls": [call]},
                                          {"role": "tool", "content": "x", "name": "f", "tool_call_id": "call00000"}])
        self.parts = shows([{"type": "text", "text": PROBE}], "'type'", '"type"')
        self.strings = shows(PROBE) or not self.parts
        text = calls({PROBE: 1})
        self.objects = calls("{}") is None or text is not None and f"'{PROBE}'" not in text


def _with_object(call):
    """Returns a tool call whose arguments are an object, where they are the JSON of one."""
    function = call.get("function")
    arguments = function.get("arguments") if isinstance(function, dict) else None
    if not isinstance(arguments, str):
        return call
    with contextlib.suppress(ValueError, RecursionError):
        found = json.loads(arguments or "{}")
        if isinstance(found, dict):
            return {**call, "function": {**function, "arguments": found}}
    return call


def _normal(message):
    """Returns a message without fields that are null, its reasoning under the names that templates read."""
    message = {name: value for name, value in message.items() if value is not None}
    reasoning = next((message[name] for name in REASONING if name in message), None)
    return message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _mark_end(message, template):
    """Puts TAG behind a message's content, which goes on, and returns that."""
    content = message.get("content")
    if content is None or "content" not in template:
        raise ValueError("continue_final_message without a last message that has a content")
    if isinstance(content, str):
        message["content"] = content + TAG
        return content
    part = next((part for part in reversed(content) if "text" in part), None)
    if part is None:
        raise ValueError("continue_final_message without a text in the last message")
    content = part["text"]
    part["text"] += TAG
    return content


def _cut(text, content):
    """Returns a text up to TAG."""
    if content.strip() not in text or TAG.strip() not in text:
        raise ValueError("continue_final_message with a template that changes the last message")
    end = text.rindex(TAG.strip())
    return text[:end] if text[end:end + len(TAG)] == TAG else text[:end].rstrip()


def _words(error):
    """Returns what an error says, on one line."""
    text = str(error)
    if isinstance(error, jinja2.TemplateSyntaxError):
        text = f"line {error.lineno}: {error.message}"
    elif isinstance(error, RecursionError):
        text = "RecursionError: maximum recursion depth exceeded"
    elif not isinstance(error, (jinja2.TemplateError, ValueError)):
        text = f"{type(error).__name__}: {text}".removesuffix(": ")
    return re.sub(r"\s+", " ", text)[:300]


def main():
    answer(lambda *values: Templates(*values).render)
