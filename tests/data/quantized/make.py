"""Makes the folders beside it: tiny models quantized by the libraries themselves, and what these say that they mean.

Needs torch, transformers, compressed-tensors, and the sources of AutoGPTQ 0.7.1, AutoAWQ 0.2.9 and GPTQModel 7.7.0,
unpacked, whose files are loaded one by one:

    python tests/data/quantized/make.py AUTOGPTQ_FOLDER AUTOAWQ_FOLDER GPTQMODEL_FOLDER

A folder has config.json, model.safetensors and meaning.json: {matrix: SHA-256 of its float32 values, [rows, columns],
as the library dequantizes them, with its scales widened to float32 first so that nothing is rounded}.
"""

import ast
import hashlib
import importlib.util
import json
import sys
import types
from pathlib import Path

import torch
from compressed_tensors.compressors.naive_quantized.base import FloatQuantizationCompressor
from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

HERE = Path(__file__).parent
SHARED = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
          "vocab_size": 24, "max_position_embeddings": 64, "tie_word_embeddings": False, "num_experts_per_tok": 2,
          "pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
MODELS = {"mixtral": {**SHARED, "num_hidden_layers": 1, "intermediate_size": 96, "num_local_experts": 3},
          "qwen3_moe": {**SHARED, "intermediate_size": 96, "moe_intermediate_size": 32, "num_experts": 4,
                        "mlp_only_layers": [1]},
          "deepseek_v3": {**SHARED, "head_dim": 16, "num_key_value_heads": 4, "intermediate_size": 160,
                          "moe_intermediate_size": 32, "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 2, "topk_group": 1, "q_lora_rank": 48, "kv_lora_rank": 32,
                          "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 24, "first_k_dense_replace": 1},
          "gpt_oss": {**SHARED, "intermediate_size": 64, "num_local_experts": 3}}


def source(path, name, **stubs):
    """Loads one file of a library, whose imports are replaced by stubs."""
    for stub, values in stubs.items():
        parts = stub.replace("__", ".").split(".")
        for end in range(1, len(parts) + 1):
            module = sys.modules.setdefault(".".join(parts[:end]), types.ModuleType(".".join(parts[:end])))
        vars(module).update(values)
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def model(kind):
    """Returns (config, state dict in f16 or bf16 with the names of checkpoints) of a random model."""
    torch.manual_seed(len(kind))
    config = AutoConfig.for_model(kind, **MODELS[kind])
    made = AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    made.save_pretrained(HERE / "whole")
    state = load_file(HERE / "whole" / "model.safetensors")
    config = json.loads((HERE / "whole" / "config.json").read_text())
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        (HERE / "whole" / name).unlink(missing_ok=True)
    (HERE / "whole").rmdir()
    return config, state


def linears(state):
    return [name for name, value in state.items() if name.endswith(("_proj.weight", "_mqa.weight"))
            or "experts" in name and value.dim() == 2]


def save(folder, config, state, quantization, meaning):
    folder = HERE / folder
    folder.mkdir(exist_ok=True)
    config = {**config, "quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: value.contiguous() for name, value in state.items()}, folder / "model.safetensors",
              metadata={"format": "pt"})
    hashes = {name: hashlib.sha256(value.float().contiguous().numpy().tobytes()).hexdigest()
              for name, value in meaning.items()}
    (folder / "meaning.json").write_text(json.dumps(hashes, indent=0))


def gptq(library, gptqmodel, kind, folder, bits, group, sym, v2=False):
    layer = source(library / "auto_gptq/nn_modules/qlinear/qlinear_cuda_old.py", "qlinear")
    quantizer = source(library / "auto_gptq/quantization/quantizer.py", "quantizer").Quantizer
    config, state = model(kind)
    meaning = {}
    for name in linears(state):
        weight = state.pop(name).float()
        rows, columns = weight.shape
        size = columns if group == -1 else group
        found = []
        for first in range(0, columns, size):
            q = quantizer()
            q.configure(bits, perchannel=True, sym=sym)
            q.find_params(weight[:, first:first + size], weight=True)
            found.append((q.scale, q.zero))
        scales, zeros = (torch.cat([pair[i] for pair in found], 1) for i in (0, 1))
        linear = torch.nn.Linear(columns, rows, bias=False)
        linear.weight.data = weight
        packed = layer.QuantLinear(bits, group, columns, rows, False, weight_dtype=torch.float16)
        scales = scales.half().float()  # as it is stored
        packed.pack(linear, scales, zeros.clone(), None)
        packed.scales = packed.scales.half()
        stored = {key: value.clone() for key, value in packed.state_dict().items()}
        packed.scales = packed.scales.float()
        meaning[name] = packed(torch.eye(columns)).T
        if v2:
            convert = function(gptqmodel / "gptqmodel/utils/model.py", "convert_gptq_v1_to_v2_format_module")
            module = types.SimpleNamespace(qzeros=types.SimpleNamespace(data=stored["qzeros"]),
                                           qzero_format=lambda format: None)
            convert(module, bits, torch.int32)
        state |= {name.removesuffix("weight") + key: value for key, value in stored.items()}
    save(folder, config, state, {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": False,
                                 "sym": sym, "checkpoint_format": "gptq_v2" if v2 else "gptq"}, meaning)


def function(path, name):
    """Returns one function of a file, without the file's imports."""
    found = next(node for node in ast.walk(ast.parse(path.read_text()))
                 if isinstance(node, ast.FunctionDef) and node.name == name)
    found.body = [node for node in found.body if not isinstance(node, ast.Assert)]
    log = types.SimpleNamespace(info=types.SimpleNamespace(once=print))
    scope = {"torch": torch, "log": log, "BaseQuantLinear": object, "nn": torch.nn}
    exec(compile(ast.Module([found], []), str(path), "exec"), scope)  # noqa: S102
    return scope[name]


def awq(library, kind, folder, group):
    packing = source(library / "awq/utils/packing_utils.py", "packing")
    gemm = source(library / "awq/modules/linear/gemm.py", "gemm",
                  awq__utils__module={"try_import": lambda name: (None, "")},
                  awq__utils__utils={"get_best_device": lambda: "cpu"},
                  awq__utils__packing_utils=vars(packing))
    quantize = function(library / "awq/quantize/quantizer.py", "pseudo_quantize_tensor")
    config, state = model(kind)
    meaning = {}
    for name in linears(state):
        weight = state.pop(name).float()
        how = types.SimpleNamespace(group_size=group, zero_point=True, w_bit=4)
        weight, scales, zeros = quantize(how, weight)
        linear = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
        linear.weight.data = weight.half()
        packed = gemm.WQLinear_GEMM.from_linear(linear, 4, group, scales=scales.T.contiguous().half(),
                                                zeros=zeros.T.contiguous().half())
        meaning[name] = packing.dequantize_gemm(packed.qweight, packed.qzeros, packed.scales.float(), 4, group).T
        state |= {name.removesuffix("weight") + key: value for key, value in packed.state_dict().items()}
    save(folder, config, state, {"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemm",
                                 "zero_point": True, "modules_to_not_convert": None}, meaning)


def compressed(kind, folder, **arguments):
    args = QuantizationArgs(**arguments)
    config, state = model(kind)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    is_float = args.type == "float"
    compressor = FloatQuantizationCompressor if is_float else PackedQuantizationCompressor
    meaning = {}
    for name in linears(state):
        weight = state.pop(name)
        rows, columns = weight.shape
        if args.strategy == "tensor":
            parts = weight.reshape(1, 1, -1)
        else:
            parts = weight.reshape(rows, -1, args.group_size or columns)
        scale, zero = calculate_qparams(parts.amin(-1), parts.amax(-1), args)
        scale = scale.to(torch.bfloat16)
        if args.strategy == "tensor":
            scale, zero = scale.reshape(1), zero.reshape(1)
        given = {"weight": weight, "weight_scale": scale}
        if not args.symmetric:
            given["weight_zero_point"] = zero
        stored = compressor.compress(given, scheme)
        wide = {**stored, "weight_scale": stored["weight_scale"].float()}
        meaning[name] = compressor.decompress(wide, scheme)["weight"]
        state |= {name.removesuffix("weight") + key: value for key, value in stored.items()}
    layout = "float-quantized" if is_float else "pack-quantized"
    written = QuantizationConfig(config_groups={"group_0": scheme}, format=layout, ignore=["lm_head"],
                                 quantization_status="compressed")
    save(folder, config, state, json.loads(written.model_dump_json()), meaning)


def fp8(kind, folder, block):
    config, state = model(kind)
    meaning, decode = {}, Fp8Dequantize(None)
    for name in linears(state):
        weight = state.pop(name).float()
        rows, columns = weight.shape
        grid = -(-rows // block[0]), -(-columns // block[1])
        scale = torch.zeros(grid)
        wide = torch.zeros(rows, columns)
        for r in range(grid[0]):
            for c in range(grid[1]):
                part = slice(r * block[0], (r + 1) * block[0]), slice(c * block[1], (c + 1) * block[1])
                scale[r, c] = weight[part].abs().max() / 448
                wide[part] = scale[r, c]
        stored = (weight / wide).to(torch.float8_e4m3fn)
        whole = rows % grid[0] == columns % grid[1] == 0 and rows // grid[0] in (rows, block[0])
        whole = whole and columns // grid[1] in (columns, block[1])  # as the library takes it
        meaning[name] = decode._dequantize_one(stored, scale, torch.float32) if whole else stored.float() * wide
        state |= {name: stored, name + "_scale_inv": scale}
    save(folder, config, state, {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
                                 "weight_block_size": block}, meaning)


def mxfp4(folder):
    config, state = model("gpt_oss")
    meaning = {}
    for name in [name for name in state if name.endswith(("gate_up_proj", "down_proj")) and state[name].dim() == 3]:
        weight = state.pop(name).float().transpose(1, 2)  # [experts, outputs, inputs]
        groups = weight.reshape(*weight.shape[:2], -1, 32)
        exponents = (torch.floor(torch.log2(groups.abs().amax(-1))) - 2).clamp(-127, 127)
        values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
        codes = (groups / torch.exp2(exponents)[..., None]).unsqueeze(-1).sub(values).abs().argmin(-1).to(torch.uint8)
        state[name + "_blocks"] = codes[..., 0::2] | codes[..., 1::2] << 4
        state[name + "_scales"] = (exponents + 127).to(torch.uint8)
        got = convert_moe_packed_tensors(state[name + "_blocks"], state[name + "_scales"], dtype=torch.float32)
        meaning[name + "_blocks"] = got.transpose(1, 2)
    save(folder, config, state, {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}, meaning)


def main(auto_gptq, auto_awq, gptqmodel):
    gptq(auto_gptq, gptqmodel, "mixtral", "gptq4", 4, 32, True)
    gptq(auto_gptq, gptqmodel, "qwen3_moe", "gptq4_asymmetric", 4, 32, False)
    gptq(auto_gptq, gptqmodel, "mixtral", "gptq8_v2", 8, -1, False, v2=True)
    awq(auto_awq, "qwen3_moe", "awq", 32)
    compressed("mixtral", "packed4", num_bits=4, type="int", strategy="group", group_size=32, symmetric=True)
    compressed("qwen3_moe", "packed4_asymmetric", num_bits=4, type="int", strategy="group", group_size=32,
               symmetric=False)
    compressed("deepseek_v3", "packed8", num_bits=8, type="int", strategy="channel", symmetric=True)
    compressed("mixtral", "float_channel", num_bits=8, type="float", strategy="channel", symmetric=True)
    compressed("qwen3_moe", "float_tensor", num_bits=8, type="float", strategy="tensor", symmetric=True)
    fp8("deepseek_v3", "fp8", [128, 128])
    mxfp4("mxfp4")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
