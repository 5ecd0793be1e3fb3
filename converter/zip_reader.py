"""Reads the zip container of torch.save over mapped bytes: its directory and its records.

It is stricter than zipfile where leniency could give wrong numbers. Each name is there once, and nothing is encrypted.
Records are stored or deflated, lie inside the file and do not overlap. Local headers agree with the directory, and each
size is taken from one place.
"""

import itertools
import mmap
import struct
import tempfile
import zlib
from collections import namedtuple

from colibri.errors import ColibriError, printable
from converter.mapped import check_size
from converter.tensor import CRC_BYTES, Storage

STORED, DEFLATED = 0, 8
END = struct.Struct("<4s4H2IH")
END64_LOCATOR = struct.Struct("<4sIQI")
END64 = struct.Struct("<4sQ2H2I4Q")
ENTRY = struct.Struct("<4s6H3I5H2I")
LOCAL = struct.Struct("<4s5H3I2H")
AGAIN = "download or save the checkpoint again"

Record = namedtuple("Record", "name offset stored_bytes bytes method crc32")


def read_directory(data, path):
    """Returns {name: Record} of the zip in `data` (bytes or mmap), in the directory's order. path: names it in errors.
    """
    num_entries, offset, end = _end_record(data, path)
    records, taken = {}, []
    for _ in range(num_entries):
        record, local_offset, next_offset = _entry(data, path, offset, end)
        if record.name in records:
            raise ColibriError(path, f"duplicate record {shown(record.name)}", "one of each name", AGAIN)
        data_offset = _local_header(data, path, record, local_offset)
        records[record.name] = record = record._replace(offset=data_offset)
        taken.append((local_offset, data_offset + record.stored_bytes, record.name))
        offset = next_offset
    taken.sort()
    for (_, stop, name), (start, _, following) in itertools.pairwise(taken):
        if stop > start:
            raise ColibriError(path, f"corrupt zip: records {shown(name)} and {shown(following)} overlap", fix=AGAIN)
    if taken and taken[-1][1] > end:
        raise ColibriError(path, f"corrupt zip: record {shown(taken[-1][2])} runs past the directory", fix=AGAIN)
    return records


def _end_record(data, path):
    """Returns (number of entries, offset of the directory, where it must end)."""
    position = data.rfind(b"PK\5\6", max(0, len(data) - END.size - 65535))
    if position < 0 or position + END.size > len(data):
        raise ColibriError(path, f"truncated: no zip end record in {len(data)} bytes", fix=AGAIN)
    _, disk, directory_disk, _, num_entries, directory_bytes, offset, comment = END.unpack_from(data, position)
    if position + END.size + comment != len(data):
        raise ColibriError(path, "truncated, or followed by foreign bytes: the zip end record is not at the end",
                           fix=AGAIN)
    end = position
    locator = position - END64_LOCATOR.size
    if locator >= 0 and data[locator:locator + 4] == b"PK\6\7":
        _, disk, end, _ = END64_LOCATOR.unpack_from(data, locator)
        if end + END64.size > locator or data[end:end + 4] != b"PK\6\6":
            raise ColibriError(path, "corrupt zip: its 64-bit end record is missing", fix=AGAIN)
        _, _, _, _, disk, directory_disk, _, num_entries, directory_bytes, offset = END64.unpack_from(data, end)
    if disk or directory_disk or num_entries * ENTRY.size > directory_bytes or offset + directory_bytes != end:
        raise ColibriError(path,
                           f"corrupt zip: its directory of {num_entries} records and {directory_bytes} bytes at "
                           f"{offset} does not end at {end}",
                           fix=f"the file's start or middle is missing, {AGAIN}")
    return num_entries, offset, end


def _entry(data, path, offset, end):
    """Returns (Record without its offset, offset of the local header, offset of the next entry)."""
    if offset + ENTRY.size > end or data[offset:offset + 4] != b"PK\1\2":
        raise ColibriError(path, f"corrupt zip directory at byte {offset}", fix=AGAIN)
    (_, _, _, flags, method, _, _, crc32, stored_bytes, size, name_bytes, extra_bytes, comment_bytes, disk, _, _,
     local_offset) = ENTRY.unpack_from(data, offset)
    next_offset = offset + ENTRY.size + name_bytes + extra_bytes + comment_bytes
    if next_offset > end:
        raise ColibriError(path, f"corrupt zip directory at byte {offset}", fix=AGAIN)
    name_offset = offset + ENTRY.size
    name = data[name_offset:name_offset + name_bytes].decode("utf-8", "surrogateescape")
    extra = data[name_offset + name_bytes:name_offset + name_bytes + extra_bytes]
    size, stored_bytes, local_offset, disk = _zip64(extra, size, stored_bytes, local_offset, disk)
    if flags & 0x2041:
        raise ColibriError(path, f"record {shown(name)} is encrypted", "a plain one", "decrypt the archive first")
    if method not in (STORED, DEFLATED):
        raise ColibriError(path, f"record {shown(name)}: compression method {method}", "0 (stored) or 8 (deflated)",
                           "save the checkpoint again with torch.save")
    if disk or (method == STORED and stored_bytes != size):
        raise ColibriError(path, f"corrupt zip: record {shown(name)} has {stored_bytes} stored bytes for {size}",
                           fix=AGAIN)
    return Record(name, None, stored_bytes, size, method, crc32), local_offset, next_offset


