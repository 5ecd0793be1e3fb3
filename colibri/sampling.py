"""Sampler: how a next token is drawn, and the draws themselves."""

import functools
from collections import namedtuple
from numbers import Integral, Real

import numpy as np

from colibri.errors import ColibriError

DRAWS = 64  # of a seed that are made at a time

Sampler = namedtuple("Sampler", "temperature top_k top_p seed", defaults=(0.0, 0, 1.0, 0))


def check_sampler(sampler, prefix=""):
    """The sampler, if its values make sense. prefix: "--" where they are options of the command line."""
    if not isinstance(sampler, Sampler):
        raise ColibriError("samplers", str(sampler), "a Sampler for each session")
    temperature, top_k, top_p, seed = sampler  # the upper limits are those of C's float and int32_t
    for name, good, expected in (
            ("temperature", isinstance(temperature, Real) and 0 <= temperature <= 1e30, "0 (greedy) to 1e30"),
            ("top_k", isinstance(top_k, Integral) and 0 <= top_k < 1 << 31, "0 (all) to 2^31 - 1"),
            ("top_p", isinstance(top_p, Real) and 0 < top_p <= 1 and np.float32(top_p) > 0,
             "more than 0 and at most 1"),
            ("seed", isinstance(seed, Integral) and 0 <= seed < 1 << 64, "0 to 2^64 - 1")):
        if not good:
            label = prefix + (name.replace("_", "-") if prefix else name)
            raise ColibriError(label, str(getattr(sampler, name)), expected)
    return sampler


def check_samplers(samplers, count):
    """The samplers as a list, or None for None."""
    if samplers is None:
        return None
    if not isinstance(samplers, (list, tuple)):
        raise ColibriError("samplers", samplers, "a list, a Sampler for each session")
    samplers = [sampler if sampler is None else check_sampler(sampler) for sampler in samplers]
    if len(samplers) != count:
        raise ColibriError("samplers", len(samplers), f"one for each of {count} sessions")
    return samplers


def draw(seed, position):
    """The draw in [0, 1) for the token at a position: it depends on the seed and the position alone.

    24 random bits, so that the float32 that C reads is exact and below 1.
    """
    return _draws(seed, position // DRAWS)[position % DRAWS]


@functools.lru_cache(1024)
def _draws(seed, block):
    """Returns the draws of DRAWS positions: the first of the four words that the generator gives for each counter."""
    words = np.random.Philox(key=seed, counter=block * DRAWS).random_raw(4 * DRAWS)[::4]
    return ((words >> np.uint64(40)) / (1 << 24)).tolist()
