"""python -m converter from end to end: the right file, or one line on stderr and nothing written."""

import json
import re
import signal
import struct
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import numpy as np
import pytest
from converter_files import MIXTRAL_CONFIG, gpt_arrays, mixtral_arrays, read_bin, tensor, text, write_pt, write_zip

from colibri.checkpoint import Checkpoint
from converter import __main__ as converter
from converter import bin_writer
from converter.pt_reader import read_checkpoint
from converter.tensor import e4m3_values

DATA = Path(__file__).parent / "data"
MODELS = Path(__file__).parent.parent / "models"
STACK = ["--k", "2", "--activation", "gelu", "--renormalize"]
CASES = {case["name"]: case for case in json.loads((DATA / "pt" / "manifest.json").read_text())["cases"]
         if case["level"] == "converter"}
BARE = ["--k", "2", "--activation", "silu", "--renormalize"]
FIELDS = {"gate": "experts_up", "up": "experts_up", "down": "experts_down", "gate_bias": "experts_up_bias",
          "up_bias": "experts_up_bias", "down_bias": "experts_down_bias", "router": "router",
          "router_bias": "router_logit_bias", "router_correction": "router_bias", "S.gate": "mlp_up", "S.up": "mlp_up",
          "S.down": "mlp_down"}


def convert(*arguments):
    assert converter.main([str(argument) for argument in arguments]) == 0
    return read_bin(Path(arguments[1]))


def refusal(capfd, *arguments):
    """The one line on stderr of a conversion that fails and writes nothing."""
    output = Path(arguments[1])
    before = sorted(output.parent.iterdir()) if output.parent.is_dir() else None
    assert converter.main([str(argument) for argument in arguments]) == 2
    assert before is None or sorted(output.parent.iterdir()) == before
    captured = capfd.readouterr()
    assert not captured.out and captured.err.count("\n") == 1 and captured.err.endswith("\n")
    return captured.err


def test_the_example_model(tmp_path):
    header, arrays = convert(MODELS / "moe-32.pt", tmp_path / "a.bin")
    source = {name: item.array() for name, item in read_checkpoint(MODELS / "moe-32.pt").items()}
    assert (header["num_layers"], header["num_experts"], header["k"], header["weight_dtype"]) == (6, 32, 2, 1)
    check_mixtral(arrays, source, 6, 32)
    assert len(arrays) == 4 + 6 * 7


def check_mixtral(arrays, source, num_layers, num_experts):
    np.testing.assert_array_equal(arrays["embed"], source["model.embed_tokens.weight"])
    np.testing.assert_array_equal(arrays["lm_head"], source["lm_head.weight"])
    np.testing.assert_array_equal(arrays["final_norm"], source["model.norm.weight"].astype(np.float32))
    for layer in range(num_layers):
        name, target = f"model.layers.{layer}.", f"layers.{layer}."
        attention = [source[f"{name}self_attn.{letter}_proj.weight"] for letter in "qkv"]
        np.testing.assert_array_equal(arrays[target + "qkv"], np.concatenate(attention))
        for field, origin in (("attention_out", "self_attn.o_proj"), ("attention_norm", "input_layernorm"),
                              ("ffn_norm", "post_attention_layernorm"), ("router", "block_sparse_moe.gate")):
            np.testing.assert_array_equal(arrays[target + field], source[f"{name}{origin}.weight"])
        assert arrays[target + "router"].dtype == np.float32
        for expert in range(num_experts):
            gate, down, up = (source[f"{name}block_sparse_moe.experts.{expert}.w{i}.weight"] for i in (1, 2, 3))
            np.testing.assert_array_equal(arrays[target + "experts_up"][expert], np.concatenate([gate, up]))
            np.testing.assert_array_equal(arrays[target + "experts_down"][expert], down)


def test_the_example_stack(tmp_path):
    header, arrays = convert(DATA / "gpt-moe-32.pt", tmp_path / "a.bin", *STACK)
    check_gpt(arrays, {name: item.array() for name, item in read_checkpoint(DATA / "gpt-moe-32.pt").items()}, 2, 32)
    assert (header["gated"], header["num_heads"], header["vocab_size"], header["activation"]) == (0, 0, 0, 1)


