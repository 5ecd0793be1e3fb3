"""converter/folders.py: which weights of a folder are read, and what is no model."""

import json
import shutil

import numpy as np
import pytest
from converter_files import MIXTRAL_CONFIG, gpt_arrays, mixtral_arrays, write_pt
from test_converter import convert
from test_converter import refusal as refusal_after
from test_inputs import CHOICES, deepspeed, inspected, write_safetensors

OLD, NEW = mixtral_arrays(seed=1), mixtral_arrays(seed=2)
FORMATS = {"safetensors": ("model", ".safetensors", write_safetensors), "bin": ("pytorch_model", ".bin", write_pt)}


@pytest.fixture(params=FORMATS)
def format(request):
    return FORMATS[request.param]


def refusal(capfd, *arguments):
    """The one line of a conversion that fails, whatever was printed before."""
    capfd.readouterr()
    return refusal_after(capfd, *arguments)


def folder_of(path, config=MIXTRAL_CONFIG):
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    return path


def write_whole(folder, format, arrays):
    format[2](folder / (format[0] + format[1]), arrays)


def write_shards(folder, format, arrays, total=2, first=1, left_out=(), spelled="{:05}-of-{:05}"):
    """Numbered shards; {tensor: shard}, the map of an index."""
    names, weight_map = list(arrays), {}
    for i in range(total):
        shard = f"{format[0]}-{spelled.format(i + first, total)}{format[1]}"
        held = {name: arrays[name] for name in names[i::total]}
        weight_map |= dict.fromkeys(held, shard)
        if i + first not in left_out:
            format[2](folder / shard, held)
    return weight_map


def write_index(folder, format, weight_map):
    (folder / f"{format[0]}{format[1]}.index.json").write_text(json.dumps({"weight_map": weight_map}))


def bin_of(tmp_path, arrays):
    """The .bin of arrays in a plain folder."""
    folder = folder_of(tmp_path / "plain")
    write_whole(folder, FORMATS["safetensors"], arrays)
    convert(folder, tmp_path / "plain.bin")
    return (tmp_path / "plain.bin").read_bytes()


def test_a_whole_file_and_the_index_of_shards_that_are_gone(capfd, tmp_path, format):
    stem, suffix, _ = format
    for left_out in ((1, 2), (2,)):
        folder = folder_of(tmp_path / f"model{len(left_out)}")
        write_index(folder, format, write_shards(folder, format, OLD, left_out=left_out))
        write_whole(folder, format, NEW)
        convert(folder, tmp_path / "a.bin", "--force")
        more = " (and 1 more)" if len(left_out) == 2 else ""
        assert capfd.readouterr().err == (
            f"{folder}/{stem}{suffix}: taken, because {stem}{suffix}.index.json lacks "
            f"{stem}-0000{left_out[0]}-of-00002{suffix}{more}\n")
        assert (tmp_path / "a.bin").read_bytes() == bin_of(tmp_path / f"model{len(left_out)}", NEW)


def test_two_whole_sets_are_refused(capfd, tmp_path, format):
    stem, suffix, _ = format
    folder = folder_of(tmp_path / "model")
    weight_map = write_shards(folder, format, OLD)
    write_index(folder, format, weight_map)
    write_whole(folder, format, NEW)
    error = "two sets of weights, expected one; move the one that is not meant away\n"
    for arguments in ([tmp_path / "a.bin"], ["--inspect"]):
        assert refusal(capfd, folder, *arguments) == (
            f"{folder}: {stem}{suffix}.index.json and {stem}{suffix}: {error}")
    (folder / f"{stem}{suffix}.index.json").unlink()
    assert refusal(capfd, folder, tmp_path / "a.bin") == (
        f"{folder}: {stem}{suffix} and {stem}-*-of-00002{suffix}: {error}")
    write_index(folder, format, weight_map)
    (folder / f"{stem}{suffix}").unlink()
    write_shards(folder, format, NEW, total=3)
    assert refusal(capfd, folder, tmp_path / "a.bin") == (
        f"{folder}: {stem}{suffix}.index.json and {stem}-*-of-00003{suffix}: {error}")


def test_an_index_of_the_whole_file(tmp_path, format):
    folder = folder_of(tmp_path / "model")
    write_whole(folder, format, NEW)
    write_index(folder, format, dict.fromkeys(NEW, format[0] + format[1]))
    convert(folder, tmp_path / "a.bin")
    assert (tmp_path / "a.bin").read_bytes() == bin_of(tmp_path, NEW)


