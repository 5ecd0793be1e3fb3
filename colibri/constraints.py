"""Constraints: the form that a request asks for of its answer, as a grammar's text; checked, but not yet compiled."""

import json
import re
from collections import namedtuple

from colibri.refused import HIDDEN, Refused, shown, wrong

MAX_BYTES = 1 << 16  # of a grammar, or of all schemas of a request as JSON
MAX_DEPTH = 48       # of lists and objects within each other in a schema
FIELDS = ("grammar", "response_format")
PARTS = ("type", "json_schema", "name", "description", "schema", "strict", "syntax", "definition")  # of them
KINDS = ("text", "json_object", "json_schema")
SYNTAXES = ("lark", "regex")
OBJECT = {"type": "object"}
# Blanks in JSON, once between two of its parts: as models write them, and so few that an answer comes to its end.
BLANKS = {"whitespace_pattern": r"(?: |\n[ \t]{0,32})?"}
ONCE = '%llguidance {"skip_repetition": "once"}\n'
PIECE = re.compile(r"\\.|.", re.DOTALL)
ASCII = {r"\d": "0-9", r"\w": "A-Za-z0-9_", r"\s": r" \t\n\r\f\v"}
SLASH = re.compile(r"(\\.)|/", re.DOTALL)

# text: in llguidance's form of Lark. where: the field that asks for it. marks: texts, number i of which is the rule
# mark_i there: a special token of the model if it has one of that text
Constraint = namedtuple("Constraint", "text where marks", defaults=((),))


def constraint_of(values, label=None):
    """Returns the Constraint that a request's fields ask for, or None.

    label: {field: the name that the client knows it by}
    """
    label = label or dict(zip(FIELDS, FIELDS))
    made = [found for name, read in (("grammar", _grammar), ("response_format", _response_format))
            if values.get(name) is not None and (found := read(values[name], label[name]))]
    if len(made) > 1:
        raise Refused(label["grammar"], f"given with {label['response_format']}", "one of them", "leave one out")
    return made[0] if made else None


def json_rule(schema):
    """Returns what stands in a Lark grammar for JSON of a schema."""
    return f"%json {json.dumps({**_in_ascii(schema), 'x-guidance': BLANKS})}"


def _in_ascii(schema):
    """Returns a schema in whose patterns \\d, \\w and \\s are ASCII, as in JavaScript: llguidance takes all of Unicode."""
    if isinstance(schema, list):
        return [_in_ascii(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found = {}
    for name, value in schema.items():
        if name == "pattern" and isinstance(value, str):
            value = _ascii_pattern(value)
        elif name == "patternProperties" and isinstance(value, dict):
            value = {_ascii_pattern(pattern): _in_ascii(each) for pattern, each in value.items()}
        elif name not in ("const", "enum", "default", "examples"):
            value = _in_ascii(value)
        found[name] = value
    return found


def _ascii_pattern(text):
    depth, parts = 0, []
    for part in PIECE.findall(text):
        depth = {"[": 1, "]": 0}.get(part, depth)
        parts.append((f"{ASCII[part]}" if depth else f"[{ASCII[part]}]") if part in ASCII else part)
    return "".join(parts)


def check_schema(schema, where):
    """Returns a JSON schema, if it is an object of a size that can be compiled."""
    if not isinstance(schema, dict):
        raise wrong(where, schema, "a JSON schema, an object")
    if "x-guidance" in schema:
        raise Refused(where, "x-guidance", "keywords of JSON Schema", "leave it out")
    depth = _depth(schema)
    if depth > MAX_DEPTH:
        raise Refused(where, f"{depth} objects and lists within each other", f"at most {MAX_DEPTH}",
                      "give names to parts of it in $defs")
    check_size(json.dumps(schema), where)
    return schema


def check_size(text, where):
    """Checks that a text is not larger than a grammar may be."""
    size = len(text.encode(errors="surrogatepass"))
    if size > MAX_BYTES:
        raise Refused(where, f"{size} bytes", f"at most {MAX_BYTES}", "make it simpler")


def _depth(value):
    """Returns how many lists and objects are within each other at most."""
    depth, level = 0, [value]
    while level := [each for each in level if isinstance(each, (dict, list))]:
        depth += 1
        level = [inner for each in level for inner in (each.values() if isinstance(each, dict) else each)]
    return depth


def _fields(value, where, known):
    """Returns an object's fields that are not null, if they are known."""
    for name in value:
        if name not in known:
            raise Refused(where, f"{shown(name)}: unknown field", f"one of {', '.join(known)}",
                          logged={"got": "...: unknown field"})
    return {name: inner for name, inner in value.items() if inner is not None}


def _response_format(value, where):
    """Returns the Constraint of OpenAI's response_format, or None for text."""
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
    return Constraint(f"{ONCE}start: {json_rule(schema)}", where)


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
    """Returns the Constraint of a grammar: Lark as a string, or {"syntax": "lark" or "regex", "definition": ...}."""
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
    return Constraint(text if syntax == "lark" else f"start: /{SLASH.sub(_escaped, text)}/", where)


def _escaped(found):
    return found[1] or r"\/"
