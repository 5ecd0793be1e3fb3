"""Grammars of tool calls, and of what stands before an answer, in the forms that models write."""

import json
from collections import namedtuple

from colibri.schemas import ONCE, json_rule


class Part(str):
    """What stands among the texts of a form."""


NAME, ARGUMENTS, CALL = Part("name"), Part("arguments"), Part("call")  # of a tool; JSON of its arguments, and of both
PAIRS = Part("pairs")  # its arguments one by one, text as it is
UNTIL = Part("until")  # any text up to the one that follows, for the first time

# How calls are written: begin, call, between, end, each of texts and parts. key: of the arguments in the JSON of a
# call. pair: what stands before an argument's name, before its value, and after that. is_single: a call is the whole
# answer. content: what stands before an answer that is no call. thought: what may stand before both
Form = namedtuple("Form", "begin call between end key pair is_single content thought",
                  defaults=((), (), (), (), "arguments", (), False, (), ()))
TAGS = ("<tool_call>", "</tool_call>")
SEP = "<｜tool▁sep｜>"
CALLS = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
ONE = ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>")
FORMS = {
    "hermes": Form(call=(TAGS[0], "\n", CALL, "\n", TAGS[1]), between=("\n",)),
    "mistral": Form(("[TOOL_CALLS]", "["), (CALL,), (", ",), ("]",)),
    "mistral-args": Form(call=("[TOOL_CALLS]", NAME, "[ARGS]", ARGUMENTS)),
    "llama": Form(call=(CALL,), key="parameters", is_single=True),
    "qwen-xml": Form(call=(TAGS[0], "\n<function=", NAME, ">\n", PAIRS, "</function>\n", TAGS[1]), between=("\n",),
                     pair=("<parameter=", ">\n", "\n</parameter>\n")),
    "glm": Form(call=(TAGS[0], NAME, "\n", PAIRS, TAGS[1]), between=("\n",),
                pair=("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n")),
    "deepseek": Form((CALLS[0],), (ONE[0], "function", SEP, NAME, "\n```json\n", ARGUMENTS, "\n```", ONE[1]), ("\n",),
                     (CALLS[1],)),
    "deepseek-v3.1": Form((CALLS[0],), (ONE[0], NAME, SEP, ARGUMENTS, ONE[1]), (), (CALLS[1],)),
    "harmony": Form(call=("<|channel|>", "commentary to=functions.", NAME, " ", "<|constrain|>", "json", "<|message|>",
                          ARGUMENTS), is_single=True, content=("<|channel|>", "final", "<|message|>"),
                    thought=("<|channel|>", "analysis", "<|message|>", UNTIL, "<|end|>", "<|start|>", "assistant"))}

TEXT = "/(?s:.*)/"
NO_CALL = "/([^{](?s:.*))?/"  # a text that is not the JSON of a call
BLANKS = "/[ \\n]{0,4}/"    # between a thought and the answer


class Writer:
    """Writes a grammar. marks: see colibri.constraints.Constraint"""

    def __init__(self, form):
        self.form, self.marks = form, []

    def mark(self, text, kind="mark"):
        if text not in self.marks:
            self.marks.append(text)
        return f"{kind}_{self.marks.index(text)}"

    def sequence(self, parts, of_part=None):
        """Returns parts one after another. of_part: {part: what it is}"""
        found, is_until = [], False
        for part in parts:
            if part is UNTIL:
                is_until = True
                continue
            found.append(of_part[part] if isinstance(part, Part) else self.mark(part, "until" if is_until else "mark"))
            is_until = False
        return " ".join(found)

    def call(self, name, schema, parts):
        """Returns a tool's call, or the parts of it that are left."""
        of_part = {NAME: json.dumps(name)}
        if ARGUMENTS in parts:
            of_part[ARGUMENTS] = json_rule(schema)
        if CALL in parts:
            of_part[CALL] = json_rule({
                "type": "object", "properties": {"name": {"const": name}, self.form.key: _without_defs(schema)},
                "required": ["name", self.form.key], "additionalProperties": False, **_defs(schema)})
        if PAIRS in parts:
            of_part[PAIRS] = " ".join(self._pair(each, value, schema)
                                      for each, value in _at(schema, "properties", {}).items()) or '""'
        return self.sequence(parts, of_part)

    def _pair(self, name, value, schema):
        before, between, after = self.form.pair
        value = value if isinstance(value, dict) else {}
        words = _at(value, "enum", [])
        if words and all(isinstance(word, str) for word in words):
            text = f"({' | '.join(map(json.dumps, words))}) {self.mark(after)}"
        elif value.get("type") == "string":
            text = self.mark(after, "until")
        else:
            text = f"{json_rule({**value, **_defs(schema)})} {self.mark(after)}"
        pair = f"{self.mark(before)} {json.dumps(name)} {self.mark(between)} {text}"
        return pair if name in _at(schema, "required", []) else f"({pair})?"

    def calls(self, tools, is_one, parts=None):
        """Returns one call or more. tools: [(name, schema)]. parts: of the first, None: all"""
        form = self.form
        first, each = (" | ".join(self.call(name, schema, these) for name, schema in tools)
                       for these in (form.call if parts is None else parts, form.call))
        more = "" if is_one or form.is_single else f" ({self.sequence(form.between)} ({each}))*"
        return f"({first}){more} {self.sequence(form.end)}"

    def required(self, tools, is_one):
        """Returns an answer of calls."""
        return f"{self.sequence(self.form.begin)} {self.calls(tools, is_one)}"

    def free(self, tools, is_one):
        """Returns an answer of any text, in which calls are as they should be."""
        form = self.form
        if form.is_single:
            text = NO_CALL if isinstance(form.call[0], Part) else TEXT
            return f"({self.sequence(form.content)} {text} | {self.calls(tools, True)})"
        lead, *begin = (*form.begin, *form.call) if form.begin else form.call
        call = (self.mark(lead, "until") + " " + (self.sequence(begin[:len(form.begin) - 1]) + " " + self.calls(
            tools, is_one) if form.begin else self.calls(tools, True, form.call[1:])))
        return f"({call}){'?' if is_one or form.begin else '*'} {TEXT}"

    def grammar(self, answer, thought=None):
        """Returns the whole text. thought: what stands before an answer, and whether it must, or None"""
        parts, must = thought or (self.form.thought, False)
        before = f"({self.sequence(parts)} {BLANKS}){'' if must else '?'} " if parts else ""
        return f"{ONCE}\nstart: {before}{answer}"


def _at(schema, name, default):
    """Returns what a schema says of a name; the default where that is of another type."""
    value = schema.get(name)
    return value if isinstance(value, type(default)) else default


def _defs(schema):
    """Returns a schema's definitions, which stand at the root."""
    return {name: schema[name] for name in ("$defs", "definitions") if name in schema}


def _without_defs(schema):
    return {name: value for name, value in schema.items() if name not in ("$defs", "definitions")}
