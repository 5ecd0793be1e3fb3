"""Answers with calls of tools in each format that models write, made of their parts."""

import json

THINK = ("<think>", "</think>")
BEGIN, END, ONE, OVER, SEP = (f"<｜tool▁{name}｜>" for name in (
    "calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep"))
PARAMETER, ARG = ("<parameter=", ">\n", "\n</parameter>\n"), ("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n")
CHANNEL, MESSAGE, END_OF_ONE, START = "<|channel|>", "<|message|>", "<|end|>", "<|start|>assistant"
CALLED = "commentary to=functions."


def _pairs(call, before, between, after):
    """The arguments one by one: text as it is, all else as JSON."""
    return "".join(f"{before}{name}{between}{value if isinstance(value, str) else json.dumps(value)}{after}"
                   for name, value in call[1].items())


def _json(call, key="arguments"):
    return json.dumps({"name": call[0], key: call[1]}, ensure_ascii=False)


def _deepseek(calls, one):
    return BEGIN + "".join(ONE + one(call) + OVER for call in calls) + END


def _harmony(content, calls, reasoning):
    parts = [f"{CHANNEL}analysis{MESSAGE}{reasoning}{END_OF_ONE}"] * bool(reasoning)
    parts += [f"{CHANNEL}{'commentary' if calls else 'final'}{MESSAGE}{content}{END_OF_ONE}"] * bool(content)
    parts += [f"{CHANNEL}{CALLED}{name} <|constrain|>json{MESSAGE}{json.dumps(values)}<|call|>"
              for name, values in calls]
    return START.join(parts)


# Of [(name, arguments)].
WRITERS = {
    "hermes": lambda calls: "\n".join(f"<tool_call>\n{_json(call)}\n</tool_call>" for call in calls),
    "qwen-xml": lambda calls: "\n".join(
        f"<tool_call>\n<function={call[0]}>\n{_pairs(call, *PARAMETER)}</function>\n</tool_call>" for call in calls),
    "mistral": lambda calls: f"[TOOL_CALLS][{', '.join(map(_json, calls))}]",
    "mistral-args": lambda calls: "".join(f"[TOOL_CALLS]{name}[ARGS]{json.dumps(values)}" for name, values in calls),
    "llama": lambda calls: "<|python_tag|>" + "; ".join(_json(call, "parameters") for call in calls),
    "glm": lambda calls: "\n".join(f"<tool_call>{call[0]}\n{_pairs(call, *ARG)}</tool_call>" for call in calls),
    "deepseek": lambda calls: _deepseek(
        calls, lambda call: f"function{SEP}{call[0]}\n```json\n{json.dumps(call[1])}\n```"),
    "deepseek-v3.1": lambda calls: _deepseek(calls, lambda call: f"{call[0]}{SEP}{json.dumps(call[1])}")}


def written(form, content="", calls=(), reasoning=""):
    """An answer as a model writes it."""
    if form == "harmony":
        return _harmony(content, calls, reasoning)
    thought = f"{THINK[0]}\n{reasoning}\n{THINK[1]}\n\n" if reasoning else ""
    return thought + content + ("\n" if content and calls else "") + (WRITERS[form](calls) if calls else "")


def assembled(deltas):
    """The message that a client puts together of deltas, as OpenAI's clients do, without the calls' ids."""
    found = {"role": "assistant", "content": ""}
    for delta in deltas:
        for name in ("content", "reasoning_content"):
            if delta.get(name):
                found[name] = found.get(name, "") + delta[name]
        for piece in delta.get("tool_calls", ()):
            calls = found.setdefault("tool_calls", [])
            if piece["index"] == len(calls):  # the first of a call has its name, and arguments in pieces follow
                assert piece["id"] and piece["type"] == "function" and piece["function"]["arguments"] == ""
                calls.append({"type": "function", "function": {"name": piece["function"]["name"], "arguments": ""}})
            else:
                assert piece.keys() == {"index", "function"} and piece["function"].keys() == {"arguments"}
                assert piece["index"] == len(calls) - 1
                calls[-1]["function"]["arguments"] += piece["function"]["arguments"]
    return found


def plain(message):
    """A message without the ids of its calls, its content a string."""
    calls = [{name: value for name, value in call.items() if name != "id"} for call in message.get("tool_calls", ())]
    return {**message, "content": message["content"] or "", **({"tool_calls": calls} if calls else {})}
