"""The conversation in the body of /v1/chat/completions, for a model that has a chat template."""

from colibri.chat import Conversation
from colibri.errors import ColibriError
from colibri.refused import HIDDEN, Refused, shown, wrong
from colibri.tools import tools_of

# Fields of a body, beside messages, that a template sees or that say how it is rendered.
FIELDS = ("tools", "tool_choice", "documents", "chat_template_kwargs", "add_generation_prompt",
          "continue_final_message", "reasoning_effort")
OWN = ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message")  # no names for values
PART = '{"type": "text", "text": ...}'


def conversation(chat, body):
    """Returns the Conversation of a body, which Chat.render() checks further; raises Refused."""
    given = {name: body[name] for name in FIELDS if body.get(name) is not None}
    begins, goes_on = (_flag(given, name) for name in ("add_generation_prompt", "continue_final_message"))
    if begins and goes_on:
        raise Refused("continue_final_message", "true, with add_generation_prompt true", "one of them",
                      "leave one out")
    tools = tools_of(given)
    try:
        return Conversation(chat, _messages(body["messages"]), tools, _objects(given, "documents"),
                            not goes_on if begins is None else begins, bool(goes_on), _values(given), adapts=True)
    except Refused:
        raise
    except ColibriError as error:
        raise Refused.of(error) from None


def _flag(given, name):
    """Returns true or false, or None where nothing is said."""
    value = given.get(name)
    if type(value) not in (bool, type(None)):
        raise wrong(name, value, "true or false")
    return value


def _objects(given, name):
    """Returns a list of objects; None where it is empty."""
    value = given.get(name, [])
    if not isinstance(value, list):
        raise wrong(name, value, "a list of objects")
    for index, each in enumerate(value):
        if not isinstance(each, dict):
            raise wrong(f"{name}[{index}]", each, "an object")
    return value or None


def _values(given):
    """Returns the names and values that a request adds to what a template sees."""
    values = given.get("chat_template_kwargs", {})
    if not isinstance(values, dict):
        raise wrong("chat_template_kwargs", values, "an object of names and values")
    name = next((name for name in values if name in OWN), None)
    if name is not None:
        raise Refused("chat_template_kwargs", name, "no field of the request's own", "put it beside messages")
    effort = given.get("reasoning_effort")
    if not isinstance(effort, (str, type(None))):
        raise wrong("reasoning_effort", effort, "a string")
    return {**({} if effort is None else {"reasoning_effort": effort}), **values}


def _messages(messages):
    """Returns the messages, of whose other fields the template knows more."""
    if not isinstance(messages, list) or not messages:
        got = "no message" if messages == [] else shown(messages)
        raise Refused("messages", got, "a list of at least one message", logged=HIDDEN)
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if not isinstance(message, dict):
            raise wrong(where, message, "an object with a role")
        if not isinstance(message.get("role"), str):
            raise wrong(f"{where}.role", message.get("role"), "a string such as user")
        _check_content(message, where)
        _check_calls(message.get("tool_calls"), f"{where}.tool_calls")
        if not isinstance(message.get("tool_call_id"), (str, type(None))):
            raise wrong(f"{where}.tool_call_id", message["tool_call_id"], "a string, the id of a tool call")
    return messages


def _check_content(message, where):
    """Checks that a content is text, a list of parts with text, or, beside tool calls, none."""
    content = message.get("content")
    if content is None:
        if message["role"] != "assistant":
            raise Refused(f"{where}.content", "missing", "a string, or a list of parts")
    elif isinstance(content, list):
        for index, part in enumerate(content):
            if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                raise wrong(f"{where}.content[{index}]", part, f"{PART}; the model takes text alone")
    elif not isinstance(content, str):
        raise wrong(f"{where}.content", content, f"a string, or a list of {PART}")


def _check_calls(calls, where):
    if calls is None:
        return
    if not isinstance(calls, list):
        raise wrong(where, calls, "a list of tool calls")
    for index, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise wrong(f"{where}[{index}]", call, 'an object such as {"type": "function", "function": {"name": ...}}')
