"""converter/pickle_names.py: what a checkpoint's pickle may hold beside plain tensors, and what is refused by name."""

import argparse
import collections
import datetime
import decimal
import io
import pathlib
import pickle
import random
import re
import struct
import types
import uuid

import numpy as np
import pytest
from converter_files import numbers, state_dict, tensor, text, write_zip
from test_pt_reader import MATRIX, read, refusal

from converter.pickle_reader import PickleReader

ONE = tensor("FloatStorage", "0", 12, 0, (3, 4), (4, 1))
CALL = ONE[:ONE.index(b"(")], ONE[ONE.index(b"("):-1]  # its function and arguments
STORAGE = ONE[ONE.index(b"((") + 1:ONE.index(b"tQ") + 2]
STATED = (b"ctorch._utils\n_rebuild_parameter_with_state\n(" + ONE + b"\x89N%stR",
          b"ctorch._tensor\n_rebuild_from_type_v2\n(" + CALL[0] + b"ctorch\nTensor\n" + CALL[1] + b"%stR",
          b"ctorch._tensor\n_rebuild_from_type_v2\n(ctorch._utils\n_rebuild_parameter_with_state\nctorch.nn.parameter\n"
          b"Parameter\n(" + ONE + b"\x89N%stNtR", ONE + b"%sb")


@pytest.mark.parametrize("form", range(4))
@pytest.mark.parametrize("state, kept", [
    (b"N", True), (b"}", True), (b"}" + text("is_expert") + b"\x88s", True), (b"(}" + text("a") + b"]s}t", True),
    (b"}" + text("data") + ONE + b"s", False), (b"(N}" + text("scale") + b"]" + ONE + b"ast", False),
    (b"(" + STORAGE + b"K\0K\x01\x85K\x01\x85t", False),
    (b"}" + text("scale") + pickle.dumps(np.ones(3), 2)[2:-1] + b"s", False)])
def test_attributes_of_tensors(tmp_path, form, state, kept):
    body = STATED[form].replace(b"%s", state)
    path = write_zip(tmp_path / "a.pt", b"}" + text("w") + body + b"s", {"0": MATRIX.tobytes()})
    if kept:
        np.testing.assert_array_equal(read(path)["w"], MATRIX)
    else:
        assert ("corrupt pickle" if form == 3 else "w: a tensor with other tensors in its attributes") in refusal(path)


def test_attributes_that_are_shared_are_charged(tmp_path):
    attributes = b"](" + b"N" * 100_000 + b"eq\x010"
    calls = b"](" + STATED[0].replace(b"%s", b"h\x01") * 500 + b"e"
    assert "opcodes" in refusal(write_zip(tmp_path / "a.pt", attributes + calls, {"0": MATRIX.tobytes()}))


@pytest.mark.parametrize("call, kind", [
    (b"_rebuild_sparse_tensor\n(ctorch.serialization\n_get_layout\n" + text(f"torch.sparse_{layout}") + b"\x85R("
     + ONE * (2 if layout == "coo" else 3) + numbers((3, 4)) + b"ttR", "a sparse tensor")
    for layout in ("coo", "csr", "csc", "bsr", "bsc")] + [
    (b"_rebuild_sparse_csr_tensor\n(ctorch\nsparse_csr\n(" + ONE * 3 + numbers((3, 4)) + b"ttR", "a sparse tensor"),
    (b"_rebuild_nested_tensor\n(" + ONE * 4 + b"tR", "a nested tensor"),
    (b"_rebuild_meta_tensor_no_storage\n(ctorch\nfloat32\n" + numbers((3,)) + numbers((1,)) + b"\x89tR",
     "a meta tensor"),
    (b"_rebuild_wrapper_subclass\n(ctorch\nTensor\nctorch\nfloat32\n" + numbers((3,)) + b"tR", "a tensor subclass"),
    (b"_rebuild_qtensor\n(" + STORAGE.replace(b"Float", b"QInt32") + b"K\0K\x03\x85K\x01\x85(ctorch\n"
     b"per_tensor_affine\nK\x01K\0t\x89NtR", "a quantized tensor")])
