"""The messages of a chat with a model that has no chat template: fields they may have, and their content as text."""

from colibri import chat
from colibri.refused import HIDDEN, Refused, shown, wrong

ROLES = ("system", "developer", "user", "assistant")
PART = "{\"type\": \"text\", \"text\": ...}"
# Fields beside role and content, by what they are. None: whatever it is, it asks for nothing here.
STRING, LIST = (str, "a string"), (list, "a list")
FIELDS = {"name": STRING, "refusal": STRING, "reasoning_content": STRING, "reasoning": STRING, "tool_calls": LIST,
          "annotations": LIST, "cache_control": None}
NOT_THERE = ("tool_calls",)  # where it is not empty


def checked(messages):
    """Returns messages with text, or None, as content, and without the fields that are null.

    A field that is null is as one that is left out. Only an assistant's message may leave its content out.
    """
    if not isinstance(messages, list) or not messages:
        got = "no message" if messages == [] else shown(messages)
        raise Refused("messages", got, "a list of at least one message", logged=HIDDEN)
    return [_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _message(message, where):
    if not isinstance(message, dict):
        raise wrong(where, message, "an object with role and content")
    role = message.get("role")
    if role is None:
        raise Refused(f"{where}.role", "missing", f"one of {', '.join(ROLES)}")
    if role not in ROLES:
        raise wrong(f"{where}.role", role, f"one of {', '.join(ROLES)}")
    if "content" not in message and role != "assistant":
        raise Refused(f"{where}.content", "missing", "a string, or a list of parts")
    others = {name: value for name, value in message.items() if name not in ("role", "content") and value is not None}
    for name, value in others.items():
        _check_field(name, value, where)
    return {"role": role, "content": _content(message.get("content"), f"{where}.content"), **others}


def _check_field(name, value, where):
    if name not in FIELDS:
        raise Refused(where, f"{shown(name)}: unknown field", f"role, content, {', '.join(FIELDS)}",
                      logged={"got": "...: unknown field"}, field=f"{where}.{name[:100]}")
    if FIELDS[name] and not isinstance(value, FIELDS[name][0]):
        raise wrong(f"{where}.{name}", value, FIELDS[name][1])
    if name in NOT_THERE and value:
        raise Refused(f"{where}.{name}", "not supported", "none", "leave it out")


def _content(content, where):
    """Returns the text of a content, which may be a list of parts, or None."""
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise wrong(where, content, f"a string, or a list of {PART}")
    for index, part in enumerate(content):
        given = {name for name, value in part.items() if value is not None} if isinstance(part, dict) else set()
        if given - {"cache_control", "annotations"} != {"type", "text"} or part["type"] != "text" \
                or not isinstance(part["text"], str):
            raise wrong(f"{where}[{index}]", part, f"{PART}, a string and nothing else")
    return "".join(part["text"] for part in content)


def transcript(messages):
    """Returns the messages as a prompt for a model without a chat template."""
    return chat.transcript([{**message, "content": message["content"] or ""} for message in checked(messages)])
