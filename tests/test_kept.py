"""Checkpoints of few bits as the libraries write them: kept exactly, or dequantized, each number rounded once.

tests/data/quantized/make.py says how the folders were made.
"""

import hashlib
import json
import re
import shutil
import struct

import numpy as np
import pytest
from conftest import DATA
from converter_files import read_bin

from colibri import headers
from converter import __main__ as converter
from converter import config, few_bits, quantized, scheme
from converter.safetensors_reader import DTYPES, read_file
from converter.tensor import NUMPY_DTYPES, Storage, Tensor

FOLDERS = sorted(path.parent for path in (DATA / "quantized").glob("*/meaning.json"))
CODES = headers.default().codes("DTYPE")
FORMS = {"gptq4": ("int4", 32, 0), "gptq4_asymmetric": ("int4", 32, 1), "gptq8_v2": ("int8", 128, 1),
         "awq": ("int4", 32, 1), "packed4": ("int4", 32, 0), "packed4_asymmetric": ("int4", 32, 1),
         "packed8": ("int8", 128, 0), "float_channel": ("fp8", 128, 0), "float_tensor": ("fp8", 128, 0),
         "fp8": ("fp8", 128, 0), "mxfp4": ("mxfp4", 32, 0)}


def convert(folder, output, *options):
    assert converter.main([str(folder), str(output), *options]) == 0
    return read_bin(output)


def refusal(capfd, *arguments):
    assert converter.main([str(argument) for argument in arguments]) == 2
    captured = capfd.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    return captured.err


def written(folder, change=None, drop=(), **settings):
    """Changes a copy of a folder. change: {name: array}, in the tensor's dtype; settings: of quantization_config."""
    values = json.loads((folder / "config.json").read_text())
    values["quantization_config"].update(settings)
    (folder / "config.json").write_text(json.dumps(values))
    names, header, data = {ours: name for name, ours in DTYPES.items()}, {}, b""
    for name, tensor in read_file(folder / "model.safetensors").items():
        if name not in drop:
            array = np.array((change or {}).get(name, tensor.array()), NUMPY_DTYPES[tensor.dtype])
            header[name] = {"dtype": names[tensor.dtype], "shape": array.shape,
                            "data_offsets": [len(data), len(data) + array.nbytes]}
            data += array.tobytes()
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)
    return folder


@pytest.fixture
def copied(tmp_path):
    return lambda name: shutil.copytree(DATA / "quantized" / name, tmp_path / name)


def test_all_folders_are_listed():
    assert [folder.name for folder in FOLDERS] == sorted(FORMS)


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_numbers_are_the_librarys(folder):
    tensors = read_file(folder / "model.safetensors")
    found = quantized.decoded(tensors, scheme.scheme(config.load(None, folder)), str(folder), [])
    meaning = json.loads((folder / "meaning.json").read_text())
    assert {name for name, tensor in found.items() if isinstance(tensor, quantized.Quantized)} == meaning.keys()
    for name, expected in meaning.items():
        shape = found[name].shape
        parts = [found[name].index(e) for e in range(shape[0])] if len(shape) == 3 else [found[name]]
        values = np.stack([part.rows(0, shape[-2]) for part in parts]).astype(np.float32)
        assert hashlib.sha256(values.tobytes()).hexdigest() == expected, name


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_kept_exactly(tmp_path, folder):
    """Rows of all families, in their new order, have the values that --dtype f32 gives."""
    header, kept = convert(folder, tmp_path / "a.bin")
    _, wide = convert(folder, tmp_path / "b.bin", "--dtype", "f32")
    dtype, group, zero_points = FORMS[folder.name]
    classes = ["expert"] if dtype == "mxfp4" else ["expert", "dense"]
    for name in classes:
        assert [header[f"{name}_{field}"] for field in ("dtype", "group", "zero_points")] == [
            CODES[dtype] + 1, group, zero_points]
    assert header["weight_dtype"] == header["compute_dtype"] - 1 == CODES["bf16"]
    few = [name for name, array in kept.items() if array.dtype == np.float64]
    assert len(few) >= 2 * len(classes) and kept.keys() == wide.keys()
    for name, array in kept.items():
        array = (array.astype(np.uint32) << 16).view(np.float32) if array.dtype == np.uint16 else array
        np.testing.assert_array_equal(array.astype(np.float32), wide[name], err_msg=name)
        assert name not in few or np.abs(array).max() > 0.01


