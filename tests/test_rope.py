"""Rotary frequencies of every kind, against their definitions written out pair by pair."""

import math

import numpy as np
import pytest

from colibri.errors import ColibriError
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


LONGROPE = {"rope_type": "longrope", "original_max_position_embeddings": 1024,
            "short_factor": [1.0, 1.25, 1.5, 2.0], "long_factor": [1.0, 3.0, 9.0, 30.5]}
REACH = math.sqrt(1 + math.log(4) / math.log(1024))  # 4096 positions are 4 times 1024
MSCALES = {"short_mscale": 1.125, "long_mscale": 1.75}


def fields(scaling, dim=8, mscales=False, **config):
    config = {**BASE, "rope_scaling": scaling, **config}
    return rope.rope(Values({key: value for key, value in config.items() if value is not None}, "case"), dim, 5e5, None,
                     mscales)


@pytest.mark.parametrize("changes", [
    {"rope_scaling": {**LONGROPE, "rope_type": "su"}}, {"rope_scaling": {**LONGROPE, "rope_type": None, "type": "su"}},
    {"rope_scaling": {**LONGROPE, "type": "su"}}, {"rope_scaling": {**LONGROPE, "factor": 4}},
    {"rope_scaling": None, "rope_parameters": {**LONGROPE, "rope_theta": 10000.0}},
    {"rope_scaling": {**LONGROPE, "original_max_position_embeddings": None}, "original_max_position_embeddings": 1024},
    {"original_max_position_embeddings": 1024}], ids=str)
def test_longrope_has_two_sets_of_frequencies(changes):
    got = fields(**{"scaling": LONGROPE, **{("scaling" if key == "rope_scaling" else key): value
                                           for key, value in changes.items()}})
    short, long = (plain(8) / LONGROPE[name] for name in ("short_factor", "long_factor"))
    np.testing.assert_allclose(got["rope_frequencies"], short, rtol=5e-7)
    np.testing.assert_allclose(got["rope_long_frequencies"], long, rtol=5e-7)
    assert got["rope_frequencies"].dtype == got["rope_long_frequencies"].dtype == np.float32
    assert (got["rope_kind"], got["rope_original_positions"]) == (2, 1024)
    assert got["rope_attention_factor"] == got["rope_long_attention_factor"] == pytest.approx(REACH)
    assert "max_positions" not in got


def test_attention_factors_of_longrope():
    def factors(**changes):
        got = fields({**LONGROPE, **changes.pop("scaling", {})}, **changes)
        return got["rope_attention_factor"], got["rope_long_attention_factor"]
    assert factors(scaling={"attention_factor": 1.5, "factor": 7}) == (1.5, 1.5)
    assert factors(max_position_embeddings=1024) == factors(max_position_embeddings=512) == (1, 1)
    assert factors(scaling=MSCALES, mscales=True) == (1.125, 1.75)


@pytest.mark.parametrize("changes, message", [
    ({"original_max_position_embeddings": None}, "original_max_position_embeddings is not there, expected int"),
    ({"original_max_position_embeddings": 1}, "original_max_position_embeddings=1, expected at least 2"),
    ({"long_factor": None}, "long_factor is not there, expected list"),
    ({"long_factor": [1.0]}, r"long_factor=\[1.0\], expected 4 numbers, one a pair"),
    ({"short_factor": [1, 2, 3, "4"]}, "short_factor=.*, expected 4 numbers"),
    ({"short_factor": [1, 2, 3, True]}, "short_factor=.*, expected 4 numbers"),
    ({"short_factor": [1, 2, 3, 0.0]}, "short_factor=.*, expected 4 numbers, .* from 1e-6 to 1e6"),
    ({"short_factor": [1, 2, 3, float("nan")]}, "short_factor=.*, expected 4 numbers"),
    ({"factor": 32.0}, "factor=32.0, expected 4, max_position_embeddings by original_.*or an attention_factor"),
    ({"beta_fast": 32}, "beta_fast=32, expected none with rope_type=longrope"),
    (MSCALES, "long_mscale=1.75, expected none with rope_type=longrope"),
])
def test_what_longrope_lacks_or_leaves_open(changes, message):
    with pytest.raises(ColibriError, match=message):
        fields({**LONGROPE, **changes})


def test_a_family_with_mscales_must_have_them():
    with pytest.raises(ColibriError, match="long_mscale is not there, expected float"):
        fields({**LONGROPE, "short_mscale": 1.0}, mscales=True)
    with pytest.raises(ColibriError, match="long_mscale=1.75, expected none with rope_type=linear"):
        fields({"rope_type": "linear", "factor": 2.0, **MSCALES}, mscales=True)
    with pytest.raises(ColibriError, match="original_max_position_embeddings=4096, expected 1024 as in rope_param"):
        fields(LONGROPE, original_max_position_embeddings=4096)


@pytest.mark.parametrize("changes, original, positions", [
    ({}, 4096, 10240), ({"original_max_position_embeddings": 4096}, 4096, 10240),
    ({"original_max_position_embeddings": 1000}, 1000, 4096), ({"factor": 1.0001}, 4096, 4096)])
def test_dynamic_has_the_default_frequencies_and_a_factor(changes, original, positions):
    scaling = {"rope_type": "dynamic", "factor": 2.5, **changes}
    got = fields(scaling)
    assert np.array_equal(got["rope_frequencies"], fields(None)["rope_frequencies"])
    assert (got["rope_kind"], got["rope_original_positions"], got["max_positions"], got["rope_dynamic_factor"],
            got["rope_attention_factor"]) == (3, original, positions, scaling["factor"], 1)
    assert "rope_long_frequencies" not in got


@pytest.mark.parametrize("scaling, dim, message", [
    ({}, 8, "factor is not there, expected float"), ({"factor": 0.5}, 8, "factor=0.5, expected at least 1"),
    ({"factor": 2.0}, 2, 'rope_type="dynamic", expected another kind with 2 rotated dimensions'),
    ({"factor": 2.0, "original_max_position_embeddings": 8192}, 8,
     "original_max_position_embeddings=8192, expected at most max_position_embeddings=4096"),
    ({"factor": 1e6}, 8, "factor=1000000.0, expected fewer than 2.31 positions, 4096 times factor"),
    ({"factor": 2.0, "alpha": 1000.0}, 8, "alpha=1000.0, expected none with rope_type=dynamic")])
def test_what_dynamic_lacks(scaling, dim, message):
    with pytest.raises(ColibriError, match=message):
        fields({"type": "dynamic", **scaling}, dim)
