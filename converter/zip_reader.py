"""The zip container of torch.save: a strict reader of its directory over mapped bytes.

Stricter than zipfile where leniency could give wrong numbers: one record a name, no encryption, stored or deflated,
local headers that agree with the directory, records inside the file that do not overlap, sizes taken from one place.
"""

import itertools
import struct
from collections import namedtuple

from colibri.errors import ColibriError, printable

STORED, DEFLATED = 0, 8
END = struct.Struct("<4s4H2IH")
END64_LOCATOR = struct.Struct("<4sIQI")
END64 = struct.Struct("<4sQ2H2I4Q")
ENTRY = struct.Struct("<4s6H3I5H2I")
LOCAL = struct.Struct("<4s5H3I2H")
AGAIN = "download or save the checkpoint again"

Record = namedtuple("Record", "name offset stored_bytes bytes method crc32")


def read_directory(data, path):
    """{name: Record} of the zip in `data` (bytes or mmap), in the directory's order. path: names the file in errors."""
    num_entries, offset, end = _end_record(data, path)
    records, taken = {}, []
    for _ in range(num_entries):
        record, local_offset, next_offset = _entry(data, path, offset, end)
        if record.name in records:
            raise ColibriError(f"{path}: duplicate record {shown(record.name)}, expected one of each name; {AGAIN}")
        data_offset = _local_header(data, path, record, local_offset)
        records[record.name] = record = record._replace(offset=data_offset)
        taken.append((local_offset, data_offset + record.stored_bytes, record.name))
        offset = next_offset
    taken.sort()
    for (_, stop, name), (start, _, following) in itertools.pairwise(taken):
        if stop > start:
            raise ColibriError(f"{path}: corrupt zip: records {shown(name)} and {shown(following)} overlap; {AGAIN}")
    if taken and taken[-1][1] > end:
        raise ColibriError(f"{path}: corrupt zip: record {shown(taken[-1][2])} runs past the directory; {AGAIN}")
    return records


def _end_record(data, path):
    """(number of entries, offset of the directory, where it must end)."""
    position = data.rfind(b"PK\5\6", max(0, len(data) - END.size - 65535))
    if position < 0 or position + END.size > len(data):
        raise ColibriError(f"{path}: truncated: no zip end record in {len(data)} bytes; {AGAIN}")
    _, disk, directory_disk, _, num_entries, directory_bytes, offset, comment = END.unpack_from(data, position)
    if position + END.size + comment != len(data):
        raise ColibriError(f"{path}: truncated, or followed by foreign bytes: the zip end record is not at the end; "
                           f"{AGAIN}")
    end = position
    locator = position - END64_LOCATOR.size
    if locator >= 0 and data[locator:locator + 4] == b"PK\6\7":
        _, disk, end, _ = END64_LOCATOR.unpack_from(data, locator)
        if end + END64.size > locator or data[end:end + 4] != b"PK\6\6":
            raise ColibriError(f"{path}: corrupt zip: its 64-bit end record is missing; {AGAIN}")
        _, _, _, _, disk, directory_disk, _, num_entries, directory_bytes, offset = END64.unpack_from(data, end)
    if disk or directory_disk or num_entries * ENTRY.size > directory_bytes or offset + directory_bytes != end:
        raise ColibriError(f"{path}: corrupt zip: its directory of {num_entries} records and {directory_bytes} bytes "
                           f"at {offset} does not end at {end}; the file's start or middle is missing, {AGAIN}")
    return num_entries, offset, end


def _entry(data, path, offset, end):
    """One directory entry as (Record without its offset, offset of the local header, offset of the next entry)."""
    if offset + ENTRY.size > end or data[offset:offset + 4] != b"PK\1\2":
        raise ColibriError(f"{path}: corrupt zip directory at byte {offset}; {AGAIN}")
    (_, _, _, flags, method, _, _, crc32, stored_bytes, size, name_bytes, extra_bytes, comment_bytes, disk, _, _,
     local_offset) = ENTRY.unpack_from(data, offset)
    next_offset = offset + ENTRY.size + name_bytes + extra_bytes + comment_bytes
    if next_offset > end:
        raise ColibriError(f"{path}: corrupt zip directory at byte {offset}; {AGAIN}")
    name_offset = offset + ENTRY.size
    name = data[name_offset:name_offset + name_bytes].decode("utf-8", "surrogateescape")
    extra = data[name_offset + name_bytes:name_offset + name_bytes + extra_bytes]
    size, stored_bytes, local_offset, disk = _zip64(extra, size, stored_bytes, local_offset, disk)
    if flags & 0x2041:
        raise ColibriError(f"{path}: record {shown(name)} is encrypted, expected a plain one; decrypt the archive "
                           "first")
    if method not in (STORED, DEFLATED):
        raise ColibriError(f"{path}: record {shown(name)}: compression method {method}, expected 0 (stored) or 8 "
                           "(deflated); save the checkpoint again with torch.save")
    if disk or (method == STORED and stored_bytes != size):
        raise ColibriError(f"{path}: corrupt zip: record {shown(name)} has {stored_bytes} stored bytes for {size}; "
                           f"{AGAIN}")
    return Record(name, None, stored_bytes, size, method, crc32), local_offset, next_offset


def _zip64(extra, size, stored_bytes, local_offset, disk):
    """The 64-bit values of the extra field 1 in place of those that are all ones."""
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
    """Where the record's bytes begin: behind a local header that agrees with the directory."""
    if offset + LOCAL.size > len(data) or data[offset:offset + 4] != b"PK\3\4":
        raise ColibriError(f"{path}: corrupt zip: record {shown(record.name)} is not at byte {offset}; {AGAIN}")
    _, _, flags, method, _, _, _, _, _, name_bytes, extra_bytes = LOCAL.unpack_from(data, offset)
    name = data[offset + LOCAL.size:offset + LOCAL.size + name_bytes].decode("utf-8", "surrogateescape")
    if name != record.name or method != record.method or flags & 0x2041:
        raise ColibriError(f"{path}: corrupt zip: record {shown(record.name)} differs between directory and local "
                           f"header; {AGAIN}")
    return offset + LOCAL.size + name_bytes + extra_bytes


def shown(name):
    """A name from the file, safe to print on one line."""
    return printable(name[:200])
