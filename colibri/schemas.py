"""JSON schemas: checked, and as llguidance takes them."""

import json
import re

from colibri.refused import Refused, wrong

MAX_BYTES = 1 << 16  # of a grammar, or of all schemas of a request as JSON
MAX_DEPTH = 48       # of lists and objects within each other in a schema
# Blanks in JSON, once between two of its parts: as models write them, and so few that an answer comes to its end.
BLANKS = {"whitespace_pattern": r"(?: |\n[ \t]{0,32})?"}
ONCE = '%llguidance {"skip_repetition": "once"}'  # in a grammar that has json_rule()
PIECE = re.compile(r"\\.|.", re.DOTALL)
ASCII = {r"\d": "0-9", r"\w": "A-Za-z0-9_", r"\s": r" \t\n\r\f\v"}


def json_rule(schema):
    """Returns what stands in a Lark grammar for JSON of a schema."""
    return f"%json {json.dumps({**_in_ascii(schema), 'x-guidance': BLANKS})}"


def _in_ascii(schema):
    """Returns a schema in whose patterns \\d, \\w and \\s are ASCII, for JSON Schema's are JavaScript's: llguidance's
    have all of Unicode.
    """
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
