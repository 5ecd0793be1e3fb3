"""Holds a checkpoint's tensors, whatever its format: Storage the bytes, Tensor plain numbers, Decoded quantized ones.

Bytes are read only when numbers are asked for.
"""

import mmap
import zlib

import numpy as np

from colibri.errors import ColibriError
from converter.mapped import check_size

WINDOW_BYTES = 32 << 20  # mapped input read before its pages are dropped
CRC_BYTES = 8 << 20
# torch dtype -> the numpy dtype that holds it. What numpy lacks is held as its bits.
NUMPY_DTYPES = {"float32": "<f4", "float64": "<f8", "float16": "<f2", "bfloat16": "<u2", "int64": "<i8", "int32": "<i4",
                "int16": "<i2", "int8": "i1", "uint8": "u1", "uint16": "<u2", "uint32": "<u4", "uint64": "<u8",
                "bool": "?", "complex64": "<c8", "complex128": "<c16", "float8_e4m3fn": "u1", "float8_e5m2": "u1",
                "float8_e4m3fnuz": "u1", "float8_e5m2fnuz": "u1", "float8_e8m0fnu": "u1"}
SCALED_FP8, MXFP4 = "scaled fp8", "mxfp4"  # the dtype of a matrix with its scales


class Storage:
    """Holds the bytes of one storage. Bytes are handed out only after the checksum has passed over them, in order."""

    def __init__(self, where, mapping, offset, num_bytes, crc32=None):
        """Takes `num_bytes` bytes of a mapped file, from `offset` on.

        where: names the file and the record in errors. crc32: the checksum of all bytes, or None where the format has
        none.
        """
        self.where, self.mapping, self.offset, self.bytes, self.crc32 = where, mapping, offset, num_bytes, crc32
        self.checked, self.crc, self.touched = 0, 0, 0

    def bytes_at(self, start, stop):
        """Returns (buffer, offset of byte `start` in it)."""
        check_size(self.mapping, self.where)
        self.check(stop)
        return self.mapping, self.offset + start

    def check(self, stop=None):
        """Carries the checksum on to byte `stop`, or to the end, where it is compared."""
        stop = self.bytes if stop is None else stop
        if self.crc32 is None or self.checked >= stop:
            return
        view = memoryview(self.mapping)
        while self.checked < stop:
            check_size(self.mapping, self.where)
            step = min(CRC_BYTES, stop - self.checked)
            start = self.offset + self.checked
            self.crc = zlib.crc32(view[start:start + step], self.crc)
            self.checked += step
            if step == CRC_BYTES:
                self.drop(step)
        if self.checked == self.bytes and self.crc != self.crc32:
            raise ColibriError(self.where, f"CRC-32={self.crc:08x}", f"{self.crc32:08x}",
                               "the file is damaged, download or save the checkpoint again")

    def drop(self, num_bytes):
        """Counts bytes as used, and gives the mapped pages back after each WINDOW_BYTES."""
        self.touched += num_bytes
        if self.touched >= WINDOW_BYTES:
            self.mapping.madvise(mmap.MADV_DONTNEED)
            self.touched = 0


class NegatedStorage:
    """Shows a storage as tensors with torch's negative bit see it: each number's sign is flipped as it is read."""

    def __init__(self, storage, dtype):
        self.storage, self.where, self.bytes, self.bits = storage, storage.where, storage.bytes, np.dtype(dtype)

    def bytes_at(self, start, stop):
        buffer, offset = self.storage.bytes_at(start, stop)
        numbers = np.frombuffer(buffer, self.bits, (stop - start) // self.bits.itemsize, offset)
        return numbers ^ self.bits.type(1 << (8 * self.bits.itemsize - 1)), 0

    def check(self, stop=None):
        self.storage.check(stop)

    def drop(self, num_bytes):
        self.storage.drop(num_bytes)


class Tensor:
    """Describes one named tensor: its dtype by torch's name, its shape, and where its numbers are.

    Numbers come as numpy views of the mapped file: bfloat16 as uint16 bits, float8 as uint8 bits.
    """

    def __init__(self, name, dtype, shape, strides, storage, offset):
        """Takes strides in elements, and the first element's offset in bytes from the storage's start."""
        self.name, self.dtype, self.shape, self.strides = name, dtype, shape, strides
        self.storage, self.offset = storage, offset
        self.numpy_dtype = np.dtype(NUMPY_DTYPES[dtype])

    def rows(self, start, stop):
        """Returns rows start..stop of the first dimension, read-only and not copied."""
        return self._view((stop - start, *self.shape[1:]), start * self.strides[0])

    def array(self):
        """Returns the whole tensor, read-only and not copied. Checks its storage to the end."""
        array = self._view(self.shape, 0)
        self.storage.check()
        return array

    def drop(self, num_bytes):
        """Says that so many bytes of views have been used and may leave memory."""
        self.storage.drop(num_bytes)

    def _view(self, shape, first):
        item = self.numpy_dtype.itemsize
        if 0 in shape:
            return np.empty(shape, self.numpy_dtype)
        start = self.offset + first * item
        stop = start + item + item * sum((size - 1) * stride for size, stride in zip(shape, self.strides))
        buffer, offset = self.storage.bytes_at(start, stop)
        return np.ndarray(shape, self.numpy_dtype, buffer, offset, [stride * item for stride in self.strides])


class Decoded:
    """Decodes rows of a quantized tensor when they are asked for.

    Rows are float64, which holds the product of a value and its scale exactly. The shape is [experts, rows, columns] or
    [rows, columns], or one row of these.
    """

    def __init__(self, source, dtype, shape, decode, first=0, step=1):
        """Takes name and storage from `source`, a Tensor.

        decode: takes row numbers, counted over all experts, and returns float64 rows.
        """
        self.source, self.dtype, self.shape, self.decode = source, dtype, shape, decode
        self.first, self.step = first, step
        self.name, self.storage, self.numpy_dtype = source.name, source.storage, source.numpy_dtype

    def rows(self, start, stop):
        with np.errstate(invalid="ignore"):  # 0 times inf is NaN, which is refused when it is written
            if len(self.shape) == 1:
                return self.decode(np.array([self.first]))[0, start:stop]
            return self.decode(self.first + self.step * np.arange(start, stop))

    def drop(self, num_bytes):
        self.source.drop(num_bytes)

    def take(self, start, count, step):
        return self._part((count, self.shape[1]), start, step)

    def index(self, i):
        return self._part(self.shape[1:], i * (self.shape[1] if len(self.shape) == 3 else 1), 1)

    def _part(self, shape, start, step):
        return Decoded(self.source, self.dtype, shape, self.decode, self.first + self.step * start, self.step * step)
