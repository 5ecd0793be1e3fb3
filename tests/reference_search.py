"""The search for weights of few bits in NumPy, bit for bit as native/host/search.c does it."""

import numpy as np
from reference_formats import FP8, INT8, e4m3

ROUNDING = np.float32(12582912)  # adding it leaves a small number's nearest integer


def search(form, rows, unit=1.0):
    """Returns (codes uint8 (rows, columns), scales (rows, groups)) for float32 rows. unit: the tensor's scale."""
    codes, scales = np.zeros(rows.shape, np.uint8), []
    for first in range(0, rows.shape[1], form.group):
        part = rows[:, first:first + form.group]
        found = _floats(part) if form.dtype == FP8 else _integers(part * (np.float32(1) / np.float32(unit)), form.dtype)
        codes[:, first:first + form.group] = found[0]
        scales.append(found[1])
    return codes, np.stack(scales, 1)


def _far(values):
    """Returns each row's value farthest from zero, of two alike the negative one."""
    most, least = np.maximum(values.max(1), 0), np.minimum(values.min(1), 0)
    return np.where(-least >= most, least, most).astype(np.float32)


def _floats(values):
    scales = np.abs(_far(values)) / np.float32(448)
    with np.errstate(all="ignore"):
        wanted = np.clip(values / scales[:, None], -448, 448)
    grid = e4m3()[:127].astype(np.float64)  # ascending; a tie goes to the even code
    size = np.abs(np.where(scales[:, None] > 0, wanted, 0)).astype(np.float64)
    above = np.clip(np.searchsorted(grid, size), 1, 126)
    low, high = size - grid[above - 1], grid[above] - size
    code = np.where((low < high) | ((low == high) & (above % 2 == 1)), above - 1, above).astype(np.uint8)
    code = np.where(scales[:, None] > 0, code | np.signbit(values).astype(np.uint8) << 7, 0)
    return code.astype(np.uint8), scales


def _integers(values, dtype):
    high, first, step = (127, 120.0, 0.75) if dtype == INT8 else (7, 6.75, 0.1875)
    best = np.zeros(len(values), np.float16)
    least = np.full(len(values), np.finfo(np.float32).max, np.float32)
    far = _far(values)
    for i in range(17):
        wanted = far / -np.float32(first + i * step) if i < 16 else _refined(values, best, high)
        with np.errstate(over="ignore"):
            half = wanted.astype(np.float16)
        scale = np.where(np.isfinite(half), half, 0).astype(np.float32)
        wide = values * _inverse(scale)
        total = np.zeros(len(values), np.float32)
        for error in (wide - _nearest(wide, high)).T:
            total += error * error
        total *= scale * scale
        better = (scale != 0) & (total < least)
        least, best = np.where(better, total, least), np.where(better, half, best)
    return (_nearest(values * _inverse(best.astype(np.float32)), high) + high + 1).astype(np.uint8), best


def _inverse(scale):
    with np.errstate(divide="ignore"):
        return np.where(scale != 0, np.float32(1) / scale, np.float32(0))[:, None]


def _nearest(values, high):
    return (np.clip(values, -high - 1, high).astype(np.float32) + ROUNDING) - ROUNDING


def _refined(values, best, high):
    products, squares = np.zeros((2, len(values)), np.float32)
    for value, q in zip(values.T, _nearest(values * _inverse(best.astype(np.float32)), high).T):
        products, squares = products + value * q, squares + q * q
    return np.where(squares > 0, products / np.where(squares > 0, squares, np.float32(1)), np.float32(0))