@pytest.mark.parametrize("name, group", [("gptq8_v2", "32"), ("gptq8_v2", "64"), ("packed8", "128")])
def test_a_whole_rows_scale_is_repeated_in_groups(tmp_path, name, group):
    header, kept = convert(DATA / "quantized" / name, tmp_path / "a.bin", "--group", group)
    _, wide = convert(DATA / "quantized" / name, tmp_path / "b.bin", "--dtype", "f32")
    assert header["expert_group"] == header["dense_group"] == int(group)
    np.testing.assert_array_equal(kept["layers.0.qkv"].astype(np.float32), wide["layers.0.qkv"])


def test_16_bits_are_rounded_once(tmp_path):
    for dtype, kind in (("f16", np.float16), ("bf16", None)):
        _, wide = convert(DATA / "quantized" / "fp8", tmp_path / f"{dtype}.bin", "--dtype", dtype)
        _, exact = convert(DATA / "quantized" / "fp8", tmp_path / "kept.bin", "--force")
        for name, array in exact.items():
            if array.dtype == np.float64 and kind:
                np.testing.assert_array_equal(wide[name], array.astype(kind))


def test_the_same_dtype_keeps_and_another_one_says_so(capfd, tmp_path, copied):
    """--dtype int4 of a checkpoint in int4 rounds nothing; from int8 it is rounded again, in words."""
    _, kept = convert(DATA / "quantized" / "gptq4", tmp_path / "a.bin")
    few_bits.library()  # says where it is built
    capfd.readouterr()
    options = ["--expert-dtype", "int4", "--dtype", "int8"]
    header, again = convert(DATA / "quantized" / "gptq4", tmp_path / "b.bin", *options)
    assert header["expert_group"] == 32 and header["dense_dtype"] == CODES["int8"] + 1
    np.testing.assert_array_equal(again["layers.0.experts_up"], kept["layers.0.experts_up"])
    error = capfd.readouterr().err
    assert "q_proj.qweight: int4, is rounded a second time, to int8, with 3 more" in error and error.count("\n") == 1
    assert np.abs(again["layers.0.qkv"] - kept["layers.0.qkv"]).max() < np.abs(kept["layers.0.qkv"]).max() / 200


def test_a_class_of_mixed_kinds_becomes_16_bits(capfd, tmp_path, copied):
    folder = copied("gptq4")
    tensors = read_file(folder / "model.safetensors")
    name = "model.layers.0.self_attn.o_proj."
    values = quantized.decoded(tensors, scheme.scheme(config.load(None, folder)), "x", [])[name + "weight"].rows(0, 64)
    bits = (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    arrays = dict(tensors)
    path = written(folder, drop=[key for key in arrays if key.startswith(name)]) / "model.safetensors"
    size = int.from_bytes(path.read_bytes()[:8], "little")
    header, data = json.loads(path.read_bytes()[8:8 + size]), path.read_bytes()[8 + size:]
    header[name + "weight"] = {"dtype": "BF16", "shape": [64, 64], "data_offsets": [len(data), len(data) + bits.nbytes]}
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data + bits.tobytes())
    fields, got = convert(folder, tmp_path / "a.bin")
    error = capfd.readouterr().err
    assert (".q_proj.qweight: int4, but model.layers.0.self_attn.o_proj.weight: bfloat16: all of the dense matrices "
            "become bf16\n") in error and error.count("\n") == 1
    assert fields["dense_dtype"] == fields["dense_group"] == 0 and fields["expert_dtype"] == CODES["int4"] + 1
    np.testing.assert_array_equal(got["layers.0.attention_out"], bits)
    assert got["layers.0.experts_up"].dtype == np.float64


def first(folder, end):
    """A tensor's name and its values."""
    return next((name, tensor.array()) for name, tensor in read_file(folder / "model.safetensors").items()
                if name.endswith(end))


