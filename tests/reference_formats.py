"""Weights of few bits in NumPy: panels made of codes and scales and taken apart again, and the values that they mean.

A matrix (rows, columns), or (num_experts, rows, columns), is
    codes   of its shape, uint8: u of int8 and int4, e4m3 bytes of fp8, e2m1 codes of mxfp4
    scales  (..., rows, column groups): f16 of int8 and int4, f32 of fp8, uint8 exponents (e8m0) of mxfp4
    zeros   of the scales' shape, uint8; None where the form has no zero points
"""

import numpy as np

from colibri import headers
from colibri.headers import Form

CODES = headers.default().codes("DTYPE")
PANEL_ROWS = headers.default().constants["PANEL_ROWS"]
INT8, INT4, FP8, MXFP4 = (CODES[name] for name in ("int8", "int4", "fp8", "mxfp4"))
SCALES = {INT8: np.dtype("<f2"), INT4: np.dtype("<f2"), FP8: np.dtype("<f4"), MXFP4: np.dtype("u1")}
ZERO = {INT8: 128, INT4: 8, FP8: 0, MXFP4: 0}  # of groups without zero points; the code that is worth zero
NUM_CODES = {INT8: 256, INT4: 16, FP8: 256, MXFP4: 16}
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
FORMS = [*(Form(dtype, group, zero_points) for dtype in (INT8, INT4) for group in (32, 64, 128)
           for zero_points in (0, 1)), Form(FP8, 128, 0), Form(MXFP4, 32, 0)]
NAMES = {code: name for name, code in CODES.items()}
SCALE = 1.5  # of tensors in int8 and int4


def e4m3():
    """Returns the 256 values of e4m3, float32; 0x7f and 0xff are NaN."""
    code = np.arange(256)
    exponent, mantissa = code >> 3 & 15, code & 7
    values = np.where(exponent == 0, mantissa / 8 * 2.0 ** -6, (1 + mantissa / 8) * 2.0 ** (exponent - 7))
    values[(code & 127) == 127] = np.nan
    return np.where(code & 128, -values, values).astype(np.float32)


def name(form):
    """Returns a test's name of a Form."""
    return NAMES[form.dtype] + (f" g{form.group}" if form.group else "") + " z" * form.zero_points