def check_gpt(arrays, source, num_layers, num_experts):
    for layer in range(num_layers):
        name, target = f"transformer.h.{layer}.mlp.", f"layers.{layer}."
        np.testing.assert_array_equal(arrays[target + "router"], source[name + "router.weight"].astype(np.float32))
        for expert in range(num_experts):
            for field, matrix in (("experts_up", "w1"), ("experts_down", "w2")):
                np.testing.assert_array_equal(arrays[target + field][expert],
                                              source[f"{name}experts.{expert}.{matrix}.weight"])


def test_small_transformer_with_config(tmp_path):
    arrays = mixtral_arrays()
    write_pt(tmp_path / "a.pt", arrays, wrap=["model"])
    (tmp_path / "shape.json").write_text(json.dumps(MIXTRAL_CONFIG))
    check_mixtral(convert(tmp_path / "a.pt", tmp_path / "a.bin", "--config", tmp_path / "shape.json")[1], arrays, 2, 3)


@pytest.mark.parametrize("source, option, code, dtype", [
    (np.float16, "keep", 1, np.float16), (np.float64, "keep", 0, np.float32), (np.float32, "f16", 1, np.float16),
    (np.float16, "f32", 0, np.float32)])
def test_dtypes(tmp_path, source, option, code, dtype):
    arrays = gpt_arrays(dtype=source)
    header, result = convert(write_pt(tmp_path / "a.pt", arrays), tmp_path / "a.bin", *STACK, "--dtype", option)
    rounded = {name: array if "router" in name else array.astype(dtype) for name, array in arrays.items()}
    check_gpt(result, rounded, 2, 3)
    assert header["weight_dtype"] == code


@pytest.mark.parametrize("experts, dense, codes", [("<f4", "<f2", (0, 0, 2)), ("<f2", "<f4", (1, 0, 1)),
                                                    ("<f4", "<f8", (0, 0, 0))])
def test_experts_and_dense_matrices_keep_dtypes_of_their_own(tmp_path, experts, dense, codes):
    arrays = {name: array.astype(experts if "experts" in name else dense) for name, array in mixtral_arrays().items()}
    write_pt(tmp_path / "a.pt", arrays)
    (tmp_path / "config.json").write_text(json.dumps(MIXTRAL_CONFIG))
    header, result = convert(tmp_path / "a.pt", tmp_path / "a.bin")
    arrays = {name: array.astype("<f4") if array.dtype == "f8" else array for name, array in arrays.items()}
    assert tuple(header[name] for name in ("weight_dtype", "expert_dtype", "dense_dtype")) == codes
    check_mixtral(result, arrays, 2, 3)
    kept = Checkpoint(tmp_path / "a.bin").tensors
    assert kept["layers.0.experts_up"].dtype == np.dtype(experts)
    assert kept["embed"].dtype == np.dtype({"<f8": "<f4"}.get(dense, dense))
    assert convert(tmp_path / "a.pt", tmp_path / "b.bin", "--dtype", "bf16")[0]["dense_dtype"] == 0


def test_bf16(tmp_path):
    arrays = {name: (array.view(np.uint32) >> 16).astype(np.uint16) for name, array in gpt_arrays(dtype="f4").items()}
    path = write_pt(tmp_path / "a.pt", arrays)
    kept = convert(path, tmp_path / "a.bin", *STACK)
    widened = convert(path, tmp_path / "b.bin", *STACK, "--dtype", "f32")
    assert kept[0]["weight_dtype"] == 2
    for name, array in kept[1].items():
        if "experts" in name:
            np.testing.assert_array_equal((array.astype(np.uint32) << 16).view(np.float32), widened[1][name])
    assert widened[1]["layers.1.experts_up"].std() > 0.5


