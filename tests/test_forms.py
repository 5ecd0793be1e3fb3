"""--dtype int4, int8 and fp8 from end to end: which matrices get which form, their values, and what --inspect says."""

import json

import numpy as np
import pytest
from conftest import DATA
from converter_files import MIXTRAL_CONFIG, gpt_arrays, mixtral_arrays, read_bin, write_pt
from reference_formats import FP8, INT4, INT8, dequantise, e4m3
from reference_search import search

from colibri import headers
from colibri.checkpoint import Checkpoint
from colibri.headers import Form
from converter import __main__ as converter

STACK = ["--k", "2", "--activation", "gelu", "--no-renormalize"]


def mixtral(folder, **options):
    arrays = mixtral_arrays(**options)
    write_pt(folder / "a.pt", arrays)
    (folder / "config.json").write_text(json.dumps(MIXTRAL_CONFIG))
    return arrays


def convert(path, output, *options):
    assert converter.main([str(path), str(output), *map(str, options), "--force"]) == 0
    return read_bin(output)


def forms(header):
    return [headers.form_of(f"{name}_t", header) for name in ("expert", "dense", "embed")]


def nearest(form, matrix, scale):
    """The values that the search gives a matrix; scale: the tensor's in the file."""
    codes, scales = search(form, np.float32(matrix), scale or 1.0)
    if form.dtype == FP8:
        return e4m3()[codes] * np.repeat(scales, form.group, 1)[:, :codes.shape[1]].astype(np.float64)
    return dequantise(form, codes, scales, scale=np.float32(scale)).astype(np.float64)


WIDE = Form(1, 0, 0)
CASES = [(["--dtype", "int4"], [Form(INT4, 64, 0), Form(INT8, 64, 0), Form(INT8, 64, 0)]),
         (["--dtype", "int8", "--group", 32], [Form(INT8, 32, 0)] * 3), (["--dtype", "fp8"], [Form(FP8, 128, 0)] * 3),
         (["--expert-dtype", "int4", "--group", 128], [Form(INT4, 128, 0), WIDE, WIDE]),
         (["--dense-dtype", "int4"], [WIDE, Form(INT4, 64, 0), Form(INT8, 64, 0)]),
         (["--dtype", "int4", "--dense-dtype", "f16"], [Form(INT4, 64, 0), WIDE, WIDE]),
         (["--dtype", "f16"], [WIDE] * 3)]


@pytest.mark.parametrize("options, expected", CASES, ids=lambda value: str(value)[:60])
def test_each_class_has_its_form_and_the_nearest_values(tmp_path, options, expected):
    """Odd sizes: 150 columns are groups of 64 and one of 22, and 6 rows of gate stand in one group of 8."""
    arrays = mixtral(tmp_path, hidden=150, ffn=70)
    (tmp_path / "config.json").write_text(json.dumps({**MIXTRAL_CONFIG, "hidden_size": 150, "intermediate_size": 70}))
    header, got = convert(tmp_path / "a.pt", tmp_path / "a.bin", *options)
    assert forms(header) == expected
    assert header["compute_dtype"] == (2 if options != ["--dtype", "f16"] else 0) and header["weight_dtype"] == 1
    scales = Checkpoint(tmp_path / "a.bin").scales
    sources = {"embed": arrays["model.embed_tokens.weight"], "lm_head": arrays["lm_head.weight"]}
    for layer in range(2):
        at = f"model.layers.{layer}."
        sources[f"layers.{layer}.qkv"] = np.concatenate([arrays[f"{at}self_attn.{x}_proj.weight"] for x in "qkv"])
        sources[f"layers.{layer}.attention_out"] = arrays[at + "self_attn.o_proj.weight"]
        for expert in range(3):
            one = [arrays[f"{at}block_sparse_moe.experts.{expert}.w{i}.weight"] for i in (1, 3, 2)]
            sources[f"layers.{layer}.experts_up", expert] = np.concatenate(one[:2])
            sources[f"layers.{layer}.experts_down", expert] = one[2]
    for key, matrix in sources.items():
        name, *place = (key, ) if isinstance(key, str) else key
        form = expected[2 if name in ("embed", "lm_head") else 0 if "experts" in name else 1]
        stored = got[name][tuple(place)] if place else got[name]
        wanted = nearest(form, matrix, scales.get(name, 0)) if form.group else matrix
        np.testing.assert_array_equal(stored, wanted, err_msg=name)
    np.testing.assert_array_equal(got["layers.1.router"], arrays["model.layers.1.block_sparse_moe.gate.weight"])


@pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("factor", [1e-3, 1, 1e3])
def test_sources_of_any_float(tmp_path, kind, factor):
    arrays = {name: (array * factor).astype(kind) for name, array in gpt_arrays(dtype="f8", hidden=70).items()}
    arrays["transformer.h.0.mlp.experts.1.w1.weight"][:] = 0
    _, got = convert(write_pt(tmp_path / "a.pt", arrays), tmp_path / "a.bin", *STACK, "--dtype", "int4")
    scale = Checkpoint(tmp_path / "a.bin").scales["layers.0.experts_up"]
    most = max(float(np.abs(arrays[f"transformer.h.0.mlp.experts.{e}.w1.weight"]).max()) for e in range(3))
    assert 2.0 ** 14 < most / scale < 2.0 ** 19 and np.log2(scale) % 1 == 0
    for expert in range(3):
        source = arrays[f"transformer.h.0.mlp.experts.{expert}.w1.weight"]
        np.testing.assert_array_equal(got["layers.0.experts_up"][expert], nearest(Form(INT4, 64, 0), source, scale))


def test_values_of_all_sizes_in_one_tensor(tmp_path):
    """A tensor's small groups keep their bits beside groups 2^20 times as large."""
    arrays = gpt_arrays(dtype=np.float32, hidden=128)
    for name in arrays:
        if name.endswith("w1.weight"):
            arrays[name][0] *= 2.0 ** 20
    for dtype, most in (("int8", 0.01), ("int4", 0.2)):
        _, got = convert(write_pt(tmp_path / "a.pt", arrays), tmp_path / "a.bin", *STACK, "--dtype", dtype)
        source = np.stack([arrays[f"transformer.h.1.mlp.experts.{e}.w1.weight"] for e in range(3)])
        size = np.abs(source).max(-1, keepdims=True)
        assert np.abs((got["layers.1.experts_up"] - source) / size).max() < most


@pytest.mark.parametrize("dtype", ["int4", "int8", "fp8"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_no_number_is_refused_by_name(capfd, tmp_path, dtype, value):
    arrays = gpt_arrays()
    arrays["transformer.h.1.mlp.experts.2.w2.weight"][3, 4] = value
    write_pt(tmp_path / "a.pt", arrays)
    assert converter.main([str(tmp_path / "a.pt"), str(tmp_path / "a.bin"), *STACK, "--dtype", dtype]) == 2
    error = capfd.readouterr().err
    assert f"transformer.h.1.mlp.experts.2.w2.weight: value={value:g} at [3, 4], expected a finite number" in error
    assert error.count("\n") == 1 and not (tmp_path / "a.bin").exists()


def inspected(capfd, *arguments):
    capfd.readouterr()
    assert converter.main([*map(str, arguments), "--inspect", "--json"]) == 0
    return json.loads(capfd.readouterr().out)


@pytest.mark.parametrize("folder", ["quantized/gptq4", "quantized/fp8", "quantized/mxfp4", "families/qwen3_moe"])
def test_inspect_counts_the_bytes_of_every_format(capfd, tmp_path, folder):
    folder = DATA / folder
    figures = inspected(capfd, folder)
    assert list(figures["formats"]) == ["bf16", "fp8", "int8", "int4"] and figures["missing"] == []
    for name, sizes in {"keep": figures, **figures["formats"]}.items():
        convert(folder, tmp_path / "a.bin", "--dtype", name)
        assert sizes["bin_bytes"] == (tmp_path / "a.bin").stat().st_size, name
        assert sizes["needed_bytes"] > sizes["bin_bytes"] and sizes["fits"]
        chosen = inspected(capfd, folder, "--dtype", name)
        assert chosen["bin_bytes"] == sizes["bin_bytes"] and not chosen["fits_gpu"]
    assert converter.main([str(folder), "--inspect", "--dtype", "int4", "--group", "32"]) == 0
    lines = dict(line.split(":", 1) for line in capfd.readouterr().out.splitlines())
    assert lines[".bin bytes"].endswith("in int4 (groups of 32), but int8 (groups of 32) beside the experts")
    assert lines["with --dtype"].strip().startswith("bf16 ") and ", int4 " in lines["with --dtype"]


def test_the_compute_dtype_is_the_checkpoints_own(tmp_path):
    for dtype, config, expected in (
            (np.float16, {}, 2), (np.float32, {}, 2), (np.float32, {"torch_dtype": "bfloat16"}, 3),
            (np.float16, {"dtype": "bfloat16"}, 3), (np.float32, {"dtype": "float32"}, 2)):
        mixtral(tmp_path, dtype=dtype)
        (tmp_path / "config.json").write_text(json.dumps({**MIXTRAL_CONFIG, **config}))
        header, _ = convert(tmp_path / "a.pt", tmp_path / "a.bin", "--dtype", "int4")
        assert header["compute_dtype"] == expected == header["weight_dtype"] + 1
