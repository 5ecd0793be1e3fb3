"""fp8 with block scales and MXFP4, against their definitions, and as experts of a family."""

import re

import numpy as np
import pytest
from test_interleave import nearest_bf16

from colibri.errors import ColibriError
from converter import interleave, quantized, views
from converter import scheme as schemes
from converter.tensor import NUMPY_DTYPES, Storage, Tensor, e4m3_values

RANDOM = np.random.default_rng(7)


def decoded(tensors, block=(128, 128)):
    return quantized.decoded(tensors, schemes.NONE._replace(block=list(block)), "case", [])


def tensor(name, dtype, array):
    data = np.ascontiguousarray(array, NUMPY_DTYPES[dtype]).tobytes()
    strides = tuple(stride // array.itemsize for stride in np.ascontiguousarray(array).strides)
    return Tensor(name, dtype, array.shape, strides, Storage(name, data, 0, len(data)), 0)


def written(part, dtype, rows=None):
    """Rows as the .bin has them, bf16 widened."""
    values = interleave.converted(part, *(rows or (0, part.shape[0])), dtype)
    return (values.astype(np.uint32) << 16).view(np.float32) if dtype == "bf16" else values


def rounded(products, dtype):
    """Exact products in `dtype`, each rounded once."""
    if dtype != "bf16":
        return np.asarray(products, np.float64).astype({"f16": np.float16, "f32": np.float32}[dtype])
    bits = np.array([nearest_bf16(value) for value in np.ravel(products)], np.uint32)
    return (bits << 16).view(np.float32).reshape(np.shape(products))


def bf16(values):
    return (np.asarray(values, np.float32).view(np.uint32) >> 16).astype(np.uint16)


# What a scale is stored as, and the numbers that the stored ones stand for.
STORED = {"float32": lambda values: (values, values), "float16": lambda values: (values.astype(np.float16),) * 2,
          "bfloat16": lambda values: (bf16(values), (bf16(values).astype(np.uint32) << 16).view(np.float32)),
          "float8_e8m0fnu": lambda values: ((values * 100).astype(np.uint8), 2.0 ** ((values * 100).astype(np.uint8)
                                                                                    - 127.0))}


def test_e4m3_has_the_values_of_its_definition():
    values = e4m3_values()
    assert [values[bits] for bits in (0x00, 0x01, 0x07, 0x08, 0x38, 0x7E, 0xB8)] == [
        0, 2.0 ** -9, 7 * 2.0 ** -9, 2.0 ** -6, 1, 448, -1]
    assert np.isnan(values[[0x7F, 0xFF]]).all() and np.isfinite(np.delete(values, [0x7F, 0xFF])).all()


@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32"])
@pytest.mark.parametrize("kind", STORED)
def test_fp8_rows_carry_the_scale_of_their_block(kind, dtype):
    bits = RANDOM.integers(0, 0x7F, (70, 50), np.uint8) | RANDOM.integers(0, 2, (70, 50), np.uint8) << 7
    stored, scale = STORED[kind](RANDOM.random((3, 4), np.float32) + np.float32(0.5))
    tensors = {"w.weight": tensor("w.weight", "float8_e4m3fn", bits),
               "w.weight_scale_inv": tensor("w.weight_scale_inv", kind, stored)}
    result = decoded(tensors, [32, 16])
    expected = rounded([[float(e4m3_values()[bits[r, c]]) * float(scale[r // 32, c // 16])
                         for c in range(50)] for r in range(70)], dtype)
    assert list(result) == ["w.weight"]
    np.testing.assert_array_equal(written(result["w.weight"], dtype), expected)
    np.testing.assert_array_equal(written(views.take(result["w.weight"], 0, 3, 20, 3), dtype, (5, 9)),
                                  expected[18:30:3])
    np.testing.assert_array_equal(written(views.index(views.take(result["w.weight"], 0, 5, 9), 2), dtype, (3, 44)),
                                  expected[7, 3:44])


@pytest.mark.parametrize("dtype, ties", [("bf16", 0x8000), ("f16", 0x1000)])
def test_an_fp8_product_is_rounded_once(dtype, ties):
    """Products so near the middle of two numbers that float32 holds that middle itself."""
    middles = (RANDOM.integers(0x3C00, 0x4400, (64, 64)).astype(np.uint32) << 16 | ties).view(np.float32)
    scale = (middles.astype(np.float64) * 8 / 9).astype(np.float32)
    bits = np.full((64, 64), 0x39, np.uint8)  # 9 / 8
    tensors = {"w": tensor("w", "float8_e4m3fn", bits), "w_scale_inv": tensor("w_scale_inv", "float32", scale)}
    exact = scale.astype(np.float64) * 9 / 8
    twice = rounded(exact.astype(np.float32).astype(np.float64), dtype)
    expected = rounded(exact, dtype)
    assert (twice != expected).any()
    np.testing.assert_array_equal(written(decoded(tensors, [1, 1])["w"], dtype), expected)


def test_fp8_of_all_experts_in_one_tensor():
    bits = RANDOM.integers(0, 0x7F, (3, 14, 21), np.uint8)
    scale = RANDOM.random((3, 4, 3), np.float32)
    tensors = {"up": tensor("up", "float8_e4m3fn", bits), "up_scale_inv": tensor("up_scale_inv", "float32", scale)}
    part = decoded(tensors, [4, 8])["up"]
    wide = np.repeat(np.repeat(scale, 4, 1), 8, 2)[:, :14, :21].astype(np.float64)
    expected = (e4m3_values()[bits] * wide).astype(np.float32)
    for e in range(3):
        np.testing.assert_array_equal(written(views.up_rows(part, {"ffn": 7}, e)[0], "f32"), expected[e, 7:])
        np.testing.assert_array_equal(written(views.expert(part, {}, e)[0], "f32", (3, 12)), expected[e, 3:12])


@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32"])
def test_mxfp4_experts_are_rows_of_gate_and_up_in_turn(dtype):
    blocks = RANDOM.integers(0, 256, (3, 10, 2, 16), np.uint8)
    scales = RANDOM.integers(118, 136, (3, 10, 2), np.uint8)
    tensors = {"up_blocks": tensor("up_blocks", "uint8", blocks), "up_scales": tensor("up_scales", "uint8", scales)}
    part = decoded(tensors, [128, 128])["up_blocks"]
    steps = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
    expected = np.zeros((3, 10, 64))
    for e, r, c in np.ndindex(expected.shape):
        byte = int(blocks[e, r, c // 32, c % 32 // 2])
        expected[e, r, c] = steps[byte >> 4 if c % 2 else byte & 15] * 2.0 ** (int(scales[e, r, c // 32]) - 127)
    assert part.shape == (3, 10, 64)
    expected = rounded(expected, dtype)
    for e in range(3):
        np.testing.assert_array_equal(written(views.even_rows(part, {"ffn": 5}, e)[0], dtype), expected[e, 0::2])
        np.testing.assert_array_equal(written(views.odd_rows(part, {"ffn": 5}, e)[0], dtype, (1, 4)), expected[e,
                                                                                                               3:9:2])
        np.testing.assert_array_equal(written(views.expert(part, {}, e)[0], dtype), expected[e])


def fp8(bits, scale, kind="float32", block=(32, 16)):
    tensors = {"w": tensor("w", "float8_e4m3fn", np.asarray(bits, np.uint8)),
               "w_scale_inv": tensor("w_scale_inv", kind, np.asarray(scale))}
    return decoded(tensors, block)["w"]


def test_scales_that_do_not_fit_are_refused():
    for kind, scale, got in (("float32", np.ones((2, 4), np.float32), r"float32 \(2, 4\)"),
                             ("float64", np.ones((3, 4)), r"float64 \(3, 4\)"),
                             ("uint8", np.ones((3, 4), np.uint8), r"uint8 \(3, 4\)")):
        with pytest.raises(ColibriError, match=rf"w_scale_inv: {got}, expected one of float32, float16, "
                                               rf"float8_e8m0fnu, "
                                               r"bfloat16 and \(3, 4\) for w, float8_e4m3fn \(70, 50\)"):
            fp8(np.zeros((70, 50)), scale, kind)
    tensors = {"up_blocks": tensor("up_blocks", "uint8", np.zeros((5, 3, 16), np.uint8)),
               "up_scales": tensor("up_scales", "uint8", np.zeros((5, 3), np.uint8))}
    with pytest.raises(ColibriError, match=r"up_blocks: uint8 \(5, 3, 16\), expected uint8 \[experts, rows, groups, "
                                           r"16\]"):
        decoded(tensors, [128, 128])


@pytest.mark.parametrize("bits, scale, kind, dtype, cause", [
    (0x7E, 200, "float32", "f16", "value=89600 at [1, 2], expected at most 65504 in f16; choose another --dtype"),
    (0xFE, 1e36, "float32", "bf16", "value=-4.48e+38 at [1, 2], expected at most 3.39e38 in bf16"),
    (0x7E, 1e36, "float32", "f32", "value=4.48e+38 at [1, 2], expected at most 3.4e38 in f32"),
    (0x7F, 1, "float32", "f32", "value=nan at [1, 2], expected a finite number"),
    (0, np.inf, "float32", "bf16", "value=nan at [1, 2], expected a finite number"),
    (0x38, 255, "float8_e8m0fnu", "bf16", "value=nan at [1, 2], expected a finite number")])
def test_products_that_are_no_numbers(bits, scale, kind, dtype, cause):
    values, scales = np.zeros((2, 3)), np.ones((2, 3), NUMPY_DTYPES[kind])
    values[1, 2], scales[1, 2] = bits, scale
    with pytest.raises(ColibriError, match=re.escape(f"w: {cause}")):
        written(fp8(values, scales, kind, (1, 1)), dtype)


def test_an_mxfp4_scale_of_nan():
    tensors = {"up_blocks": tensor("up_blocks", "uint8", np.zeros((1, 2, 1, 16), np.uint8)),
               "up_scales": tensor("up_scales", "uint8", np.array([[[127], [255]]], np.uint8))}
    part = views.expert(decoded(tensors, [128, 128])["up_blocks"], {}, 0)[0]
    with pytest.raises(ColibriError, match=r"value=nan at \[1, 0\], expected a finite number"):
        written(part, "f32")