def test_other_kinds_of_tensors_are_named(tmp_path, call, kind):
    pickled, storages = state_dict({"v": MATRIX})
    path = write_zip(tmp_path / "a.pt", pickled[:-1] + text("w") + b"ctorch._utils\n" + call + b"u", storages)
    assert f"w: {kind}, expected a plain tensor" in refusal(path)


METADATA = {
    "args": argparse.Namespace(lr=0.1, path=pathlib.Path("/a")), "set": {1, "a"}, "frozen": frozenset("ab"),
    "counter": collections.Counter("aab"), "default": collections.defaultdict(list, {1: [2]}),
    "ordered": collections.OrderedDict(a=1), "deque": collections.deque([1], 3), "bytes": b"\0\xff",
    "bytearray": bytearray(b"ab" * 200), "complex": 1 + 2j, "time": datetime.datetime(2026, 1, 2, 3),
    "zone": datetime.timezone(datetime.timedelta(1 / 24)), "scalar": np.float32(3),
    "int": np.int64(4), "array": np.arange(6.0).reshape(2, 3),
    "fortran": np.asfortranarray(np.ones((2, 3))), "strings": np.array(["a"]), "record": np.zeros(2, [("a", "f4")]),
    "dtype": np.dtype("f4"), "type": float, "random": random.getstate(), "generator": np.random.default_rng(1),
    "state": np.random.RandomState(1), "pure": pathlib.PurePosixPath("a"), "windows": pathlib.PureWindowsPath("a"),
    "uuid": uuid.UUID(int=7), "decimal": decimal.Decimal("1.5"), "file": io.BytesIO(b"abc"), "big": 1 << 100,
    "space": types.SimpleNamespace(a=1), "pattern": re.compile("a"), "range": range(3), "slice": slice(1, 2)}


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("name", METADATA)
def test_metadata_is_passed_over(name, protocol):
    reader = PickleReader(pickle.dumps([METADATA[name], "end"], protocol), "a")
    assert reader.load()[1] == "end" and not reader.storages


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("first", [False, True])
def test_metadata_beside_tensors(tmp_path, wrapped, first):
    pickled, storages = state_dict({"a.w": MATRIX, "a.v": MATRIX.T})
    model = text("model") + pickled if wrapped else pickled[2:-1]
    others = b"".join(text(name) + pickle.dumps(value, 2)[2:-1] for name, value in METADATA.items())
    named = read(write_zip(tmp_path / "a.pt", b"}(" + (others + model if first else model + others) + b"u", storages))
    assert list(named) == ["a.w", "a.v"]
    np.testing.assert_array_equal(named["a.v"], MATRIX.T)


@pytest.mark.parametrize("body", [
    b"ccopy_reg\n_reconstructor\n(cargparse\nNamespace\nc__builtin__\nobject\nNtR}" + text("a") + b"K\x01sb",
    b"c__builtin__\nset\n]" + text("a") + b"a\x85R",
    b"c__builtin__\nbytearray\n" + text("a") + text("latin-1") + b"\x86R",
    b"cpathlib._local\nPosixPath\n" + text("a") + b"\x85R", b"cnumpy._core.multiarray\nscalar\ncnumpy\ndtype\n"
    + text("f4") + b"\x85RC\x04abcd\x86R", b"\x96" + struct.pack("<Q", 3) + b"abc", b"\x8f(K\x01\x90", b"(K\x01\x91",
    b"ctypes\nSimpleNamespace\n)}\x92", b"clightning.fabric.utilities.data\nAttributeDict\n)\x81}b",
    b"cmegatron.core.enums\nModelType\nK\x01\x85R", b"cargparse\nNamespace\n)\x81}" + text("w") + ONE + b"sb"])
