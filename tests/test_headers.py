"""colibri/headers.py against the C compiler's own view of the same headers."""

import ctypes
import json
import shutil
import subprocess

import numpy as np
import pytest

from colibri import headers
from colibri.headers import NATIVE, Headers, evaluate

CONFIG = {"num_experts": 7, "k": 3, "num_heads": 0, "vocab_size": 0, "max_batch": 48, "max_seq_len": 40}
LONG = {"max_seq_len": 5000, "num_kv_heads": 2, "window_piece": 200}


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
                  "long cache_positions = cache_sizes(&header, num_layers).cache_positions;\n"
                  "STATE_BUFFERS(ROW)")
    source = directory / "sizes.c"
    source.write_text('#include <stdio.h>\n#include <stddef.h>\n#include "colibri.h"\n#include "model.h"\n'
                      'int main(void) {\nprintf("{");' + "\n".join(prints) + 'printf("\\"end\\": 0}");}\n')
    defines = [f"-D{name.upper()}={value}" for name, value in config.items()]
    subprocess.run(["gcc", "-I", NATIVE, *defines, source, "-o", directory / "sizes"], check=True)
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
    buffers = reader.state_buffers({"num_layers": 5, "window": 6, "window_layers": [0x2a, 0, 0, 0]}, num_slots=3)
    assert len(buffers) == sum(name.startswith("state.") for name in seen)
    for buffer in buffers:
        assert seen[f"state.{buffer.name}"] == [buffer.dtype.itemsize, buffer.rows, buffer.columns]


def test_format_structs_have_their_stated_sizes_and_no_padding():
    structs = headers.default().structs
    assert structs["BinHeader"].itemsize == 512
    assert structs["BinTensor"].itemsize == 120
    for name in ("BinHeader", "BinTensor", "Config", "Batch", "Layer", "Weights"):
        assert sum(structs[name][field].itemsize for field in structs[name].names) == structs[name].itemsize, name
    assert structs["Batch"]["tokens"].shape == (512,)
    assert Headers({"max_seq_len": 1000}).structs["Batch"]["tokens"].shape == (1000,)


def header(**fields):
    return {**dict.fromkeys(headers.default().structs["BinHeader"].names, 0), "dense_layers": [0] * 4, **fields}


def test_tensors_of_a_transformer():
    model = header(num_layers=2, hidden=10, ffn=6, num_heads=4, num_kv_heads=2, head_dim=3, v_head_dim=3, vocab_size=11,
                   num_experts=5, gated=1, tied_embeddings=1, router_bias=1)
    tensors = {tensor.name: (tensor.type, tensor.shape) for tensor in headers.default().tensors(model)}
    assert "lm_head" not in tensors
    assert tensors["embed"] == ("weight_t", (11, 10))
    assert tensors["layers.1.qkv"] == ("weight_t", (24, 10))
    assert tensors["layers.1.attention_out"] == ("weight_t", (10, 12))
    assert tensors["layers.0.router"] == ("float", (5, 10))
    assert tensors["layers.0.router_bias"] == ("float", (5,))
    assert tensors["layers.0.experts_up"] == ("weight_t", (5, 12, 10))
    assert tensors["layers.0.experts_down"] == ("weight_t", (5, 10, 6))
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


def test_evaluate_is_arithmetic_only():
    assert evaluate("(a > 2 ? a : 2) * 3", {"a": 5}) == 15
    assert evaluate("7 / 2 - (1 == 1)", {}) == 2
    with pytest.raises(SyntaxError):
        evaluate("__import__('os')", {})
