"""The safetensors reader: values, shards, and files that lie about themselves."""

import json

import numpy as np
import pytest

from colibri.errors import ColibriError
from converter import safetensors_reader


def write(path, header, data=b"", length=None):
    text = header if type(header) is bytes else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return path


def entry(dtype, shape, start, stop):
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


def test_values_come_back_in_the_headers_order(tmp_path):
    a, b = np.arange(6, dtype="<f4"), np.array([1, 2, 3], "<u2")
    header = {"__metadata__": {"format": "pt"}, "b": entry("BF16", [3], 24, 30), "a": entry("F32", [2, 3], 0, 24)}
    tensors = safetensors_reader.read_file(write(tmp_path / "x.safetensors", header, a.tobytes() + b.tobytes()))
    assert list(tensors) == ["b", "a"]
    np.testing.assert_array_equal(tensors["a"].array(), a.reshape(2, 3))
    np.testing.assert_array_equal(tensors["a"].rows(1, 2), [[3, 4, 5]])
    assert tensors["b"].dtype == "bfloat16" and tensors["b"].array().tolist() == [1, 2, 3]


HOSTILE = [
    ("header past the end", {}, b"", 999),
    ("header length of 2^63", {}, b"", 2 ** 63),
    ("not an object", b"[1, 2, 3]", b"", None),
    ("not JSON", b"{\"a\": ", b"", None),
    ("a name twice", b'{"a": %s, "a": %s}' % ((json.dumps(entry("U8", [1], 0, 1)).encode(),) * 2), b"1", None),
    ("unknown dtype", {"a": entry("F3", [1], 0, 4)}, b"1234", None),
    ("negative size", {"a": entry("F32", [-1], 0, 4)}, b"1234", None),
    ("size overflow", {"a": entry("F32", [2 ** 40, 2 ** 40], 0, 4)}, b"1234", None),
    ("size as text", {"a": entry("F32", ["1"], 0, 4)}, b"1234", None),
    ("true as size", {"a": entry("U8", [True], 0, 1)}, b"1", None),
    ("bytes past the end", {"a": entry("F32", [2], 0, 8)}, b"1234", None),
    ("bytes left over", {"a": entry("F32", [1], 0, 4)}, b"12345", None),
    ("overlap", {"a": entry("F32", [1], 0, 4), "b": entry("F32", [1], 2, 6)}, b"123456", None),
    ("the same bytes", {"a": entry("F32", [1], 0, 4), "b": entry("F32", [1], 0, 4)}, b"1234", None),
    ("hole", {"a": entry("F32", [1], 0, 4), "b": entry("F32", [1], 6, 10)}, b"1234567890", None),
    ("shape against bytes", {"a": entry("F32", [2], 0, 4)}, b"1234", None),
    ("no offsets", {"a": {"dtype": "F32", "shape": [1]}}, b"1234", None),
    ("entry as a list", {"a": [1]}, b"1234", None),
    ("empty file", None, b"", None),
]


@pytest.mark.parametrize(("header", "data", "length"), [case[1:] for case in HOSTILE], ids=[c[0] for c in HOSTILE])
def test_hostile_files_are_refused_by_name(tmp_path, header, data, length):
    path = tmp_path / "x.safetensors"
    path.write_bytes(b"\1\0") if header is None else write(path, header, data, length)
    with pytest.raises(ColibriError, match=r"x\.safetensors"):
        safetensors_reader.read_file(path)


def shards(folder, weight_map):
    write(folder / "1.safetensors", {"a": entry("U8", [1], 0, 1)}, b"\7")
    write(folder / "2.safetensors", {"b": entry("U8", [1], 0, 1)}, b"\x08")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder / "model.safetensors.index.json"


def test_shards_are_one_checkpoint(tmp_path):
    tensors, lost = safetensors_reader.read_shards(shards(tmp_path, {"b": "2.safetensors", "a": "1.safetensors"}))
    assert {name: tensor.array().tolist() for name, tensor in tensors.items()} == {"b": [8], "a": [7]} and not lost


@pytest.mark.parametrize(("weight_map", "names", "file", "message"), [
    ({"a": "1.safetensors", "c": "3.safetensors", "d": "3.safetensors"}, ["c", "d"], "3.safetensors",
     "index.json: 3.safetensors: no such file beside it, expected every shard that it names"),
    ({"a": "1.safetensors", "x": "2.safetensors"}, ["b", "x"], None,
     "2.safetensors: [bx]: in one of file and model.safetensors.index.json only")])
def test_what_an_index_names_and_no_file_holds_is_lost(tmp_path, weight_map, names, file, message):
    tensors, lost = safetensors_reader.read_shards(shards(tmp_path, weight_map))
    assert sorted(lost) == names and "a" in tensors
    for why in lost.values():
        assert why.file == file
        with pytest.raises(ColibriError, match=message):
            raise why.error


@pytest.mark.parametrize(("weight_map", "message"), [
    ({"a": "1.safetensors", "b": "../2.safetensors"}, "json: ../2.safetensors: no such file beside it"),
    ({"a": "1.safetensors", "b": ""}, "json: : no such file beside it"),
    ({"a": 1}, "not readable, expected JSON with weight_map"),
    (["a"], "not readable, expected JSON with weight_map"),
])
def test_an_index_that_is_none_is_refused(tmp_path, weight_map, message):
    with pytest.raises(ColibriError, match=message):
        safetensors_reader.read_shards(shards(tmp_path, weight_map))


def test_a_git_lfs_pointer_says_so(tmp_path):
    (tmp_path / "x.safetensors").write_bytes(b"version https://git-lfs\noid sha256:00\nsize 9\n")
    with pytest.raises(ColibriError, match="x.safetensors: a Git LFS pointer, .*; run git lfs pull"):
        safetensors_reader.read_file(tmp_path / "x.safetensors")
