"""fp8 with block scales and MXFP4, against their definitions, and as experts of a family."""

import numpy as np
import pytest

from colibri.errors import ColibriError
from converter import quantized, views
from converter.pt_reader import NUMPY_DTYPES, Storage, Tensor

RANDOM = np.random.default_rng(7)


def tensor(name, dtype, array):
    data = np.ascontiguousarray(array, NUMPY_DTYPES[dtype]).tobytes()
    strides = tuple(stride // array.itemsize for stride in np.ascontiguousarray(array).strides)
    return Tensor(name, dtype, array.shape, strides, Storage(name, data, 0, len(data)), 0)


def wide(part, rows=None):
    values = part.array() if rows is None else part.rows(*rows)
    return (values.astype(np.uint32) << 16).view(np.float32)


def bf16(values):
    bits = np.asarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)).view(np.float32)


def test_e4m3_has_the_values_of_its_definition():
    values = quantized.e4m3_values()
    assert [values[bits] for bits in (0x00, 0x01, 0x07, 0x08, 0x38, 0x7E, 0xB8)] == [
        0, 2.0 ** -9, 7 * 2.0 ** -9, 2.0 ** -6, 1, 448, -1]
    assert np.isnan(values[[0x7F, 0xFF]]).all() and np.isfinite(np.delete(values, [0x7F, 0xFF])).all()


def test_fp8_rows_carry_the_scale_of_their_block():
    bits = RANDOM.integers(0, 0x7F, (70, 50), np.uint8)
    scale = RANDOM.random((3, 4), np.float32) + np.float32(0.5)
    tensors = {"w.weight": tensor("w.weight", "float8_e4m3fn", bits),
               "w.weight_scale_inv": tensor("w.weight_scale_inv", "float32", scale)}
    result = quantized.decoded(tensors, [32, 16], "case")
    expected = bf16([[quantized.e4m3_values()[bits[r, c]] * scale[r // 32, c // 16] for c in range(50)]
                     for r in range(70)])
    assert list(result) == ["w.weight"]
    np.testing.assert_array_equal(wide(result["w.weight"]), expected)
    np.testing.assert_array_equal(wide(views.take(result["w.weight"], 0, 3, 20, 3), (5, 9)), expected[18:30:3])


def test_mxfp4_experts_are_rows_of_gate_and_up_in_turn():
    blocks = RANDOM.integers(0, 256, (3, 10, 2, 16), np.uint8)
    scales = RANDOM.integers(118, 136, (3, 10, 2), np.uint8)
    tensors = {"up_blocks": tensor("up_blocks", "uint8", blocks), "up_scales": tensor("up_scales", "uint8", scales)}
    part = quantized.decoded(tensors, [128, 128], "case")["up_blocks"]
    steps = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
    expected = np.zeros((3, 10, 64), np.float32)
    for e, r, c in np.ndindex(expected.shape):
        byte = int(blocks[e, r, c // 32, c % 32 // 2])
        expected[e, r, c] = steps[byte >> 4 if c % 2 else byte & 15] * 2.0 ** (int(scales[e, r, c // 32]) - 127)
    assert part.shape == (3, 10, 64)
    for e in range(3):
        np.testing.assert_array_equal(wide(views.even_rows(part, {"ffn": 5}, e)[0]), expected[e, 0::2])
        np.testing.assert_array_equal(wide(views.odd_rows(part, {"ffn": 5}, e)[0], (1, 4)), expected[e, 3:9:2])
        np.testing.assert_array_equal(wide(views.expert(part, {}, e)[0]), expected[e])


def test_scales_that_do_not_fit_are_refused():
    tensors = {"w": tensor("w", "float8_e4m3fn", np.zeros((70, 50), np.uint8)),
               "w_scale_inv": tensor("w_scale_inv", "float32", np.ones((2, 4), np.float32))}
    with pytest.raises(ColibriError, match=r"w_scale_inv: float32 \(2, 4\), expected float32 \(3, 4\)"):
        quantized.decoded(tensors, [32, 16], "case")