def _zip64(extra, size, stored_bytes, local_offset, disk):
    """Returns the numbers with the 64-bit values of extra field 1 in place of those that are all ones."""
    position = 0
    while position + 4 <= len(extra):
        kind, length = struct.unpack_from("<2H", extra, position)
        field = extra[position + 4:position + 4 + length]
        position += 4 + length
        if kind != 1:
            continue
        values = iter(struct.unpack(f"<{len(field) // 8}Q", field[:len(field) // 8 * 8]))
        size = next(values, size) if size == 0xFFFFFFFF else size
        stored_bytes = next(values, stored_bytes) if stored_bytes == 0xFFFFFFFF else stored_bytes
        local_offset = next(values, local_offset) if local_offset == 0xFFFFFFFF else local_offset
        disk = 0 if disk == 0xFFFF else disk
    return size, stored_bytes, local_offset, disk


def _local_header(data, path, record, offset):
    """Returns where the record's bytes begin: behind a local header that agrees with the directory."""
    if offset + LOCAL.size > len(data) or data[offset:offset + 4] != b"PK\3\4":
        raise ColibriError(path, f"corrupt zip: record {shown(record.name)} is not at byte {offset}", fix=AGAIN)
    _, _, flags, method, _, _, _, _, _, name_bytes, extra_bytes = LOCAL.unpack_from(data, offset)
    name = data[offset + LOCAL.size:offset + LOCAL.size + name_bytes].decode("utf-8", "surrogateescape")
    if name != record.name or method != record.method or flags & 0x2041:
        raise ColibriError(path,
                           f"corrupt zip: record {shown(record.name)} differs between directory and local header",
                           fix=AGAIN)
    return offset + LOCAL.size + name_bytes + extra_bytes


class DeflatedStorage(Storage):
    """Inflates a compressed record on first use into an unnamed file, so that it costs no anonymous memory."""

    def __init__(self, where, mapping, record, crc32):
        super().__init__(where, None, 0, record.bytes, crc32)
        self.source, self.record = mapping, record

    def bytes_at(self, start, stop):
        if self.mapping is None:
            self.mapping = self._inflate()
        return super().bytes_at(start, stop)

    def check(self, stop=None):
        if self.mapping is None and self.bytes:
            self.mapping = self._inflate()
        super().check(stop)

    def _inflate(self):
        try:
            with tempfile.TemporaryFile() as file:
                for piece in inflate(self.source, self.record, self.where):
                    file.write(piece)
                file.flush()
                return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise ColibriError(tempfile.tempdir or "TMPDIR", error.strerror,
                               f"room for {self.bytes} bytes inflated from {self.where}",
                               "set TMPDIR to a directory with space") from None


def inflate(data, record, where):
    """Yields a deflated record's bytes in pieces, never more than the directory states."""
    engine, left = zlib.decompressobj(-15), record.bytes
    try:
        for start in range(record.offset, record.offset + record.stored_bytes, 1 << 20):
            check_size(data, where)
            piece = data[start:min(start + (1 << 20), record.offset + record.stored_bytes)]
            inflated, limit = b"", 0
            while piece or len(inflated) == limit:  # a full answer: the engine may hold more
                limit = min(CRC_BYTES, left + 1)
                inflated = engine.decompress(piece, limit)
                left -= len(inflated)
                if left < 0:
                    raise ColibriError(where, f"inflates to more than {record.bytes} bytes", "that many",
                                       "download or save the checkpoint again")
                yield inflated
                piece = engine.unconsumed_tail
    except zlib.error:
        raise ColibriError(where, "corrupt deflated data", fix="download or save the checkpoint again") from None
    if left or not engine.eof:
        raise ColibriError(where, f"inflates to {record.bytes - left} bytes", record.bytes,
                           "download or save the checkpoint again")


def shown(name):
    """Returns a name from the file, safe to print on one line."""
    return printable(name[:200])
