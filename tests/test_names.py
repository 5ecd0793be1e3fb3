"""converter/sources.py, families.py and config.py: every tensor used or named, every number known or asked for."""

import json
import os

import numpy as np
import pytest
from converter_files import MIXTRAL_CONFIG, gpt_arrays, mixtral_arrays, write_pt

from colibri.errors import ColibriError
from converter import __main__ as converter
from converter import config, sources

FLAGS = {"k": 2, "activation": "gelu", "renormalize": True}
EXPERT = "transformer.h.1.mlp.experts.2.w1.weight"


def plan(tmp_path, arrays, values=None, flags=None):
    """(header fields, sources) of arrays by name, a config's values and flags."""
    path = write_pt(tmp_path / "model.pt", arrays)
    if values is not None:
        (tmp_path / "model.json").write_text(json.dumps(values))
    options = converter.parser().parse_args([str(path), "a.bin"])
    for name, value in (flags or {}).items():
        setattr(options, name, value)
    made = converter.understand(options)
    bound = sources.sources(made.family, made.input.tensors, made.fields, path, sources.MOE if made.bare else None)
    return made.fields, bound.sources


def refusal(*arguments):
    with pytest.raises(ColibriError) as caught:
        plan(*arguments)
    return str(caught.value)


def changed(arrays, **changes):
    return {**arrays, **{name.replace("__", "."): value for name, value in changes.items()}}


def without(values, *keys):
    return {key: value for key, value in values.items() if key not in keys}


def test_numbers_sort_as_numbers(tmp_path):
    arrays = gpt_arrays(layers=11, experts=12, hidden=2, ffn=3)
    shuffled = {name: arrays[name] for name in np.random.default_rng(0).permutation(list(arrays))}
    fields, sources = plan(tmp_path, shuffled, None, FLAGS)
    assert (fields["num_layers"], fields["num_experts"], fields["hidden"], fields["ffn"]) == (11, 12, 2, 3)
    for layer in range(11):
        experts = [parts[0] for parts in sources[f"layers.{layer}.experts_up"]]
        assert [tensor.name for tensor in experts] == [
            f"transformer.h.{layer}.mlp.experts.{expert}.w1.weight" for expert in range(12)]
        np.testing.assert_array_equal(experts[10].array(), arrays[experts[10].name])


def test_mixtral_parts(tmp_path):
    fields, sources = plan(tmp_path, mixtral_arrays(), MIXTRAL_CONFIG)
    assert [tensor.name.split(".")[-2] for tensor in sources["layers.1.qkv"][0]] == ["q_proj", "k_proj", "v_proj"]
    assert [tensor.name.split(".")[-2] for tensor in sources["layers.1.experts_up"][2]] == ["w1", "w3"]
    assert [tensor.name.split(".")[-2] for tensor in sources["layers.0.experts_down"][0]] == ["w2"]
    expected = {"num_layers": 2, "num_experts": 3, "k": 2, "hidden": 10, "ffn": 6, "num_heads": 4, "num_kv_heads": 2,
                "head_dim": 6, "vocab_size": 11, "max_positions": 64, "gated": 1, "renormalize": 1, "activation": 0,
                "router_kind": 0, "norm_kind": 1, "rope_kind": 1, "norm_eps": 1e-5, "rope_theta": 1e4,
                "tied_embeddings": 0}
    assert {name: fields[name] for name in expected} == expected


WRAPPERS = ["module.", "_orig_mod.", "_forward_module.", "_fsdp_wrapped_module.", "_fsdp_wrapped_module._fpw_module.",
            "_checkpoint_wrapped_module.", "module._orig_mod.", "_forward_module.module."]


@pytest.mark.parametrize("prefix", [*WRAPPERS, "model.", "module.model.", "model.module.", "model._orig_mod."])
def test_prefixes_are_stripped(tmp_path, prefix):
    arrays = gpt_arrays()
    _, sources = plan(tmp_path, {prefix + name: array for name, array in arrays.items()}, None, FLAGS)
    expert = sources["layers.1.experts_up"][2][0]
    np.testing.assert_array_equal(expert.array(), arrays[EXPERT])
    assert expert.name == prefix + EXPERT  # in errors


