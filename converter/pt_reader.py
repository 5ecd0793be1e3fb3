"""Reads a PyTorch checkpoint without PyTorch. Tensors are lazy over the mapped file; nothing is executed or copied."""

import struct
import zlib
from collections import deque

import numpy as np

from colibri.errors import ColibriError
from converter.mapped import map_file
from converter.pickle_names import NUMPY_ARRAY, Rebuilt, StorageRef
from converter.pickle_reader import PickleReader
from converter.tensor import NUMPY_DTYPES, NegatedStorage, Storage, Tensor
from converter.zip_reader import DEFLATED, DeflatedStorage, inflate, read_directory, shown

MAX_PICKLE_BYTES = 64 << 20
MAX_EXPANDED_BYTES = 1 << 30  # of a tensor that has more elements than its storage (stride 0)
MAX_RANK = 32
MAX_NAME = 500  # characters of a name in dicts within dicts
LEGACY_MAGIC = b"\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."  # behind the protocol, and from protocol 4 on a frame's size
WRAPPERS = ("model", "module", "state_dict", "model_state_dict")
ITEM_BYTES = {**{name: np.dtype(dtype).itemsize for name, dtype in NUMPY_DTYPES.items()},
              "qint8": 1, "quint8": 1, "qint32": 4}
# dtype -> an integer for its bits, whose uppermost is the sign.
SIGNED_BITS = {"float16": "<u2", "bfloat16": "<u2", "float32": "<u4", "float64": "<u8", "complex64": "<u4",
               "complex128": "<u8"}


def read_checkpoint(path):
    """Reads a checkpoint as {name: Tensor}, in its order.

    Tensors are checked against their storages here, their bytes when they are read. ColibriError names file and cause.
    """
    data = map_file(path)
    if data[:4] == b"PK\3\4":
        value, storages = _read_zip(data, path)
    elif data[:1] == b"\x80" and LEGACY_MAGIC in (data[2:2 + len(LEGACY_MAGIC)], data[11:11 + len(LEGACY_MAGIC)]):
        value, storages = _read_legacy(data, path)
    else:
        raise ColibriError(path, *_foreign(data))
    named = _named_tensors(value, path)
    return {name: _resolve(rebuilt, name, storages, path) for name, rebuilt in named.items()}


def _foreign(data):
    """Returns (what a file that is no checkpoint seems to be, what was expected, what to do)."""
    head = data[:512]
    if head.startswith(b"version https://git-lfs"):
        return "a Git LFS pointer, not the file itself", None, "run git lfs pull"
    if head[257:262] == b"ustar" or head.startswith(b"sys_info\0"):
        return "the tar format of torch before 0.1.10", "a zip .pt", "load it with torch and save it again"
    if len(head) > 9 and head[8:9] == b"{" and struct.unpack_from("<Q", head)[0] < len(data):
        return "not a checkpoint of torch.save but a safetensors file", None, "rename it to end in .safetensors"
    if head.startswith(b"COLI"):
        return "a Colibri .bin already", "a PyTorch checkpoint", None
    if data.rfind(b"PK\5\6", max(0, len(data) - 65557)) >= 0:
        return "corrupt: a zip whose first bytes are missing", None, "download or save the checkpoint again"
    return "not a checkpoint of torch.save", "a zip or legacy .pt", "check the path"


def _read_zip(data, path):
    """Returns (pickled value, {key: Storage}) of a zip checkpoint."""
    records = read_directory(data, path)
    pickles = [name for name in records if name.endswith("/data.pkl") and name.count("/") == 1]
    if any(name.endswith("/constants.pkl") or "/code/" in name for name in records):
        raise ColibriError(path, "a TorchScript archive", "plain tensors",
                           "load it with torch.jit.load and save its state_dict()")
    if len(pickles) != 1:
        raise ColibriError(path, f"{len(pickles)} data.pkl records in the zip", "one", "this is no torch.save file")
    prefix = pickles[0][:-len("data.pkl")]
    has_crc = any(record.crc32 for record in records.values())  # torch can be told to write none: all are 0 then
    order = _contents(data, records.get(prefix + "byteorder"), path, has_crc) or b"little"
    if order.strip() != b"little":
        raise ColibriError(path, f"byteorder={order[:16].decode('ascii', 'replace')}", "little",
                           "save it again on a little-endian machine")
    where = f"{path}: data.pkl"
    contents = _contents(data, records[pickles[0]], path, has_crc)
    value = PickleReader(contents, where, max_opcodes=2_000_000 + 200 * len(records)).load()
    storages = {}
    for name, record in records.items():
        if name.startswith(prefix + "data/"):
            place, crc32 = f"{path}: {shown(name[len(prefix):])}", record.crc32 if has_crc else None
            storages[name[len(prefix) + 5:]] = (
                DeflatedStorage(place, data, record, crc32) if record.method == DEFLATED
                else Storage(place, data, record.offset, record.bytes, crc32))
    return value, storages