@pytest.mark.parametrize("first, spelled", [(1, "{:05}-of-{:05}"), (0, "{:05}-of-{:05}"), (1, "{:05}-of-{:06}"),
                                            (1, "{}-of-{}")])
def test_numbered_shards_without_an_index(capfd, tmp_path, format, first, spelled):
    stem, suffix, _ = format
    folder = folder_of(tmp_path / "model")
    write_shards(folder, format, NEW, 11, first, spelled=spelled)
    convert(folder, tmp_path / "a.bin")
    assert (tmp_path / "a.bin").read_bytes() == bin_of(tmp_path, NEW)
    for number in (3, 10):
        (folder / f"{stem}-{spelled.format(number, 11)}{suffix}").unlink()
    total = spelled.format(0, 11).split("-of-")[1]
    assert refusal(capfd, folder, tmp_path / "b.bin") == (
        f"{folder}: missing {stem}-{spelled.format(3, 11)}{suffix} (and 1 more), expected all 11 of "
        f"{stem}-*-of-{total}{suffix}; download or save the checkpoint again\n")
    assert inspected(capfd, folder)["missing"][:2] == [f"{stem}-{spelled.format(n, 11)}{suffix}" for n in (3, 10)]


def test_shards_of_two_totals(capfd, tmp_path, format):
    """Refused where nothing says which is meant, even if one is not whole; an index, or a whole file, says so."""
    stem, suffix, _ = format
    folder = folder_of(tmp_path / "model")
    weight_map = write_shards(folder, format, NEW)
    write_shards(folder, format, OLD, 3, left_out=(2,))
    assert refusal(capfd, folder, tmp_path / "a.bin") == (
        f"{folder}: {stem}-*-of-00002{suffix} and {stem}-*-of-00003{suffix}: two sets of weights, expected one; move "
        "the one that is not meant away\n")
    write_index(folder, format, weight_map)
    convert(folder, tmp_path / "a.bin")
    assert (tmp_path / "a.bin").read_bytes() == bin_of(tmp_path, NEW)
    (folder / f"{stem}-00001-of-00002{suffix}").unlink()
    assert f"{stem}{suffix}.index.json and {stem}-*-of-00003{suffix}: two sets" in refusal(
        capfd, folder, tmp_path / "b.bin")
    write_whole(folder, format, NEW)
    convert(folder, tmp_path / "a.bin", "--force")
    assert (tmp_path / "a.bin").read_bytes() == (tmp_path / "plain.bin").read_bytes()


def test_an_old_index_beside_other_shards(capfd, tmp_path, format):
    folder = folder_of(tmp_path / "model")
    write_index(folder, format, write_shards(folder, format, OLD, 3, left_out=(1, 2, 3)))
    write_shards(folder, format, NEW)
    convert(folder, tmp_path / "a.bin")
    assert "-*-of-00002" in capfd.readouterr().err
    assert (tmp_path / "a.bin").read_bytes() == bin_of(tmp_path, NEW)


@pytest.mark.parametrize("number, cause", [
    ("3-of-00002", "a number beyond 00002, expected 1 to 2; give the shards their own names again"),
    ("0002-of-00002", "the same shard twice, expected it once"), ("00000-of-00002", "a number beyond 00002")])
def test_numbers_that_cannot_be(capfd, tmp_path, format, number, cause):
    folder = folder_of(tmp_path / "model")
    write_shards(folder, format, NEW)
    format[2](folder / f"{format[0]}-{number}{format[1]}", {"a": np.zeros(2, "f2")})
    assert cause in refusal(capfd, folder, tmp_path / "a.bin")


def test_shards_that_share_a_tensor(capfd, tmp_path, format):
    folder = folder_of(tmp_path / "model")
    write_shards(folder, format, {**NEW, "lm_head.weight": OLD["lm_head.weight"]})
    format[2](folder / f"{format[0]}-00001-of-00002{format[1]}", NEW)
    assert "-00002-of-00002" + format[1] + ": model." in (error := refusal(capfd, folder, tmp_path / "a.bin"))
    assert "in another shard, too, expected each tensor once" in error


def test_one_shard_alone_is_not_the_model(capfd, tmp_path, format):
    arrays = gpt_arrays(layers=1)
    path = tmp_path / f"{format[0]}-00001-of-00003{format[1]}"
    format[2](path, arrays)
    assert refusal(capfd, path, tmp_path / "a.bin", *CHOICES) == (
        f"{path}: one of 3 shards, expected all of them; name the folder, {tmp_path}\n")
    path = path.rename(tmp_path / f"{format[0]}-00001-of-00001{format[1]}")
    convert(path, tmp_path / "a.bin", *CHOICES)