@pytest.mark.parametrize("word", WRAPPERS)
@pytest.mark.parametrize("place", range(5))
def test_wrappers_within_names(tmp_path, word, place):
    arrays, wrapped = mixtral_arrays(), {}
    for name, array in arrays.items():
        words = name.split(".")
        at = min(place, len(words) - 1)
        wrapped[".".join(words[:at] + [word + words[at]] + words[at + 1:])] = array
    _, sources = plan(tmp_path, wrapped, MIXTRAL_CONFIG)
    for key, name in (("embed", "model.embed_tokens.weight"), ("lm_head", "lm_head.weight"),
                      ("layers.1.router", "model.layers.1.block_sparse_moe.gate.weight")):
        np.testing.assert_array_equal(sources[key][0][0].array(), arrays[name])


@pytest.mark.parametrize("wrapper", ["", "_forward_module.", "module."])
def test_lightnings_model_before_all_names(tmp_path, wrapper):
    arrays = mixtral_arrays()
    _, sources = plan(tmp_path, {f"{wrapper}model.{name}": array for name, array in arrays.items()}, MIXTRAL_CONFIG)
    np.testing.assert_array_equal(sources["lm_head"][0][0].array(), arrays["lm_head.weight"])
    np.testing.assert_array_equal(sources["layers.1.qkv"][0][1].array(),
                                  arrays["model.layers.1.self_attn.k_proj.weight"])


@pytest.mark.parametrize("name, cause", [
    ("model.layers.1.block_sparse_moe.gate.weight", "model.layers.1.block_sparse_moe.gate.weight beside model.model."),
    ("model.embed_tokens.weight", "model.embed_tokens.weight beside model.model."),
    ("lm_head.weight", "lm_head.weight: stands for lm_head.weight, as model.lm_head.weight does"),
    ("module.model.model.norm.weight", ": stands for model.model.norm.weight, as model.model.norm.weight does"),
    ("ema.model.norm.weight", "unknown tensor ema.model.norm.weight")])
def test_two_readings_of_model_are_refused(tmp_path, name, cause):
    arrays = {f"model.{name}": array for name, array in mixtral_arrays().items()}
    arrays[name] = np.ones((3, 10), np.float16)
    assert cause in refusal(tmp_path, arrays, MIXTRAL_CONFIG)


def test_a_tensor_called_as_a_wrapper(tmp_path):
    assert "unknown tensor transformer.h.0.module" in refusal(
        tmp_path, {**gpt_arrays(), "transformer.h.0.module": np.ones(3, np.float16)}, None, FLAGS)


def test_ignored_names(tmp_path):
    arrays = changed(mixtral_arrays(), model__layers__1__self_attn__rotary_emb__inv_freq=np.ones(3, np.float32))
    assert plan(tmp_path, arrays, MIXTRAL_CONFIG)[0]["num_layers"] == 2


def test_tied_embeddings(tmp_path):
    arrays, tied = mixtral_arrays(), {**MIXTRAL_CONFIG, "tie_word_embeddings": True}
    assert "lm_head" not in plan(tmp_path, without(arrays, "lm_head.weight"), tied)[1]
    arrays["lm_head.weight"] = arrays["model.embed_tokens.weight"]
    assert "lm_head" not in plan(tmp_path, arrays, tied)[1]
    arrays["lm_head.weight"] = arrays["lm_head.weight"] + np.float16(1)
    assert "lm_head.weight: differs from model.embed_tokens.weight" in refusal(tmp_path, arrays, tied)
    assert "missing tensor lm_head.weight" in refusal(tmp_path, without(arrays, "lm_head.weight"), MIXTRAL_CONFIG)