def test_scales_in_bf16_or_f32_are_held_exactly_or_refused(capfd, tmp_path, copied):
    """Small scales need the tensor's own; those of 24 bits have no place."""
    folder = copied("packed4")
    _, before = convert(folder, tmp_path / "a.bin")
    changed = {name: tensor.array() - np.uint16(60 << 7) for name, tensor in  # 2^60 times smaller
               read_file(folder / "model.safetensors").items() if name.endswith("weight_scale")}
    written(folder, changed)
    _, got = convert(folder, tmp_path / "b.bin")
    np.testing.assert_array_equal(got["layers.0.experts_up"], before["layers.0.experts_up"] * 2.0 ** -60)
    name, scales = first(folder, "w1.weight_scale")
    scales = scales.copy()
    scales[3, 1] += 100 << 7  # 2^100 times the others: no one number brings both into f16
    capfd.readouterr()
    error = refusal(capfd, written(folder, {name: scales}), tmp_path / "c.bin")
    assert (f"{folder}/model.safetensors: model.layers.0.block_sparse_moe.experts.0.w1.weight_packed: scales of many "
            "bits, expected those that f16 times one f32 for all of ") in error
    assert not (tmp_path / "c.bin").exists()
    assert convert(folder, tmp_path / "c.bin", "--dtype", "f32")[0]["weight_dtype"] == 0


def spoiled(end, place, value):
    """Changes a number of the first tensor whose name ends so."""
    def change(folder):
        name, array = first(folder, end)
        array = array.copy()
        array[place] = value
        return written(folder, {name: array})
    return change


def settings(**changed):
    return lambda folder: written(folder, **changed)


def lacking(end):
    return lambda folder: written(folder, drop=[first(folder, end)[0]])


def grouped(folder):
    """The same model as if its groups were half as long: 16 columns."""
    changed = {name: np.repeat(tensor.array(), 2, 1) for name, tensor in read_file(folder / "model.safetensors").items()
               if name.endswith("weight_scale")}
    values = json.loads((folder / "config.json").read_text())
    groups = values["quantization_config"]["config_groups"]
    groups["group_0"]["weights"]["group_size"] = 16
    return written(folder, changed, config_groups=groups)


QCONFIG = "config.json: quantization_config."
REFUSALS = [
    ("gptq4", settings(bits=3), QCONFIG + "bits=3, expected 4 or 8"),
    ("gptq4", settings(checkpoint_format="marlin"), 'checkpoint_format="marlin", expected "gptq" or "gptq_v2"'),
    ("gptq4", settings(group_size=48), "those of a group of 48 side by side"),
    ("gptq4", settings(group_size=16), "w1.qweight: 2 groups for 64 columns, expected group_size=16"),
    ("gptq4", spoiled("g_idx", 5, 1), ("(desc_act), expected those of a group of 32 side by side; quantize the model "
                                       "without desc_act")),
    ("gptq4_asymmetric", spoiled("q_proj.qzeros", (0, 0), -1),
     ("q_proj.qzeros: a zero point stored as 15, expected one below, since some read it as 0 and others as 16; save "
     "the")),
    ("gptq4", lacking("k_proj.scales"), ("gptq4: missing tensor model.layers.0.self_attn.k_proj.scales (and 1 more), "
                                        "expected 3 experts in each")),
    ("gptq4", spoiled("k_proj.scales", (0, 7), np.inf), "k_proj.qweight: a scale that is not finite at [7, 0]"),
    ("awq", settings(version="gemv"), 'version="gemv", expected "gemm" or "GEMM"'),
    ("awq", settings(bits=8), "bits=8, expected 4"),
    ("packed4", settings(format="marlin-24"), 'format="marlin-24", expected "pack-quantized" or'),
    ("packed4", settings(format="nvfp4-pack-quantized"), 'format="nvfp4-pack-quantized"'),
    ("packed4", settings(sparsity_config={"format": "sparse-24-bitmask"}), 'sparsity_config.format="sparse-24-bit'),
    ("packed4", settings(transform_config={"config_groups": {"u": {}}}), "none, since its rotations are not supported"),
    ("packed4", grouped, "weight_packed: int4 in groups of 16 columns, expected a multiple of 32, or a whole row; ch"),
    ("packed8", spoiled("q_a_proj.weight_shape", 1, 60),
     "weight_packed: int32 (48, 16), expected rows and columns [48, 60] in 8 bits"),
    ("float_channel", settings(quant_method="fbgemm_fp8"), 'quant_method="fbgemm_fp8", expected "fp8" or "mxfp4" or'),
    ("float_channel", spoiled("w1.weight", (3, 4), 0x7F),
     "w1.weight: NaN at [3, 4], expected numbers; the checkpoint is damaged"),
    ("fp8", settings(weight_block_size=[32, 32]),
     "weight_scale_inv: float32 (1, 2), expected one of float32, float16, float8_e8m0fnu, bfloat16 and (2, 5) for"),
    ("mxfp4", spoiled("gate_up_proj_scales", (0, 2, 1), 255), "a scale that is NaN, infinite or too large at [1, 1]")]