# Both formats

def test_safetensors_go_before_the_same_pickles(capfd, tmp_path):
    folder = folder_of(tmp_path / "model")
    write_whole(folder, FORMATS["safetensors"], NEW)
    expected = bin_of(tmp_path, NEW)
    for others in ({**NEW, "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(3, "f4")},
                   {name: array for name, array in NEW.items() if name != "lm_head.weight"}):
        write_whole(folder, FORMATS["bin"], others)
        convert(folder, tmp_path / "a.bin", "--force")
        assert not capfd.readouterr().err
        assert (tmp_path / "a.bin").read_bytes() == expected


NORM = "model.layers.1.input_layernorm.weight"


@pytest.mark.parametrize("change, where", [
    (lambda arrays: OLD, "model.embed_tokens.weight"), (lambda arrays: {"a": np.ones(3, "f2")}, "every name"),
    (lambda arrays: {**arrays, NORM: arrays[NORM] + np.float16(1)}, NORM),
    (lambda arrays: {**arrays, NORM: arrays[NORM].astype("f4")}, NORM),
    (lambda arrays: {**arrays, NORM: arrays[NORM][:9]}, NORM)])
def test_safetensors_and_pickles_of_two_models(capfd, tmp_path, change, where):
    folder = folder_of(tmp_path / "model")
    write_whole(folder, FORMATS["safetensors"], NEW)
    write_whole(folder, FORMATS["bin"], change(NEW))
    assert refusal(capfd, folder, tmp_path / "a.bin") == (
        f"{folder}: model.safetensors and pytorch_model.bin: differ in {where}, expected the same tensors; move the "
        f"one "
        "that is not meant away\n")


def test_a_format_that_cannot_be_read_is_no_choice(capfd, tmp_path):
    folder = folder_of(tmp_path / "model")
    write_whole(folder, FORMATS["safetensors"], NEW)
    (folder / "pytorch_model.bin").write_bytes(b"version https://git-lfs\noid sha256:00\n")
    convert(folder, tmp_path / "a.bin")
    assert (tmp_path / "a.bin").read_bytes() == bin_of(tmp_path, NEW)
    (folder / "model.safetensors").unlink()
    write_whole(folder, FORMATS["bin"], NEW)
    write_index(folder, FORMATS["safetensors"], dict.fromkeys(OLD, "model-00001-of-00001.safetensors"))
    capfd.readouterr()
    convert(folder, tmp_path / "b.bin")
    assert capfd.readouterr().err == (f"{folder}/pytorch_model.bin: taken, because model.safetensors.index.json lacks "
                                       "model-00001-of-00001.safetensors\n")
    assert (tmp_path / "b.bin").read_bytes() == (tmp_path / "a.bin").read_bytes()


# Tensors that are left out

LEFT_OUT = {"module.model.layers.0.self_attn.rotary_emb.inv_freq": (3,), "model.layers.2.mlp.up_proj.weight": (4, 10),
            "model.layers.2.mlp.up_proj.weight_scale_inv": (1, 1), "lm_head.weight": (11, 10)}


@pytest.mark.parametrize("how", ["absent shard", "not in its shard", "not in the index"])
def test_what_is_left_out_may_be_missing(capfd, tmp_path, format, how):
    folder = folder_of(tmp_path / "model", {**MIXTRAL_CONFIG, "tie_word_embeddings": True,
                                            "num_nextn_predict_layers": 1})
    arrays = {name: array for name, array in NEW.items() if name != "lm_head.weight"}
    write_whole(folder, format, arrays)
    convert(folder, tmp_path / "whole.bin")
    (folder / (format[0] + format[1])).unlink()
    weight_map = write_shards(folder, format, arrays)
    second = next(shard for shard in weight_map.values() if "00002" in shard)
    gone = f"{format[0]}-00003-of-00003{format[1]}" if how == "absent shard" else second
    if how == "not in the index":
        extra = {name: np.zeros(shape, "f2") for name, shape in [*LEFT_OUT.items()][:2]}
        held = {name: array for name, array in arrays.items() if weight_map[name] == second}
        format[2](folder / second, {**held, **extra})
    else:
        weight_map |= dict.fromkeys(LEFT_OUT, gone)
    write_index(folder, format, weight_map)
    convert(folder, tmp_path / "a.bin")
    assert (tmp_path / "a.bin").read_bytes() == (tmp_path / "whole.bin").read_bytes()
    capfd.readouterr()
    assert inspected(capfd, folder)["missing"] == []


def test_a_shard_of_what_is_left_out_and_more_must_be_there(capfd, tmp_path, format):
    folder = folder_of(tmp_path / "model")
    weight_map = write_shards(folder, format, NEW, 3, left_out=(3,))
    weight_map = {name: shard for name, shard in weight_map.items() if "00003" not in shard}
    gone = f"{format[0]}-00003-of-00003{format[1]}"
    weight_map |= dict.fromkeys(["model.layers.0.self_attn.rotary_emb.inv_freq", "lm_head.weight"], gone)
    write_index(folder, format, weight_map)
    assert refusal(capfd, folder, tmp_path / "a.bin") == (
        f"{folder}/{format[0]}{format[1]}.index.json: {gone}: no such file beside it, expected every shard that it "
        "names; download or save the checkpoint again\n")
    assert inspected(capfd, folder)["missing"][0] == gone


def test_bare_layers_of_absent_shards(capfd, tmp_path, format):
    """What has no config may lack what is left out, and no layer, even the last."""
    arrays = gpt_arrays(layers=3)
    folder = tmp_path / "model"
    folder.mkdir()
    shards = {f"{i}{format[1]}": {name: array for name, array in arrays.items() if f".h.{i}." in name}
              for i in range(3)}
    for shard, held in shards.items():
        format[2](folder / shard, held)
    weight_map = {name: shard for shard, held in shards.items() for name in held}
    write_index(folder, format, {**weight_map, "transformer.wte.weight": f"9{format[1]}"})
    header, _ = convert(folder, tmp_path / "a.bin", *CHOICES)
    assert header["num_layers"] == 3
    for shard in reversed(shards):
        (folder / shard).unlink()
        assert f"{format[1]}: no such file beside it, expected every shard that it names" in refusal(
            capfd, folder, tmp_path / "b.bin", *CHOICES)


# What is no model

@pytest.mark.parametrize("name, content, what", [
    ("a.gguf", b"GGUF\3\0\0\0", "a GGUF file"), ("a.bin", b"GGUF\3\0\0\0", "a GGUF file"),
    ("a.gguf", b"version https://git-lfs", "a GGUF file"), ("model.onnx", b"\x08\x07", "an ONNX model"),
    ("tf_model.h5", b"\x89HDF\r\n\x1a\n", "weights of Keras or TensorFlow"),
    ("flax_model.msgpack", b"\x82", "weights of Flax")])
@pytest.mark.parametrize("given", ["file", "folder"])
def test_files_of_other_programs(capfd, tmp_path, name, content, what, given):
    folder = folder_of(tmp_path / "model")
    (folder / name).write_bytes(content)
    assert refusal(capfd, folder / name if given == "file" else folder, tmp_path / "a.bin") == (
        f"{folder / name}: {what}, expected a checkpoint of PyTorch or safetensors; get the safetensors of the model\n")


def test_a_gguf_beside_safetensors_is_passed_over(capfd, tmp_path):
    folder = folder_of(tmp_path / "model")
    write_whole(folder, FORMATS["safetensors"], NEW)
    (folder / "a.gguf").write_bytes(b"GGUF")
    convert(folder, tmp_path / "a.bin")


@pytest.mark.parametrize("names", [["base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"],
                                   ["module.model.layers.0.self_attn.q_proj.lora_B.default.weight"],
                                   ["model.layers.0.self_attn.q_proj.lora_A"]])
@pytest.mark.parametrize("file", ["adapter_model", "other"])
def test_adapters(capfd, tmp_path, format, names, file):
    path = tmp_path / f"{file}{'.pt' if file == 'other' and format[1] == '.bin' else format[1]}"
    format[2](path, {name: np.zeros((2, 3), "f2") for name in names})
    sign = path.name if file == "adapter_model" else names[0]
    error = ("a LoRA or other PEFT adapter ({}), expected a whole model; merge it into its base with PEFT's "
             "merge_and_unload, save that with save_pretrained, and convert it\n")
    assert refusal(capfd, path, tmp_path / "a.bin") == f"{path}: {error.format(sign)}"
    for arguments in ([tmp_path / "a.bin"], ["--inspect"]):
        (tmp_path / "adapter_config.json").write_text("{}")
        assert refusal(capfd, tmp_path, *arguments) == f"{tmp_path}: {error.format('adapter_config.json')}"


def test_an_adapter_beside_a_model_is_two_readings(capfd, tmp_path, format):
    """Others would add it."""
    folder = folder_of(tmp_path / "model")
    write_whole(folder, format, {**NEW, **{name + ".lora_A.weight": array for name, array in NEW.items()}})
    assert "a LoRA or other PEFT adapter (model.embed_tokens.weight.lora_A.weight)" in refusal(
        capfd, folder, tmp_path / "a.bin")
    write_whole(folder, format, NEW)
    (folder / "adapter_config.json").write_text("{}")
    assert "a LoRA or other PEFT adapter (adapter_config.json)" in refusal(capfd, folder, tmp_path / "a.bin")


# Folders with more in them

def trainer(tmp_path):
    """A Trainer's folder: a model, and the state of its optimizer as DeepSpeed saves it."""
    folder = folder_of(tmp_path / "model")
    write_whole(folder, FORMATS["safetensors"], NEW)
    (folder / "latest").write_text("global_step7")
    (folder / "global_step7").mkdir()
    write_pt(folder / "global_step7" / "mp_rank_00_model_states.pt", OLD, wrap=["module"])
    return folder


def test_weights_beside_the_state_of_an_optimizer(tmp_path):
    folder = trainer(tmp_path)
    convert(folder, tmp_path / "a.bin")
    assert (tmp_path / "a.bin").read_bytes() == bin_of(tmp_path, NEW)
    shutil.rmtree(folder / "global_step7")  # what `latest` names is often removed
    convert(folder, tmp_path / "a.bin", "--force")
    assert (tmp_path / "a.bin").read_bytes() == (tmp_path / "plain.bin").read_bytes()


def test_weights_beside_the_experts_of_deepspeed(capfd, tmp_path):
    deepspeed(tmp_path / "model")
    write_whole(tmp_path / "model", FORMATS["safetensors"], gpt_arrays())
    assert ("model: model.safetensors and the experts of a DeepSpeed-MoE checkpoint: two sets of weights" in
            refusal(capfd, tmp_path / "model", tmp_path / "a.bin", *CHOICES))
    (tmp_path / "model" / "model.safetensors").unlink()
    write_index(tmp_path / "model", FORMATS["safetensors"], {"a": "model-00001-of-00001.safetensors"})
    assert convert(tmp_path / "model", tmp_path / "a.bin", *CHOICES)[0]["ffn"] == 6  # an index without its shards


def test_an_index_is_not_its_own_config(tmp_path):
    folder, format = folder_of(tmp_path / "model"), FORMATS["safetensors"]
    write_index(folder, format, write_shards(folder, format, NEW))
    convert(folder / "model.safetensors.index.json", tmp_path / "a.bin")
    assert (tmp_path / "a.bin").read_bytes() == bin_of(tmp_path, NEW)


@pytest.mark.parametrize("content", [b"", b" ", b'{"version": "1.0", "model": {"vo', b"[]", b"version https://git-lfs",
                                     b"\xef\xbb\xbf{}", b"\0\1\2"])
def test_tokenizers_that_are_none(capfd, tmp_path, content):
    folder = folder_of(tmp_path / "model")
    write_whole(folder, FORMATS["safetensors"], NEW)
    (folder / "tokenizer.json").write_bytes(content)
    assert (f"tokenizer.json: {len(content)} bytes that are no tokenizer.json, expected a JSON object with" in
            refusal(capfd, folder, tmp_path / "a.bin"))


@pytest.mark.parametrize("name, cause", [("tokenizer.json", "not a regular file, nor a link to one"),
                                         ("generation_config.json", "No such file or directory"),
                                         ("config.json", "No such file or directory")])
def test_links_to_nothing(capfd, tmp_path, name, cause):
    """As a cache leaves them whose files were removed."""
    folder = folder_of(tmp_path / "model")
    write_whole(folder, FORMATS["safetensors"], NEW)
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to("nothing")
    assert f"{name}: {cause}" in refusal(capfd, folder, tmp_path / "a.bin")


def test_a_warning_is_one_line(capfd, tmp_path):
    folder, format = folder_of(tmp_path / "model"), FORMATS["safetensors"]
    write_whole(folder, format, NEW)
    write_index(folder, format, {"a": "two\nlines.safetensors"})
    convert(folder, tmp_path / "a.bin")
    assert capfd.readouterr().err.endswith("model.safetensors.index.json lacks two lines.safetensors\n")
