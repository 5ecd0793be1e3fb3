"""converter/interleave.py against the layout and the rounding rules written out element by element."""

import warnings
from fractions import Fraction

import numpy as np
import pytest
from converter_files import write_pt

from colibri.errors import ColibriError
from colibri.headers import stored_rows
from converter.interleave import converted, panels, transposed
from converter.pt_reader import read_checkpoint


def tensors(tmp_path, *arrays):
    checkpoint = read_checkpoint(write_pt(tmp_path / "a.pt", {str(i): array for i, array in enumerate(arrays)}))
    return [checkpoint[str(i)] for i in range(len(arrays))]


def stored(experts, gated):
    """The format's formula, one element at a time. experts: for each, the parts as arrays."""
    height = sum(len(part) for part in experts[0])
    columns, total = experts[0][0].shape[1], stored_rows(height, gated)
    result = np.zeros((total // 64, len(experts), columns, 64), experts[0][0].dtype)
    for expert, parts in enumerate(experts):
        for index, part in enumerate(parts):
            for row, values in enumerate(part):
                place = row // 8 * 16 + index * 8 + row % 8 if gated else row + sum(map(len, parts[:index]))
                result[place // 64, expert, :, place % 64] = values
    return result


@pytest.mark.parametrize("heights, columns, num_experts, gated", [
    ((64,), 8, 1, False), ((100,), 7, 3, False), ((1,), 1, 2, False), ((24, 12, 12), 10, 1, False),
    ((70, 65, 3), 5, 2, False), ((32, 32), 8, 2, True), ((6, 6), 10, 3, True), ((75, 75), 33, 2, True),
    ((8, 8), 4, 1, True), ((96, 96), 128, 2, True)])
@pytest.mark.parametrize("dtype", ["f2", "f4", "u2"])
def test_panels(tmp_path, heights, columns, num_experts, gated, dtype):
    generator = np.random.default_rng(columns)
    experts = [[generator.integers(0, 30000, (height, columns)).astype(dtype) for height in heights]
               for _ in range(num_experts)]
    flat = tensors(tmp_path, *[part for parts in experts for part in parts])
    parts = [flat[i:i + len(heights)] for i in range(0, len(flat), len(heights))]
    name = {"f2": "f16", "f4": "f32", "u2": "bf16"}[dtype]
    result = list(panels(parts, name, gated))
    np.testing.assert_array_equal(np.concatenate([panel.reshape(-1) for panel in result]),
                                  stored(experts, gated).reshape(-1))
    assert all(panel.flags.c_contiguous for panel in result)


def test_transposed_views_are_read_through_their_strides(tmp_path):
    array = np.arange(70 * 9, dtype=np.float32).reshape(9, 70).T
    result = np.concatenate([panel.reshape(-1) for panel in panels([tensors(tmp_path, array)], "f32", False)])
    np.testing.assert_array_equal(result, stored([[array]], False).reshape(-1))


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.float32, np.float64])
@pytest.mark.parametrize("columns", [1, 4, 12, 15, 64])
def test_transposed(dtype, columns):
    panel = np.random.default_rng(0).integers(0, 255, (64, columns)).astype(dtype)
    np.testing.assert_array_equal(transposed(panel), panel.T)


def nearest_bf16(value):
    """The bits of the bfloat16 nearest to a finite number, ties to the even one, by exact arithmetic."""
    low = int(np.float32(value).view(np.uint32)) >> 16
    near = [bits for bits in range(low - 1 if low & 0x7FFF else low, low + 2)]
    exact = Fraction(float(value))
    distance = {bits: abs(Fraction(float(np.uint32(bits << 16).view(np.float32))) - exact) for bits in near}
    return min(near, key=lambda bits: (distance[bits], bits & 1))


def test_rounding_to_bf16_is_to_nearest_even(tmp_path):
    generator = np.random.default_rng(4)
    values = (generator.standard_normal(3000) * 10.0 ** generator.integers(-30, 30, 3000)).astype(np.float32)
    ties = ((generator.integers(0x3000, 0x4F00, 500).astype(np.uint32) << 16) | 0x8000).view(np.float32)
    close = ties.astype(np.float64) * (1 + generator.choice([-1, 0, 1], 500) * 2.0 ** -40)  # ties only in f32
    singles = np.concatenate([values, ties, -ties, np.float32([0.0, -0.0, 1e-40])])
    single, double = tensors(tmp_path, singles, close)
    np.testing.assert_array_equal(converted(single, 0, len(singles), "bf16"), [nearest_bf16(v) for v in singles])
    np.testing.assert_array_equal(converted(double, 0, len(close), "bf16"), [nearest_bf16(v) for v in close])


def test_conversions_between_the_others(tmp_path):
    f64 = np.random.default_rng(5).standard_normal(500)
    f32, f16, bf16 = f64.astype(np.float32), f64.astype(np.float16), (f64.astype("f4").view("u4") >> 16).astype("u2")
    wide = (bf16.astype(np.uint32) << 16).view(np.float32)
    items = tensors(tmp_path, f64, f32, f16, bf16)
    for dtype, numpy_dtype in (("f32", np.float32), ("f16", np.float16)):
        for item, source in zip(items, (f64, f32, f16, wide)):
            np.testing.assert_array_equal(converted(item, 0, 500, dtype), source.astype(numpy_dtype))
    np.testing.assert_array_equal(converted(items[3], 0, 500, "bf16"), bf16)


@pytest.mark.parametrize("value, source, dtype, cause", [
    (70000.0, "f4", "f16", r"0: value=70000 at \[3, 2\], expected at most 65504 in f16"),
    (65520.0, "f4", "f16", "expected at most 65504"), (-1e300, "f8", "f32", "at most 3.4e38 in f32"),
    (3.4e38, "f4", "bf16", "at most 3.39e38 in bf16"), (1e39, "f8", "bf16", "at most 3.39e38"),
    (np.nan, "f2", "f16", r"value=nan at \[3, 2\], expected a finite number"),
    (np.inf, "f4", "bf16", "value=inf at"), (-np.inf, "f8", "f32", "value=-inf at"),
    (-np.inf, "f2", "f16", "value=-inf at"), (-np.nan, "f4", "f32", "value=nan at"),
    (np.inf, "f2", "f32", "value=inf at")])
def test_what_has_no_number_is_refused(tmp_path, value, source, dtype, cause):
    array = np.ones((5, 4), source)
    array[3, 2] = value
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(ColibriError, match=cause):
            list(panels([tensors(tmp_path, array)], dtype, False))


def test_the_largest_numbers_pass(tmp_path):
    single, = tensors(tmp_path, np.float32([65519.0, -65504.0]))
    np.testing.assert_array_equal(converted(single, 0, 2, "f16"), np.float16([65504, -65504]))
