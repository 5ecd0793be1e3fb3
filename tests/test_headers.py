"""colibri/headers.py against the C compiler's own view of the same headers."""

import ctypes
import json
import shutil
import subprocess

import numpy as np
import pytest

from colibri import headers
from colibri.headers import NATIVE, Headers, evaluate

CONFIG = {"num_experts": 7, "k": 3, "num_heads": 0, "num_kv_heads": 0, "head_dim": 0, "vocab_size": 0,
          "max_batch": 48, "max_step_tokens": 70}
LONG = {"max_step_tokens": 5000, "num_kv_heads": 2, "window_piece": 200, "max_batch": 100}
CONTEXT = 700


def compiled(config, directory):
    """Sizes, field offsets, constants and state buffers as gcc sees them under the same -D flags."""
    reader = Headers(config)
    prints = [f'printf("\\"{name}\\": %ld,\\n", (long)({name}));' for name in reader.constants]
    for name, dtype in reader.structs.items():
        prints.append(f'printf("\\"{name}\\": %zu,\\n", sizeof({name}));')
        prints += [f'printf("\\"{name}.{field}\\": %zu,\\n", offsetof({name}, {field}));' for field in dtype.names]
    prints.append('#define ROW(name, type, rows, columns) printf("\\"state.%s\\": [%zu, %ld, %ld],\\n", #name, '
                  "sizeof(type), (long)(rows), (long)(columns));\nlong num_layers = 5, num_slots = 3;\n"
                  "BinHeader header = {.window = 6, .window_layers = {0x2a}};\n"  # the last is no layer
                  "long cache_positions = cache_sizes(&header, num_layers, CONTEXT).cache_positions;\n"
                  "STATE_BUFFERS(ROW)")
    source = directory / "sizes.c"
    source.write_text('#include <stdio.h>\n#include <stddef.h>\n#include "colibri.h"\n#include "cache.h"\n'
                      'int main(void) {\nprintf("{");' + "\n".join(prints) + 'printf("\\"end\\": 0}");}\n')
    defines = [f"-D{reader.macros[name]}={value}" for name, value in config.items()]
    subprocess.run(["gcc", "-I", NATIVE, f"-DCONTEXT={CONTEXT}", *defines, source, "-o", directory / "sizes"],
                   check=True)
    return json.loads(subprocess.run([directory / "sizes"], check=True, capture_output=True, text=True).stdout)


@pytest.mark.skipif(not shutil.which("gcc"), reason="needs gcc")
@pytest.mark.parametrize("config", [{}, CONFIG, LONG])
def test_headers_agree_with_the_compiler(config, tmp_path):
    reader, seen = Headers(config), compiled(config, tmp_path)
    for name, value in reader.constants.items():
        assert seen[name] == value, name
    for name, dtype in reader.structs.items():
        assert seen[name] == dtype.itemsize, name
        for field in dtype.names:
            assert seen[f"{name}.{field}"] == dtype.fields[field][1], (name, field)
    buffers = reader.state_buffers({"num_layers": 5, "window": 6, "window_layers": [0x2a, 0, 0, 0]}, num_slots=3,
                                   context=CONTEXT)
    assert len(buffers) == sum(name.startswith("state.") for name in seen)
    for buffer in buffers:
        assert seen[f"state.{buffer.name}"] == [buffer.dtype.itemsize, buffer.rows, buffer.columns]


def test_format_structs_have_their_stated_sizes_and_no_padding():
    structs = headers.default().structs
    assert structs["BinHeader"].itemsize == 512
    assert structs["BinTensor"].itemsize == 120
    for name in ("BinHeader", "BinTensor", "Config", "Batch", "Layer", "Weights"):
        assert sum(structs[name][field].itemsize for field in structs[name].names) == structs[name].itemsize, name
    assert structs["Batch"]["tokens"].shape == (512,) and structs["Batch"]["sampled"].shape == (64,)
    large = Headers({"max_step_tokens": 1000, "max_batch": 100}).structs["Batch"]
    assert large["tokens"].shape == (1000,) and large["sampled"].shape == (100,)