def write_typed(path, arrays, codes):
    """Writes a .safetensors and its config. codes: {the end of a numpy dtype's name: the format's}."""
    header, data = {}, b""
    for name, array in arrays.items():
        header[name] = {"dtype": codes[array.dtype.str[1:]], "shape": array.shape,
                        "data_offsets": [len(data), len(data) + array.nbytes]}
        data += array.tobytes()
    path.write_bytes(len(json.dumps(header)).to_bytes(8, "little") + json.dumps(header).encode() + data)
    path.with_suffix(".json").write_text(json.dumps(MIXTRAL_CONFIG))


def test_fp8_of_a_model_in_other_floats(capfd, tmp_path):
    """fp8 stays, unless other experts are not; one product, rounded once, in a --dtype; scales in bf16, f16 and f32."""
    arrays, products, codes = mixtral_arrays(dtype=np.float32), {}, {"f4": "F32", "f2": "F16", "u2": "BF16",
                                                                     "u1": "F8_E4M3"}
    generator = np.random.default_rng(8)
    for i, name in enumerate([name for name in arrays if "experts" in name]):
        bits, kind = generator.integers(0, 0x7F, arrays[name].shape).astype("u1"), ("u2", "f2", "f4")[i % 3]
        scale = generator.random((1, 1), np.float32) / 100
        stored = (scale.view(np.uint32) >> 16).astype("u2") if kind == "u2" else scale.astype(kind)
        scale = (stored.astype(np.uint32) << 16).view("f4") if kind == "u2" else stored
        products[name] = e4m3_values()[bits] * scale.astype(np.float64)
        arrays |= {name: bits, name + "_scale_inv": stored}
    first, *_ = products
    write_typed(tmp_path / "mixed.safetensors", {**{name: array for name, array in arrays.items() if name !=
                                                    first + "_scale_inv"}, first: products[first].astype("f4")}, codes)
    header, got = convert(tmp_path / "mixed.safetensors", tmp_path / "a.bin")
    assert "experts.0.w3.weight: fp8, but model.layers.0.block_sparse_moe.experts.0.w1.weight: float32: all of the " \
           "experts become f16\n" in capfd.readouterr().err
    assert header["weight_dtype"] == 1 and got["layers.0.experts_up"].dtype == np.float16
    path = tmp_path / "a.safetensors"
    write_typed(path, arrays, codes)
    header, got = convert(path, tmp_path / "kept.bin")  # what is no expert's stays as it is
    names = ("weight_dtype", "expert_dtype", "dense_dtype", "embed_dtype", "compute_dtype")
    assert tuple(header[name] for name in names) == (1, 6, 1, 0, 2)
    np.testing.assert_array_equal(got["embed"], arrays["model.embed_tokens.weight"])
    check_mixtral(got, {**arrays, **products}, 2, 3)
    for dtype, kind in (("f16", np.float16), ("f32", np.float32)):
        _, got = convert(path, tmp_path / f"{dtype}.bin", "--dtype", dtype)
        check_mixtral(got, {name: products.get(name, array).astype(kind) if array.ndim == 2 and "moe.gate" not in name
                            else array for name, array in arrays.items()}, 2, 3)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case["expect"] != "ok"])
def test_case_is_refused(capfd, tmp_path, name):
    path = next(path for path in (DATA / "pt" / f"{name}.pt", DATA / "pt" / name) if path.exists())
    message = refusal(capfd, path, tmp_path / "a.bin", *STACK)
    if path.is_file():
        for word in json.loads((DATA / "pt" / f"{name}.json").read_text())["mention"]:
            assert word in message
    assert str(path) in message


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case["expect"] == "ok"])
def test_case_gives_its_experts(tmp_path, name):
    header, arrays = convert(DATA / "pt" / f"{name}.pt", tmp_path / "a.bin", *BARE, "--dtype", "f32")
    expected = dict(np.load(DATA / "pt" / f"{name}.canon.npz"))
    for key, values in expected.items():
        layer, expert, part = re.fullmatch(r"L(\d+)\.(?:E(\d+)\.)?(.+)", key).groups()
        stored = arrays[f"layers.{layer}.{FIELDS[part]}"]
        if expert:
            stored = stored.reshape(int(header["num_experts"]), -1, *stored.shape[2:])[int(expert)]
        half = len(stored) // 2
        part = part.removeprefix("S.").removesuffix("_bias") if part != "router_bias" else part
        stored = stored[:half] if part == "gate" else stored[half:] if part == "up" else stored
        np.testing.assert_array_equal(stored, values, err_msg=key)
    used = {f"layers.{key[1:].split('.')[0]}.{FIELDS[key.split('.', 2)[2] if '.E' in key else key.split('.', 1)[1]]}"
            for key in expected}
    assert used == set(arrays)


