"""Constraints: the form that a request asks for of its answer, as a grammar's text; checked, but not yet compiled."""

import json
import re
from collections import namedtuple

from colibri.call_grammars import FORMS, UNTIL, Form, Writer
from colibri.refused import HIDDEN, Refused, shown, wrong
from colibri.schemas import check_schema, check_size, json_rule

FIELDS = ("grammar", "response_format")
PARTS = ("type", "json_schema", "name", "description", "schema", "strict", "syntax", "definition",
         "function", "parameters")  # of them and of tools
KINDS = ("text", "json_object", "json_schema")
SYNTAXES = ("lark", "regex")
CHOICES = 'none, auto, required, or {"type": "function", "function": {"name": ...}}'
ONE = "one"  # call, of the tool that tool_choice names
OBJECT = {"type": "object"}
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}  # the arguments of a tool without any
SLASH = re.compile(r"(\\.)|/", re.DOTALL)

# text: in llguidance's form of Lark. where: the field that asks for it. marks: texts, of which number i is there the
# rule mark_i, and until_i what ends with it: a special token of the model where it has one of that text
Constraint = namedtuple("Constraint", "text where marks", defaults=((),))


def constraint_of(values, label=None, tool_format=None, thought=None):
    """Returns the Constraint that a request's fields ask for, or None.

    label: {field: the name that the client knows it by}
    tool_format: one of call_grammars.FORMS, in which the model writes calls of the request's tools, or None
    thought: (begin, end, whether the prompt has the first), texts around what the model thinks before it answers
    """
    label = {**dict(zip(FIELDS, FIELDS)), **(label or {})}
    given = {name: read(values[name], label[name])
             for name, read in (("grammar", _grammar), ("response_format", _response_format))
             if values.get(name) is not None}
    grammar, schema = given.get("grammar"), given.get("response_format")
    tools, must = _tools(values)
    if grammar and (schema is not None or tools):
        raise Refused(label["grammar"], f"given with {label['response_format'] if schema is not None else 'tools'}",
                      "one of them", "leave one out")
    if not tools and schema is None:
        return Constraint(grammar, label["grammar"]) if grammar else None
    if tools and tool_format not in FORMS:
        raise Refused("tool_choice" if must else "tools", f"calls in a form of the model's own ({tool_format})",
                      f"one of {', '.join(FORMS)}", 'set "tool_choice" to "auto", without "strict"')
    writer, is_one = Writer(FORMS.get(tool_format, Form())), must == ONE or values.get("parallel_tool_calls") is False
    answer = "" if schema is None else f"{writer.sequence(writer.form.content)} {json_rule(schema)}"
    if must:
        answer = writer.required(tools, is_one)
    elif tools:
        answer = f"({answer} | {writer.required(tools, is_one)})" if answer else writer.free(tools, is_one)
    where = label["response_format"] if not tools else "tool_choice" if must else "tools"
    return Constraint(writer.grammar(answer, _thought(thought)), where, tuple(writer.marks))


def _thought(thought):
    """Returns what Writer.grammar() takes."""
    if thought is None:
        return None
    begin, end, is_begun = thought
    return ((UNTIL, end) if is_begun else (begin, UNTIL, end)), is_begun


def _tools(values):
    """Returns ([(name, schema)] of the tools whose calls have a grammar, whether there must be a call, or ONE)."""
    tools, choice = values.get("tools") or [], values.get("tool_choice") or "auto"
    named = choice.get("function") if isinstance(choice, dict) else None
    if isinstance(choice, dict):
        if choice.get("type") != "function" or not isinstance(named, dict) or not isinstance(named.get("name"), str):
            raise wrong("tool_choice", choice, CHOICES)
    elif choice not in ("none", "auto", "required"):
        raise wrong("tool_choice", choice, CHOICES)
    if not isinstance(tools, list):
        raise wrong("tools", tools, "a list of objects")
    found, is_strict = {}, False
    for index, tool in enumerate(tools if choice != "none" else ()):
        name, schema, strict = _tool(tool, f"tools[{index}]")
        found[name], is_strict = schema, is_strict or strict
    if named is not None and named["name"] not in found:
        raise Refused("tool_choice.function.name", shown(named["name"]), "the name of one of tools", logged=HIDDEN)
    if choice == "required" and not found:
        raise Refused("tool_choice", '"required"', "tools", "give some")
    check_size(json.dumps(found), "tools")
    if named is not None:
        return [(named["name"], found[named["name"]])], ONE
    has_grammar = choice == "required" or is_strict or found and _asks_for_json(values)
    return (list(found.items()) if has_grammar else []), choice == "required"


