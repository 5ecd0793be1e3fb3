"""The library's search for weights of few bits, bit for bit against NumPy, and how good what it finds is."""

import numpy as np
import pytest
from reference_formats import FP8, INT4, INT8, dequantise, name, pack
from reference_search import search

from colibri import headers
from colibri.headers import Form
from converter import few_bits

FORMS = [Form(INT8, 32, 0), Form(INT8, 128, 0), Form(INT4, 32, 0), Form(INT4, 64, 0), Form(INT4, 128, 0),
         Form(FP8, 128, 0)]
F32, F16, BF16 = (headers.default().codes("DTYPE")[dtype] for dtype in ("f32", "f16", "bf16"))


def found(form, rows, unit=1.0, source=F32, threads=2):
    """Returns the panel of 64 rows as the library makes it."""
    rows = np.ascontiguousarray(rows)
    panel = np.full(headers.panel_values(form, rows.shape[1])["panel_bytes"], 0xAA, np.uint8)
    few_bits.library().search(rows.ctypes.data, source, rows.shape[1], form.dtype, form.group, unit,
                              panel.ctypes.data, threads)
    return panel


def rows_of(kind, columns, seed=0):
    generator = np.random.default_rng(seed)
    rows = generator.standard_normal((64, columns)).astype(np.float32)
    if kind == "wide":  # values of all sizes side by side
        rows *= np.exp2(generator.integers(-30, 30, rows.shape)).astype(np.float32)
    elif kind == "zeros":
        rows[:, generator.random(columns) < 0.9] = 0
        rows[::3] = 0
        rows[1::3] *= -0.0
    elif kind == "ties":  # halves of a step, and extremes on both sides
        rows = generator.integers(-16, 17, rows.shape).astype(np.float32) / 2
    return rows


@pytest.mark.parametrize("form", FORMS, ids=name)
@pytest.mark.parametrize("columns", [1, 37, 64, 200])
@pytest.mark.parametrize("kind", ["plain", "wide", "zeros", "ties"])
def test_every_bit_is_numpys(form, columns, kind):
    rows, unit = rows_of(kind, columns, seed=columns), 2.0 ** -12
    codes, scales = search(form, rows, unit)
    expected = pack(form, codes, scales)[0, 0]
    for threads in (1, 2):
        np.testing.assert_array_equal(found(form, rows, unit, threads=threads), expected)


@pytest.mark.parametrize("form", FORMS, ids=name)
@pytest.mark.parametrize("power, unit", [(-149, -126), (-140, -126), (-126, -126), (-100, -110), (126, 110)])
def test_denormal_and_huge_values(form, power, unit):
    rows = np.ldexp(rows_of("ties", 100) / 16, power).astype(np.float32)  # up to 0.5 * 2^power, some of them denormal
    rows[0] = np.ldexp(np.float32(1), power)
    codes, scales = search(form, rows, 2.0 ** unit)
    np.testing.assert_array_equal(found(form, rows, 2.0 ** unit), pack(form, codes, scales)[0, 0])
    assert np.isfinite(scales).all()


@pytest.mark.parametrize("form", FORMS, ids=name)
def test_sources_of_16_bits(form):
    rows = rows_of("wide", 150)
    half = np.clip(rows, -60000, 60000).astype(np.float16)
    half[5, :20] = np.ldexp(np.arange(20), -24)  # denormal
    bits = (rows.view(np.uint32) >> 16).astype(np.uint16)
    for source, given, wide in ((F16, half, half.astype(np.float32)),
                                (BF16, bits, (bits.astype(np.uint32) << 16).view(np.float32))):
        np.testing.assert_array_equal(found(form, given, 0.5, source), found(form, wide, 0.5))


def test_no_scale_near_by_fits_better():
    """A finer grid of scales, of both signs, finds at most a little less error than the search's."""
    rows = rows_of("plain", 64, seed=3)
    for form, unit, most in ((Form(INT4, 64, 0), 2.0 ** -14, 1.01), (Form(INT8, 64, 0), 2.0 ** -18, 1.03)):
        codes, scales = search(form, rows, unit)
        got = ((dequantise(form, codes, scales, scale=unit) - rows) ** 2).sum(1)
        high, far = (7, 127)[form.dtype == INT8], np.abs(rows).max(1)
        least = np.full(64, np.inf)
        for sign in (-1, 1):
            for divisor in np.linspace(high * 0.8, high * 1.6, 400):
                scale = (sign * far / divisor)[:, None]
                errors = ((np.clip(np.rint(rows / scale), -high - 1, high) * scale - rows) ** 2).sum(1)
                least = np.minimum(least, errors)
        assert got.sum() <= most * least.sum()


def test_fp8_is_the_nearest_value():
    rows = rows_of("plain", 256, seed=4)
    form = Form(FP8, 128, 0)
    codes, scales = search(form, rows)
    values = dequantise(form, codes, scales)
    assert np.abs(values - rows).max() <= np.abs(rows).max() / 28 * 1.01  # half a step of 32 beside 448
    assert np.abs(values / rows - 1)[np.abs(rows) > 0.01].max() <= 2 ** -4 * 1.001
