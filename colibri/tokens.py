"""Text to tokens and back without a step of the model: /tokenize and /detokenize in vLLM's shape."""

from colibri.messages import transcript
from colibri.openai import check_model, check_neutral
from colibri.refused import Refused, shown, wrong

NEUTRAL = {"return_token_strs": (False,), "add_generation_prompt": (True,), "continue_final_message": (False,),
           "tools": ([],), "chat_template_kwargs": ({},)}


def tokenized(body, server):
    """Returns the tokens of a prompt, or of a chat's messages, as a completion would take them."""
    given = _given(body, server, ("prompt", "messages", "add_special_tokens"))
    if ("prompt" in given) == ("messages" in given):
        got = "given with messages" if "prompt" in given else "missing"
        raise Refused("prompt", got, "exactly one of prompt, messages")
    special = given.get("add_special_tokens", True)
    if type(special) is not bool:
        raise wrong("add_special_tokens", special, "true or false")
    name = "prompt" if "prompt" in given else "messages"
    text = given["prompt"] if name == "prompt" else transcript(given["messages"])
    if not isinstance(text, str):
        raise wrong("prompt", text, "a string")
    tokens = server.reader.tokens(text, name, special)
    return {"count": len(tokens), "max_model_len": server.engine.context, "tokens": tokens, "token_strs": None}


def detokenized(body, server):
    """Returns the text of tokens."""
    given = _given(body, server, ("tokens",))
    if not isinstance(given.get("tokens"), list):
        raise wrong("tokens", given["tokens"], "a list of integers") if given else Refused(
            "tokens", "missing", "a list of integers")
    return {"prompt": server.reader.text(given["tokens"], "tokens")}


def _given(body, server, known):
    """Returns the fields of a body that ask for something. The model may be left out: there is only one."""
    given = {name: value for name, value in body.items() if value is not None}
    if "model" in given:
        check_model(given, server.name)
    for name, value in given.items():
        if name in NEUTRAL:
            check_neutral(name, value, NEUTRAL[name])
        elif name not in ("model", *known):
            raise Refused(shown(name), "unsupported field", f"one of model, {', '.join(known)}",
                          logged={"where": "..."}, field=name[:100])
    return {name: value for name, value in given.items() if name in known}


TOKENS = {"/tokenize": tokenized, "/detokenize": detokenized}