def test_metadata_of_other_pythons_and_libraries(tmp_path, body):
    pickled, storages = state_dict({"v": MATRIX})
    path = write_zip(tmp_path / "a.pt", b"}(" + text("x") + body + pickled[2:], storages)
    assert list(read(path)) == ["v"]


def test_a_state_dict_of_a_subclass_of_dict(tmp_path):
    pickled, storages = state_dict({"w": MATRIX})
    heads = b"ccollections\ndefaultdict\nc__builtin__\nlist\n\x85R", b"ceasydict\nEasyDict\n)\x81"
    for number, head in enumerate(heads):
        path = write_zip(tmp_path / f"{number}.pt", head + pickled[1:], storages)
        np.testing.assert_array_equal(read(path)["w"], MATRIX)
    body = b"ceasydict\nEasyDict\n(" + pickled + b"tR"  # not as pickle writes it: its items would be dropped
    assert "corrupt pickle" in refusal(write_zip(tmp_path / "a.pt", body, storages))


def test_an_ordered_dict_of_words_is_refused(tmp_path):
    body = b"ccollections\nOrderedDict\n](" + text("ab") + b"e\x85R"
    assert "corrupt pickle" in refusal(write_zip(tmp_path / "a.pt", body, {}))


@pytest.mark.parametrize("name", [
    "builtins getattr", "builtins eval", "builtins exec", "builtins __import__", "builtins open", "builtins map",
    "builtins type", "__builtin__ getattr", "__builtin__ apply", "os system", "posix system", "nt system",
    "subprocess Popen", "functools partial", "operator attrgetter", "operator methodcaller", "pickle loads",
    "importlib import_module", "runpy run_path", "torch load", "torch.hub load", "torch.jit load", "numpy load",
    "codecs encode", "_codecs lookup", "numpy.core.multiarray fromfile", "numpy._core.multiarray frombuffer",
    "argparse ArgumentParser", "pathlib Path.unlink", "collections namedtuple", "copyreg add_extension",
    "__main__ Flag", "types FunctionType", "types CodeType", "ctypes CDLL", "io open", "_io open", "re compile"])
@pytest.mark.parametrize("stacked", [False, True])
def test_other_names_stay_forbidden(tmp_path, name, stacked):
    module, attribute = name.split(" ")
    body = text(module) + text(attribute) + b"\x93" if stacked else f"c{module}\n{attribute}\n".encode()
    path = write_zip(tmp_path / "a.pt", body + text("touch hit") + b"\x85R", {})
    assert f"forbidden global {module}.{attribute}, expected" in refusal(path)


def write_legacy(path, pickled, storages, protocol=2):
    """torch's format before 1.6 around a pickle's body, with storages of float32."""
    pickles = [0x1950a86a20f9469cfc6c, 1001, {"little_endian": True}]
    head = [pickle.dumps(value, protocol) for value in pickles] + [b"\x80\x02" + pickled + b"."]
    path.write_bytes(b"".join([*head, pickle.dumps(list(storages), protocol)])
                     + b"".join(struct.pack("<q", len(data) // 4) + data for data in storages.values()))
    return path


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_legacy_with_storages_of_dropped_objects(tmp_path, protocol):
    pickled, storages = state_dict({"v": MATRIX})
    dropped = (text("x") + b"cargparse\nNamespace\n)\x81}" + text("w")
               + tensor("FloatStorage", "7", 2, 0, (2,), (1,)) + b"sb" + text("y") + b"]"
               + tensor("QInt32Storage", "8", 2, 0, (2,), (1,)) + b"a")
    storages = {"7": bytes(8), "8": bytes(8), **storages}
    path = write_legacy(tmp_path / "a.pt", b"}(" + dropped + pickled[2:], storages, protocol)
    np.testing.assert_array_equal(read(path)["v"], MATRIX)