def test_version_1_by_hand(tmp_path):
    """2 experts, hidden 2, ffn 3: the bytes written out."""
    name = "transformer.h.0.mlp."
    first, second = np.float16([[1, 2], [3, 4], [5, 6]]), np.float16([[-1, -2], [-3, -4], [-5, -6]])
    arrays = {name + "router.weight": np.float16([[10, 20], [30, 40]]),
              name + "experts.0.w1.weight": first, name + "experts.1.w1.weight": second,
              name + "experts.0.w2.weight": first.T * 7, name + "experts.1.w2.weight": second.T * 7}
    write_pt(tmp_path / "a.pt", arrays)
    assert converter.main([str(tmp_path / "a.pt"), str(tmp_path / "v1.bin"), "--format", "v1", "--layer", "0",
                           "--k", "1", "--activation", "relu", "--no-renormalize"]) == 0
    values = [1, -1, 2, -2, 3, -3, 4, -4, 5, -5, 6, -6,
              7, -7, 21, -21, 35, -35, 14, -14, 28, -28, 42, -42,
              10, 30, 20, 40]
    expected = b"COLI" + struct.pack("<3I", 1, 2, 1) + struct.pack("<28e", *values)
    assert (tmp_path / "v1.bin").read_bytes() == expected
    header, back = convert(tmp_path / "v1.bin", tmp_path / "v2.bin", "--hidden", 2, "--ffn", 3, "--activation", "relu",
                           "--no-renormalize")
    check_gpt(back, arrays, 1, 2)
    assert (header["k"], header["activation"], header["renormalize"]) == (1, 2, 0)


def test_version_1_round_trip(tmp_path):
    source, old = DATA / "gpt-moe-32.pt", tmp_path / "v1.bin"
    assert converter.main([str(source), str(old), "--format", "v1", "--layer", "1", *STACK]) == 0
    assert old.read_bytes()[:16] == bytes.fromhex("434f4c49 01000000 20000000 02000000")
    _, direct = convert(source, tmp_path / "v2.bin", *STACK)
    _, back = convert(old, tmp_path / "back.bin", "--hidden", 64, "--ffn", 96, "--activation", "gelu", "--renormalize")
    for field in ("router", "experts_up", "experts_down"):
        np.testing.assert_array_equal(back[f"layers.0.{field}"], direct[f"layers.1.{field}"])


@pytest.mark.parametrize("flags, cause", [
    ([], "give --hidden, --ffn, --activation, --renormalize or --no-renormalize\n"),
    (["--hidden", 64, "--renormalize"], "give --ffn, --activation\n"),
    (["--hidden", 64, "--ffn", 95], "expected 782352 from num_experts=32, hidden=64, ffn=95"),
    (["--hidden", 64, "--ffn", 96], "give --activation, --renormalize or --no-renormalize\n"),
    (["--hidden", 64, "--ffn", 96, *STACK[2:], "--k", 3], "k=2, but --k says 3")])
def test_version_1_inputs_that_cannot_be(capfd, tmp_path, flags, cause):
    assert converter.main([str(DATA / "gpt-moe-32.pt"), str(tmp_path / "v1.bin"), "--format", "v1", "--layer", "1",
                           *STACK]) == 0
    capfd.readouterr()
    assert cause in refusal(capfd, tmp_path / "v1.bin", tmp_path / "a.bin", *flags)


