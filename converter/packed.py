"""Reads matrices of integers that lie in int32 words, as GPTQ, AWQ and compressed-tensors write them."""

from collections import namedtuple

import numpy as np

from colibri.errors import ColibriError
from converter.tensor import Quantized

AWQ_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]  # where in a word each of eight rows lies
DTYPES = {4: "int4", 8: "int8"}
Found = namedtuple("Found", "name matrix parts")  # parts: the Tensors that the matrix is made of


def e8m0(bits):
    """Returns the values of float8_e8m0fnu: powers of two, and NaN."""
    return np.where(bits == 255, np.nan, np.ldexp(1.0, bits.astype(np.int32) - 127))


# The dtypes of scales, and their float64 values.
SCALE_DTYPES = {"float32": np.float64, "float16": np.float64, "float8_e8m0fnu": e8m0,
                "bfloat16": lambda bits: (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)}


def matrix(name, tensors, scheme, where, missing):
    """Returns the Found of a name that is the first part of a packed matrix, or None.

    missing: a list that gets the names of parts that are not there; the Found's matrix is then None.
    """
    base, _, last = name.rpartition(".")
    reader = READERS.get((scheme.method, last))
    if reader is None:
        return None
    needed, optional, read = reader
    parts = {word: tensors.get(f"{base}.{word}") for word in (last, *needed, *optional)}
    lacking = [f"{base}.{word}" for word in needed if parts[word] is None]
    missing += lacking
    there = [part for part in parts.values() if part is not None]
    return Found(f"{base}.weight", None if lacking else read(parts, scheme, where), there)


