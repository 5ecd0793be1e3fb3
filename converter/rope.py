"""Turns all kinds of rotary embedding into frequencies, one a pair of dimensions, and a factor of cos and sin.

Longrope has two of each, by a sequence's length. Dynamic NTK has a factor by which a length changes its frequencies.
"""

import math

import numpy as np

from colibri import headers
from colibri.errors import ColibriError
from converter.values import Values

CODES = headers.default().constants
MAX_HEAD_DIM = CODES["MAX_HEAD_DIM"]
TENSORS = ("rope_frequencies", "rope_long_frequencies")  # made here; no checkpoint has them
# rope_type -> the fields that it may have. Another type, or another field, is refused.
KNOWN = {"default": (), "linear": ("factor",), "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
         "yarn": ("factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate", "attention_factor"),
         "longrope": ("factor", "attention_factor", "short_factor", "long_factor"), "dynamic": ("factor",)}
MSCALES = ("short_mscale", "long_mscale")  # attention factors of longrope, in families that have them


def rope(c, dim, theta, partial, mscales=False):
    """Returns the header's fields of rotary embedding, and TENSORS.

    partial: the default of partial_rotary_factor, or None where the family has none. mscales: whether the family's
    longrope has MSCALES.
    """
    given = c.get("rope_scaling|rope_parameters", dict, {})
    p = Values({key: "longrope" if key in ("rope_type", "type") and value == "su" else value  # su: its older name
                for key, value in given.items() if value is not None}, f"{c.where}: rope_parameters")
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
        raise ColibriError(c.where, f"{dim} rotated dimensions", f"an even number from 2 to {MAX_HEAD_DIM}",
                           "correct head_dim or partial_rotary_factor")
    if kind not in KNOWN:
        raise p.bad("rope_type", kind, "one of " + ", ".join(KNOWN))
    known = KNOWN[kind] + (MSCALES if mscales and kind == "longrope" else ())
    unknown = p.values.keys() - {*known, "rope_type", "type", "rope_theta", "partial_rotary_factor",
                                 "original_max_position_embeddings"}
    if unknown:
        raise p.bad(min(unknown), p.values[min(unknown)], f"none with rope_type={kind}")
    powers = np.float32(theta) ** (np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim))
    fields = {"rope_kind": CODES["ROPE_DEFAULT"], "rotary_dim": dim, "rope_theta": theta,
              "rope_frequencies": np.float32(1) / powers, "rope_attention_factor": 1.0}
    return {**fields, **scaling(c, p, kind, powers, theta, mscales)}


def scaling(c, p, kind, powers, theta, mscales):
    """Returns the fields in which a kind differs from the default one. powers: of theta, 1 / the default frequencies.
    """
    longest = c.need("max_position_embeddings|max_seq_len")
    given = in_either(c, p, "original_max_position_embeddings", int)
    original = longest if given is None else given
    if kind == "default":
        return {}
    if kind == "longrope":
        return longrope(p, powers, given, longest, mscales)
    if p.need("factor", float) < 1 or original < 1:
        raise p.bad("factor", p.need("factor", float), "at least 1, with original_max_position_embeddings")
    if kind == "dynamic":
        return dynamic(p, len(powers), original, longest)
    frequencies, factor = np.float32(1) / powers, 1.0
    if kind == "linear":
        frequencies = frequencies / np.float32(p.need("factor", float))
    elif kind == "llama3":
        frequencies = llama3(frequencies, p, original)
    elif kind == "yarn":
        frequencies, factor = yarn(frequencies, p, original, theta)
    return {"rope_frequencies": frequencies.astype(np.float32), "rope_attention_factor": factor}


def in_either(c, p, key, kind, default=None):
    """Returns a value that may stand in the config, in its rope_parameters, or alike in both."""
    outer, inner = c.get(key, kind), p.get(key, kind)
    if None not in (outer, inner) and outer != inner:
        raise c.bad(key, outer, f"{inner} as in rope_parameters")
    return next((value for value in (outer, inner) if value is not None), default)


def longrope(p, powers, original, longest, mscales):
    """Returns frequencies and attention factors, up to the original length and beyond it."""
    if original is None:
        original = p.need("original_max_position_embeddings")
    if original < 2:
        raise p.bad("original_max_position_embeddings", original, "at least 2")
    short, long = (np.float32(1) / (factors(p, name, len(powers)) * powers) for name in ("short_factor", "long_factor"))
    if mscales:
        attention = [p.need(name, float) for name in MSCALES]
    else:
        attention = [longrope_attention(p, original, longest)] * 2
    return {"rope_kind": CODES["ROPE_LONG"], "rope_original_positions": original,
            "rope_frequencies": short, "rope_attention_factor": attention[0],
            "rope_long_frequencies": long, "rope_long_attention_factor": attention[1]}


def factors(p, name, count):
    """Returns one of longrope's lists, float32 (count,)."""
    given = p.need(name, list)
    if len(given) != count or not all(type(value) in (int, float) and 1e-6 <= value <= 1e6 for value in given):
        raise p.bad(name, given, f"{count} numbers, one a pair of rotated dimensions, from 1e-6 to 1e6")
    return np.array(given, np.float32)


def longrope_attention(p, original, longest):
    ratio, given, factor = longest / original, p.get("attention_factor", float), p.get("factor", float)
    if given is not None:
        return given
    if factor is not None and not math.isclose(factor, ratio, rel_tol=1e-6):
        raise p.bad("factor", factor, f"{ratio:g}, max_position_embeddings by original_max_position_embeddings, or an "
                                      "attention_factor that tells which of the two counts")
    return math.sqrt(1 + math.log(ratio) / math.log(original)) if ratio > 1 else 1.0


def dynamic(p, num_pairs, original, longest):
    """Returns what dynamic NTK adds to the default frequencies.

    Where a config has one length alone, that is the original one, and the context is `factor` times as long.
    """
    factor = p.need("factor", float)
    if num_pairs < 2:
        raise p.bad("rope_type", "dynamic", "another kind with 2 rotated dimensions")
    if original > longest:
        raise p.bad("original_max_position_embeddings", original, f"at most max_position_embeddings={longest}")
    positions = longest if original < longest else factor * longest
    if positions >= 2 ** 31:
        raise p.bad("factor", factor, f"fewer than 2^31 positions, {longest} times factor")
    return {"rope_kind": CODES["ROPE_DYNAMIC"], "rope_original_positions": original, "rope_dynamic_factor": factor,
            "max_positions": int(positions)}


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
