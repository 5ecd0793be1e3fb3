"""A call's arguments that a model has written as text, one by one: as JSON, of the types of the tool's schema."""

import json

from colibri.scan import Malformed

WORDS = {"True": "true", "False": "false", "None": "null"}  # as Python, in which templates write them, has these
KINDS = {dict: "object", list: "array", str: "string", bool: "boolean", int: "integer", float: "number",
         type(None): "null"}
INNER = ("anyOf", "oneOf", "allOf")


def _no_constant(name):
    raise ValueError(name)


def loads(text):
    """Returns the value of JSON's text; Malformed where it is none."""
    try:
        return json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        raise Malformed from None


def as_json(values, schema):
    """Returns JSON of texts by name. schema: of the tool's parameters, or None"""
    schema = schema if isinstance(schema, dict) else {}
    properties = schema.get("properties")
    properties = properties if isinstance(properties, dict) else {}
    pairs = (f"{json.dumps(name, ensure_ascii=False)}: {_value(text, _kinds(properties.get(name), schema))}"
             for name, text in values.items())
    return "{" + ", ".join(pairs) + "}"


def _value(text, kinds):
    """Returns JSON of a text: of one of these kinds where it reads so, else a string. kinds: empty where any may be"""
    if kinds != {"string"}:
        found = text.strip()
        found = WORDS.get(found, found) if kinds else found
        try:
            value = loads(found)
        except Malformed:
            value = text
        else:
            kind = KINDS[type(value)]
            if not kinds or kind in kinds or kind == "integer" and "number" in kinds \
                    or kind == "number" and "integer" in kinds and value.is_integer():
                return found
    return json.dumps(text, ensure_ascii=False)


def _kinds(schema, root):
    """Returns the names of the types that a schema allows, an empty set where it does not say."""
    found, left, seen = set(), [schema], set()
    while left:
        each = left.pop()
        if not isinstance(each, dict):
            return set()
        reference, kind = each.get("$ref"), each.get("type")
        values = each.get("enum", [each["const"]] if "const" in each else None)
        inner = [one for name in INNER if isinstance(each.get(name), list) for one in each[name]]
        if isinstance(reference, str):
            left += [_referred(reference, root)] if reference not in seen else []
            seen.add(reference)
        elif isinstance(kind, (str, list)):
            found |= {one for one in ([kind] if isinstance(kind, str) else kind) if isinstance(one, str)}
        elif isinstance(values, list) and values:
            found |= {KINDS[type(value)] for value in values}
        elif inner:
            left += inner
        else:
            return set()
    return found


def _referred(reference, root):
    """Returns what a reference such as #/$defs/Name stands for in a schema, or None."""
    found = root
    for name in reference.removeprefix("#/").split("/") if reference.startswith("#/") else ("",):
        found = found.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(found, dict) else None
    return found
