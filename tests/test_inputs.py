"""Whatever a user may point the converter at: folders, shards, DeepSpeed's and Megatron's files; and --inspect."""

import json
import os
import shutil

import numpy as np
import pytest
from converter_files import MIXTRAL_CONFIG, gpt_arrays, mixtral_arrays, read_bin, tensor, text, write_pt, write_zip
from test_converter import DATA, convert, refusal
from test_safetensors import entry, write

from colibri.checkpoint import Checkpoint
from colibri.engine import Engine
from colibri.errors import ColibriError
from converter import __main__ as converter
from converter import inputs

FAMILY = DATA / "families"
CHOICES = ["--k", "1", "--activation", "gelu", "--no-renormalize"]


def folder_of(path, arrays, config=MIXTRAL_CONFIG, **files):
    """A Hugging Face folder around pytorch_model.bin."""
    path.mkdir()
    write_pt(path / "pytorch_model.bin", arrays)
    (path / "config.json").write_text(json.dumps(config))
    for name, content in files.items():
        (path / f"{name}.json").write_text(json.dumps(content))
    return path


def test_shards_of_pickles(capfd, tmp_path):
    arrays = mixtral_arrays()
    folder = folder_of(tmp_path / "model", arrays)
    whole = (convert(folder, tmp_path / "whole.bin"), (tmp_path / "whole.bin").read_bytes())[1]
    names = list(arrays)
    shards = {"pytorch_model-1.bin": names[:20], "pytorch_model-2.bin": names[20:]}
    for shard, held in shards.items():
        write_pt(folder / shard, {name: arrays[name] for name in held})
    (folder / "pytorch_model.bin").unlink()
    index = folder / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": {name: shard for shard, held in shards.items() for name in held}}))
    convert(folder, tmp_path / "sharded.bin")
    assert (tmp_path / "sharded.bin").read_bytes() == whole
    (folder / "pytorch_model-2.bin").unlink()
    capfd.readouterr()
    assert "pytorch_model-2.bin: no such file beside it, expected every shard" in refusal(
        capfd, folder, tmp_path / "a.bin")


def test_an_index_that_is_a_pipe(capfd, tmp_path):
    os.mkfifo(tmp_path / "a.index.json")
    assert "a.index.json: no regular file" in refusal(capfd, tmp_path / "a.index.json", tmp_path / "a.bin")


def test_folders_that_are_none(capfd, tmp_path):
    (tmp_path / "empty").mkdir()
    assert "a directory without weights, expected one of model.safetensors.index.json" in refusal(
        capfd, tmp_path / "empty", tmp_path / "a.bin")
    folder = folder_of(tmp_path / "other", mixtral_arrays(), {**MIXTRAL_CONFIG, "model_type": "llama"})
    assert "model_type=llama, expected one of mixtral, olmoe" in refusal(capfd, folder, tmp_path / "a.bin")


def test_the_tokenizer_goes_into_the_file(tmp_path):
    folder = folder_of(tmp_path / "model", mixtral_arrays(), tokenizer={"some": "json"})
    convert(folder, tmp_path / "a.bin")
    checkpoint = Checkpoint(tmp_path / "a.bin")
    assert checkpoint.tokenizer == b'{"some": "json"}'
    data = bytearray((tmp_path / "a.bin").read_bytes())
    data[checkpoint.header["tokenizer_offset"]] ^= 1
    (tmp_path / "a.bin").write_bytes(data)
    with pytest.raises(ColibriError, match="tokenizer_crc32=.*the tokenizer is damaged"):
        Checkpoint(tmp_path / "a.bin")


def test_an_end_token_ends_the_text(tmp_path):
    """The greedy text of the recorded model, cut where its fifth token is declared an end."""
    recorded = np.load(FAMILY / "mixtral.npz")
    greedy, prompt = recorded["greedy"][0].tolist(), recorded["ids"][0][:8]
    folder = shutil.copytree(FAMILY / "mixtral", tmp_path / "model")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": greedy[5]}))
    convert(folder, tmp_path / "a.bin")
    with Engine(tmp_path / "a.bin", backend="host") as engine, engine.session() as session:
        assert list(session.generate(prompt, 24)) == greedy[:greedy.index(greedy[5])]


# DeepSpeed-MoE

