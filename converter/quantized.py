"""Finds quantized matrices by their names, and reads fp8 and MXFP4 ones. packed.py reads integers in int32 words."""

import numpy as np

from colibri.errors import ColibriError
from converter import packed
from converter.packed import SCALE_DTYPES, e8m0
from converter.tensor import Quantized

MXFP4_GROUP = 32  # columns that share a scale, which is a power of two
SCALE_INV, SCALE, BLOCKS, SCALES = "_scale_inv", "_scale", "_blocks", "_scales"
# Last words of names of what only quantizes activations and caches, which Colibri keeps as they are.
UNUSED = ("input_scale", "activation_scale", "k_scale", "v_scale")


def decoded(tensors, scheme, where, missing):
    """Returns `tensors` with each quantized matrix and what belongs to it as one Quantized, under the matrix's name.

    scheme: a Scheme. missing: a list that gets the names of parts that are not there; their matrix is left out.
    """
    result, used = {}, set()
    for name, tensor in tensors.items():
        if tensor.dtype == "float8_e4m3fn" and (scale := _first(tensors, name + SCALE_INV, name + SCALE)):
            result[name] = _fp8(tensor, scale, scheme.block, max(scheme.groups, default=0), where)
            used.add(scale.name)
        elif name.endswith(BLOCKS) and (scale := tensors.get(name.removesuffix(BLOCKS) + SCALES)):
            result[name] = _mxfp4(tensor, scale, where)
            used.add(scale.name)
        elif found := packed.matrix(name, tensors, scheme, where, missing):
            result[found.name] = found.matrix
            used.update(part.name for part in found.parts)
        else:
            result[name] = tensor
    return {name: tensor for name, tensor in result.items()
            if isinstance(tensor, Quantized) or tensor is not None and tensor.name not in used}


def _first(tensors, *names):
    return next((tensors[name] for name in names if name in tensors), None)


def _fp8(tensor, scale, block, group, where):
    """Returns the Quantized of an fp8 matrix, of one expert or of all.

    It has a scale for each block of rows and columns, for each group of a row, for each row, or one alone.
    """
    *experts, rows, columns = tensor.shape if len(tensor.shape) in (2, 3) else (0, 0)
    tables = {(1, 1): (rows, columns), (rows, 1): (1, columns),
              (rows, -(-columns // (group or columns or 1))): (1, group or columns),
              (-(-rows // block[0]), -(-columns // block[1])): tuple(block)}
    shape = scale.shape[len(experts):] if scale.shape[:len(experts)] == tuple(experts) else None
    if shape is not None and len(shape) < 2:
        shape = {(): (1, 1), (1,): (1, 1), (rows,): (rows, 1)}.get(shape)
    if scale.dtype not in SCALE_DTYPES or shape not in tables:
        expected = (*experts, -(-rows // block[0]), -(-columns // block[1]))
        raise ColibriError(where, f"{scale.name}: {scale.dtype} {scale.shape}",
                           f"one of {', '.join(SCALE_DTYPES)} and {expected} for {tensor.name}, {tensor.dtype} "
                           f"{tensor.shape}, or one scale a row, or one in all",
                           "the checkpoint and its config disagree")
    row_block, column_block = tables[shape]
    widen = SCALE_DTYPES[scale.dtype]

    def codes(numbers):
        return tensor.array()[(numbers // rows, numbers % rows) if experts else numbers]

    def scales(numbers):
        table = scale.array().reshape(*experts, *shape)
        place = (numbers % rows) // row_block
        return widen(table[(numbers // rows, place) if experts else place])
    return Quantized(tensor, "fp8", tensor.shape, column_block, codes, scales)


def _mxfp4(blocks, scales, where):
    expected = (*scales.shape, MXFP4_GROUP // 2)
    if (blocks.dtype, scales.dtype) != ("uint8", "uint8") or len(expected) != 4 or blocks.shape != expected:
        raise ColibriError(where, f"{blocks.name}: {blocks.dtype} {blocks.shape}",
                           f"uint8 [experts, rows, groups, {MXFP4_GROUP // 2}] around {scales.name}, {scales.dtype} "
                           f"{scales.shape}", "save the checkpoint again")
    experts, rows, groups = scales.shape

    def codes(numbers):
        pairs = blocks.array()[numbers // rows, numbers % rows].reshape(len(numbers), -1)
        return np.stack([pairs & 15, pairs >> 4], -1).reshape(len(numbers), -1)  # the low half is the first column
    return Quantized(blocks, "mxfp4", (experts, rows, groups * MXFP4_GROUP), MXFP4_GROUP, codes,
                     lambda numbers: e8m0(scales.array()[numbers // rows, numbers % rows]))
