"""Makes panels of few bits (native/panels.h): a checkpoint's own, exactly, or the library's search for the nearest."""

import functools
import math
import os

import numpy as np

from colibri import build, headers, native
from colibri.errors import ColibriError
from converter import interleave
from converter.tensor import VALUES, ZEROS, Quantized

CODES = headers.default().codes("DTYPE")
DTYPES = {code: name for name, code in CODES.items()}
SCALES = {"int8": "<f2", "int4": "<f2", "fp8": "<f4", "mxfp4": "u1"}
# The exponent of the largest value in a tensor, less that of its scale: its largest f16 scale is then some 20000.
UNIT_EXPONENTS = {"int8": 20, "int4": 16}
CHUNK_BYTES = 4 << 20
NO_CHOICE = "choose --dtype bf16, f16 or f32"


def content(experts, form, gated):
    """Returns (the tensor's scale, the matrix in the order of the file, panel by panel, as arrays of bytes).

    experts: a list of Tensors for each expert, as for interleave.panels. form: a Form of few bits.
    """
    tensors = [tensor for parts in experts for tensor in parts]
    if all(is_kept(tensor, form) for tensor in tensors):
        unit = exact_unit(tensors) if headers.has_scale(form.dtype) else 0
        return unit, _kept(experts, form, gated, unit)
    dtypes = {interleave.NAMES[tensor.dtype] for tensor in tensors}
    source = dtypes.pop() if len(dtypes) == 1 and dtypes < interleave.NUMPY_DTYPES.keys() else "f32"
    unit = _search_unit(tensors, source, DTYPES[form.dtype]) if headers.has_scale(form.dtype) else 0
    return unit, _searched(experts, form, gated, source, unit)


def fits(tensor, group):
    """Returns whether groups of so many columns have one scale each in a Quantized."""
    return tensor.group % group == 0 or tensor.group >= tensor.shape[-1]


def is_kept(tensor, form):
    """Returns whether a Form holds a tensor as it is."""
    return (isinstance(tensor, Quantized) and CODES[tensor.dtype] == form.dtype and fits(tensor, form.group)
            and (form.zero_points or not tensor.needs_zeros))


# Kept as they are

def exact_unit(tensors):
    """Returns the number by which all scales of integers are exactly f16."""
    candidates, most = [1.0], 0.0
    for tensor in tensors:
        for scales in _scale_chunks(tensor):
            most = max(most, float(np.abs(scales).max()))
    if most:
        power = max(math.frexp(most)[1] - 15, -126)
        candidates += [math.ldexp(1, power), float(np.float32(most))]
    for unit in candidates:
        bad = next((tensor for tensor in tensors for scales in _scale_chunks(tensor) if not _is_exact(scales, unit)),
                   None)
        if bad is None:
            return unit
    raise ColibriError(bad.storage.where, f"{bad.name}: scales of many bits",
                       f"those that f16 times one f32 for all of {tensors[0].name} and what is stored with it holds "
                       "exactly", NO_CHOICE)


