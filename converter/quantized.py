"""fp8 and MXFP4 matrices with their scales, decoded to bfloat16 a few rows at a time."""

import numpy as np

from colibri.errors import ColibriError

FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
FP4 = np.concatenate([FP4, -FP4])
MXFP4_GROUP = 32  # columns of one scale, a power of two
SCALE_INV, BLOCKS, SCALES = "_scale_inv", "_blocks", "_scales"


class Decoded:
    """A Tensor of bfloat16 bits, [rows, columns] or [experts, rows, columns], whose rows are computed on demand."""

    def __init__(self, source, shape, decode, first=0, step=1):
        """source: the Tensor that names it. decode: row numbers, counted over all experts -> float32 rows."""
        self.source, self.shape, self.decode, self.first, self.step = source, shape, decode, first, step
        self.name, self.storage, self.dtype, self.numpy_dtype = source.name, source.storage, "bfloat16", np.dtype("<u2")

    def rows(self, start, stop):
        bits = self.decode(self.first + self.step * np.arange(start, stop)).view(np.uint32)
        return ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)

    def array(self):
        return self.rows(0, self.shape[0])

    def drop(self, num_bytes):
        self.source.drop(num_bytes)

    def take(self, start, count, step):
        first = self.first + self.step * start
        return Decoded(self.source, (count, self.shape[1]), self.decode, first, self.step * step)

    def index(self, i):
        return Decoded(self.source, self.shape[1:], self.decode, self.first + i * self.shape[1])


def decoded(tensors, block, where):
    """`tensors` with each quantized matrix and its scales as one Decoded, under the matrix's name.

    block: rows and columns of one fp8 scale."""
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
    rows, columns = tensor.shape if len(tensor.shape) == 2 else (0, 0)
    expected = (-(-rows // block[0]), -(-columns // block[1]))
    if tensor.dtype != "float8_e4m3fn" or scale.dtype != "float32" or scale.shape != expected:
        raise ColibriError(f"{where}: {scale.name}: {scale.dtype} {scale.shape}, expected float32 {expected} for "
                           f"{tensor.dtype} {tensor.shape}; the checkpoint and its config disagree")
    table = e4m3_values()

    def decode(numbers):
        scales = np.repeat(scale.array()[numbers // block[0]], block[1], axis=1)[:, :columns]
        return table[tensor.array()[numbers]] * scales
    return Decoded(tensor, tensor.shape, decode)


def _mxfp4(blocks, scales, where):
    if (blocks.dtype, scales.dtype) != ("uint8", "uint8") or blocks.shape != (*scales.shape, MXFP4_GROUP // 2):
        raise ColibriError(f"{where}: {blocks.name}: {blocks.dtype} {blocks.shape}, expected uint8 "
                           f"{(*scales.shape, MXFP4_GROUP // 2)} from {scales.name}; save the checkpoint again")
    experts, rows, groups = scales.shape
    pairs = np.stack([FP4[np.arange(256) & 15], FP4[np.arange(256) >> 4]], 1)  # the low half is the first column

    def decode(numbers):
        e, r = numbers // rows, numbers % rows
        values = pairs[blocks.array()[e, r]].reshape(len(numbers), groups, MXFP4_GROUP)
        scale = np.ldexp(np.float32(1), scales.array()[e, r].astype(np.int32) - 127)
        return (values * scale[:, :, None]).reshape(len(numbers), groups * MXFP4_GROUP)
    return Decoded(blocks, (experts, rows, groups * MXFP4_GROUP), decode)


def e4m3_values():
    """The 256 values of float8_e4m3fn by their bits."""
    bits = np.arange(256)
    exponent, mantissa = (bits >> 3) & 15, bits & 7
    size = np.where(exponent == 0, np.ldexp(mantissa / 8, -6), np.ldexp(1 + mantissa / 8, exponent - 7))
    size = np.where(bits & 127 == 127, np.nan, size)
    return np.where(bits & 128, -size, size).astype(np.float32)