def _gptq(parts, scheme, where):
    """Reads qweight int32 [columns / values of a word, rows], qzeros [groups, rows / values of a word] and scales
    [groups, rows].
    """
    weight, zeros, scales, order = (parts[word] for word in ("qweight", "qzeros", "scales", "g_idx"))
    bits, = scheme.bits
    per_word = 32 // bits
    groups, rows = scales.shape if len(scales.shape) == 2 else (0, 0)
    columns = weight.shape[0] * per_word
    group = _group(weight, columns, groups, scheme, where)
    _check(weight, "int32", (columns // per_word, rows), where)
    _check(zeros, "int32", (groups, -(-rows // per_word)), where)
    _check_scale(scales, where)
    if order is not None and (order.shape != (columns,) or (order.array() != np.arange(columns) // group).any()):
        raise ColibriError(where, f"{order.name}: columns in the order of their activations (desc_act)",
                           f"those of a group of {group} side by side", "quantize the model without desc_act")

    def zero_points(numbers):
        stored = _unpacked(zeros.array()[:, numbers // per_word], numbers % per_word * bits, bits).T
        if scheme.zero_offset and (stored == (1 << bits) - 1).any():
            raise ColibriError(where, f"{zeros.name}: a zero point stored as {(1 << bits) - 1}",
                               f"one below, since some read it as 0 and others as {1 << bits}",
                               "save the checkpoint as gptq_v2")
        return stored + np.uint8(scheme.zero_offset)

    def codes(numbers):
        words = np.ascontiguousarray(_columns(weight.array(), numbers).T)
        return _spread(words, bits)
    return Quantized(weight, DTYPES[bits], (rows, columns), group, codes, _scales_of_columns(scales), zero_points)


def _awq(parts, scheme, where):
    """Reads qweight int32 [columns, rows / 8], qzeros [groups, rows / 8] and scales [groups, rows]."""
    weight, zeros, scales = (parts[word] for word in ("qweight", "qzeros", "scales"))
    groups, rows = scales.shape if len(scales.shape) == 2 else (0, 0)
    columns = weight.shape[0]
    group = _group(weight, columns, groups, scheme, where)
    _check(weight, "int32", (columns, rows // 8), where)
    _check(zeros, "int32", (groups, rows // 8), where)
    _check_scale(scales, where)
    places = np.array(AWQ_ORDER) * 4

    def unpacked(tensor):
        return lambda numbers: np.ascontiguousarray(
            _unpacked(_columns(tensor.array(), numbers // 8), places[numbers % 8], 4).T)
    return Quantized(weight, "int4", (rows, columns), group, unpacked(weight), _scales_of_columns(scales),
                     unpacked(zeros))


def _compressed(parts, scheme, where):
    """Reads weight_packed int32 [rows, columns / values of a word] and weight_scale [rows, groups]; weight_shape is
    rows and columns. A zero point is a row's and group's, packed over rows, or int8.
    """
    weight, scales, zeros, order = (parts[word] for word in ("weight_packed", "weight_scale", "weight_zero_point",
                                                             "weight_g_idx"))
    rows, columns = map(int, parts["weight_shape"].array()) if parts["weight_shape"].shape == (2,) else (0, 0)
    bits = next((bits for bits in scheme.bits if weight.shape == (rows, -(-columns * bits // 32))), None)
    if bits is None or not columns:
        raise ColibriError(where, f"{weight.name}: {weight.dtype} {weight.shape}",
                           f"rows and columns {[rows, columns]} in {' or '.join(map(str, scheme.bits))} bits",
                           "the checkpoint and its config disagree")
    groups = scales.shape[1] if len(scales.shape) == 2 else 0
    group = _group(weight, columns, groups, scheme, where)
    _check(weight, "int32", weight.shape, where)
    _check(scales, scales.dtype, (rows, groups), where)
    _check_scale(scales, where)
    if order is not None and (order.shape != (columns,) or (order.array() != np.arange(columns) // group).any()):
        raise ColibriError(where, f"{order.name}: columns in the order of their activations (actorder)",
                           f"those of a group of {group} side by side", "quantize the model without actorder=group")
    if zeros is not None and zeros.dtype != "int8":
        _check(zeros, "int32", (-(-rows * bits // 32), groups), where)
    elif zeros is not None:
        _check(zeros, "int8", (rows, groups), where)
    per_word = 32 // bits

    def zero_points(numbers):
        if zeros.dtype == "int8":
            return (zeros.array()[numbers] + np.int16(1 << bits - 1)).astype(np.uint8)
        return _unpacked(zeros.array()[numbers // per_word].T, numbers % per_word * bits, bits).T
    return Quantized(weight, DTYPES[bits], (rows, columns), group,
                     lambda numbers: _spread(weight.array()[numbers], bits)[:, :columns],
                     lambda numbers: SCALE_DTYPES[scales.dtype](scales.array()[numbers]), zeros and zero_points)


# (quant_method, last word of the name): the words of the other parts, those that may lack, and the reader.
READERS = {("gptq", "qweight"): (("qzeros", "scales"), ("g_idx",), _gptq),
           ("awq", "qweight"): (("qzeros", "scales"), (), _awq),
           ("compressed-tensors", "weight_packed"): (("weight_scale", "weight_shape"),
                                                     ("weight_zero_point", "weight_g_idx"), _compressed)}


def _columns(array, numbers):
    """Returns columns of an array by their numbers: a view where they lie side by side."""
    if len(numbers) and (np.diff(numbers) == 1).all():
        return array[:, numbers[0]:numbers[-1] + 1]
    return array[:, numbers]


def _unpacked(words, shifts, bits):
    """Returns the value of each int32 word at a place of its column's own."""
    return (words.view(np.uint32) >> shifts.astype(np.uint32) & np.uint32((1 << bits) - 1)).astype(np.uint8)


def _spread(words, bits):
    """Returns all values of rows of int32 words, the lowest bits first."""
    data = np.ascontiguousarray(words, "<i4").view(np.uint8)
    return data if bits == 8 else np.stack([data & 15, data >> 4], -1).reshape(len(words), -1)


def _scales_of_columns(scales):
    return lambda numbers: np.ascontiguousarray(SCALE_DTYPES[scales.dtype](scales.array()[:, numbers]).T)


def _group(weight, columns, groups, scheme, where):
    """Returns how many columns share a scale, the one of the config's sizes that makes so many groups."""
    size = next((size or columns for size in scheme.groups if columns and -(-columns // (size or columns)) == groups),
                columns if groups == 1 else None)
    if not size:
        raise ColibriError(where, f"{weight.name}: {groups} groups for {columns} columns",
                           f"group_size={' or '.join(str(size or -1) for size in scheme.groups)}",
                           "the checkpoint and its config disagree")
    return size


def _check(tensor, dtype, shape, where):
    if (tensor.dtype, tensor.shape) != (dtype, shape):
        raise ColibriError(where, f"{tensor.name}: {tensor.dtype} {tensor.shape}", f"{dtype} {shape}",
                           "the checkpoint and its config disagree")


def _check_scale(scales, where):
    if scales.dtype not in SCALE_DTYPES:
        raise ColibriError(where, f"{scales.name}: dtype={scales.dtype}", f"one of {', '.join(SCALE_DTYPES)}",
                           "save the checkpoint again")