def pack(form, codes, scales, zeros=None):
    """Returns a matrix as it is stored: uint8 (row panels, experts, bytes of a panel)."""
    experts, rows, columns = codes.reshape(-1, *codes.shape[-2:]).shape
    shape, extra = (experts, -(-rows // PANEL_ROWS), PANEL_ROWS), -rows % PANEL_ROWS
    unit = headers.panel_values(form, columns)["unit"]

    def filled(array, value):
        padded = np.pad(array.reshape(experts, rows, -1), ((0, 0), (0, extra), (0, 0)), constant_values=value)
        return padded.reshape(*shape, -1)
    codes, scales = filled(codes, ZERO[form.dtype]), filled(scales.astype(SCALES[form.dtype]), 0)
    zeros = np.full(scales.shape, ZERO[form.dtype], np.uint8) if zeros is None else filled(zeros, ZERO[form.dtype])
    pieces = []
    for group in range(scales.shape[-1]):
        pieces.append(np.ascontiguousarray(scales[..., group]).view(np.uint8))
        if form.zero_points:
            pieces.append(zeros[..., group])
        part = codes[..., group * form.group:(group + 1) * form.group]
        rest = np.repeat(zeros[..., group, None], -part.shape[-1] % unit, axis=-1)
        units = np.concatenate([part, rest], axis=-1).reshape(*shape, -1, unit).swapaxes(2, 3)
        units = units if unit == 4 else units[..., :4] | units[..., 4:] << 4
        pieces.append(units.reshape(*shape[:2], -1))
    return np.ascontiguousarray(np.concatenate(pieces, axis=-1).swapaxes(0, 1))


def unpack(form, panels, rows, columns):
    """Returns (codes, scales, zeros) of pack()'s panels, each (experts, rows, ...)."""
    values = headers.panel_values(form, columns)
    shape = panels.shape[1], panels.shape[0], PANEL_ROWS
    panels, codes, scales, zeros, start = panels.swapaxes(0, 1), [], [], [], 0
    for first in range(0, columns, form.group):
        count = min(form.group, columns - first)
        after_scales = start + PANEL_ROWS * values["scale_bytes"]
        units = start + values["table_bytes"]
        end = units + -(-count // values["unit"]) * 4 * PANEL_ROWS
        scales.append(np.ascontiguousarray(panels[..., start:after_scales]).view(SCALES[form.dtype]))
        zeros.append(panels[..., after_scales:units])
        bytes_ = panels[..., units:end].reshape(*shape[:2], -1, PANEL_ROWS, 4)
        halves = [bytes_] if values["unit"] == 4 else [bytes_ & 15, bytes_ >> 4]
        part = np.concatenate(halves, axis=-1).swapaxes(2, 3).reshape(*shape, -1)
        codes.append(part[..., :count])
        start = end
    assert start == panels.shape[-1] == values["panel_bytes"]
    codes = np.concatenate(codes, axis=-1).reshape(shape[0], -1, columns)[:, :rows]
    scales, zeros = (np.stack(parts, axis=-1).reshape(shape[0], shape[1] * PANEL_ROWS, -1)[:, :rows]
                     if parts[0].size else None for parts in (scales, zeros))
    return codes, scales, zeros


def dequantise(form, codes, scales, zeros=None, scale=1.0):
    """Returns the float32 values of a matrix. scale: the tensor's."""
    columns = codes.shape[-1]
    wide = np.repeat(scales, form.group, axis=-1)[..., :columns]
    if form.dtype == FP8:
        return e4m3()[codes] * wide
    if form.dtype == MXFP4:
        return np.ldexp(E2M1[codes], wide.astype(np.int32) - 127)
    zero = np.float32(ZERO[form.dtype])
    if zeros is not None:
        zero = np.repeat(zeros, form.group, axis=-1)[..., :columns].astype(np.float32)
    return (codes.astype(np.float32) - zero) * wide.astype(np.float32) * np.float32(scale)


def random_matrix(rng, form, *shape):
    """Returns (codes, scales, zeros) of a random matrix, whose values are about 1 / sqrt(columns)."""
    groups, size = (*shape[:-1], -(-shape[-1] // form.group)), shape[-1] ** -0.5
    codes = rng.integers(0, NUM_CODES[form.dtype], shape).astype(np.uint8)
    if form.dtype == FP8:
        codes[(codes & 127) == 127] = 0x38  # no NaN, but 1
        return codes, (rng.uniform(0.2, 1, groups) * size / 100).astype(np.float32), None
    if form.dtype == MXFP4:
        return codes, (127 + np.round(np.log2(size / 3)) + rng.integers(-2, 2, groups)).astype(np.uint8), None
    zeros = rng.integers(0, NUM_CODES[form.dtype], groups).astype(np.uint8) if form.zero_points else None
    return codes, (rng.uniform(0.2, 1, groups) * size * 3 / NUM_CODES[form.dtype]).astype(np.float16), zeros


class Few(np.ndarray):
    """The float32 values of a matrix, with what they are stored as: parts = form, codes, scales, zeros."""


def random_few(rng, form, *shape):
    """Returns a random Few, whose tensor's scale is SCALE where it has one."""
    parts = random_matrix(rng, form, *shape)
    matrix = dequantise(form, *parts, scale=SCALE).view(Few)
    matrix.parts = form, *parts
    return matrix


def interleave(gate, up, rows):
    """Returns the panels of gate and up, each a Few. rows: reference.interleave_gate, which fills up with zeros."""
    form, zero = gate.parts[0], 0 if gate.parts[0].zero_points else ZERO[gate.parts[0].dtype]
    codes = rows(gate.parts[1] - np.uint8(zero), up.parts[1] - np.uint8(zero)) + np.uint8(zero)
    return pack(form, codes, rows(gate.parts[2], up.parts[2]),
                rows(gate.parts[3], up.parts[3]) if form.zero_points else None)


def fma(a, b, c):
    """Returns a * b + c of float32 arrays, rounded once: in float64 to odd, and then to float32."""
    product = a.astype(np.float64) * b.astype(np.float64)  # exact
    wide = c.astype(np.float64)
    total = product + wide
    part = total - product
    error = (product - (total - part)) + (wide - part)
    bits = total.view(np.int64).copy()
    is_even = (bits & 1 == 0) & (error != 0) & np.isfinite(total)
    bits += is_even * np.where((error > 0) == (total > 0), 1, -1)
    return bits.view(np.float64).astype(np.float32)


def quantise(x, group):
    """Returns int8 values (rows, columns) and float32 scales (rows, groups) of float32 rows, as the host does."""
    rows, columns = x.shape
    padded = np.pad(x, ((0, 0), (0, -columns % group))).reshape(rows, -1, group)
    largest = np.abs(padded).max(axis=-1, keepdims=True)
    scales = largest / np.float32(127)
    with np.errstate(all="ignore"):
        values = np.rint(np.clip(padded / scales, -127, 127))
    values = np.where((scales > 0) & np.isfinite(largest), values, 0).astype(np.int8)
    scales = np.where(np.isfinite(largest), scales, np.float32(np.nan))
    return values.reshape(rows, -1)[:, :columns], scales[..., 0]


def product(matrix, x):
    """Returns x (rows, columns) times a Few (outputs, columns), transposed, with the bits of the host."""
    form, codes, scales, zeros = matrix.parts
    sums = np.zeros((len(x), len(codes)), np.float32)
    values, input_scales = quantise(x, form.group)
    for group in range(scales.shape[-1]):
        columns = slice(group * form.group, (group + 1) * form.group)
        part, scale = codes[:, columns], scales[:, group]
        if form.dtype == FP8:
            total = np.zeros_like(sums)
            for column in range(part.shape[1]):
                total = fma(e4m3()[part[:, column]], x[:, columns][:, column, None], total)
            sums = fma(total, scale, sums)
            continue
        if form.dtype == MXFP4:
            weights, scale = (2 * E2M1[part]).astype(np.int64), np.ldexp(np.float32(1), scale.astype(np.int32) - 128)
        else:
            zero = ZERO[form.dtype] if zeros is None else zeros[:, group, None].astype(np.int64)
            weights = part.astype(np.int64) - zero
        exact = values[:, columns].astype(np.int64) @ weights.T
        sums = fma(exact.astype(np.float32), scale.astype(np.float32) * input_scales[:, group, None], sums)
    return sums * np.float32(SCALE) if headers.has_scale(form.dtype) else sums
