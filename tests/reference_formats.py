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
    zero = ZERO[form.dtype] if zeros is None else np.repeat(zeros, form.group, axis=-1)[..., :columns].astype(np.float32)
    return (codes.astype(np.float32) - np.float32(zero)) * wide.astype(np.float32) * np.float32(scale)


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