def header(**fields):
    return {**dict.fromkeys(headers.default().structs["BinHeader"].names, 0), "dense_layers": [0] * 4, **fields}


def test_tensors_of_a_transformer():
    model = header(num_layers=2, hidden=10, ffn=6, num_heads=4, num_kv_heads=2, head_dim=3, v_head_dim=3, vocab_size=11,
                   num_experts=5, gated=1, tied_embeddings=1, router_bias=1)
    tensors = {tensor.name: (tensor.type, tensor.shape) for tensor in headers.default().tensors(model)}
    assert "lm_head" not in tensors
    assert tensors["embed"] == ("embed_t", (11, 10))
    assert tensors["layers.1.qkv"] == ("dense_t", (24, 10))
    assert tensors["layers.1.attention_out"] == ("dense_t", (10, 12))
    assert tensors["layers.0.router"] == ("float", (5, 10))
    assert tensors["layers.0.router_bias"] == ("float", (5,))
    assert tensors["layers.0.experts_up"] == ("expert_t", (5, 12, 10))
    assert tensors["layers.0.experts_down"] == ("expert_t", (5, 10, 6))
    assert len(tensors) == 2 + 2 * 8


def test_tensors_of_a_bare_stack():
    model = header(num_layers=1, hidden=10, ffn=6, num_experts=5)
    assert [tensor.name for tensor in headers.default().tensors(model)] == [
        "layers.0.router", "layers.0.experts_up", "layers.0.experts_down"]


def test_tensors_of_a_dense_layer_and_a_shared_expert():
    model = header(num_layers=34, hidden=10, ffn=6, num_experts=5, gated=1, dense_ffn=20, shared_ffn=8, shared_gate=1,
                   dense_layers=headers.mask([0, 33]))
    tensors = {tensor.name: tensor.shape for tensor in headers.default().tensors(model)}
    assert model["dense_layers"] == [1, 2, 0, 0]
    for dense, moe in ((0, 1), (33, 32)):
        assert tensors[f"layers.{dense}.mlp_up"] == (40, 10) and tensors[f"layers.{dense}.mlp_down"] == (10, 20)
        assert tensors[f"layers.{moe}.mlp_up"] == (16, 10) and tensors[f"layers.{moe}.shared_gate"] == (10,)
        assert f"layers.{dense}.router" not in tensors and f"layers.{dense}.shared_gate" not in tensors
        assert tensors[f"layers.{moe}.experts_up"] == (5, 12, 10)


def test_rows_of_each_kind_of_attention():
    model = header(num_layers=1, hidden=10, ffn=6, num_heads=4, num_kv_heads=2, head_dim=6, v_head_dim=6, vocab_size=11,
                   num_experts=5, k=2)
    latent = {"attention_kind": 1, "num_kv_heads": 4, "v_head_dim": 5, "kv_lora_rank": 7, "rotary_dim": 2}
    for change, qkv, kv_b, out in (({}, 48, None, 24), ({**latent, "q_lora_rank": 3}, 12, (36, 7), 20),
                                   (latent, 33, (36, 7), 20), ({"attention_kind": 2}, 24, None, None)):
        tensors = {tensor.name: tensor.shape for tensor in headers.default().tensors({**model, **change})}
        assert tensors["layers.0.qkv"] == (qkv, 10) and tensors.get("layers.0.kv_b") == kv_b
        assert tensors.get("layers.0.attention_out") == (out and (10, out))
        assert ("layers.0.attention_experts_in" in tensors) == (out is None)


def test_codes_and_functions():
    reader = headers.default()
    assert reader.codes("ACTIVATION") == {"silu": 0, "gelu": 1, "relu": 2, "clamped_swiglu": 3}
    assert reader.codes("ROUTER") == {"softmax": 0, "topk_softmax": 1, "sigmoid": 2, "sparsemixer": 3}
    assert reader.functions["colibri_error"] == (ctypes.c_char_p, [])
    assert reader.functions["colibri_fma_rate"] == (ctypes.c_double, [ctypes.c_double, ctypes.c_int])
    assert reader.functions["colibri_run_op"] == (
        ctypes.c_int, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int, ctypes.c_int])
    assert reader.structs["Layer"]["experts_up"] == np.dtype("<u8")