def _contents(data, record, path, has_crc):
    """Returns a small record's bytes, checked, or None when there is no such record."""
    if record is None:
        return None
    where = f"{path}: {record.name.rsplit('/', 1)[1]}"
    if record.bytes > MAX_PICKLE_BYTES:
        raise ColibriError(where, f"{record.bytes} bytes", f"at most {MAX_PICKLE_BYTES}", "save the tensors alone")
    contents = (b"".join(inflate(data, record, where)) if record.method == DEFLATED
                else data[record.offset:record.offset + record.bytes])
    if has_crc and zlib.crc32(contents) != record.crc32:
        raise ColibriError(where, f"CRC-32={zlib.crc32(contents):08x}", f"{record.crc32:08x}",
                           "the file is damaged, download or save the checkpoint again")
    return contents


def _read_legacy(data, path):
    """Returns (pickled value, {key: Storage}) of the format before torch 1.6.

    The file is five pickles, then the number of items and the data of each storage.
    """
    head, position, values, items = data[:MAX_PICKLE_BYTES], 0, [], {}
    for name in ("magic", "protocol", "system info", "object", "storage keys"):
        reader = PickleReader(head, f"{path}: {name}", position)
        values.append(reader.load())
        position = reader.position
        items.update((ref.key, ITEM_BYTES[ref.dtype]) for ref in reader.storages if ref.dtype in ITEM_BYTES)
    _, _, system, value, keys = values
    if type(system) is not dict or system.get("little_endian") is not True or type(keys) is not list:
        raise ColibriError(path, "corrupt: expected a little-endian checkpoint with a list of storages",
                           fix="save it again")
    storages = {}
    for key in keys:
        if type(key) is not str or key not in items or position + 8 > len(data):
            raise ColibriError(path, f"truncated or corrupt list of storages at byte {position}", fix="save it again")
        num_bytes = struct.unpack_from("<q", data, position)[0] * items[key]
        if not 0 <= num_bytes <= len(data) - position - 8:
            raise ColibriError(path, f"truncated: storage {shown(key)} of {num_bytes} bytes runs past the end",
                               fix="save it again")
        storages[key] = Storage(f"{path}: storage {shown(key)}", data, position + 8, num_bytes)
        position += 8 + num_bytes
    return value, storages


def _named_tensors(value, path):
    """Returns the state dict in a pickled value: the value itself, or what one of WRAPPERS holds.

    What else stands beside it, such as an optimizer's state or averaged weights, is left out.
    """
    for depth in range(4):
        if type(value) is not dict:
            break
        inner = [key for key in WRAPPERS if type(value.get(key)) is dict and _has_tensors(value[key])]
        value = _flattened(value, path) if depth and not inner else value
        tensors = {key: item for key, item in value.items() if type(key) is str and type(item) is Rebuilt}
        if tensors and not inner:
            _check_others(value, path)
            return tensors
        beside = [key for key, tensor in tensors.items() if not _is_metadata(key, tensor)]
        if len(inner) > 1 or beside:
            raise ColibriError(path,
                               f"tensors under {' and '.join(inner)}"
                               + (f" and beside it ({shown(beside[0])})" if beside else ""),
                               "one state dict", "save one of them alone")
        value = value[inner[0]] if inner else None
    if type(value) is Rebuilt:
        raise ColibriError(path, "no named tensors, only a bare one",
                           fix="expected a dict of names, save a state_dict()")
    raise ColibriError(path, "no tensors in a dict of names", f"them at the top or under {', '.join(WRAPPERS)}",
                       "save a state_dict()")


def _is_metadata(key, tensor):
    """Returns whether a tensor beside the model looks like a counter, a generator's state or the like."""
    return "." not in key and (type(tensor.shape) is not tuple or len(tensor.shape) < 2)


def _has_tensors(value):
    """Returns whether there are tensors in dicts within dicts. Visits each dict once."""
    seen, queue = set(), [value]
    while queue:
        item = queue.pop()
        if type(item) is Rebuilt:
            return True
        if type(item) is dict and id(item) not in seen:
            seen.add(id(item))
            queue.extend(item.values())
    return False