def deepspeed(path, layers=2, experts=3, hidden=8, ffn=6, local=None, down_bias=0.0, nested=True):
    """A checkpoint folder with its MoE layers at transformer layers 1, 3, ...; {Colibri name: array} beside it."""
    step, generator, expected = path / "global_step7", np.random.default_rng(3), {}
    step.mkdir(parents=True)
    (path / "latest").write_text("global_step7\n")

    def numbers(*shape):
        return generator.standard_normal(shape).astype(np.float32)
    main = {"language_model.embedding.weight": numbers(5, hidden)}
    for moe in range(layers):
        block = f"language_model.encoder.layers.{2 * moe + 1}.mlp.deepspeed_moe."
        router = numbers(experts, hidden)
        main[block + "gate.wg.weight"] = expected[f"layers.{moe}.router"] = router
        parts = []
        for e in range(experts):
            number = e if local is None else e % local
            up, bias, down = numbers(ffn, hidden), numbers(ffn), numbers(hidden, ffn)
            parts.append((up, bias, down))
            leaf = f"{block}experts.deepspeed_experts.{number}."
            write_pt(step / f"layer_{moe}_expert_{e}_mp_rank_00_model_states.pt", {
                leaf + "dense_h_to_4h.weight": up, leaf + "dense_h_to_4h.bias": bias,
                leaf + "dense_4h_to_h.weight": down,
                leaf + "dense_4h_to_h.bias": np.full(hidden, down_bias, np.float32)})
        for name, arrays in zip(("experts_up", "experts_up_bias", "experts_down"), zip(*parts)):
            expected[f"layers.{moe}.{name}"] = np.stack(arrays)
    write_main(step / "mp_rank_00_model_states.pt", main, nested)
    return expected


