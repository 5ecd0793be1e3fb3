"""Random JSON schemas whose answers come to an end, and whether a value follows one."""

import re

NAMES = ("a", "name", "größe", 'say "x"', "back\\slash", "a b", "0", "")
PATTERNS = ("^[a-c]{1,4}$", "^\\d{3}-[A-Z]$", "^(ab|ba){2}$", "^[\\w.]{2}[\\d]$", "^\\s?\\w$")
WORDS = ("red", "grün", 'a"b', "\\", "\n", "", "日本")


def random_schema(source, depth=3):
    """A schema that bounds strings and arrays. source: random.Random"""
    kinds = ["string", "pattern", "enum", "const", "integer", "number", "boolean", "null"]
    kind = source.choice(kinds + (["object", "array", "anyOf", "tuple"] * 3 if depth else []))
    if kind == "string":
        low = source.randrange(3)
        return {"type": "string", "minLength": low, "maxLength": low + source.randrange(6)}
    if kind == "pattern":
        return {"type": "string", "pattern": source.choice(PATTERNS)}
    if kind == "enum":
        return {"enum": [*source.sample(WORDS, 3), source.randrange(100), None, True]}
    if kind == "const":
        return {"const": source.choice([*WORDS, 5, -1.5, False, None, ["x", 1], {"k": "v"}])}
    if kind == "integer":
        low = source.randrange(-1000, 1000)
        return {"type": "integer", "minimum": low, "maximum": low + source.randrange(500)}
    if kind == "number":
        low = source.randrange(-10, 10)
        return {"type": "number", "minimum": low, "maximum": low + source.choice([1, 2.5, 100])}
    if kind == "array":
        low = source.randrange(3)
        return {"type": "array", "items": random_schema(source, depth - 1), "minItems": low,
                "maxItems": low + source.randrange(3)}
    if kind == "tuple":
        items = [random_schema(source, depth - 1) for _ in range(source.randrange(1, 4))]
        return {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}
    if kind == "anyOf":
        return {"anyOf": [random_schema(source, depth - 1) for _ in range(source.randrange(1, 4))]}
    if kind == "object":
        return _object(source, depth)
    return {"type": kind}


def _object(source, depth):
    names = source.sample(NAMES, source.randrange(5))
    return {"type": "object", "properties": {name: random_schema(source, depth - 1) for name in names},
            "required": [name for name in names if source.random() < 0.7], "additionalProperties": False}


def follows(value, schema):
    """Whether a value, as json.loads() has it, follows a schema that random_schema() made."""
    if "anyOf" in schema:
        return any(follows(value, other) for other in schema["anyOf"])
    if "enum" in schema:
        return any(type(value) is type(good) and value == good for good in schema["enum"])
    if "const" in schema:
        return type(value) is type(schema["const"]) and value == schema["const"]
    return CHECKS[schema["type"]](value, schema)


def _is_string(value, schema):
    return (isinstance(value, str) and len(value) >= schema.get("minLength", 0)
            and len(value) <= schema.get("maxLength", len(value))
            and re.search(schema.get("pattern", ""), value, re.ASCII) is not None)


def _is_number(value, schema):
    return type(value) in (int, float) and schema["minimum"] <= value <= schema["maximum"]


def _is_array(value, schema):
    if not isinstance(value, list) or len(value) < schema["minItems"]:
        return False
    if "prefixItems" in schema:
        return len(value) == len(schema["prefixItems"]) and all(map(follows, value, schema["prefixItems"]))
    return len(value) <= schema["maxItems"] and all(follows(each, schema["items"]) for each in value)


def _is_object(value, schema):
    return (isinstance(value, dict) and set(schema["required"]) <= set(value) <= set(schema["properties"])
            and all(follows(each, schema["properties"][name]) for name, each in value.items()))


CHECKS = {"string": _is_string, "number": _is_number, "array": _is_array, "object": _is_object,
          "integer": lambda value, schema: type(value) is int and _is_number(value, schema),
          "boolean": lambda value, schema: isinstance(value, bool), "null": lambda value, schema: value is None}
