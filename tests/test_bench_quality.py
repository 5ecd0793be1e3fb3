"""bench/quality.py compares what two models say of a text."""

import math

import numpy as np
import pytest
from conftest import ROOT, program

from bench import quality


def test_comparison_by_hand():
    """Two tokens of three: probabilities 1/2, 1/4, 1/4 beside 1/4, 1/2, 1/4, and equal ones."""
    found = quality.Comparison()
    reference = np.log([[2, 1, 1], [1, 1, 2], [9, 9, 9]]).astype(np.float32)
    logits = np.log([[1, 2, 1], [1, 1, 2], [1, 2, 3]]).astype(np.float32) + 5
    found.add(np.array([0, 1, 2]), logits, reference)
    bits, same, mean, high, count = found.row(4)
    assert bits == pytest.approx((1 + 1) / 4)  # tokens 1 and 2 have 1/2 each
    divergence = 0.5 * math.log(2) - 0.25 * math.log(2)
    assert (same, count) == (0.5, 2) and mean == pytest.approx(divergence / 2)
    assert high == pytest.approx(0.99 * divergence)


def test_a_format_beside_the_first(tmp_path):
    text = (ROOT / "tests" / "data" / "heldout.txt").read_bytes()[:300]
    (tmp_path / "text").write_bytes(text)
    ended = program("bench.quality", "--text", tmp_path / "text", "--window", 100, "--as", "f16", "--as", "int8")
    assert ended.returncode == 0, ended.stderr.decode()
    head, first, second = (line.split(",") for line in ended.stdout.decode().splitlines())
    assert head[:3] == ["format", "bytes", "bits_a_byte"]
    assert first[0] == "f16" and first[3:7] == ["1", "0", "0", "297"]
    assert second[0] == "int8" and int(second[1]) < 0.6 * int(first[1])
    assert abs(float(second[2]) - float(first[2])) < 0.01 and 0 < float(second[4]) < 0.002 and float(second[3]) > 0.95


def test_a_text_shorter_than_a_window(tmp_path):
    (tmp_path / "text").write_bytes(b"short")
    ended = program("bench.quality", "--text", tmp_path / "text", "--as", "f16")
    assert (ended.returncode, ended.stderr.decode().splitlines()[-1]) == (
        2, "--text: 5 tokens, expected at least 512, a window; lower --window, or take a longer text")