def write_main(path, arrays, nested):
    """{"module": ...} with dotted names, or those of the embedding as dicts in dicts."""
    classes, items, storages = "FloatStorage", [], {}
    for key, (name, array) in enumerate(arrays.items()):
        storages[str(key)] = array.tobytes()
        strides = [stride // 4 for stride in array.strides]
        items.append((name, tensor(classes, str(key), array.size, 0, array.shape, strides)))
    flat = b"".join(text(name.removeprefix("language_model.")) + item for name, item in items)
    inner = (text("language_model") + b"}(" + flat + b"u" if nested
             else b"".join(text(name) + item for name, item in items))
    write_zip(path, b"}(" + text("module") + b"}(" + inner + b"u" + text("optimizer") + b"Nu", storages)


@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("local", [None, 2])
def test_deepspeed_folder(tmp_path, nested, local):
    expected = deepspeed(tmp_path / "ds", layers=11, experts=4, local=local, nested=nested)
    header, arrays = convert(tmp_path / "ds", tmp_path / "a.bin", *CHOICES)
    assert (header["gated"], header["expert_bias"], header["num_layers"], header["ffn"]) == (0, 1, 11, 6)
    for name, array in expected.items():
        np.testing.assert_array_equal(arrays[name].reshape(array.shape), array, err_msg=name)
    assert not arrays["layers.0.experts_down_bias"].any()


def test_deepspeed_bias_that_is_not_added(capfd, tmp_path):
    deepspeed(tmp_path / "ds", down_bias=0.5)
    convert(tmp_path / "ds", tmp_path / "a.bin", *CHOICES)
    assert capfd.readouterr().err.count("dense_4h_to_h.bias: not zero, but DeepSpeed does not add it either") == 6


@pytest.mark.parametrize("change, cause", [
    (lambda step: (step / "layer_1_expert_2_mp_rank_00_model_states.pt").unlink(), "missing expert 2 of MoE layer 1"),
    (lambda step: (step / "mp_rank_01_model_states.pt").touch(), "mp_rank_01, expected mp_rank_00 alone"),
    (lambda step: (step / "mp_rank_00_model_states.pt").unlink(), "mp_rank_00_model_states.pt: No such file"),
    (lambda step: shutil.copy(step / "layer_0_expert_0_mp_rank_00_model_states.pt",
                              step / "layer_0_expert_3_mp_rank_00_model_states.pt"), "extra expert"),
    (lambda step: shutil.copy(step / "layer_0_expert_0_mp_rank_00_model_states.pt",
                              step / "layer_1_expert_0_mp_rank_00_model_states.pt"), "belongs to another layer"),
    (lambda step: shutil.copy(step / "layer_0_expert_2_mp_rank_00_model_states.pt",
                              step / "layer_0_expert_1_mp_rank_00_model_states.pt"), "expert 2 by the names in it"),
    (lambda step: shutil.copy(step / "layer_0_expert_2_mp_rank_00_model_states.pt",
                              step / "layer_0_expert_02_mp_rank_00_model_states.pt"), "the same expert twice"),
    (lambda step: [file.unlink() for file in step.iterdir()], "no mp_rank_00_model_states.pt, expected one in a Deep"),
    (lambda step: (step.parent / "latest").write_text("../elsewhere"), "'../elsewhere', expected the name of a folder"),
])
def test_deepspeed_folders_that_cannot_be(capfd, tmp_path, change, cause):
    deepspeed(tmp_path / "ds")
    change(tmp_path / "ds" / "global_step7")
    assert cause in refusal(capfd, tmp_path / "ds", tmp_path / "a.bin", *CHOICES)


def test_an_expert_in_the_place_of_another_of_its_rank(capfd, tmp_path):
    deepspeed(tmp_path / "ds", experts=6, local=3)
    step = tmp_path / "ds" / "global_step7"
    shutil.copy(step / "layer_1_expert_5_mp_rank_00_model_states.pt",
                step / "layer_1_expert_3_mp_rank_00_model_states.pt")
    assert "layer_1_expert_3_mp_rank_00_model_states.pt: expert 2 by the names in it, expected 3" in refusal(
        capfd, tmp_path / "ds", tmp_path / "a.bin", *CHOICES)


# Megatron and fairseq

def stack_arrays(router, up, down, gated=1, biases=None, layers=2, experts=12, hidden=10, ffn=6):
    """({checkpoint name: array}, {Colibri name: array}); templates have {n} and {e}."""
    generator, arrays, expected = np.random.default_rng(5), {}, {}
    for n in range(layers):
        arrays[router.format(n=n)] = expected[f"layers.{n}.router"] = generator.standard_normal((experts, hidden))
        shapes = {"experts_up": (up, (ffn * (1 + gated), hidden)), "experts_down": (down, (hidden, ffn))}
        if biases:
            shapes |= {"experts_up_bias": (biases[0], (ffn,)), "experts_down_bias": (biases[1], (hidden,))}
        for field, (template, shape) in shapes.items():
            stacked = generator.standard_normal((experts, *shape))
            expected[f"layers.{n}.{field}"] = stacked
            arrays |= {template.format(n=n, e=e): stacked[e] for e in range(experts)}
    return ({name: array.astype(np.float32) for name, array in arrays.items()},
            {name: array.astype(np.float32) for name, array in expected.items()})


MEGATRON = "decoder.layers.{n}.mlp.experts."
FAIRSEQ = "decoder.layers.{n}.moe_layer."


@pytest.mark.parametrize("gated", [0, 1])
@pytest.mark.parametrize("fc1, fc2", [("local_experts.{e}.linear_fc1.weight", "local_experts.{e}.linear_fc2.weight"),
                                      ("linear_fc1.weight{e}", "linear_fc2.weight{e}")])
def test_megatron(tmp_path, gated, fc1, fc2):
    arrays, expected = stack_arrays("decoder.layers.{n}.mlp.router.weight", MEGATRON + fc1, MEGATRON + fc2, gated)
    header, got = convert(write_pt(tmp_path / "a.pt", arrays), tmp_path / "a.bin", *CHOICES)
    assert header["gated"] == gated and got.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(got[name], array)
    del arrays[(MEGATRON + fc2).format(n=1, e=11)]
    with pytest.raises(ColibriError, match=r"missing tensor " + (MEGATRON + fc2).format(n=1, e=11)):
        converter.convert(converter.parser().parse_args([str(write_pt(tmp_path / "b.pt", arrays)),
                                                         str(tmp_path / "b.bin"), *CHOICES]))


@pytest.mark.parametrize("gated", [0, 1])
def test_megatron_experts_in_two_matrices(tmp_path, gated):
    """Its forward pass is rows @ weight1.view(E, hidden, -1)[e], gate columns before up columns, then @ weight2's."""
    experts, hidden, ffn = 5, 8, 12
    generator, columns = np.random.default_rng(6), ffn * (1 + gated)
    router, weight1, weight2 = (generator.standard_normal(shape).astype(np.float32) for shape in (
        (experts, hidden), (hidden, experts * columns), (experts * ffn, hidden)))
    place = "decoder.layers.0.mlp."
    arrays = {place + "router.weight": router, place + "experts.weight1": weight1, place + "experts.weight2": weight2}
    header, got = convert(write_pt(tmp_path / "a.pt", arrays), tmp_path / "a.bin", "--k", "2", "--activation", "silu",
                          "--renormalize", "--ffn", str(ffn))
    assert (header["num_experts"], header["hidden"], header["ffn"], header["gated"]) == (experts, hidden, ffn, gated)
    x = generator.standard_normal((3, hidden)).astype(np.float32)
    for e in range(experts):
        np.testing.assert_allclose(x @ got["layers.0.experts_up"][e].T,
                                   x @ weight1.reshape(experts, hidden, columns)[e], rtol=1e-4, atol=1e-5)
        np.testing.assert_array_equal(got["layers.0.experts_down"][e].T, weight2.reshape(experts, ffn, hidden)[e])
    arrays[place + "experts.weight1"] = np.asfortranarray(weight1)  # has no such view
    with pytest.raises(ColibriError, match="experts.weight1: float32 with strides, expected one block of plain floats"):
        read_all(write_pt(tmp_path / "b.pt", arrays), "--k", "2", "--activation", "silu", "--renormalize", "--ffn",
                 "12")


def test_one_rank_of_megatron_experts_is_not_taken_for_all(tmp_path):
    """2 of 4 experts of ffn 8 have the shapes of 4 of ffn 4."""
    place = "decoder.layers.0.mlp."
    arrays = {place + "router.weight": np.ones((4, 6), np.float32),
              place + "experts.weight1": np.ones((6, 16), np.float32),
              place + "experts.weight2": np.ones((16, 6), np.float32)}
    path, flags = write_pt(tmp_path / "a.pt", arrays), ("--k", "2", "--activation", "silu", "--renormalize")
    with pytest.raises(ColibriError) as error:
        read_all(path, *flags)
    assert str(error.value) == (
        f"{path}: experts.weight1: no ffn given, expected it, since 4 experts of 4 rows look like a rank's share of "
        "larger ones; give --ffn 4 if these are all")
    with pytest.raises(ColibriError) as error:
        read_all(path, *flags, "--ffn", "8")
    assert str(error.value) == (f"{path}: experts.weight1: rows for 4 experts of ffn=4, expected ffn=8; it has one "
                                "rank's experts alone, join those of all ranks")


def read_all(path, *flags):
    return converter.convert(converter.parser().parse_args([str(path), str(path.with_suffix(".bin")), *flags]))


def test_groups_and_scaling_of_bare_layers(capfd, tmp_path):
    """From a config or from flags; a family whose models have them says what it takes where nothing tells."""
    path = shutil.copy(DATA / "pt" / "fam_deepseek_v3.pt", tmp_path / "a.pt")
    experts = convert(path, tmp_path / "0.bin", *CHOICES[:2], "--renormalize")[0]["num_experts"]
    assert ("taken to choose from all experts and not to scale; if it does otherwise, give --num-groups, "
            "--topk-groups, --routed-scaling") in capfd.readouterr().err
    flags = ["--num-groups", experts, "--topk-groups", "2", "--routed-scaling", "2.5"]
    one = convert(path, tmp_path / "1.bin", *CHOICES[:2], "--renormalize", *flags)[0]
    assert (one["num_groups"], one["topk_groups"], one["routed_scaling"]) == (experts, 2, 2.5)
    values = {"n_group": int(experts), "topk_group": 2, "routed_scaling_factor": 2.5, "num_experts_per_tok": 1,
              "norm_topk_prob": True, "scoring_func": "sigmoid"}
    (tmp_path / "a.json").write_text(json.dumps(values))
    assert convert(path, tmp_path / "2.bin")[0].tobytes() == one.tobytes() and not capfd.readouterr().err
    assert "--topk-groups: 1, but" in refusal(capfd, path, tmp_path / "b.bin", "--topk-groups", "1")
    (tmp_path / "a.json").write_text(json.dumps({**values, "scoring_func": "softmax"}))
    assert 'scoring_func="softmax", expected softmax or sigmoid, as deepseek_v3' in refusal(
        capfd, path, tmp_path / "b.bin")
    (tmp_path / "a.json").write_text(json.dumps({**values, "n_group": 5}))
    assert f"num_groups=5, expected a divisor of num_experts={experts}" in refusal(capfd, path, tmp_path / "b.bin")


def test_bare_names_of_families_that_route_differently(capfd, tmp_path):
    """Mixtral's names on disk are phimoe's too; phimoe's fused names could be gpt_oss's, which has biases, though."""
    generator, shape = np.random.default_rng(0), {"experts.gate_up_proj": (3, 12, 10), "experts.down_proj": (3, 10, 6)}
    convert(DATA / "pt" / "fam_mixtral_disk.pt", tmp_path / "a.bin", *CHOICES[:2], "--renormalize")
    warning = "mixtral/phimoe: names of families that route differently: taken to route by softmax"
    assert warning in capfd.readouterr().err
    arrays = {f"model.layers.0.mlp.{name}": generator.standard_normal(size).astype(np.float32)
              for name, size in {"router.weight": (3, 10), **shape}.items()}
    header, got = convert(write_pt(tmp_path / "b.pt", arrays), tmp_path / "b.bin")
    assert header["router_kind"] == 3 and not capfd.readouterr().err
    np.testing.assert_array_equal(got["layers.0.experts_up"], arrays["model.layers.0.mlp.experts.gate_up_proj"])


def test_megatron_correction_means_sigmoid_scores(tmp_path):
    arrays, _ = stack_arrays("decoder.layers.{n}.mlp.router.weight", MEGATRON + "linear_fc1.weight{e}",
                             MEGATRON + "linear_fc2.weight{e}")
    for n in range(2):
        arrays[f"decoder.layers.{n}.mlp.router.expert_bias"] = np.arange(12, dtype=np.float32) + n
    header, got = convert(write_pt(tmp_path / "a.pt", arrays), tmp_path / "a.bin", *CHOICES)
    assert (header["router_kind"], header["router_bias"]) == (2, 1)
    np.testing.assert_array_equal(got["layers.1.router_bias"], np.arange(12) + 1)


def test_fairseq_biases_are_added(tmp_path):
    arrays, expected = stack_arrays(FAIRSEQ + "gate.wg.weight", FAIRSEQ + "experts.{e}.fc1.weight",
                                    FAIRSEQ + "experts.{e}.fc2.weight", 0,
                                    (FAIRSEQ + "experts.{e}.fc1.bias", FAIRSEQ + "experts.{e}.fc2.bias"), layers=1)
    path = write_pt(tmp_path / "a.pt", arrays)
    header, _ = convert(path, tmp_path / "a.bin", "--k", "2", "--activation", "relu", "--renormalize")
    assert header["expert_bias"] == 1
    layer = {name.split(".")[-1]: array.astype(np.float64) for name, array in expected.items()}
    x = np.random.default_rng(1).standard_normal((7, 10)).astype(np.float32)
    scores = np.exp(x @ layer["router"].T)
    y = np.zeros_like(x, np.float64)
    for t, row in enumerate(x):
        ids = np.argsort(-scores[t])[:2]
        for e in ids:
            mid = np.maximum(layer["experts_up"][e] @ row + layer["experts_up_bias"][e], 0)
            out = layer["experts_down"][e] @ mid + layer["experts_down_bias"][e]
            y[t] += scores[t, e] / scores[t, ids].sum() * out
    with Engine(tmp_path / "a.bin", backend="host") as engine:
        np.testing.assert_allclose(engine.stack(x), y, rtol=1e-4, atol=1e-5)


# --inspect

def test_inspect_counts(capfd, tmp_path):
    assert converter.main([str(FAMILY / "qwen2_moe"), "--inspect", "--json"]) == 0
    figures = json.loads(capfd.readouterr().out)
    convert(FAMILY / "qwen2_moe", tmp_path / "a.bin")
    header, arrays = read_bin(tmp_path / "a.bin")
    arrays.pop("rope_frequencies")
    experts = sum(array.size for array in arrays.values() if array.ndim == 3)
    total = sum(array.size for array in arrays.values())
    assert (figures["family"], figures["layers"], figures["experts"], figures["k"]) == (
        "qwen2_moe", header["num_layers"], header["num_experts"], header["k"])
    assert figures["parameters"] == total == figures["checkpoint_bytes"] // 4
    assert figures["active_parameters"] == total - experts + experts * header["k"] // header["num_experts"]
    assert figures["bin_bytes"] == (tmp_path / "a.bin").stat().st_size and figures["fits"]
    assert figures["missing"] == figures["extra"] == []


def test_the_output_may_come_after_options(tmp_path):
    assert converter.main([str(DATA / "gpt-moe-32.pt"), "--k", "2", *CHOICES[2:], str(tmp_path / "a.bin")]) == 0
    assert read_bin(tmp_path / "a.bin")[0]["k"] == 2


def test_inspect_tells_what_is_missing(capfd, tmp_path):
    arrays = mixtral_arrays()
    del arrays["model.layers.1.block_sparse_moe.experts.2.w3.weight"]
    folder = folder_of(tmp_path / "model", arrays)
    assert converter.main([str(folder), "--inspect"]) == 0
    lines = dict(line.split(":", 1) for line in capfd.readouterr().out.splitlines())
    assert lines["missing"].strip() == "model.layers.1.block_sparse_moe.experts.2.w3.weight"
    assert lines["family"].strip() == "mixtral" and lines["fits this machine"].strip().startswith("yes: ")
    assert converter.main([str(DATA / "gpt-moe-32.pt"), "--inspect"]) == 0
    assert "a choice of --k, a choice of --activation" in capfd.readouterr().out


def inspected(capfd, *arguments):
    assert converter.main([*map(str, arguments), "--inspect", "--json"]) == 0
    return json.loads(capfd.readouterr().out)


def test_inspect_lists_files_that_are_missing(capfd, tmp_path):
    figures = inspected(capfd, DATA / "pt" / "deepspeed_missing")
    assert figures["missing"][:3] == ["a choice of --k", "a choice of --activation",
                                      "a choice of --renormalize or --no-renormalize"]
    assert figures["missing"][3] == "layer_1_expert_7_mp_rank_00_model_states.pt"
    assert (figures["family"], figures["layers"], figures["experts"]) == ("deepspeed", 2, 12)
    folder = shutil.copytree(FAMILY / "mixtral", tmp_path / "model")
    (folder / "model-00003-of-00011.safetensors").unlink()
    weight_map = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    lost = {name for name, shard in weight_map.items() if shard == "model-00003-of-00011.safetensors"}
    missing = inspected(capfd, folder)["missing"]
    assert missing[0] == "model-00003-of-00011.safetensors" and set(missing[1:]) == lost


def test_a_model_larger_than_the_memory_does_not_fit(capfd, monkeypatch):
    from converter import inspection
    assert inspected(capfd, FAMILY / "mixtral")["fits"] is True
    monkeypatch.setattr(inspection, "_memory_bytes", lambda: 1 << 20)
    assert inspected(capfd, FAMILY / "mixtral")["fits"] is False


@pytest.mark.parametrize("tool, name, memory, fits", [
    (None, "qwen3_moe", None, None), ("echo 143771; echo 1", "qwen3_moe", 143771 << 20, True),
    ("echo 1", "qwen3_moe", 1 << 20, False), ("echo 143771", "mixtral", 143771 << 20, False),  # f32
    ("exit 9", "qwen3_moe", None, None), ("echo none", "qwen3_moe", None, None)])
def test_whether_a_model_fits_the_gpu(capfd, monkeypatch, tmp_path, tool, name, memory, fits):
    if tool:
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{tool}\n")
        (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    figures = inspected(capfd, FAMILY / name)
    assert (figures["gpu_memory_bytes"], figures["fits_gpu"]) == (memory, fits)
    assert converter.main([str(FAMILY / name), "--inspect"]) == 0
    line = next(line for line in capfd.readouterr().out.splitlines() if line.startswith("fits this GPU:"))
    assert line.split(":")[1].strip() == ("none found" if memory is None else "yes" if fits else "no")


@pytest.mark.parametrize("arguments, cause", [
    (["--json", "a.bin"], "--json: given, expected only with --inspect"), ([], "required: output"),
    (["--inspect", "a.bin"], "a.bin: an output with --inspect")])
def test_options_of_inspect(capfd, arguments, cause):
    assert converter.main([str(FAMILY / "mixtral"), *arguments]) == 2
    assert cause in capfd.readouterr().err


@pytest.mark.parametrize("numbers, error", [
    ([3, 4], ("layers from 3 on, expected the first to be 0; convert the checkpoint that has those before it, or "
              "rename these")),
    ([0, 2], ("missing tensor transformer.h.1.mlp.router.weight (and 6 more), expected 3 experts in each MoE layer of "
              "3 layers; the checkpoint is incomplete"))])
def test_bare_layers_that_are_not_all(capfd, tmp_path, numbers, error):
    arrays = {name.replace("h.0.", f"h.{number}."): array
              for number in numbers for name, array in gpt_arrays(layers=1).items()}
    write_pt(tmp_path / "a.pt", arrays)
    assert refusal(capfd, tmp_path / "a.pt", tmp_path / "a.bin", *CHOICES) == f"{tmp_path}/a.pt: {error}\n"


def test_a_file_of_an_earlier_conversion(tmp_path):
    """Still mapped, and cut off since: that is nothing to the next one."""
    write_pt(tmp_path / "a.pt", gpt_arrays())
    write_pt(tmp_path / "b.pt", gpt_arrays())
    held = inputs.read(tmp_path / "a.pt")
    os.truncate(tmp_path / "a.pt", 100)
    convert(tmp_path / "b.pt", tmp_path / "b.bin", *CHOICES)
    assert held.tensors


def test_bare_layers_without_experts(capfd, tmp_path):
    """A router of no rows, where only the number of experts tells their size; and a checkpoint of nothing."""
    arrays = {"router.weight": np.ones((0, 8), "f2"), "experts.weight1": np.ones((8, 24), "f2"),
              "experts.weight2": np.ones((12, 8), "f2")}
    write_pt(tmp_path / "a.pt", {f"decoder.layers.0.mlp.{name}": array for name, array in arrays.items()})
    write(tmp_path / "none.safetensors", {}, b"")
    for arguments in (["--inspect"], [tmp_path / "a.bin", *CHOICES]):
        assert refusal(capfd, tmp_path / "a.pt", *arguments) == (
            f"{tmp_path}/a.pt: num_experts=0, expected 1 to 256; correct the config or the flag\n")
        assert refusal(capfd, tmp_path / "none.safetensors", *arguments) == (
            f"{tmp_path}/none.safetensors: 0 tensors, expected those of a model; download or save the checkpoint "
            "again\n")


def write_safetensors(path, arrays):
    ends = np.cumsum([array.nbytes for array in arrays.values()]).tolist()
    header = {name: entry("F16", array.shape, end - array.nbytes, end)
              for end, (name, array) in zip(ends, arrays.items())}
    write(path, header, b"".join(array.tobytes() for array in arrays.values()))


@pytest.mark.parametrize("arguments", [["--inspect"], ["a.bin", "--k", "1", "--renormalize", "--activation", "silu"]])
def test_a_whole_model_without_its_config(capfd, tmp_path, arguments):
    """Is not taken for a bare stack, which needs none."""
    arrays = mixtral_arrays()
    write_safetensors(tmp_path / "model.safetensors", arrays)
    error = ("model.safetensors: model.embed_tokens.weight (and 6 more) of a whole language model, but no config with "
             "model_type, expected its config.json beside it; put it there, or name it with --config\n")
    assert refusal(capfd, tmp_path / "model.safetensors", *arguments).endswith(error)
    attention = {name: array for name, array in arrays.items() if "moe" in name or "q_proj" in name}
    write_safetensors(tmp_path / "model.safetensors", attention)
    error = "0.self_attn.q_proj.weight (and 1 more) of a whole language model, but no config"
    assert error in refusal(capfd, tmp_path / "model.safetensors", *arguments)
    stack = {name: array for name, array in arrays.items() if "moe" in name}
    write_safetensors(tmp_path / "model.safetensors", stack)
    assert inspected(capfd, tmp_path / "model.safetensors")["missing"] == [
        "a choice of --k", "a choice of --renormalize or --no-renormalize"]