@pytest.mark.parametrize("name, change, cause", REFUSALS, ids=lambda value: str(value)[:40])
def test_what_cannot_be_kept_is_refused_by_name(capfd, tmp_path, copied, name, change, cause):
    folder = change(copied(name))
    error = refusal(capfd, folder, tmp_path / "a.bin")
    assert cause in error and not (tmp_path / "a.bin").exists(), error


def test_inspect_lists_parts_that_are_missing(capfd, tmp_path, copied):
    folder = lacking("k_proj.scales")(copied("gptq4"))
    assert converter.main([str(folder), "--inspect", "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["missing"] == [
        f"model.layers.0.self_attn.k_proj.{part}" for part in ("scales", "weight")]


def test_zero_points_may_be_bytes():
    """As earlier versions of compressed-tensors wrote them."""
    folder = DATA / "quantized" / "packed4_asymmetric"
    tensors, how = read_file(folder / "model.safetensors"), scheme.scheme(config.load(None, folder))
    before = quantized.decoded(tensors, how, "x", [])
    for name, tensor in list(tensors.items()):
        if name.endswith("weight_zero_point"):
            words = np.ascontiguousarray(tensor.array().T).view(np.uint8)
            bytes_ = (np.stack([words & 15, words >> 4], -1).reshape(len(words), -1).T - np.uint8(8)).view(np.int8)
            data = np.ascontiguousarray(bytes_).tobytes()
            shape = bytes_.shape
            tensors[name] = Tensor(name, "int8", shape, (shape[1], 1), Storage("x", data, 0, len(data)), 0)
    after = quantized.decoded(tensors, how, "x", [])
    for name, matrix in before.items():
        if isinstance(matrix, quantized.Quantized):
            np.testing.assert_array_equal(after[name].rows(0, matrix.shape[0]), matrix.rows(0, matrix.shape[0]))


def test_groups_of_16_can_be_dequantized(tmp_path, copied):
    _, before = convert(DATA / "quantized" / "packed4", tmp_path / "a.bin", "--dtype", "f32")
    _, after = convert(grouped(copied("packed4")), tmp_path / "b.bin", "--dtype", "f32")
    for name, array in before.items():
        np.testing.assert_array_equal(array, after[name])


def test_what_quantizes_activations_alone_is_left_out(capfd, tmp_path, copied):
    folder = copied("float_tensor")
    path = folder / "model.safetensors"
    raw = path.read_bytes()
    size = struct.unpack("<Q", raw[:8])[0]
    text = raw[8:8 + size].replace(b'"model.norm.weight"', b'"model.layers.0.self_attn.q_proj.input_scale"')
    values = json.loads(text)
    values["model.norm.weight"] = {**values["model.layers.0.self_attn.q_proj.input_scale"],
                                   "data_offsets": [len(raw) - 8 - size, len(raw) - 8 - size + 128]}
    text = json.dumps(values).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + size:] + np.full(64, 0x3F80, "<u2").tobytes())
    convert(folder, tmp_path / "a.bin")
    assert re.search(r"left out: model\.layers\.0\.self_attn\.q_proj\.input_scale\n", capfd.readouterr().out)