def _flattened(value, path):
    """Returns a wrapped state dict with the entries of dicts in it under dotted names. Visits each dict once."""
    result, seen, queue = {}, set(), deque([("", value)])
    while queue:
        prefix, item = queue.popleft()
        for key, entry in item.items():
            if type(key) is not str or (type(entry) is dict and id(entry) in seen):
                continue
            if len(prefix) + len(key) > MAX_NAME:
                raise ColibriError(path, f"{shown(prefix + key)}: a name of {len(prefix) + len(key)} characters",
                                   f"at most {MAX_NAME}", "save a state_dict()")
            if type(entry) is dict:
                seen.add(id(entry))
                queue.append((f"{prefix}{key}.", entry))
            elif prefix + key in result:
                raise ColibriError(path, f"{shown(prefix + key)}: there twice, in one dict and in a dict within it",
                                   "each tensor once", "save a state_dict()")
            else:
                result[prefix + key] = entry
    return result


def _check_others(named, path):
    """Refuses numbers of another kind under a parameter's name, one with a dot, since they would be left out."""
    for name, item in named.items():
        first = item[0] if type(item) in (list, tuple) and item else item
        if type(name) is str and "." in name and (first is NUMPY_ARRAY or type(first) is StorageRef or (
                type(first) is Rebuilt and first is not item)):
            what = "numpy arrays" if first is NUMPY_ARRAY else "storages" if type(first) is StorageRef else "tensors"
            raise ColibriError(path, f"{shown(name)}: {what} in the place of a tensor", "a tensor",
                               "make it one, or leave it out")


def _resolve(rebuilt, name, storages, path):
    """Turns a Rebuilt description into a Tensor, with every number of it checked."""
    where = f"{path}: {shown(name)}"
    if rebuilt.problem:
        raise ColibriError(where, rebuilt.problem, "a plain tensor", "save it dense and materialised")
    storage_ref, offset, shape, strides = rebuilt.storage, rebuilt.offset, rebuilt.shape, rebuilt.strides
    numbers = [offset, *shape, *strides] if type(shape) is tuple and type(strides) is tuple else [None]
    if type(storage_ref) is not StorageRef or any(type(number) is not int for number in numbers):
        raise ColibriError(where, "corrupt pickle: a tensor without storage, shape or strides", fix="save it again")
    dtype = rebuilt.dtype or storage_ref.dtype
    if dtype not in NUMPY_DTYPES:
        raise ColibriError(where, f"unsupported dtype {dtype}", f"one of {', '.join(NUMPY_DTYPES)}")
    if len(shape) != len(strides) or min(numbers) < 0 or len(shape) > MAX_RANK:
        raise ColibriError(where, f"bad strides {_short(strides)} for shape {_short(shape)}",
                           "one stride, not negative, for each dimension", "save the tensor contiguous")
    item = np.dtype(NUMPY_DTYPES[dtype]).itemsize
    storage, first, available = _storage(storage_ref, storages, path)
    count = 1
    for size in shape:
        count *= size
    if count * item > max(available, MAX_EXPANDED_BYTES):
        raise ColibriError(where, f"too large: shape {_short(shape)}, but its storage has {available} bytes",
                           fix="save it again")
    extent = (offset + sum((size - 1) * stride for size, stride in zip(shape, strides)) + 1) * item if count else 0
    if extent > available:
        raise ColibriError(where,
                           f"out of bounds: shape {_short(shape)}, strides {_short(strides)} and offset {offset} "
                           f"need {_short(extent)} bytes, but its storage has {available}",
                           fix="the checkpoint is damaged")
    if rebuilt.negated:
        if dtype not in SIGNED_BITS:
            raise ColibriError(where, f"a tensor of {dtype} with the neg bit", "it with floats alone",
                               "save it after resolve_neg()")
        storage = NegatedStorage(storage, SIGNED_BITS[dtype])
    return Tensor(name, dtype, shape, strides, storage, first + offset * item)


def _storage(ref, storages, path):
    """Returns (Storage, first byte, number of bytes) that a tensor may use. Checks that the record has ref's size."""
    if ref.key not in storages:
        raise ColibriError(path, f"missing storage data/{shown(ref.key)}", "it in the file",
                           "save or download it again")
    storage, item = storages[ref.key], np.dtype(NUMPY_DTYPES.get(ref.dtype, "u1")).itemsize
    if ref.numel * item != storage.bytes:
        raise ColibriError(storage.where, f"storage size={storage.bytes} bytes",
                           f"{_short(ref.numel * item)} from {_short(ref.numel)} items of {ref.dtype}",
                           "the checkpoint is damaged")
    if not 0 <= ref.view_offset <= ref.view_offset + ref.view_numel <= ref.numel:
        raise ColibriError(storage.where, "out of bounds: a view of it is larger than it",
                           fix="the checkpoint is damaged")
    return storage, ref.view_offset * item, ref.view_numel * item


def _short(value):
    text = str(value)
    return text if len(text) <= 80 else text[:77] + "..."
