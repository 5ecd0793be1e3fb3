"""The fields of a request that say how its tokens are drawn and where its text ends, read from JSON."""

import re
import secrets

from colibri.errors import ColibriError
from colibri.refused import HIDDEN, Refused, shown, wrong
from colibri.sampling import MAX_BIASES, MAX_STOP_TOKENS, PLAIN, Sampler, check_sampler, check_tokens

MAX_STOPS = 16
SEED_BITS = 53  # of a seed that is drawn: so many that every JSON reader keeps them all
OF_SAMPLER = tuple(name for name in PLAIN._fields if name != "grammar")  # which colibri.constraints reads
OF_TEXT = (*OF_SAMPLER, "stop", "include_stop_str_in_output", "skip_special_tokens")  # fields that are read here


def boolean(values, name, label, default=False):
    return _flag(values.get(name, default), label[name])


def integer(values, name, low, high, label):
    value = values[name]
    limit = f"{low} to {high}" if high else f"{low} or more"
    if type(value) is not int or value < low or (high and value > high):
        raise wrong(label[name], value, f"an integer, {limit}")
    return value


def sampler(values, label, checkpoint):
    """Returns a Sampler of JSON values, for a model; colibri.sampling knows their ranges."""
    fields = {name: READERS.get(name, _number)(values[name], label[name]) for name in OF_SAMPLER if name in values}
    made = Sampler(**fields)
    try:
        check_sampler(made)
        check_tokens(made, checkpoint.header["vocab_size"], checkpoint.eos)
    except ColibriError as error:
        name, expected = error.where, error.expected
        if name == "top_p" and 0 < fields[name] < 1:
            expected = "at least 1e-45, which is more than 0 as a float32, and at most 1"
        got = error.got if name in READERS else shown(fields[name])
        raise Refused(label[name], got, expected, error.fix, logged=HIDDEN) from None
    return made


def _number(value, name):
    if type(value) not in (int, float):
        raise wrong(name, value, "a number")
    return value


def _flag(value, name):
    if type(value) is not bool:
        raise wrong(name, value, "true or false")
    return value


def _biases(value, name):
    """Returns logit_bias as a Sampler has it, of an object such as {"429": -100}."""
    if not isinstance(value, dict):
        raise wrong(name, value, 'an object such as {"429": -100}')
    if len(value) > MAX_BIASES:
        raise Refused(name, f"{len(value)} tokens", f"at most {MAX_BIASES}")
    for token, bias in value.items():
        if not re.fullmatch("0|[1-9][0-9]{0,8}", token):
            raise wrong(name, token, "token numbers as its names")
        if type(bias) not in (int, float) or not -100 <= bias <= 100:
            raise wrong(f"{name}.{token}", bias, "-100 to 100")
    return tuple((int(token), bias) for token, bias in value.items())


def _tokens(value, name):
    if not isinstance(value, list):
        raise wrong(name, value, "a list of integers")
    if len(value) > MAX_STOP_TOKENS:
        raise Refused(name, f"{len(value)} tokens", f"at most {MAX_STOP_TOKENS}")
    for index, token in enumerate(value):
        if type(token) is not int or not 0 <= token < 1 << 31:
            raise wrong(f"{name}[{index}]", token, "a token number")
    return tuple(value)


READERS = {"logit_bias": _biases, "stop_token_ids": _tokens, "ignore_eos": _flag}


def stops(values, label):
    """Returns the strings that end the text, () for none: null, an empty string or an empty list."""
    value, name = values.get("stop"), label["stop"]
    if value is None or value in ("", []):
        return ()
    if isinstance(value, str):
        return (_stop(value, name),)
    if not isinstance(value, list):
        raise wrong(name, value, f"a string, or a list of 1 to {MAX_STOPS}")
    if len(value) > MAX_STOPS:
        raise Refused(name, f"{len(value)} strings", f"at most {MAX_STOPS}")
    return tuple(_stop(string, f"{name}[{index}]") for index, string in enumerate(value))


def _stop(value, name):
    if not isinstance(value, str) or not value:
        raise wrong(name, value, "a string of at least 1 character")
    return value


def with_seed(values, spare):
    """Returns (the values with a seed, that seed where it was drawn).

    spare: a seed drawn for a request that has none, or None: then 0 stands for it. A seed of -1 asks for another.
    """
    seed = values.get("seed")
    if type(seed) is int and seed == -1 or seed is None and "seed" not in values and spare is not None:
        seed = drawn_seed() if spare is None else spare
        return {**values, "seed": seed}, seed
    return values, None


def drawn_seed():
    return secrets.randbits(SEED_BITS)
