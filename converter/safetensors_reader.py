"""Reads .safetensors files as lazy tensors over the mapped files: one file, or the shards that an index names."""

import json
from collections import namedtuple
from math import prod
from pathlib import Path

import numpy as np

from colibri.errors import ColibriError
from converter.mapped import map_file
from converter.tensor import NUMPY_DTYPES, Storage, Tensor
from converter.values import once

# A tensor that is not where an index says. file: the shard that is not there, or None. error: a ColibriError.
Lost = namedtuple("Lost", "name file error")
MAX_HEADER_BYTES = 100 << 20
LFS_POINTER = b"version https://git-lfs"
DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn",
          "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu", "I64": "int64", "I32": "int32", "I16": "int16",
          "I8": "int8", "U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8", "BOOL": "bool"}


def read_file(path):
    """Reads one file as {name: Tensor}. Its tensors must fill it to the end, without holes or overlap."""
    data, end = map_file(path), 0
    if data[:len(LFS_POINTER)] == LFS_POINTER:
        raise ColibriError(path, "a Git LFS pointer, not the file itself", "its contents", "run git lfs pull")
    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 or not 2 <= length <= min(MAX_HEADER_BYTES, len(data) - 8) or data[8:9] != b"{":
        raise _bad(path, f"header_bytes={length}", f"a JSON header within the file's {len(data)} bytes")
    try:
        header = json.loads(data[8:8 + length], object_pairs_hook=once)
    except (ValueError, RecursionError) as error:
        raise _bad(path, f"header: not JSON ({str(error)[:80]})", "an object with each name once") from None
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in sorted(header.items(), key=lambda item: _offsets(item[1])):
        dtype, shape = (entry.get("dtype"), entry.get("shape")) if type(entry) is dict else (None, None)
        if (type(dtype) is not str or dtype not in DTYPES or type(shape) is not list or len(shape) > 8
                or not all(type(size) is int and 0 <= size < 2 ** 48 for size in shape)):
            raise _bad(path, f"{name[:100]}: {str(entry)[:100]}", f"dtype (one of {', '.join(DTYPES)}) and shape")
        num_bytes = prod(shape) * np.dtype(NUMPY_DTYPES[DTYPES[dtype]]).itemsize
        if _offsets(entry) != (end, end + num_bytes):
            raise _bad(path, f"{name[:100]}: data_offsets={str(entry.get('data_offsets'))[:60]}",
                       f"{[end, end + num_bytes]} from its shape and the tensor before it")
        storage = Storage(str(path), data, 8 + length + end, num_bytes)
        tensors[name] = Tensor(name, DTYPES[dtype], tuple(shape), _strides(shape), storage, 0)
        end += num_bytes
    if 8 + length + end != len(data):
        raise _bad(path, f"bytes={len(data)}", f"{8 + length + end} from the header")
    return {name: tensors[name] for name in header}


def read_index(path):
    """Reads a *.index.json as {tensor name: file name}."""
    if not Path(path).is_file():
        raise _bad(path, "no regular file", "an index of shards")
    try:
        weight_map = json.loads(Path(path).read_bytes(), object_pairs_hook=once)["weight_map"]
        shards = {Path(path).parent / shard: shard for shard in weight_map.values()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise _bad(path, "not readable", "JSON with weight_map: {tensor: file}") from None
    for file, shard in shards.items():
        if file.name != shard or file.is_dir():
            raise _no_shard(path, shard)
    return weight_map


def read_shards(index_path, read=read_file):
    """Reads the shards that an index names. Returns ({name: Tensor}, {name: Lost}).

    A tensor is lost where its shard is not there, and where only one of shard and index has it.
    """
    weight_map, tensors, lost = read_index(index_path), {}, {}
    homes = {}
    for name, shard in weight_map.items():
        homes.setdefault(shard, set()).add(name)
    for shard, named in homes.items():
        path = Path(index_path).parent / shard
        if not path.exists():
            lost.update({name: Lost(name, shard, _no_shard(index_path, shard)) for name in sorted(named)})
            continue
        held = read(path)
        for name in sorted(held.keys() ^ named):
            lost[name] = Lost(name, None, _bad(path, f"{name[:100]}: in one of file and {Path(index_path).name} only",
                                               "each tensor in both"))
        tensors.update(held)
    return {name: tensors[name] for name in dict.fromkeys([*weight_map, *tensors]) if name in tensors}, lost


def _no_shard(index_path, shard):
    return _bad(index_path, f"{shard[:100]}: no such file beside it", "every shard that it names")


def _offsets(entry):
    offsets = entry.get("data_offsets") if type(entry) is dict else None
    valid = type(offsets) is list and len(offsets) == 2 and all(type(offset) is int for offset in offsets)
    return tuple(offsets) if valid else (-1, -1)


def _strides(shape):
    return tuple(prod(shape[axis + 1:]) for axis in range(len(shape)))


def _bad(path, got, expected=None):
    return ColibriError(path, got, expected, "download or save the checkpoint again")