LATENT = {"attention_kind": 1, "num_kv_heads": 8, "kv_lora_rank": 7, "rotary_dim": 8, "v_head_dim": 12}
MOA = {"attention_kind": 2, "num_heads": 6, "num_kv_heads": 3}
BROKEN_FORMS = [
    ({"dtype": 8}, "dtype", "0, 1 (f32), 2 (f16), 3 (bf16), 4 (int8), 5 (int4), 6 (fp8) or 7 (mxfp4)"),
    ({"group": 32}, "group", "0 without weights of few bits"),
    ({"dtype": 3, "group": 64}, "group", "0 without weights of few bits"),
    ({"dtype": 4, "group": 16}, "group", "32, 64 or 128 with int8 and int4"),
    ({"dtype": 5}, "group", "32, 64 or 128 with int8 and int4"),
    ({"dtype": 6, "group": 64}, "group", "128 with fp8"), ({"dtype": 7, "group": 64}, "group", "32 with mxfp4"),
    ({"dtype": 6, "group": 128, "zero_points": 1}, "zero_points", "0, or 1 with int8 and int4"),
    ({"dtype": 5, "group": 32, "zero_points": 2}, "zero_points", "0, or 1 with int8 and int4")]
BROKEN = [  # of config.h's defaults: 32 experts, k=2, 8 heads of 16, 4 kv heads
    ({"num_experts": 257}, "num_experts", "1 to 256"), ({"num_experts": 0}, "num_experts", "1 to 256"),
    ({"k": 33}, "k", "1 to 16, and at most num_experts=32"), ({"num_experts": 1}, "k", "1 to 16, and at most num_exp"),
    ({"k": 3, "router_kind": 3}, "k", "2 with router_kind=sparsemixer"),
    ({"num_groups": 0}, "num_groups", "a divisor of num_experts=32"), ({"num_groups": 5}, "num_groups", "a divisor"),
    ({"topk_groups": 2}, "topk_groups", "1 to num_groups=1"), ({"topk_groups": 0}, "topk_groups", "1 to num_groups=1"),
    ({"num_groups": 32}, "topk_groups", "enough groups to hold k=2 experts"),
    ({"hidden": 0}, "hidden", "at least 1"), ({"ffn": 0}, "ffn", "at least 1"),
    ({"vocab_size": 0}, "vocab_size", "0 for a bare stack of MoE layers (num_heads=0) and at least 1 otherwise"),
    ({"num_heads": 0, "vocab_size": 0}, "num_kv_heads", "0 for num_heads=0"),
    ({"num_heads": 0, "vocab_size": 0, "num_kv_heads": 0}, "head_dim", "0 for num_heads=0"),
    ({"num_kv_heads": 0}, "num_kv_heads", "a divisor of num_heads=8"),
    ({"num_kv_heads": 3}, "num_kv_heads", "a divisor of num_heads=8"),
    ({"head_dim": 15}, "head_dim", "an even number from 2 to 512"), ({"head_dim": 514}, "head_dim", "an even number"),
    ({"rotary_dim": 18}, "rotary_dim", "an even number up to head_dim=16"),
    ({"rotary_dim": 7}, "rotary_dim", "an even"),
    ({"rope_kind": 3, "rotary_dim": 2}, "rotary_dim", "at least 4 with rope_kind=dynamic"),
    ({**LATENT, "rotary_dim": 16}, "rotary_dim", "below head_dim=16 with a latent"),
    ({"v_head_dim": 12}, "v_head_dim", "head_dim=16"), ({**LATENT, "v_head_dim": 0}, "v_head_dim", "1 to 512"),
    ({**LATENT, "kv_lora_rank": 0}, "kv_lora_rank", "at least 1 with a latent, else 0"),
    ({"kv_lora_rank": 3}, "kv_lora_rank", "at least 1 with a latent, else 0"),
    ({"q_lora_rank": 3}, "q_lora_rank", "0 without a latent"),
    ({**LATENT, "num_kv_heads": 4}, "num_kv_heads", "num_heads=8 with a latent"),
    ({**MOA, "num_heads": 3}, "num_heads", "k * num_kv_heads, with k=2 and num_kv_heads=3, with experts of attention"),
    ({"weight_dtype": 3}, "weight_dtype", "0 (f32), 1 (f16) or 2 (bf16)"),
    *(({f"{name}_{field}": value for field, value in values.items()}, f"{name}_{field}", words)
      for name in ("expert", "dense", "embed") for values, field, words in BROKEN_FORMS),
    ({"compute_dtype": 1}, "compute_dtype", "0 (weight_dtype), 2 (f16) or 3 (bf16)"),
    *(({f"{name}_dtype": 4, f"{name}_group": 32}, "compute_dtype", "2 (f16) or 3 (bf16) with weights of few bits")
      for name in ("expert", "dense", "embed")),
    ({"expert_dtype": 5, "expert_group": 128, "dense_dtype": 4, "dense_group": 64, "dense_zero_points": 1,
      "embed_dtype": 2, "compute_dtype": 3}, None, None),
    ({"expert_dtype": 7, "expert_group": 32, "dense_dtype": 6, "dense_group": 128, "compute_dtype": 3}, None, None),
    ({"dense_ffn": 8, "gated": 0}, "gated", "1 with dense_ffn or shared_ffn"),
    ({"shared_ffn": 8, "gated": 0}, "gated", "1 with dense_ffn or shared_ffn"),
    ({}, None, None), (LATENT, None, None), ({**LATENT, "q_lora_rank": 3}, None, None), (MOA, None, None),
    ({"num_heads": 0, "vocab_size": 0, "num_kv_heads": 0, "head_dim": 0}, None, None)]


