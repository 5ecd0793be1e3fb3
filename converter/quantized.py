"""Decodes fp8 and MXFP4 matrices with their scales, a few rows at a time. Products are exact, and are rounded once."""

import numpy as np

from colibri.errors import ColibriError
from converter.tensor import MXFP4, SCALED_FP8, Decoded

FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
FP4 = np.concatenate([FP4, -FP4])
MXFP4_GROUP = 32  # columns that share a scale, which is a power of two
SCALE_INV, BLOCKS, SCALES = "_scale_inv", "_blocks", "_scales"


def decoded(tensors, block, where):
    """Returns `tensors` with each quantized matrix and its scales as one Decoded, under the matrix's name.

    block: how many rows and columns share one fp8 scale.
    """
    result = {}
    for name, tensor in tensors.items():
        if name + SCALE_INV in tensors:
            result[name] = _fp8(tensor, tensors[name + SCALE_INV], block, where)
        elif name.endswith(BLOCKS) and name.removesuffix(BLOCKS) + SCALES in tensors:
            result[name] = _mxfp4(tensor, tensors[name.removesuffix(BLOCKS) + SCALES], where)
        elif not (name.removesuffix(SCALE_INV) in tensors and name.endswith(SCALE_INV)
                  or name.removesuffix(SCALES) + BLOCKS in tensors and name.endswith(SCALES)):
            result[name] = tensor
    return result


def _fp8(tensor, scale, block, where):
    """Returns the Decoded of an fp8 matrix, of one expert or of all, with a scale for each block of rows and columns.
    """
    *experts, rows, columns = tensor.shape if len(tensor.shape) in (2, 3) else (0, 0)
    row_blocks, column_blocks = -(-rows // block[0]), -(-columns // block[1])
    expected = (*experts, row_blocks, column_blocks)
    if tensor.dtype != "float8_e4m3fn" or scale.dtype not in SCALE_DTYPES or scale.shape != expected:
        raise ColibriError(where, f"{scale.name}: {scale.dtype} {scale.shape}",
                           f"one of {', '.join(SCALE_DTYPES)} and {expected} for {tensor.name}, {tensor.dtype} "
                           f"{tensor.shape}", "the checkpoint and its config disagree")
    table, widen = e4m3_values(), SCALE_DTYPES[scale.dtype]

    def decode(numbers):
        place = (numbers // rows, numbers % rows) if experts else (numbers,)
        scales = widen(scale.array()[(*place[:-1], place[-1] // block[0])])
        return table[tensor.array()[place]] * np.repeat(scales, block[1], axis=1)[:, :columns]
    return Decoded(tensor, SCALED_FP8, tensor.shape, decode)


def _mxfp4(blocks, scales, where):
    expected = (*scales.shape, MXFP4_GROUP // 2)
    if (blocks.dtype, scales.dtype) != ("uint8", "uint8") or len(expected) != 4 or blocks.shape != expected:
        raise ColibriError(where, f"{blocks.name}: {blocks.dtype} {blocks.shape}",
                           f"uint8 [experts, rows, groups, {MXFP4_GROUP // 2}] around {scales.name}, {scales.dtype} "
                           f"{scales.shape}", "save the checkpoint again")
    experts, rows, groups = scales.shape
    pairs = np.stack([FP4[np.arange(256) & 15], FP4[np.arange(256) >> 4]], 1)  # the low half is the first column

    def decode(numbers):
        e, r = numbers // rows, numbers % rows
        values = pairs[blocks.array()[e, r]].reshape(len(numbers), groups, MXFP4_GROUP)
        return (values * e8m0(scales.array()[e, r])[:, :, None]).reshape(len(numbers), groups * MXFP4_GROUP)
    return Decoded(blocks, MXFP4, (experts, rows, groups * MXFP4_GROUP), decode)


def e8m0(bits):
    """Returns the values of float8_e8m0fnu: powers of two, and NaN."""
    return np.where(bits == 255, np.nan, np.ldexp(1.0, bits.astype(np.int32) - 127))


def e4m3_values():
    """Returns the 256 values of float8_e4m3fn, by their bits."""
    bits = np.arange(256)
    exponent, mantissa = (bits >> 3) & 15, bits & 7
    size = np.where(exponent == 0, np.ldexp(mantissa / 8, -6), np.ldexp(1 + mantissa / 8, exponent - 7))
    size = np.where(bits & 127 == 127, np.nan, size)
    return np.where(bits & 128, -size, size)


# The dtypes of an fp8 matrix's scales, and their float64 values.
SCALE_DTYPES = {"float32": np.float64, "float16": np.float64, "float8_e8m0fnu": e8m0,
                "bfloat16": lambda bits: (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)}