@pytest.mark.parametrize("arguments, cause", [
    (["--format", "v1"], "--layer: missing, expected 0 to 1 with --format v1"),
    (["--format", "v1", "--layer", "2"], "--layer: 2"),
    (["--format", "v1", "--layer", "0", "--dtype", "bf16"], "--dtype: bf16, expected f16"),
    (["--format", "v3"], "--format: v3, expected one of v2, v1"), (["--layer", "0"], "--layer: 0, expected only with"),
    (["--dtype", "int3"], "--dtype: int3, expected one of keep, int4, int8, fp8, f16, bf16, f32"),
    (["--group", "16"], "--group: 16, expected one of 32, 64, 128"),
    (["--group", "32", "--dtype", "fp8"], "--group: 32, expected only with matrices in int4 or int8; drop it"),
    (["--format", "v1", "--layer", "0", "--expert-dtype", "int8"], ("--expert-dtype: int8, expected none with "
                                                                   "--format v1")),
    (["--hidden", "64"], "only for a version 1"),
    (["--activation", "tanh"], "--activation: activation=tanh, expected one of silu, gelu, relu"),
    (["--colour"], "--colour: unknown option, expected one that --help lists"),
    (["--k", "two"], "--k: two, expected an integer"), (["--k", "33"], "k=33, expected 1 to 16")])
def test_options_that_cannot_be(capfd, tmp_path, arguments, cause):
    stack = [] if arguments[0] in ("--k", "--activation") else STACK
    rest = {"--k": STACK[2:], "--activation": ["--k", "2", "--renormalize"]}.get(arguments[0], [])
    assert cause in refusal(capfd, DATA / "gpt-moe-32.pt", tmp_path / "a.bin", *stack, *rest, *arguments)


def test_all_that_is_missing_is_asked_for_at_once(capfd, tmp_path):
    def asked(*flags):
        return refusal(capfd, DATA / "gpt-moe-32.pt", tmp_path / "a.bin", *flags).rpartition("; ")[2]
    assert asked() == "give --k, --activation, --renormalize or --no-renormalize\n"
    assert asked("--activation", "gelu") == "give --k, --renormalize or --no-renormalize\n"
    assert asked("--k", 2, "--renormalize") == "give --activation\n"


def test_one_layer_is_no_plural(capfd, tmp_path):
    arrays = {name: array for name, array in gpt_arrays().items() if ".h.0." in name}
    convert(write_pt(tmp_path / "a.pt", arrays), tmp_path / "a.bin", *STACK)
    assert "1 layer of 3 experts, k=2" in capfd.readouterr().out


def test_gated_experts_have_no_version_1(capfd, tmp_path):
    message = refusal(capfd, MODELS / "moe-32.pt", tmp_path / "a.bin", "--format", "v1", "--layer", "0")
    assert "mixtral has gated experts, expected 2-matrix ones" in message


def test_values_that_overflow_f16_name_their_tensor(capfd, tmp_path):
    arrays = gpt_arrays(dtype=np.float32)
    arrays["transformer.h.1.mlp.experts.2.w2.weight"][4, 5] = -1e5
    write_pt(tmp_path / "a.pt", arrays)
    message = refusal(capfd, tmp_path / "a.pt", tmp_path / "a.bin", *STACK, "--dtype", "f16")
    assert "transformer.h.1.mlp.experts.2.w2.weight: value=-100000 at [4, 5], expected at most 65504 in f16" in message


