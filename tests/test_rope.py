"""Rotary frequencies of every kind, against their definitions written out pair by pair."""

import math

import numpy as np
import pytest

from converter import rope
from converter.values import Values

BASE = {"max_position_embeddings": 4096, "rope_theta": 10000.0}


def result(scaling, dim=16, partial=None):
    values = rope.rope(Values({**BASE, "rope_scaling": scaling}, "case"), dim, 5e5, partial)
    return values["rotary_dim"], values["rope_frequencies"], values["rope_attention_factor"]


def plain(dim):
    return np.array([10000.0 ** (-2 * i / dim) for i in range(dim // 2)])


def test_plain_linear_and_partial():
    np.testing.assert_allclose(result(None)[1], plain(16), rtol=1e-6)
    np.testing.assert_allclose(result({"type": "linear", "factor": 4})[1], plain(16) / 4, rtol=1e-6)
    dim, frequencies, factor = result({"rope_type": "default", "partial_rotary_factor": 0.5}, partial=1.0)
    assert (dim, len(frequencies), factor) == (8, 4, 1.0)


def test_llama3_divides_slow_pairs_and_blends_between():
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 1024}
    expected = []
    for frequency in plain(32):
        turns = 1024 * frequency / (2 * math.pi)
        blend = (turns - 1) / 3
        expected.append(frequency if turns > 4 else frequency / 8 if turns < 1
                        else (1 - blend) * frequency / 8 + blend * frequency)
    np.testing.assert_allclose(result(scaling, 32)[1], expected, rtol=1e-6)


@pytest.mark.parametrize("truncate", [True, False])
def test_yarn_keeps_fast_pairs_and_stretches_slow_ones(truncate):
    scaling = {"rope_type": "yarn", "factor": 40.0, "beta_fast": 16, "beta_slow": 2, "truncate": truncate,
               "original_max_position_embeddings": 2048}
    low, high = (64 * math.log(2048 / (turns * 2 * math.pi)) / (2 * math.log(10000)) for turns in (16, 2))
    low, high = (math.floor(low), math.ceil(high)) if truncate else (low, high)
    expected = []
    for pair, frequency in enumerate(plain(64)):
        stretch = min(max((pair - low) / (high - low), 0), 1)
        expected.append(frequency * (1 - stretch) + frequency / 40 * stretch)
    _, frequencies, factor = result(scaling, 64)
    np.testing.assert_allclose(frequencies, expected, rtol=2e-6)
    assert factor == pytest.approx(0.1 * math.log(40) + 1)


def test_yarn_mscales_that_agree_cancel():
    scaling = {"type": "yarn", "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
               "original_max_position_embeddings": 4096}
    assert result(scaling)[2] == 1.0
    assert result({**scaling, "mscale": 0.707})[2] == pytest.approx(
        (0.0707 * math.log(40) + 1) / (0.1 * math.log(40) + 1))
    assert result({**scaling, "attention_factor": 1.25})[2] == 1.25