@pytest.mark.skipif(not shutil.which("gcc"), reason="needs gcc")
@pytest.mark.parametrize("config, field, words", BROKEN)
def test_python_and_the_compiler_refuse_the_same_models(config, field, words):
    reader = Headers(config)
    fields = {name: reader.constants[macro] for name, macro in reader.macros.items()}
    broken = reader.broken_rule(fields)
    assert broken is None if field is None else broken[0] == field and broken[1].startswith(words)
    defines = [f"-D{reader.macros[name]}={value}" for name, value in config.items()]
    compiled = subprocess.run(["gcc", "-fsyntax-only", *defines, NATIVE / "config.h"], capture_output=True, text=True,
                              check=False)
    assert (compiled.returncode == 0) == (field is None)
    refused = compiled.stderr.partition("native/config.h: expected ")[2].partition("; correct DEFINES")[0]
    assert field is None or (field in refused and " " in refused)


def test_every_rule_is_broken_by_one_of_these():
    broken = {(field, words) for config, field, words in BROKEN}
    for row in headers.default().tables["MODEL_RULES"]:
        field, words = row.split(",")[0], row.split('"')[1].partition("{")[0]
        assert any(field == each and text.startswith(words[:len(text)]) for each, text in broken - {(None, None)}), row


def test_evaluate_is_arithmetic_only():
    assert evaluate("(a > 2 ? a : 2) * 3", {"a": 5}) == 15
    assert evaluate("7 / 2 - (1 == 1)", {}) == 2
    assert evaluate("a != 0 && 7 % a == 1", {"a": 0}) == 0 and evaluate("a == 0 || 7 % a == 1", {"a": 0}) == 1
    assert evaluate("a != 0 && 7 % a == 1", {"a": 3}) == 1 and evaluate("a <= 2 || a >= 4", {"a": 3}) == 0
    with pytest.raises(SyntaxError):
        evaluate("__import__('os')", {})
