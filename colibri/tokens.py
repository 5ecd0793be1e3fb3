"""Text to tokens and back without a step of the model: /tokenize and /detokenize in vLLM's shape."""

from colibri import conversation
from colibri.openai import chat_prompt, check_model, check_neutral
from colibri.refused import Refused, shown, wrong

NEUTRAL = {"return_token_strs": (False,), "add_generation_prompt": (True,), "continue_final_message": (False,),
           "tools": ([],), "chat_template_kwargs": ({},)}


def tokenized(body, server):
    """Returns the tokens of a prompt, or of a chat's messages, as a completion would take them."""
    of_template = conversation.FIELDS if server.chat and body.get("messages") is not None else ()
    given = _given(body, server, ("prompt", "messages", "add_special_tokens"), of_template)
    if ("prompt" in given) == ("messages" in given):
        got = "given with messages" if "prompt" in given else "missing"
        raise Refused("prompt", got, "exactly one of prompt, messages")
    name = "prompt" if "prompt" in given else "messages"
    text = given["prompt"] if name == "prompt" else chat_prompt(given, server.chat)
    if name == "prompt" and not isinstance(text, str):
        raise wrong("prompt", text, "a string")
    special = given.get("add_special_tokens", isinstance(text, str))
    if type(special) is not bool:
        raise wrong("add_special_tokens", special, "true or false")
    tokens = server.reader.tokens(text, name, special)
    return {"count": len(tokens), "max_model_len": server.engine.context, "tokens": tokens, "token_strs": None}


def detokenized(body, server):
    """Returns the text of tokens."""
    given = _given(body, server, ("tokens",))
    if not isinstance(given.get("tokens"), list):
        raise wrong("tokens", given["tokens"], "a list of integers") if given else Refused(
            "tokens", "missing", "a list of integers")
    return {"prompt": server.reader.text(given["tokens"], "tokens")}


def _given(body, server, known, of_template=()):
    """Returns the fields of a body that ask for something. The model may be left out: there is only one."""
    given = {name: value for name, value in body.items() if value is not None}
    if "model" in given:
        check_model(given, server.name)
    for name, value in given.items():
        if name in ("model", *known, *of_template):
            continue
        if name not in NEUTRAL:
            raise Refused(shown(name), "unsupported field", f"one of model, {', '.join(known)}",
                          logged={"where": "..."}, field=name[:100])
        check_neutral(name, value, NEUTRAL[name])
    return {name: value for name, value in given.items() if name in (*known, *of_template)}


TOKENS = {"/tokenize": tokenized, "/detokenize": detokenized}
