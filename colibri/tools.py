"""The tools of a chat, and which of them its answer may or must call."""

import json

from colibri.refused import HIDDEN, Refused, shown, wrong

MAX_TOOLS = 128      # as many as OpenAI's API takes
MAX_BYTES = 1 << 18  # of all tools as JSON
MAX_DEPTH = 48       # of lists and objects within each other
MAX_NAME = 64        # characters
CHOICES = ("none", "auto", "required")
NAMED = '{"type": "function", "function": {"name": ...}}'


def tools_of(given):
    """Returns the tools that the template is to see, or None, of a body's fields; raises Refused."""
    tools, choice = given.get("tools", []), given.get("tool_choice", "auto")
    if not isinstance(tools, list):
        raise wrong("tools", tools, "a list of objects")
    if len(tools) > MAX_TOOLS:
        raise Refused("tools", f"{len(tools)} tools", f"at most {MAX_TOOLS}")
    for index, tool in enumerate(tools):
        if not isinstance(tool, dict):
            raise wrong(f"tools[{index}]", tool, "an object")
    if choice == "none":  # what nobody sees need not be right
        return None
    names = [_name(tool, f"tools[{index}]") for index, tool in enumerate(tools)]
    for index, name in enumerate(names):
        if name in names[:index]:
            raise Refused(f"tools[{index}].function.name", f"{shown(name)} twice", "a name of its own",
                          logged={"got": "... twice"})
    _check_size(tools)
    _check_choice(choice, names)
    return tools or None


def _name(tool, where):
    """Returns the name of a tool, which is a function."""
    if tool.get("type", "function") != "function":
        raise wrong(f"{where}.type", tool["type"], "function")
    function = tool.get("function")
    if not isinstance(function, dict):
        raise wrong(f"{where}.function", function, "an object with a name")
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME:
        raise wrong(f"{where}.function.name", name, f"a string of 1 to {MAX_NAME} characters")
    if not isinstance(parameters, (dict, type(None))):
        raise wrong(f"{where}.function.parameters", parameters, "a JSON schema, an object")
    return name


def _check_size(tools):
    """Checks that tools are not nested more deeply, and not longer, than a template should have to write."""
    for index, tool in enumerate(tools):
        depth, level = 0, [tool]
        while level := [each for each in level if isinstance(each, (dict, list))]:
            depth += 1
            if depth > MAX_DEPTH:
                raise Refused(f"tools[{index}]", f"nested more deeply than {MAX_DEPTH} objects and lists", "fewer",
                              "give names to parts of its schema in $defs")
            level = [inner for each in level for inner in (each.values() if isinstance(each, dict) else each)]
    size = len(json.dumps(tools))
    if size > MAX_BYTES:
        raise Refused("tools", f"{size} bytes of JSON", f"at most {MAX_BYTES}", "send fewer, or shorter ones")


def _check_choice(choice, names):
    expected = f"{', '.join(CHOICES)}, or {NAMED}"
    if isinstance(choice, dict):
        function = choice.get("function")
        if choice.get("type") != "function" or not isinstance(function, dict) \
                or not isinstance(function.get("name"), str):
            raise wrong("tool_choice", choice, expected)
        if function["name"] not in names:
            raise Refused("tool_choice.function.name", shown(function["name"]), "the name of one of tools",
                          logged=HIDDEN)
    elif choice not in CHOICES:
        raise wrong("tool_choice", choice, expected)
    elif choice == "required" and not names:
        raise Refused("tool_choice", '"required"', "tools", "give some")


def check_possible(choice):
    """Checks that an answer can be made to follow a tool_choice: without masks, a call cannot be made to come."""
    if choice not in (None, "none", "auto"):
        raise Refused("tool_choice", f"{shown(choice)}, not supported", "auto or none", "leave it out",
                      logged={"got": "..., not supported"})
