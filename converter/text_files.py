"""Reads what a Hugging Face folder says of text: its tokenizer, the token that begins a prompt, those that end a text.

What it says of chats is in chat_files.
"""

import json
from collections import namedtuple
from pathlib import Path

from colibri.errors import ColibriError
from converter import chat_files, config

NAMES = ("generation_config.json", "tokenizer.json", "tokenizer_config.json", *chat_files.NAMES)  # beside config.json
MAX_TOKENIZER_BYTES = 256 << 20
MAX_EOS = config.HEADER["eos_ids"].shape[0]

# eos: numbers of the tokens that end a text. fields: BinHeader's fields of EOS and BOS. sections: tokenizer.json's
# bytes and those of the settings, b"" where there are none. settings: as chat_files.read has them. warnings: lines for
# the user.
Text = namedtuple("Text", "eos fields sections settings warnings")
# A tokenizer.json. where: its path. ids: {a token's text: its number}. begins: texts of tokens that its post-processor
# puts before a prompt.
Tokenizer = namedtuple("Tokenizer", "where data ids begins")


def read(config_path, vocab_size):
    """Returns the Text that stands beside a config.json."""
    if config_path is None or Path(config_path).name != "config.json":
        return _text([], None, b"", {name: {} for name in chat_files.SETTINGS}, [])
    folder, warnings = Path(config_path).parent, []
    tokenizer = _tokenizer(folder / NAMES[1])
    beyond = sorted((number, text) for text, number in tokenizer.ids.items() if number >= vocab_size)
    if beyond:
        warnings.append(f"{tokenizer.where}: tokens beyond vocab_size={vocab_size}: {len(beyond)}, the first is "
                        f"{beyond[0][1][:40]!r}, {beyond[0][0]}; a prompt that holds one is refused")
    where = folder / NAMES[2]
    values = config.read_json(where) if config.is_there(where) else {}
    bos = _bos(values, where, tokenizer, vocab_size, warnings)
    eos = _token(values, "eos_token", where)
    found = [(path, name, token) for path in (folder / "config.json", folder / NAMES[0])
             for name, token in _eos_ids(path)]
    if eos in tokenizer.ids:
        found.append((where, f"eos_token={eos!r}", tokenizer.ids[eos]))
    elif eos is not None:
        warnings.append(f"{where}: eos_token={eos[:40]!r}, expected a token of {NAMES[1]}; no text ends there")
    settings = chat_files.read(folder, warnings)
    return _text(_union(found), bos, tokenizer.data, settings, warnings)


def _text(eos, bos, tokenizer, settings, warnings):
    """Returns a Text. bos: the number of the token that begins a prompt, or None where tokenizer.json decides."""
    fields = {"num_eos": len(eos), "eos_ids": eos + [0] * (MAX_EOS - len(eos)), "add_bos": int(bos is not None),
              "bos_id": bos or 0}
    return Text(eos, fields, (tokenizer, chat_files.section(settings)), settings, warnings)


def _tokenizer(path):
    """Returns the Tokenizer in a file, an empty one where there is no file."""
    if not config.is_there(path):
        return Tokenizer(path, b"", {}, [])
    if not path.is_file():
        raise ColibriError(path, "not a regular file, nor a link to one", "a tokenizer.json",
                           "download it again, or remove it")
    size = path.stat().st_size
    if size > MAX_TOKENIZER_BYTES:
        raise ColibriError(path, f"{size} bytes", f"at most {MAX_TOKENIZER_BYTES}")
    data = path.read_bytes()
    try:
        values = json.loads(data.decode())
        vocab = (values.get("model") or {}).get("vocab") or {}
        ids = dict(vocab) if type(vocab) is dict else {piece[0]: number for number, piece in enumerate(vocab)}
        ids |= {token["content"]: token["id"] for token in values.get("added_tokens") or []}
        begins = _begins(values.get("post_processor") or {})
        good = all(type(text) is str and type(number) is int for text, number in ids.items())
    except (ValueError, TypeError, AttributeError, LookupError, RecursionError):
        good = False
    if not good:
        raise ColibriError(path, f"{len(data)} bytes that are no tokenizer.json",
                           "a JSON object with a vocabulary of text and numbers", "download it again, or remove it")
    return Tokenizer(path, data, ids, begins)


def _begins(processor):
    """Returns the texts of the tokens that a post-processor puts before a prompt."""
    begins = [text for part in processor.get("processors", []) for text in _begins(part)]
    for piece in processor.get("single", []):
        if "SpecialToken" not in piece:
            break
        begins.append(piece["SpecialToken"]["id"])
    return begins + processor.get("cls", [])[:1]


def _token(values, name, where):
    """Returns a token's text as tokenizer_config.json has it: by itself, or as the content of an object."""
    value = values.get(name)
    text = value.get("content") if type(value) is dict else value
    if not (value is None or type(text) is str):
        raise ColibriError(where, f"{name}={json.dumps(value)[:80]}", "a token's text", "correct it")
    return text


def _bos(values, where, tokenizer, vocab_size, warnings):
    """Returns the number of the token that add_bos_token puts before a prompt, or None."""
    added, bos = values.get("add_bos_token"), _token(values, "bos_token", where)
    if type(added) not in (bool, type(None)):
        raise ColibriError(where, f"add_bos_token={json.dumps(added)[:80]}", "true or false", "correct it")
    if added is False and bos in tokenizer.begins:
        warnings.append(f"{where}: add_bos_token=false, but {NAMES[1]} puts {bos[:40]!r} before a prompt; so does "
                        "Colibri, but for a request with add_special_tokens=false")
    if not added or not tokenizer.data:  # without one there is no text, and numbers are taken as they are
        return None
    number = tokenizer.ids.get(bos)
    if number is None or number >= vocab_size:
        got = json.dumps(bos)[:60] + ("" if number is None else f", which is {number}")
        raise ColibriError(where, f"bos_token={got}",
                           f"a token of {NAMES[1]} below vocab_size={vocab_size} with add_bos_token=true",
                           "correct it")
    return number


def _eos_ids(path):
    """Returns [("eos_token_id=2", 2), ...] of a config."""
    found = config.read_json(path).get("eos_token_id") if config.is_there(path) else None
    ids = found if type(found) is list else [] if found is None else [found]
    if not all(type(token) is int and 0 <= token < 1 << 32 for token in ids):
        raise ColibriError(path, f"eos_token_id={str(found)[:80]}", "token numbers", "correct it")
    return [(f"eos_token_id={token}", token) for token in ids]


def _union(found):
    """Returns the numbers of [(path, what it says, number)], each once."""
    eos = []
    for path, name, token in found:
        if token not in eos and len(eos) == MAX_EOS:
            raise ColibriError(path, f"{name[:80]} is one token more that ends a text than {MAX_EOS}",
                               f"at most {MAX_EOS} in config.json, {NAMES[0]} and {NAMES[2]} together",
                               "leave one out")
        eos += [token] * (token not in eos)
    return eos
