"""converter/pt_reader.py on the checkpoint cases and on files made here: right arrays, or one clear error."""

import io
import json
import os
import pickle
import re
import time
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest
from converter_files import gpt_arrays, integer, state_dict, tensor, text, write_pt, write_zip

from colibri.errors import ColibriError
from converter.__main__ import main
from converter.pt_reader import read_checkpoint

CASES = Path(__file__).parent / "data" / "pt"
MANIFEST = {case["name"]: case for case in json.loads((CASES / "manifest.json").read_text())["cases"]}
MATRIX = np.arange(12, dtype=np.float32).reshape(3, 4)
REFUSED = ["legacy_tar"]  # of the cases that may be either


def read(path):
    return {name: np.array(item.array()) for name, item in read_checkpoint(path).items()}


def refusal(path):
    """The one clear error of a file, with bounds on time and memory."""
    tracemalloc.start()
    started = time.process_time()
    with pytest.raises(ColibriError) as caught:
        read(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert time.process_time() - started < 20 and peak < 256 << 20
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("name", [name for name, case in MANIFEST.items() if case["expect"] == "ok"]
                         + [name for name, case in MANIFEST.items()
                            if case["expect"] == "either" and case["level"] == "container" and name not in REFUSED])
def test_case_gives_its_arrays(name):
    checkpoint, expected = read_checkpoint(CASES / f"{name}.pt"), np.load(CASES / f"{name}.npz")
    assert set(checkpoint) == set(expected.files)
    for key in expected.files:
        array = np.array(checkpoint[key].array())
        assert checkpoint[key].dtype == MANIFEST[name]["dtypes"][key]
        assert array.dtype == expected[key].dtype and array.shape == expected[key].shape
        assert array.tobytes() == expected[key].tobytes(), key


@pytest.mark.parametrize("name", REFUSED + [name for name, case in MANIFEST.items()
                                            if case["expect"] == "error" and case["level"] == "container"])
def test_case_is_refused(name):
    message = refusal(CASES / f"{name}.pt")
    for word in json.loads((CASES / f"{name}.json").read_text())["mention"]:
        assert word in message


@pytest.mark.parametrize("name", [name for name, case in MANIFEST.items() if case["level"] == "converter"
                                  and case["expect"] != "ok" and (CASES / f"{name}.pt").exists()])
def test_converter_case_reads_as_a_container(name):
    assert len(read(CASES / f"{name}.pt")) > 10


def test_strides_dtypes_and_rows(tmp_path):
    generator = np.random.default_rng(1)
    arrays = {"a": generator.standard_normal((5, 7)).astype(np.float32).T,
              "b": generator.standard_normal((3, 4, 5)).astype(np.float16).transpose(1, 2, 0),
              "c": generator.integers(0, 60000, 9, dtype=np.uint16), "d": np.zeros((0, 3), np.float32),
              "e": np.array(2.5, np.float64)}
    checkpoint = read_checkpoint(write_pt(tmp_path / "a.pt", arrays))
    for name, array in arrays.items():
        np.testing.assert_array_equal(checkpoint[name].array(), array)
    np.testing.assert_array_equal(checkpoint["b"].rows(1, 3), arrays["b"][1:3])
    np.testing.assert_array_equal(checkpoint["c"].rows(8, 9), arrays["c"][8:])


@pytest.mark.parametrize("wrap", [["model"], ["module"], ["module", "model"], ["state_dict"]])
def test_state_dict_inside_dicts(tmp_path, wrap):
    np.testing.assert_array_equal(read(write_pt(tmp_path / "a.pt", {"w": MATRIX}, wrap))["w"], MATRIX)


def test_training_checkpoint_with_other_things(tmp_path):
    pickled, storages = state_dict({"w": MATRIX})
    body = (b"}(" + text("model") + pickled + text("epoch") + integer(3) + text("optimizer") + b"}(" + text("lr")
            + b"G" + bytes(8) + integer(0) + b"(" + integer(1) + integer(2) + b"t" + b"uu")
    assert list(read(write_zip(tmp_path / "a.pt", body, storages))) == ["w"]


def test_two_state_dicts_are_ambiguous(tmp_path):
    pickled, storages = state_dict({"w": MATRIX})
    path = write_zip(tmp_path / "a.pt", b"}(" + text("model") + pickled + text("module") + pickled + b"u", storages)
    assert "model and module" in refusal(path)


@pytest.mark.parametrize("wrap", ["model", "module", "state_dict", "model_state_dict"])
@pytest.mark.parametrize("first", [False, True])
def test_the_model_beside_an_optimizer_and_averages(tmp_path, wrap, first):
    arrays = {name: np.random.default_rng(len(name)).standard_normal((3, 5)).astype("f4")
              for name in ("w", "exp_avg", "ema", "model_ema")}
    stored = {name: tensor("FloatStorage", name, 15, 0, (3, 5), (5, 1)) for name in arrays}
    others = b"".join(text(name) + b"}" + text("w") + stored[name] + b"s" for name in ("ema", "model_ema"))
    others += text("optimizer") + b"}" + text("state") + b"}K\0}" + text("exp_avg") + stored["exp_avg"] + b"sss"
    others += text("rng_state") + tensor("FloatStorage", "w", 15, 0, (7,), (1,))  # a counter or the like
    model = text(wrap) + b"}" + text("w") + stored["w"] + b"s"
    body = b"}(" + (others + model if first else model + others) + b"u"
    named = read(write_zip(tmp_path / "a.pt", body, {name: array.tobytes() for name, array in arrays.items()}))
    assert list(named) == ["w"]
    np.testing.assert_array_equal(named["w"], arrays["w"])


@pytest.mark.parametrize("entry, cause", [
    (text("layer.w") + tensor("FloatStorage", "0", 12, 0, (12,), (1,)), r"under model and beside it \(layer\.w\)"),
    (text("w") + tensor("FloatStorage", "0", 12, 0, (3, 4), (4, 1)), r"under model and beside it \(w\)")])
def test_weights_beside_the_model_are_ambiguous(tmp_path, entry, cause):
    pickled, storages = state_dict({"v": MATRIX})
    path = write_zip(tmp_path / "a.pt", b"}(" + text("model") + pickled + entry + b"u", storages)
    assert re.search(cause, refusal(path))


def test_a_wrapper_without_tensors_is_none(tmp_path):
    pickled, storages = state_dict({"w": MATRIX})
    body = b"}(" + text("model") + b"}" + text("name") + text("x") + b"s" + text("state_dict") + pickled + b"u"
    assert list(read(write_zip(tmp_path / "a.pt", body, storages))) == ["w"]


def test_dicts_within_the_state_dict(tmp_path):
    one = tensor("FloatStorage", "0", 12, 0, (3, 4), (4, 1))
    nested = b"}(" + text("b") + b"}" + text("w") + one + b"s" + text("b.w") + one + b"u"
    body = b"}" + text("model") + b"}" + text("a") + nested + b"ss"
    assert "a.b.w: there twice" in refusal(write_zip(tmp_path / "a.pt", body, {"0": MATRIX.tobytes()}))
    deep = b"".join(b"}" + text("a" * 50) for _ in range(12)) + one + b"s" * 12
    body = b"}" + text("model") + deep + b"s"
    assert "a name of 509 characters" in refusal(write_zip(tmp_path / "b.pt", body, {"0": MATRIX.tobytes()}))


@pytest.mark.parametrize("value, cause", [
    (pickle.dumps(np.ones(3), 2)[2:-1], "numpy arrays"), (pickle.dumps([np.ones(3)], 2)[2:-1], "numpy arrays"),
    (b"]" + tensor("FloatStorage", "0", 12, 0, (3,), (1,)) + b"a", "tensors"),
    (b"(" + text("storage") + b"ctorch\nFloatStorage\n" + text("0") + text("cpu") + integer(12) + b"tQ", "storages")])
def test_numbers_under_a_parameters_name_are_not_left_out(tmp_path, value, cause):
    pickled, storages = state_dict({"layer.w": MATRIX})
    path = write_zip(tmp_path / "a.pt", pickled[:-1] + text("layer.bias") + value + b"u", storages)
    assert f"layer.bias: {cause} in the place of a tensor" in refusal(path)
    path = write_zip(tmp_path / "b.pt", pickled[:-1] + text("rng") + value + b"u", storages)
    assert list(read(path)) == ["layer.w"]


NEG = b"}" + text("neg") + b"\x88s"


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", "u2"])  # u2: bfloat16
def test_the_negative_bit_turns_signs(tmp_path, dtype):
    generator = np.random.default_rng(5)
    block = generator.standard_normal((5, 7, 3))
    block[2, 3, 1] = 0
    block = generator.integers(0, 1 << 16, block.shape, "u2") if dtype == "u2" else block.astype(dtype)
    arrays = {"a.w": block, "a.t": block.transpose(2, 0, 1), "a.v": block[0, 0].copy(), "a.e": block[:0].copy()}
    signs = np.array(1 << 8 * block.itemsize - 1, f"u{block.itemsize}")
    checkpoint = read_checkpoint(write_zip(tmp_path / "a.pt", *state_dict(arrays, NEG)))
    for name, array in arrays.items():
        expected = (np.ascontiguousarray(array).view(signs.dtype) ^ signs).view(dtype)
        assert checkpoint[name].array().tobytes() == expected.tobytes()
        for start in range(len(array) - 1):
            assert checkpoint[name].rows(start, start + 2).tobytes() == expected[start:start + 2].tobytes()


def test_the_negative_bit_of_part_of_a_storage_and_a_parameter(tmp_path):
    view = tensor("FloatStorage", "0", 12, 5, (2, 3), (4, 1), NEG)
    parameter = b"ctorch._utils\n_rebuild_parameter\n(" + view + b"\x88NtR"
    fp8 = (b"ctorch._utils\n_rebuild_tensor_v3\n((" + text("storage") + b"ctorch.storage\nUntypedStorage\n" + text("0")
           + text("cpu") + integer(48) + b"tQ" + integer(5) + b"K\x02K\x03\x86K\x04K\x01\x86\x89Nctorch\nfloat32\n"
           + NEG + b"tR")
    for number, body in enumerate((view, parameter, fp8)):
        path = write_zip(tmp_path / f"{number}.pt", b"}" + text("w") + body + b"s", {"0": MATRIX.tobytes()})
        np.testing.assert_array_equal(read(path)["w"], -MATRIX.ravel()[5:12].copy()[[[0, 1, 2], [4, 5, 6]]])


def test_negated_checkpoints_convert(tmp_path):
    """Strided views of them too: the result is that of the numbers as they are."""
    arrays = {name: np.asfortranarray(array) for name, array in gpt_arrays(hidden=70, dtype=np.float32).items()}
    write_zip(tmp_path / "a.pt", *state_dict({name: -array for name, array in arrays.items()}, NEG))
    write_pt(tmp_path / "b.pt", arrays)
    for name in "ab":
        assert main([f"{tmp_path}/{name}.pt", f"{tmp_path}/{name}.bin", "--k", "2", "--activation", "gelu",
                     "--renormalize"]) == 0
    assert (tmp_path / "a.bin").read_bytes() == (tmp_path / "b.bin").read_bytes()


def test_damage_behind_the_negative_bit_is_found(tmp_path):
    path = write_zip(tmp_path / "a.pt", *state_dict({"w": MATRIX}, NEG))
    data = bytearray(path.read_bytes())
    data[data.index(MATRIX.tobytes()) + 7] ^= 16
    path.write_bytes(data)
    assert "data/0: CRC-32=" in refusal(path)


def with_metadata(path, metadata, dtype="FloatStorage", size=4):
    body = tensor(dtype, "0", 12, 0, (3, 4), (4, 1), metadata)
    return write_zip(path, b"}" + text("w") + body + b"s", {"0": MATRIX.tobytes() * (size // 4)})


@pytest.mark.parametrize("metadata", [b"}", b"N", b"}" + text("neg") + b"\x89s", b"}" + text("conj") + b"\x89s",
                                      b"}" + text("x") + b"Ns", b"ccollections\nOrderedDict\n)R"])
def test_metadata_that_says_nothing(tmp_path, metadata):
    np.testing.assert_array_equal(read(with_metadata(tmp_path / "a.pt", metadata))["w"], MATRIX)


@pytest.mark.parametrize("metadata, cause", [
    (b"}" + text("conj") + b"\x88s", "w: a tensor with the conj bit"),
    (b"}(" + text("neg") + b"\x88" + text("conj") + b"\x88u", "w: a tensor with the conj bit"),
    (b"}" + text("zoom") + b"\x88s", "w: a tensor with the zoom bit"),
    (b"}K\x01\x88s", "w: a tensor with the 1 bit"), (b"]", "w: a tensor with metadata that is not torch's"),
    (text("neg"), "w: a tensor with metadata"), (b"\x88", "w: a tensor with metadata"),
    (b"}(" + b"".join(b"K" + bytes([i]) + b"N" for i in range(17)) + b"u", "w: a tensor with metadata"),
    (NEG + b"N", "corrupt pickle")])
def test_metadata_that_may_change_numbers_is_refused(tmp_path, metadata, cause):
    assert cause in refusal(with_metadata(tmp_path / "a.pt", metadata))


def test_conjugated_complex_and_negated_integers_are_refused(tmp_path):
    conj = b"}" + text("conj") + b"\x88s"
    assert "the conj bit" in refusal(with_metadata(tmp_path / "a.pt", conj, "ComplexFloatStorage", 8))
    assert "w: a tensor of int64 with the neg bit" in refusal(with_metadata(tmp_path / "b.pt", NEG, "LongStorage", 8))


def test_deflated_records(tmp_path):
    path = write_pt(tmp_path / "a.pt", {"w": MATRIX, "v": MATRIX.T, "empty": np.zeros((0, 2), "f4")},
                    compression=zipfile.ZIP_DEFLATED)
    np.testing.assert_array_equal(read(path)["w"], MATRIX)
    assert read(path)["empty"].shape == (0, 2)
    np.testing.assert_array_equal(read_checkpoint(path)["v"].rows(1, 2), MATRIX.T[1:2])


def test_expanded_tensor_reads_and_a_huge_one_does_not(tmp_path):
    small = text("w") + tensor("FloatStorage", "0", 4, 0, (3, 4), (0, 1))
    path = write_zip(tmp_path / "a.pt", b"}" + small + b"s", {"0": MATRIX[1].tobytes()})
    np.testing.assert_array_equal(read(path)["w"], np.tile(MATRIX[1], (3, 1)))
    huge = text("w") + tensor("FloatStorage", "0", 4, 0, (1 << 40, 4), (0, 1))
    assert "too large" in refusal(write_zip(tmp_path / "b.pt", b"}" + huge + b"s", {"0": MATRIX[1].tobytes()}))


def test_damage_is_found_when_the_rows_are_read(tmp_path):
    rows = np.random.default_rng(2).standard_normal((1000, 300)).astype(np.float32)
    path = write_pt(tmp_path / "a.pt", {"w": rows})
    data = bytearray(path.read_bytes())
    data[data.index(rows[500].tobytes()) + 7] ^= 16
    path.write_bytes(data)
    read_rows = read_checkpoint(path)["w"].rows
    np.testing.assert_array_equal(read_rows(0, 100), rows[:100])
    with pytest.raises(ColibriError, match=r"a\.pt: data/0: CRC-32="):
        read_rows(900, 1000)


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_a_file_that_is_cut_off_while_it_is_read(tmp_path, compression):
    path = write_pt(tmp_path / "a.pt", {"w": np.random.default_rng(0).standard_normal((1000, 300))},
                    compression=compression)
    checkpoint = read_checkpoint(path)
    os.truncate(path, 4096)
    with pytest.raises(ColibriError, match=r"a\.pt: data/0: the file shrank to 4096 bytes while it was read"):
        checkpoint["w"].rows(900, 1000)


def test_no_room_to_inflate_names_the_place(tmp_path, monkeypatch):
    class Full(io.BytesIO):
        def write(self, data):
            raise OSError(28, "No space left on device")
    path = write_pt(tmp_path / "a.pt", {"w": MATRIX}, compression=zipfile.ZIP_DEFLATED)
    monkeypatch.setattr("tempfile.TemporaryFile", Full)
    monkeypatch.setattr("tempfile.tempdir", "/small")
    with pytest.raises(ColibriError, match=r"^/small: No space left on device, expected room for 48 bytes inflated"):
        read(path)


def test_big_endian_is_refused(tmp_path):
    assert "byteorder=big" in refusal(write_pt(tmp_path / "a.pt", {"w": MATRIX}, extra=[("byteorder", b"big")]))


SHARED_TOWER = b")" + b"".join(b"q" + bytes([i]) + b"h" + bytes([i]) + b"\x86" for i in range(1, 61))
DEEP_TUPLE = b")" + b"\x85" * 100_000


@pytest.mark.parametrize("key", [SHARED_TOWER, DEEP_TUPLE], ids=["shared", "deep"])
def test_hostile_keys_are_never_hashed(tmp_path, key):
    pickled, storages = state_dict({"w": MATRIX})
    path = write_zip(tmp_path / "a.pt", b"}(" + text("model") + pickled + key + b"Nu", storages)
    assert list(read(path)) == ["w"]


def test_deep_calls_are_refused(tmp_path):
    call = b"ctorch._tensor\n_rebuild_from_type_v2\nq\x01"
    arguments = b")q\x020" + b"(h\x01Nh\x02Ntq\x020" * 20_000
    assert "corrupt pickle" in refusal(write_zip(tmp_path / "a.pt", call + arguments + b"h\x02R", {}))


def test_a_pickle_bomb_is_bounded(tmp_path):
    path = write_zip(tmp_path / "a.pt", b"]" + b"]\x94" * (20 << 20), {}, zipfile.ZIP_DEFLATED)
    assert "opcodes" in refusal(path)


PAIRS = b"](" + b"NN\x86" * 50_000 + b"eq\x010"


@pytest.mark.parametrize("body, cause", [
    (PAIRS + b"](" + b"ccollections\nOrderedDict\nh\x01\x85R0" * 2000, "opcodes"),
    (b"ctorch._utils\n_rebuild_parameter\n(" + b"N" * 17 + b"tR", "corrupt pickle"),
    (b"(" + text("storage") + b"ctorch\nFloatStorage\n" + text("0") + b"NK\x01" + b"N" * 12 + b"tQ", "corrupt pickle")])
def test_shared_arguments_are_charged_or_refused(tmp_path, body, cause):
    assert cause in refusal(write_zip(tmp_path / "a.pt", body, {}))


def test_an_ordered_dict_of_pairs(tmp_path):
    pickled, storages = state_dict({"w": MATRIX})
    pair = text("w") + pickled[2 + len(text("w")):-1] + b"\x86"
    body = b"ccollections\nOrderedDict\n](" + pair + b"e\x85R"
    np.testing.assert_array_equal(read(write_zip(tmp_path / "a.pt", body, storages))["w"], MATRIX)
    empty = b"ccollections\nOrderedDict\n)R(" + pickled[2:-1] + b"u"
    np.testing.assert_array_equal(read(write_zip(tmp_path / "b.pt", empty, storages))["w"], MATRIX)


@pytest.mark.parametrize("body, cause", [
    (b"cbuiltins\neval\n", "forbidden global builtins.eval"),
    (text("os") + text("system") + b"\x93", "forbidden global os.system"),
    (b"(S'ls'\nios\nsystem\n", "forbidden opcode 0x53"),
    (b"ctorch\nFloatStorage\n)\x81", "forbidden opcode 0x81"),
    (b"Plocation\n", "forbidden opcode 0x50"),
    (b"ctorch\nFloatStorage\n)R", "corrupt pickle"),
    (b"\x8b\xff\xff\xff\x7f", "corrupt pickle"),
    (b"h\x09", "corrupt pickle"), (b"(", "corrupt pickle"), (b"s", "corrupt pickle"), (b"\x80\x09N", "corrupt pickle"),
    (b"]}b", "corrupt pickle"), (text("x") + b"Q", "corrupt pickle"), (b"", "corrupt pickle"),
])
def test_only_the_allow_list_is_read(tmp_path, body, cause):
    assert cause in refusal(write_zip(tmp_path / "a.pt", body, {}))


@pytest.mark.parametrize("content, cause", [(b"", "0 bytes"), (b"hello", "not a checkpoint"),
                                            (b"COLI" + bytes(99), "Colibri .bin"), (b"PK\3\4", "truncated")])
def test_other_files(tmp_path, content, cause):
    path = tmp_path / "a.pt"
    path.write_bytes(content)
    assert cause in refusal(path)


def test_missing_file_and_directory(tmp_path):
    assert "No such file" in refusal(tmp_path / "none.pt")
    assert "a directory" in refusal(tmp_path)
    os.mkfifo(tmp_path / "pipe.pt")
    assert "not a regular file" in refusal(tmp_path / "pipe.pt")


def test_random_damage_never_escapes(tmp_path):
    """Whatever is flipped or cut: the same arrays, or a ColibriError."""
    original = write_pt(tmp_path / "good.pt", {"w": MATRIX, "v": MATRIX.T, "u": MATRIX.astype(np.float16)})
    expected, data = read(original), original.read_bytes()
    generator, path, refused = np.random.default_rng(3), tmp_path / "bad.pt", 0
    for trial in range(600):
        damaged = bytearray(data[:generator.integers(1, len(data))] if trial % 4 == 0 else data)
        for _ in range(generator.integers(1, 4)):
            damaged[generator.integers(len(damaged))] ^= 1 << generator.integers(8)
        path.write_bytes(damaged)
        try:
            arrays = read(path)
        except ColibriError:
            refused += 1
            continue
        assert {name: array.tobytes() for name, array in arrays.items()} == {
            name: array.tobytes() for name, array in expected.items()} or set(arrays) != set(expected), trial
    assert refused > 300


def test_random_damage_inside_the_pickle_never_escapes(tmp_path):
    """With checksums that are right, so that the pickle machine and the checks behind it are what must hold."""
    pickled, storages = state_dict({"w": MATRIX, "v": MATRIX.T})
    generator, refused = np.random.default_rng(4), 0
    for _ in range(1500):
        damaged = bytearray(pickled)
        for _ in range(generator.integers(1, 4)):
            place, length = generator.integers(len(damaged)), generator.integers(1, 9)
            damaged[place:place + length] = [b"", generator.bytes(length), damaged[-length:] * 2][generator.integers(3)]
        try:
            read(write_zip(tmp_path / "a.pt", bytes(damaged), storages))
        except ColibriError:
            refused += 1
    assert refused > 1000
