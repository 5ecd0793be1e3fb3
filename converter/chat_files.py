"""Reads what a Hugging Face folder says of chats: templates, the special tokens that these see, how answers are drawn.
"""

import json

from colibri.errors import ColibriError
from converter import config

NAMES = ("chat_template.jinja", "chat_template.json", "special_tokens_map.json")  # beside config.json
FOLDER = "chat_templates"  # of templates by their names
TEMPLATE = NAMES[0]
CONFIG, MAP, GENERATION = "tokenizer_config.json", NAMES[2], "generation_config.json"
SETTINGS = ("chat_templates", "special_tokens", "sampling")
NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# Of sampling: (name, kinds, whether a value is good, what is expected).
SAMPLING = (("temperature", (int, float), lambda value: 0 <= value <= 1e30, "0 (greedy) to 1e30"),
            ("top_p", (int, float), lambda value: 1e-45 <= value <= 1, "more than 0 and at most 1"),
            ("top_k", (int,), lambda value: 0 <= value < 1 << 31, "0 (all) to 2^31 - 1"))


def read(folder, warnings):
    """Returns the SETTINGS that a folder's files make: {name: text}, {name: text} and {name: number}."""
    values = _json(folder / CONFIG)
    templates = _templates(folder, values, warnings)
    tokens = _special_tokens(folder, values) if templates else {}
    return dict(zip(SETTINGS, (templates, tokens, _sampling(folder / GENERATION, warnings))))


def section(settings):
    """Returns the bytes of a .bin's settings, none where there are none."""
    return json.dumps(settings).encode() if any(settings.values()) else b""


def _json(path):
    return config.read_json(path) if config.is_there(path) else {}


def _templates(folder, values, warnings):
    """Returns {name: template}. Files of templates go before tokenizer_config.json, as transformers has it."""
    files = {path.name.removesuffix(".jinja"): _text(path) for path in sorted((folder / FOLDER).glob("*.jinja"))}
    if config.is_there(folder / TEMPLATE):
        files = {"default": _text(folder / TEMPLATE), **files}
    own = _declared(values.get("chat_template"), folder / CONFIG)
    other = _declared(_json(folder / NAMES[1]).get("chat_template"), folder / NAMES[1])
    found = [(where, templates) for where, templates in ((folder / TEMPLATE, files), (folder / CONFIG, own),
                                                         (folder / NAMES[1], other)) if templates]
    warnings.extend(f"{where}: another chat template than {found[0][0].name}, which is taken"
                    for where, templates in found[1:] if templates != found[0][1])
    return found[0][1] if found else {}


def _text(path):
    """Returns the text of a template's file."""
    if not path.is_file():
        raise ColibriError(path, "not a regular file, nor a link to one", "a chat template", "remove it")
    if path.stat().st_size > config.MAX_CONFIG_BYTES:
        raise ColibriError(path, f"{path.stat().st_size} bytes", f"at most {config.MAX_CONFIG_BYTES}")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ColibriError(path, f"byte 0x{error.object[error.start]:02x} at {error.start}", "UTF-8",
                           "download it again") from None


def _declared(value, where):
    """Returns {name: template} of a chat_template in JSON: one, a list of named ones, or an object of them."""
    if value is None:
        return {}
    if type(value) is str:
        return {"default": value}
    rule = "a template's text, or a list of names and templates"
    if type(value) is list:
        if not all(type(each) is dict and type(each.get("name")) is str for each in value):
            raise ColibriError(where, f"chat_template={json.dumps(value)[:60]}", rule, "correct it")
        pairs = [(each["name"], each.get("template")) for each in value]
        twice = next((name for number, (name, _) in enumerate(pairs) if name in dict(pairs[:number])), None)
        if twice is not None:
            raise ColibriError(where, f"chat_template: {twice[:60]!r} twice", "each name once", "leave one out")
        value = dict(pairs)
    if type(value) is not dict or not all(type(text) is str for text in value.values()):
        raise ColibriError(where, f"chat_template={json.dumps(value)[:60]}", rule, "correct it")
    return value


def _special_tokens(folder, values):
    """Returns {name: text} of the tokens that templates see, as in transformers' special_tokens_map.

    Those are the standard ones and a model's own: each *_token, and what extra_special_tokens names. Where
    tokenizer_config.json has no added_tokens_decoder, special_tokens_map.json replaces what it has.
    """
    if "added_tokens_decoder" not in values:
        values = {**values, **_json(folder / MAP)}
    extra = values.get("extra_special_tokens")
    own = {name: value for name, value in values.items() if name in NAMED or name.endswith("_token")}
    found = {name: _token(value) for name, value in {**own, **(extra if type(extra) is dict else {})}.items()}
    return {name: text for name, text in found.items() if text is not None}


def _token(value):
    """Returns a token's text, by itself or as an object's content; None where it is none."""
    text = value.get("content") if type(value) is dict else value
    return text if type(text) is str else None


def _sampling(path, warnings):
    """Returns temperature, top_p and top_k as the model's authors set them; {} is greedy, as without do_sample."""
    values = _json(path)
    given = {name: values[name] for name, *_ in SAMPLING if values.get(name) is not None}
    for name, kinds, is_good, expected in SAMPLING:
        if name in given and not (type(given[name]) in kinds and is_good(given[name])):
            raise ColibriError(path, f"{name}={json.dumps(given[name])[:60]}", expected, "correct it")
    does = values.get("do_sample")
    if type(does) not in (bool, type(None)):
        raise ColibriError(path, f"do_sample={json.dumps(does)[:60]}", "true or false", "correct it")
    if does:
        return {"temperature": 1.0, **given}
    if does is None and given.get("temperature"):
        warnings.append(f"{path}: temperature={given['temperature']} without do_sample=true; the model's text is "
                        "greedy unless a request says otherwise")
    return {}
