"""Holds a checkpoint's tensors, whatever its format: Storage the bytes, Tensor plain numbers, Quantized few bits.

Bytes are read only when numbers are asked for.
"""

import functools
import mmap
import zlib
from collections import namedtuple

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
# Parts of rows of a Quantized: codes uint8 (rows, columns), scales float64 (rows, groups), zeros uint8 (rows, groups).
Parts = namedtuple("Parts", "codes scales zeros")


def e4m3_values():
    """Returns the 256 values of float8_e4m3fn, by their bits."""
    bits = np.arange(256)
    exponent, mantissa = (bits >> 3) & 15, bits & 7
    size = np.where(exponent == 0, np.ldexp(mantissa / 8, -6), np.ldexp(1 + mantissa / 8, exponent - 7))
    size = np.where(bits & 127 == 127, np.nan, size)
    return np.where(bits & 128, -size, size)


E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
# What each code of a dtype of few bits is worth, and the zero point of a group that has none.
VALUES = {"int8": np.arange(256.0), "int4": np.arange(16.0), "fp8": e4m3_values(),
          "mxfp4": np.concatenate([E2M1, -E2M1])}
ZEROS = {"int8": 128, "int4": 8, "fp8": 0, "mxfp4": 0}


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


class Quantized:
    """Holds a matrix of few bits. Its rows are read when they are asked for, as Parts or as the numbers they mean.

    dtype:  int8 and int4 (unsigned codes), fp8 or mxfp4; a number is (code - zero point) * scale, or a code's value
            times the scale
    shape:  [experts, rows, columns] or [rows, columns], or one row of these
    group:  columns of a row that share a scale; the last group may be short
    """

    def __init__(self, source, dtype, shape, group, codes, scales, zeros=None, first=0, step=1):
        """Takes name and storage from `source`, a Tensor.

        codes, scales, zeros: functions that take row numbers, counted over all experts, and return what Parts has of
        these rows. zeros: None where groups have no zero points.
        """
        self.source, self.dtype, self.shape, self.group = source, dtype, shape, group
        self.codes, self.scales, self.zeros, self.first, self.step = codes, scales, zeros, first, step
        self.name, self.storage, self.numpy_dtype = source.name, source.storage, source.numpy_dtype

    def numbers(self, start, stop):
        return self.first + self.step * np.arange(start, stop)

    def parts(self, start, stop):
        """Returns the Parts of rows start..stop."""
        numbers = self.numbers(start, stop)
        return Parts(self.codes(numbers), self.scales(numbers), self.zeros and self.zeros(numbers))

    @functools.cached_property
    def needs_zeros(self):
        """Returns whether a zero point is not that of a group that has none. Reads them all."""
        step = max(1, WINDOW_BYTES // (64 * self.shape[1]))
        return self.zeros is not None and any(
            (self.zeros(self.numbers(start, min(start + step, self.shape[0]))) != ZEROS[self.dtype]).any()
            for start in range(0, self.shape[0], step))

    def rows(self, start, stop):
        """Returns rows start..stop as float64, which holds the product of a value and its scale exactly."""
        if len(self.shape) == 1:
            return self.index(0, [1, *self.shape]).rows(0, 1)[0, start:stop]
        codes, scales, zeros = self.parts(start, stop)
        values = VALUES[self.dtype][codes]
        groups = np.arange(self.shape[1]) // self.group
        if self.dtype in ("int8", "int4"):
            values -= ZEROS[self.dtype] if zeros is None else zeros[:, groups]
        with np.errstate(invalid="ignore"):  # 0 times inf is NaN, which is refused when it is written
            return values * scales[:, groups]

    def drop(self, num_bytes):
        self.source.drop(num_bytes)

    def take(self, start, count, step):
        return self._part((count, self.shape[1]), start, step)

    def index(self, i, shape=None):
        return self._part(shape or self.shape[1:], i * (self.shape[1] if len(self.shape) == 3 else 1), 1)

    def _part(self, shape, start, step):
        return Quantized(self.source, self.dtype, shape, self.group, self.codes, self.scales, self.zeros,
                         self.first + self.step * start, self.step * step)
