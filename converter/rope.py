"""All kinds of rotary embedding as one vector of frequencies, one a pair of dimensions, and a factor of cos and sin."""

import math

import numpy as np

from colibri import headers
from colibri.errors import ColibriError
from converter.values import Values

MAX_HEAD_DIM = headers.default().constants["MAX_HEAD_DIM"]
# rope_type -> what it may bring along; another kind, or another field, is refused.
KNOWN = {"default": (), "linear": ("factor",), "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
         "yarn": ("factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate", "attention_factor")}


def rope(c, dim, theta, partial):
    """rotary_dim, rope_frequencies, rope_attention_factor. partial: its default; None where the family has none."""
    given = c.get("rope_scaling|rope_parameters", dict, {})
    p = Values({key: value for key, value in given.items() if value is not None}, f"{c.where}: rope_parameters")
    kind = p.get("rope_type|type", str, "default")
    theta = in_either(c, p, "rope_theta", float, theta)
    if not theta > 1:
        raise c.bad("rope_theta", theta, "above 1")
    if partial is None:
        for values in (p, c):
            values.accept("partial_rotary_factor", [1])
    else:
        dim = int(dim * in_either(c, p, "partial_rotary_factor", float, partial))
    if not 2 <= dim <= MAX_HEAD_DIM or dim % 2:
        raise ColibriError(f"{c.where}: {dim} rotated dimensions, expected an even number from 2 to {MAX_HEAD_DIM}; "
                           "correct head_dim or partial_rotary_factor")
    if kind not in KNOWN:
        raise p.bad("rope_type", kind, "one of " + ", ".join(KNOWN))
    unknown = p.values.keys() - {*KNOWN[kind], "rope_type", "type", "rope_theta", "partial_rotary_factor",
                                 "original_max_position_embeddings"}
    if unknown:
        raise p.bad(min(unknown), p.values[min(unknown)], f"none with rope_type={kind}")
    frequencies = np.float32(1) / np.float32(theta) ** (np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim))
    original = in_either(c, p, "original_max_position_embeddings", int) or c.need("max_position_embeddings|max_seq_len")
    attention_factor = 1.0
    if kind != "default" and (p.need("factor", float) < 1 or original < 1):
        raise p.bad("factor", p.need("factor", float), "at least 1, with original_max_position_embeddings")
    if kind == "linear":
        frequencies = frequencies / np.float32(p.need("factor", float))
    elif kind == "llama3":
        frequencies = llama3(frequencies, p, original)
    elif kind == "yarn":
        frequencies, attention_factor = yarn(frequencies, p, original, theta)
    return {"rotary_dim": dim, "rope_theta": theta, "rope_frequencies": frequencies.astype(np.float32),
            "rope_attention_factor": attention_factor}


def in_either(c, p, key, kind, default=None):
    """A value that may stand in the config, in its rope_parameters, or alike in both."""
    outer, inner = c.get(key, kind), p.get(key, kind)
    if None not in (outer, inner) and outer != inner:
        raise c.bad(key, outer, f"{inner} as in rope_parameters")
    return next((value for value in (outer, inner) if value is not None), default)


def llama3(frequencies, p, original):
    factor, low, high = (p.need(name, float) for name in ("factor", "low_freq_factor", "high_freq_factor"))
    if high <= low:
        raise p.bad("high_freq_factor", high, f"above low_freq_factor={low}")
    turns = original * frequencies / (2 * math.pi)  # of each pair over the original length
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    return (1 - smooth) * frequencies / factor + smooth * frequencies


def yarn(frequencies, p, original, theta):
    factor, dim = p.need("factor", float), 2 * len(frequencies)

    def pair_of(turns):  # the pair, as a real number, that makes so many turns over the original length
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))
    low, high = pair_of(p.get("beta_fast", float) or 32.0), pair_of(p.get("beta_slow", float) or 1.0)
    if p.get("truncate", bool, True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = np.clip((np.arange(dim // 2, dtype=np.float32) - low) / ((high - low) or 0.001), 0, 1)
    mscale, all_dim = p.get("mscale", float), p.get("mscale_all_dim", float)
    given = p.get("attention_factor", float)
    ratio = yarn_mscale(factor, mscale) / yarn_mscale(factor, all_dim) if mscale and all_dim else yarn_mscale(factor)
    return frequencies * (1 - ramp) + frequencies / factor * ramp, ratio if given is None else given


def yarn_mscale(factor, mscale=1.0):
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0
