"""Makes the stored form of a matrix: its final dtype, in panels [row panel][expert][column][64 rows] (native/panels.h).

Panels are made in the order of the file, 64 rows of one expert at a time, so memory does not grow with the model.
"""

import numpy as np

from colibri import headers
from colibri.errors import ColibriError
from converter.tensor import VALUES

PANEL_ROWS = headers.default().constants["PANEL_ROWS"]
GATE_GROUP = headers.default().constants["GATE_GROUP"]
NUMPY_DTYPES = {"f32": np.dtype("<f4"), "f16": np.dtype("<f2"), "bf16": np.dtype("<u2")}  # bf16 as its bits
# The dtype in which rows of each checkpoint dtype arrive, and the one that --dtype keep stores.
FLOATS = {"float16": "f16", "bfloat16": "bf16", "float32": "f32", "float64": "f64"}
NAMES = {**FLOATS, **dict.fromkeys(VALUES, "f64")}
KEPT = {**FLOATS, "float64": "f32"}
LARGEST = {"f16": "65504", "bf16": "3.39e38", "f32": "3.4e38"}


def panels(experts, dtype, gated):
    """Yields the stored matrix as arrays [columns, 64 rows] in the file's order: each panel, expert by expert.

    experts: a list of Tensors [rows, columns] for each expert, which are stacked, or (gate, up) when gated. dtype: f32,
    f16 or bf16. ColibriError names tensor and value on NaN, infinity and overflow.
    """
    rows, columns = sum(part.shape[0] for part in experts[0]), experts[0][0].shape[1]
    panel = np.zeros((PANEL_ROWS, columns), NUMPY_DTYPES[dtype])
    for first in range(0, headers.stored_rows(rows, gated), PANEL_ROWS):
        for parts in experts:
            fill(panel, parts, first, gated, dtype)
            yield transposed(panel)


def fill(panel, parts, first, gated, dtype):
    """Fills in a panel [64 rows, columns] from row `first` of an expert on, in `dtype`."""
    chosen = pieces(parts, first, gated)
    if sum(stop - start for _, _, start, stop in chosen) < PANEL_ROWS:
        panel[:] = 0
    for rows, tensor, start, stop in chosen:
        panel[rows] = converted(tensor, start, stop, dtype)
        tensor.drop((stop - start) * panel.shape[1] * tensor.numpy_dtype.itemsize)


def pieces(parts, first, gated):
    """Returns [(rows of the panel, tensor, start, stop)]: where the panel's rows from `first` on come from."""
    return list(_gated_pieces(parts, first) if gated else _stacked_pieces(parts, first))


def vector(experts):
    """Yields a vector's parts as float32, checked like a matrix, one expert after another."""
    for parts in experts:
        for tensor in parts:
            yield np.ascontiguousarray(converted(tensor, 0, tensor.shape[0], "f32"))


def _stacked_pieces(parts, first):
    offset = 0
    for tensor in parts:
        start, stop = max(first - offset, 0), min(first + PANEL_ROWS - offset, tensor.shape[0])
        if start < stop:
            yield slice(offset + start - first, offset + stop - first), tensor, start, stop
        offset += tensor.shape[0]


def _gated_pieces(parts, first):
    """Groups of gate and up rows alternate."""
    start = first // 2
    for half, tensor in enumerate(parts):
        stop = min(start + PANEL_ROWS // 2, tensor.shape[0])
        row = np.arange(stop - start)
        if start < stop:
            yield (row // GATE_GROUP * 2 + half) * GATE_GROUP + row % GATE_GROUP, tensor, start, stop


def transposed(panel):
    """Returns a contiguous copy of panel.T. Moves groups of columns as 8-byte words first, which is twice as fast."""
    rows, columns = panel.shape
    group = 8 // panel.itemsize
    if columns % group:
        return panel.T.copy()
    words = np.ascontiguousarray(panel.view(np.uint64).T)
    elements = words.view(panel.dtype).reshape(columns // group, rows, group)
    return elements.transpose(0, 2, 1).copy().reshape(columns, rows)


def converted(tensor, start, stop, dtype):
    """Returns rows start..stop of a tensor in `dtype`, rounded to nearest, ties to even."""
    source = NAMES[tensor.dtype]
    rows = tensor.rows(start, stop)
    if not _finite(rows, source):
        raise _bad_value(tensor, start, rows, source, ~np.isfinite(_widened(rows, source)),
                         "a finite number", "the checkpoint is damaged")
    if source == dtype:
        return rows
    with np.errstate(over="ignore"):
        values = _widened(rows, source)
        result = _to_bf16(values) if dtype == "bf16" else values.astype(NUMPY_DTYPES[dtype])
    if not _finite(result, dtype):
        raise _bad_value(tensor, start, rows, source, ~np.isfinite(_widened(result, dtype)),
                         f"at most {LARGEST[dtype]} in {dtype}", "choose another --dtype")
    return result


def _finite(values, dtype):
    """Returns whether no value is NaN or infinite, that is, has all exponent bits set."""
    return largest(values, dtype)[0]


def largest(values, dtype):
    """Returns (whether all values are finite, the largest size among them). Sizes mean nothing where one is not finite.

    Two maxima of integers tell that quickly. Among unsigned integers the largest is a negative number, if there is one;
    among signed integers it is a positive number.
    """
    bits, signed, inf = {"f16": (np.uint16, np.int16, 0x7C00), "bf16": (np.uint16, np.int16, 0x7F80),
                         "f32": (np.uint32, np.int32, 0x7F800000),
                         "f64": (np.uint64, np.int64, 0x7FF0000000000000)}[dtype]
    sign = np.iinfo(signed).max + 1
    negative, positive = int(values.view(bits).max()) - sign, int(values.view(signed).max())
    size = np.array([max(negative, positive, 0)], bits)
    return negative < inf and positive < inf, float(_widened(size.view(values.dtype), dtype)[0])


def _widened(values, dtype):
    """Returns values as float32, or those of f64 as float64."""
    if dtype == "bf16":
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values if dtype == "f64" else values.astype(np.float32)


def _to_bf16(values):
    narrow = values.astype(np.float32)
    bits = narrow.view(np.uint32)
    if values.dtype == np.float64:  # rounding twice is wrong where the first time makes a tie: step back from that
        ties = np.nonzero((bits & 0xFFFF) == 0x8000)
        exact, rounded = np.abs(values[ties]), np.abs(narrow[ties].astype(np.float64))
        bits[ties] += (exact > rounded).astype(np.uint32) - (exact < rounded)
    return ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)


def _bad_value(tensor, start, rows, source, bad, expected, fix):
    where = [int(index[0]) for index in np.nonzero(bad)]
    value = _widened(rows, source)[tuple(where)]
    where[0] += start
    return ColibriError(tensor.storage.where, f"{tensor.name}: value={value:g} at {where}", expected, fix)