def _asks_for_json(values):
    form = values.get("response_format")
    return isinstance(form, dict) and form.get("type") != "text"


def _tool(tool, where):
    """Returns (name, schema, whether it is strict) of a tool; calls of one that is not have any arguments."""
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise wrong(where, tool, 'an object such as {"type": "function", "function": {"name": ...}}')
    strict, schema = function.get("strict"), function.get("parameters")
    if type(strict) not in (bool, type(None)):
        raise wrong(f"{where}.function.strict", strict, "true or false")
    schema = NOTHING if schema is None else check_schema(schema, f"{where}.function.parameters")
    return function["name"], schema, bool(strict)


def _fields(value, where, known):
    """Returns an object's fields that are not null, if they are known."""
    for name, inner in value.items():
        if inner is not None and name not in known:
            raise Refused(where, f"{shown(name)}: unknown field", f"one of {', '.join(known)}",
                          logged={"got": "...: unknown field"})
    return {name: inner for name, inner in value.items() if inner is not None}


def _response_format(value, where):
    """Returns the schema of OpenAI's response_format, or None for text."""
    if not isinstance(value, dict):
        raise wrong(where, value, 'an object such as {"type": "json_object"}')
    kind = value.get("type")
    if kind not in KINDS:
        raise Refused(f"{where}.type", "missing" if kind is None else shown(kind), f"one of {', '.join(KINDS)}",
                      logged=HIDDEN)
    given = _fields(value, where, ("type", "json_schema") if kind == "json_schema" else ("type",))
    if kind == "text":
        return None
    schema = OBJECT if kind == "json_object" else _json_schema(given.get("json_schema"), f"{where}.json_schema")
    return schema


def _json_schema(value, where):
    """Returns the schema in OpenAI's json_schema. `strict` changes nothing: an answer always follows it."""
    if not isinstance(value, dict):
        raise Refused(where, "missing", 'an object such as {"name": "answer", "schema": {...}}') if value is None else \
            wrong(where, value, 'an object such as {"name": "answer", "schema": {...}}')
    given = _fields(value, where, ("name", "description", "schema", "strict"))
    for name, kind, words in (("name", str, "a string"), ("description", str, "a string"),
                              ("strict", bool, "true or false")):
        if name in given and not isinstance(given[name], kind):
            raise wrong(f"{where}.{name}", given[name], words)
    if "schema" not in given:
        raise Refused(f"{where}.schema", "missing", "a JSON schema, an object")
    return check_schema(given["schema"], f"{where}.schema")


def _grammar(value, where):
    """Returns the Lark of a grammar: a string of it, or {"syntax": "lark" or "regex", "definition": ...}."""
    expected = 'a Lark grammar, or an object such as {"syntax": "regex", "definition": "[a-z]+"}'
    if isinstance(value, dict):
        given = _fields(value, where, ("syntax", "definition"))
        syntax, text, place = given.get("syntax"), given.get("definition"), f"{where}.definition"
        if syntax not in SYNTAXES:
            raise Refused(f"{where}.syntax", "missing" if syntax is None else shown(syntax),
                          f"one of {', '.join(SYNTAXES)}", logged=HIDDEN)
        if text is None:
            raise Refused(place, "missing", "a string")
    else:
        syntax, text, place = "lark", value, where
    if not isinstance(text, str):
        raise wrong(place, text, expected if place == where else "a string")
    if not text.strip():
        raise Refused(place, "empty", expected if place == where else "a grammar")
    check_size(text, place)
    return text if syntax == "lark" else f"start: /{SLASH.sub(_escaped, text)}/"


def _escaped(found):
    return found[1] or r"\/"