def _scale_chunks(tensor):
    step = max(1, CHUNK_BYTES * tensor.group // (8 * tensor.shape[1]))
    for start in range(0, tensor.shape[0], step):
        scales = tensor.scales(tensor.numbers(start, min(start + step, tensor.shape[0])))
        if not np.isfinite(scales).all():
            raise _bad(tensor, start, ~np.isfinite(scales), "a scale that is not finite", "finite ones")
        yield scales


def _is_exact(scales, unit):
    with np.errstate(over="ignore"):
        return bool(((scales / unit).astype(np.float16).astype(np.float64) * unit == scales).all())


def _kept(experts, form, gated, unit):
    dtype = DTYPES[form.dtype]
    rows, columns = sum(part.shape[0] for part in experts[0]), experts[0][0].shape[1]
    first_columns = np.arange(0, columns, form.group)
    for first in range(0, headers.stored_rows(rows, gated), interleave.PANEL_ROWS):
        for parts in experts:
            codes = np.full((interleave.PANEL_ROWS, columns), ZEROS[dtype], np.uint8)
            scales = np.zeros((interleave.PANEL_ROWS, len(first_columns)), SCALES[dtype])
            zeros = np.full(scales.shape, ZEROS[dtype], np.uint8)
            for place, tensor, start, stop in interleave.pieces(parts, first, gated):
                own = tensor.parts(start, stop)
                groups = np.minimum(first_columns // tensor.group, own.scales.shape[1] - 1)
                codes[place] = own.codes
                scales[place] = _stored_scales(tensor, start, own, unit)[:, groups]
                if own.zeros is not None:
                    zeros[place] = own.zeros[:, groups]
                tensor.drop((stop - start) * columns)
            yield packed(form, codes, scales, zeros)


def _stored_scales(tensor, start, parts, unit):
    """Returns the scales of rows from `start` on as they are stored. Checks that all weights are numbers."""
    if tensor.dtype == "fp8" and (parts.codes & 127 == 127).any():
        raise _bad(tensor, start, parts.codes & 127 == 127, "NaN", "numbers")
    largest = np.nanmax(VALUES[tensor.dtype])
    bad = ~(np.abs(parts.scales) * largest <= np.finfo(np.float32).max)
    if bad.any():
        raise _bad(tensor, start, bad, "a scale that is NaN, infinite or too large",
                   f"at most {np.finfo(np.float32).max / largest:.2e}")
    if tensor.dtype == "mxfp4":
        return (np.frexp(parts.scales)[1] + 126).astype(np.uint8)  # e8m0
    return (parts.scales / (unit or 1)).astype(SCALES[tensor.dtype])


def _bad(tensor, start, bad, got, expected):
    row, column = (int(index[0]) for index in np.nonzero(bad))
    return ColibriError(tensor.storage.where, f"{tensor.name}: {got} at {[start + row, column]}", expected,
                        "the checkpoint is damaged")


def packed(form, codes, scales, zeros):
    """Returns a panel's bytes: of codes [64 rows, columns], scales and zero points [64 rows, groups]."""
    columns, whole = codes.shape[1], codes.shape[1] // form.group
    values = headers.panel_values(form, columns)
    unit, result = values["unit"], np.empty(values["panel_bytes"], np.uint8)
    per_group = values["table_bytes"] + form.group // unit * 4 * interleave.PANEL_ROWS
    if whole:
        _pack_groups(form, unit, codes[:, :whole * form.group].reshape(len(codes), whole, -1), scales[:, :whole],
                     zeros[:, :whole], result[:whole * per_group].reshape(whole, -1))
    if columns % form.group:
        filled = np.repeat(zeros[:, -1:], -(-(columns % form.group) // unit) * unit, 1)
        filled[:, :columns % form.group] = codes[:, whole * form.group:]
        _pack_groups(form, unit, filled[:, None], scales[:, whole:], zeros[:, whole:],
                     result[whole * per_group:].reshape(1, -1))
    return result


def _pack_groups(form, unit, codes, scales, zeros, target):
    """Packs codes [64 rows, groups, columns of a group] into [groups, bytes of a group]."""
    rows, groups, _ = codes.shape
    tables = [np.ascontiguousarray(scales.T).view(np.uint8)] + [zeros.T] * form.zero_points
    start = 0
    for table in tables:
        target[:, start:start + table.shape[1]] = table
        start += table.shape[1]
    if unit == 8:
        halves = codes.reshape(rows, groups, -1, 2, 4)
        codes = halves[..., 0, :] | halves[..., 1, :] << 4
    words = np.ascontiguousarray(codes).view("<u4").reshape(rows, -1)
    target[:, start:] = np.ascontiguousarray(words.T).view(np.uint8).reshape(groups, -1)


# Searched for

class _NoModel:
    """Stands for a model whose library is that of config.h's defaults: the search has no shape."""

    path = None

    def __init__(self):
        self.header = {name: headers.default().constants[macro] for name, macro in headers.default().macros.items()}


@functools.cache
def library():
    """Returns the library that searches. It is built where it is not there."""
    return native.Library(build.library_path(_NoModel()))


def _search_unit(tensors, source, dtype):
    """Returns a power of two by which f16 holds all scales without overflow, and with all of its bits."""
    most = 0.0
    for tensor in tensors:
        step = max(1, CHUNK_BYTES // (8 * tensor.shape[1]))
        for start in range(0, tensor.shape[0], step):
            stop = min(start + step, tensor.shape[0])
            most = max(most, interleave.largest(interleave.converted(tensor, start, stop, source), source)[1])
            tensor.drop((stop - start) * tensor.shape[1] * tensor.numpy_dtype.itemsize)
    return math.ldexp(1, max(math.frexp(most)[1] - 1 - UNIT_EXPONENTS[dtype], -126)) if most else 1.0


def _searched(experts, form, gated, source, unit):
    rows, columns = sum(part.shape[0] for part in experts[0]), experts[0][0].shape[1]
    panel = np.zeros((interleave.PANEL_ROWS, columns), interleave.NUMPY_DTYPES[source])
    num_bytes, threads = headers.panel_values(form, columns)["panel_bytes"], len(os.sched_getaffinity(0))
    for first in range(0, headers.stored_rows(rows, gated), interleave.PANEL_ROWS):
        for parts in experts:
            interleave.fill(panel, parts, first, gated, source)
            result = np.zeros(num_bytes, np.uint8)
            library().search(panel.ctypes.data, CODES[source], columns, form.dtype, form.group, unit,
                             result.ctypes.data, threads)
            yield result