@pytest.mark.parametrize("options", [[], ["--format", "v1", "--layer", "1"]])
def test_damage_in_a_storage_with_a_tail_that_no_tensor_uses(capfd, tmp_path, options):
    """The checksum covers all of a storage, so that it must be carried to the end to tell of the used part."""
    arrays, items, offset = gpt_arrays(), [], 0
    data = b"".join(array.tobytes() for array in arrays.values()) + bytes(2000)
    for name, array in arrays.items():
        items.append(text(name) + tensor("HalfStorage", "0", len(data) // 2, offset, array.shape, (array.shape[1], 1)))
        offset += array.size
    path = write_zip(tmp_path / "a.pt", b"}(" + b"".join(items) + b"u", {"0": data})
    content = bytearray(path.read_bytes())
    content[content.index(data[:64]) + 20] ^= 16
    path.write_bytes(content)
    assert "a.pt: data/0: CRC-32=" in refusal(capfd, path, tmp_path / "a.bin", *STACK, *options)


def test_dry_run_tells_the_exact_bytes_and_writes_nothing(capfd, tmp_path):
    assert converter.main([str(MODELS / "moe-32.pt"), str(tmp_path / "a.bin"), "--dry-run"]) == 0
    report = capfd.readouterr().out
    assert not list(tmp_path.iterdir())
    assert "192 x model.layers.N.block_sparse_moe.experts.E.w1.weight [96, 128] float16" in report
    assert re.search(r"peak memory: about \d+ MiB", report)
    convert(MODELS / "moe-32.pt", tmp_path / "a.bin")
    assert f"would write: {(tmp_path / 'a.bin').stat().st_size} bytes, 46 tensors, f16" in report


def test_existing_outputs_and_the_input_itself(capfd, tmp_path):
    source, output = write_pt(tmp_path / "a.pt", gpt_arrays()), tmp_path / "a.bin"
    convert(source, output, *STACK)
    content = output.read_bytes()
    capfd.readouterr()
    assert "exists already; give --force" in refusal(capfd, source, output, *STACK)
    assert "is the checkpoint itself" in refusal(capfd, source, source, *STACK, "--force")
    convert(source, output, *STACK, "--force", "--dtype", "f32")
    assert output.read_bytes() != content


def test_what_is_read_is_not_replaced(capfd, tmp_path):
    """Config, tokenizer and shards stay; an older .bin in the checkpoint's folder may go."""
    folder = tmp_path / "model"
    folder.mkdir()
    write_pt(folder / "pytorch_model.bin", mixtral_arrays())
    for name in ("config.json", "tokenizer.json", "generation_config.json", "notes.txt"):
        (folder / name).write_text(json.dumps(MIXTRAL_CONFIG))
    for name in ("config.json", "pytorch_model.bin", "notes.txt"):
        assert "or a file of it" in refusal(capfd, folder, folder / name, "--force")
    for name in ("config.json", "tokenizer.json", "generation_config.json"):
        assert "or a file of it" in refusal(capfd, folder / "pytorch_model.bin", folder / name, "--force")
    for _ in range(2):
        convert(folder, folder / "a.bin", "--force")
    convert(folder / "pytorch_model.bin", folder / "notes.txt", "--force")


def test_control_characters_of_a_checkpoint_are_not_printed(capfd, tmp_path):
    write_pt(tmp_path / "a.pt", {**gpt_arrays(), "evil\x1b[2J\x07\nname": np.zeros((2, 3), "f4")})
    assert "unknown tensor evil\\x1b[2J\\x07" in refusal(capfd, tmp_path / "a.pt", tmp_path / "a.bin", *STACK)
    (tmp_path / "b.json").write_text(json.dumps({**MIXTRAL_CONFIG, "hidden_act": "\x1b[2J\n"}))
    write_pt(tmp_path / "b.pt", mixtral_arrays())
    assert "\\u001b[2J" in refusal(capfd, tmp_path / "b.pt", tmp_path / "b.bin")
    converter.say("left out: a\x1b[2J\ud800b\n  c")
    assert capfd.readouterr().out == "left out: a\\x1b[2J\\ud800b\n  c\n"


@pytest.mark.parametrize("streams, status, line", [
    (">&-", 0, ""), ("2>&-", 0, ""), ("<&- >&- 2>&-", 0, ""), ("--k 3 2>&-", 2, ""),
    (">/dev/full", 2, "stdout: No space left on device, expected to write the results there; free some space\n"),
    ("--dry-run >/dev/full", 2,
     "stdout: No space left on device, expected to write the results there; free some space\n")])
def test_streams_that_are_closed_or_full(tmp_path, streams, status, line):
    arrays = gpt_arrays(experts=2)
    write_pt(tmp_path / "a.pt", arrays)
    choices = "--activation gelu --renormalize" + ("" if "--k" in streams else " --k 2")
    command = ["sh", "-c", f'exec "$@" {choices} {streams}', "sh", sys.executable, "-m", "converter"]
    run = subprocess.run([*command, tmp_path / "a.pt", tmp_path / "a.bin"], capture_output=True, text=True, check=False,
                         cwd=MODELS.parent)
    assert (run.returncode, run.stderr) == (status, line)
    if not status:
        read_bin(tmp_path / "a.bin")


def test_paths_that_cannot_be(capfd, tmp_path):
    source = DATA / "gpt-moe-32.pt"
    assert "none.pt: No such file" in refusal(capfd, tmp_path / "none.pt", tmp_path / "a.bin", *STACK)
    assert "No such file or directory" in refusal(capfd, source, tmp_path / "none" / "a.bin", *STACK)
    assert "File name too long" in refusal(capfd, source, tmp_path / ("a" * 300), *STACK)
    assert "not a regular file" in refusal(capfd, source, "/dev/full", *STACK, "--force")


def test_interrupts_leave_nothing(capfd, tmp_path, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt
    monkeypatch.setattr(bin_writer, "write", interrupt)
    assert converter.main([str(DATA / "gpt-moe-32.pt"), str(tmp_path / "a.bin"), *STACK]) == 130
    assert not list(tmp_path.iterdir())
    assert capfd.readouterr().err == "interrupted; nothing was written\n"


def test_help_teaches(capfd):
    assert converter.main(["--help"]) == 0
    assert "python -m converter moe.pt moe.bin --k 2" in capfd.readouterr().out


@pytest.fixture(scope="module")
def big_checkpoint(tmp_path_factory):
    """240 MiB, one storage for each layer, as some trainers save: 4 layers of 8 experts, f16."""
    path, experts, hidden, ffn = tmp_path_factory.mktemp("big") / "big.pt", 8, 1024, 1920
    block, items = np.random.default_rng(0).standard_normal(ffn * hidden).astype(np.float16).tobytes(), []
    matrix = ffn * hidden
    for layer in range(4):
        name = f"transformer.h.{layer}.mlp."
        total = 2 * experts * matrix
        items.append(text(name + "router.weight") + tensor("HalfStorage", str(layer), total, 0, (experts, hidden),
                                                           (hidden, 1)))
        for expert in range(experts):
            for half, shape in enumerate([(ffn, hidden), (hidden, ffn)]):
                items.append(text(f"{name}experts.{expert}.w{half + 1}.weight") + tensor(
                    "HalfStorage", str(layer), total, (2 * expert + half) * matrix, shape, (shape[1], 1)))
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02}(" + b"".join(items) + b"u.")
        for layer in range(4):
            with archive.open(f"archive/data/{layer}", "w") as record:
                for _ in range(2 * experts):
                    record.write(block)
    yield path
    path.unlink()


def start(path, output):
    return subprocess.Popen([sys.executable, "-m", "converter", path, output, *STACK], stderr=subprocess.PIPE,
                            stdout=subprocess.DEVNULL, cwd=MODELS.parent)


def test_memory_stays_bounded(big_checkpoint, tmp_path):
    """Converts within a quarter of the checkpoint's size of anonymous memory, and lets go of the mapped input."""
    limit = big_checkpoint.stat().st_size / 4
    process, anonymous, mapped = start(big_checkpoint, tmp_path / "a.bin"), 0, 0
    while process.poll() is None:
        status = dict(re.findall(r"(Rss\w+):\s*(\d+)", Path(f"/proc/{process.pid}/status").read_text()))
        anonymous = max(anonymous, int(status.get("RssAnon", 0)) << 10)
        mapped = max(mapped, int(status.get("RssFile", 0)) << 10)
        time.sleep(0.002)
    assert process.returncode == 0, process.stderr.read()
    assert 1 << 20 < anonymous < limit and mapped < 2 * limit, (anonymous, mapped)
    process.stderr.close()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_leave_nothing(big_checkpoint, tmp_path, number):
    process = start(big_checkpoint, tmp_path / "a.bin")
    while process.poll() is None and not list(tmp_path.iterdir()):
        time.sleep(0.001)
    process.send_signal(number)
    assert process.communicate()[1] == b"interrupted; nothing was written\n"
    assert process.returncode == 130 and not list(tmp_path.iterdir())