def test_newer_config_keeps_theta_in_rope_parameters(tmp_path):
    values = {**without(MIXTRAL_CONFIG, "rope_theta"), "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}
    assert plan(tmp_path, mixtral_arrays(), values)[0]["rope_theta"] == 5e5


@pytest.mark.parametrize("arrays, cause", [
    (without(gpt_arrays(), EXPERT), f"missing tensor {EXPERT}, expected 3 experts in each MoE layer of 2 layers"),
    (without(gpt_arrays(), "transformer.h.1.mlp.router.weight"), "missing tensor transformer.h.1.mlp.router.weight"),
    (changed(gpt_arrays(), transformer__h__7__mlp__router__weight=np.ones((3, 10), "f4")),
     "missing tensor transformer.h.2.mlp.router.weight"),
    (changed(gpt_arrays(), transformer__h__0__attn__bias=np.ones(3, "f4")),
     "unknown tensor transformer.h.0.attn.bias, expected gpt's names alone"),
    (changed(gpt_arrays(), **{EXPERT.replace("2", "02"): np.ones((6, 10), "f4")}), "unknown tensor"),
    ({**gpt_arrays(), EXPERT: np.ones((10, 6), "f4")},
     f"{EXPERT}: shape=(10, 6), expected (6, 10) from ffn=6, hidden=10; the checkpoint and its config disagree"),
    ({**gpt_arrays(), EXPERT: np.ones((6, 10), np.int8)}, f"{EXPERT}: dtype=int8, expected one of float16"),
    ({**gpt_arrays(), "module." + EXPERT: np.ones((6, 10), "f4")}, f"module.{EXPERT}: stands for {EXPERT}"),
    ({"model.layers.0.mlp.experts.gate_up": np.ones((6, 10), "f4")}, "family not known by its tensor names"),
])
def test_tensors_are_used_or_named(tmp_path, arrays, cause):
    assert cause in refusal(tmp_path, arrays, None, FLAGS)


@pytest.mark.parametrize("change, cause", [
    ({"num_experts_per_tok": None}, "num_experts_per_tok is not there, expected int"),
    ({"hidden_act": "quick_gelu"}, 'hidden_act="quick_gelu", expected one of silu, swish, gelu, relu'),
    ({"num_key_value_heads": 3}, "num_kv_heads=3, expected a divisor of num_heads=4"),
    ({"num_experts_per_tok": 4}, "k=4, expected 1 to 16, and at most num_experts"),
    ({"num_local_experts": 300}, "num_experts=300, expected 1 to 256"),
    ({"num_local_experts": 2}, "gate.weight: shape=(3, 10), expected (2, 10) from hidden=10, num_experts=2; "),
    ({"num_local_experts": 4}, "gate.weight: shape=(3, 10), expected (4, 10) from hidden=10, num_experts=4; "),
    ({"num_hidden_layers": 1}, "extra tensor model.layers.1."),
    ({"num_hidden_layers": 3}, "missing tensor model.layers.2.input_layernorm.weight"),
    ({"num_hidden_layers": 4_000_000_000}, "num_hidden_layers=4000000000, expected 1 to 128"),
    ({"hidden_size": 16}, "model.embed_tokens.weight: shape=(11, 10), expected (11, 16) from hidden=16, vocab_size=11"),
    ({"hidden_size": "10"}, 'hidden_size="10", expected int'),
    ({"hidden_size": True}, "hidden_size=true, expected int"),
    ({"hidden_size": 1 << 40}, "hidden_size=1099511627776, expected int"),
    ({"rms_norm_eps": -1.0}, "rms_norm_eps=-1.0"), ({"rope_theta": 0.5}, "rope_theta=0.5, expected above 1"),
    ({"rope_scaling": {"rope_type": "yarn"}}, "factor is not there"),
    ({"rope_parameters": {"rope_type": "axial"}}, 'rope_type="axial", expected one of default, linear'),
    ({"rope_parameters": {"rope_type": "longrope"}}, "original_max_position_embeddings is not there, expected int"),
    ({"num_experts": 7}, "num_experts=7, expected 3 as in num_local_experts"), ({"k": 1}, "k=1, expected 2"),
    ({"ffn": 12}, "ffn=12, expected 6"),
    ({"activation": "gelu"}, 'activation="gelu", expected \'silu\' as in hidden_act'),
    ({"renormalize": False}, "renormalize=false, expected 1"),
    ({"rope_parameters": {"rope_theta": 5e5}}, "rope_theta=10000.0, expected 500000.0 as in rope_parameters"),
    ({"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"rope_type": "default"}},
     'rope_parameters={"rope_type": "default"}, expected'),
    ({"rope_theta": 0}, "rope_theta=0.0, expected above 1"), ({"rope_theta": 1e-300}, "rope_theta=1e-300, expected"),
    ({"rms_norm_eps": 1e-300}, "norm_eps=1e-300, expected a number that float32 holds"),
    ({"rms_norm_eps": 0}, "norm_eps=0.0, expected above 0"), ({"rms_norm_eps": 10 ** 400}, "rms_norm_eps=1000"),
    ({"rope_scaling": {"rope_type": "llama3", "factor": 2, "low_freq_factor": 4, "high_freq_factor": 4}},
     "high_freq_factor=4.0, expected above low_freq_factor=4.0"),
    ({"head_dim": 1 << 31}, "2147483648 rotated dimensions, expected an even number from 2 to 512"),
    ({"head_dim": None, "hidden_size": 3}, "that mixtral divides by is 0"),
    ({"model_type": "bert"}, "model_type=bert, expected one of mixtral, olmoe"),
])
def test_configs_that_cannot_be_right(tmp_path, change, cause):
    message = refusal(tmp_path, mixtral_arrays(), {**MIXTRAL_CONFIG, **change})
    assert cause in message and str(tmp_path / "model.") in message


@pytest.mark.parametrize("model_type, change, cause", [
    ("olmoe", {"sliding_window": 32}, "sliding_window=32, expected a config without it, since it is not supported; "),
    ("olmoe", {"head_dim": 6}, "head_dim=6, expected a config without it, since it is not supported; "),
    ("granitemoe", {"sliding_window": 32}, ("sliding_window=32, expected a config without it, since it is not "
                                           "supported")),
    ("olmoe", {"layer_types": ["full_attention", "sliding_attention"]},
     ('layer_types=["full_attention", "sliding_attention"], expected full_attention alone, since others are not '
      "supported in olmoe without a sliding window; ")),
    ("mixtral", {"layer_types": ["linear_attention"] * 2}, "since others are not supported in mixtral without")])
def test_what_is_not_supported_is_called_so(tmp_path, model_type, change, cause):
    values = {**without(MIXTRAL_CONFIG, "head_dim", "sliding_window"), "model_type": model_type, "hidden_size": 24}
    assert cause in refusal(tmp_path, mixtral_arrays(), {**values, **change})


@pytest.mark.parametrize("missing, flag", [("k", "--k"), ("activation", "--activation"),
                                           ("renormalize", "--renormalize or --no-renormalize")])
def test_what_a_stack_cannot_tell_is_asked_for(tmp_path, missing, flag):
    assert f"give {flag}" in refusal(tmp_path, gpt_arrays(), None, without(FLAGS, missing))


def test_a_window_that_hides_nothing_is_none(tmp_path):
    assert plan(tmp_path, mixtral_arrays(), {**MIXTRAL_CONFIG, "sliding_window": 64})[0]["window_layers"] == []
    assert plan(tmp_path, mixtral_arrays(), {**MIXTRAL_CONFIG, "sliding_window": 63})[0]["window_layers"] == [0, 1]


def test_a_name_twice_is_refused(tmp_path):
    arrays = {**mixtral_arrays(), "norm.weight": np.ones(10, np.float16)}
    assert "norm.weight: stands for model.norm.weight" in refusal(tmp_path, arrays, MIXTRAL_CONFIG)


def test_flags_and_config_must_agree(tmp_path):
    assert "--k: 3, but" in refusal(tmp_path, mixtral_arrays(), MIXTRAL_CONFIG, {"k": 3})
    assert plan(tmp_path, mixtral_arrays(), MIXTRAL_CONFIG, {"k": 2, "activation": "silu"})[0]["k"] == 2
    values = {"k": 2, "activation": "gelu", "renormalize": False}
    assert plan(tmp_path, gpt_arrays(), values)[0]["renormalize"] == 0
    assert "--k: 3, but" in refusal(tmp_path, gpt_arrays(), values, {"k": 3})


def test_config_files(tmp_path):
    (tmp_path / "config.json").write_text('{"k": 1}')
    checkpoint = tmp_path / "model.pt"
    assert config.load(None, checkpoint).get("k") == 1
    (tmp_path / "model.json").write_text('{"k": 2}')
    assert config.load(None, checkpoint).get("k") == 2
    assert config.load(tmp_path / "config.json", checkpoint).get("k") == 1
    for content in ("{", "[1]", "[" * 100_000, "\xff", '{"k": 1, "k": 2}',
                    '{"k": 1, "rope_scaling": {"a": 1, "a": 1}}'):
        (tmp_path / "bad.json").write_bytes(content.encode("latin-1"))
        with pytest.raises(ColibriError, match=r"bad\.json"):
            config.load(tmp_path / "bad.json", checkpoint)
    os.mkfifo(tmp_path / "pipe.json")
    for name in ("pipe.json", "", "/dev/zero"):
        with pytest.raises(ColibriError, match="not a regular file"):
            config.load(tmp_path / name, checkpoint)
    with pytest.raises(ColibriError, match="No such file"):
        config.load(tmp_path / "none.json", checkpoint)
