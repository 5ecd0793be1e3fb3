"""A model's header fields from its config.json, or from flags for bare MoE layers; what Colibri lacks is refused."""

import json
import os
from pathlib import Path

import numpy as np

from colibri import headers
from colibri.errors import ColibriError
from converter.rope import rope, yarn_mscale
from converter.values import Values, once

CODES = headers.default().constants
ROUTER_SOFTMAX, ROUTER_TOPK_SOFTMAX, ROUTER_SIGMOID, ROUTER_SPARSEMIXER = (
    CODES[f"ROUTER_{kind}"] for kind in ("SOFTMAX", "TOPK_SOFTMAX", "SIGMOID", "SPARSEMIXER"))
ATTENTION_LATENT, ATTENTION_MOA = CODES["ATTENTION_LATENT"], CODES["ATTENTION_MOA"]
QK_NORM_HEAD, QK_NORM_ALL = CODES["QK_NORM_HEAD"], CODES["QK_NORM_ALL"]
NORM_RMS, NORM_LAYER = CODES["NORM_RMS"], CODES["NORM_LAYER"]
SILU, ACTIVATION_CLAMPED = CODES["ACTIVATION_SILU"], CODES["ACTIVATION_CLAMPED_SWIGLU"]
ACTIVATIONS = {"silu": SILU, "swish": SILU, "gelu": CODES["ACTIVATION_GELU"], "relu": CODES["ACTIVATION_RELU"]}
LATENT_EPS = 1e-6  # the latent norms have an epsilon of their own, whatever the config says
MAX_CONFIG_BYTES = 16 << 20
HEADER = headers.default().structs["BinHeader"]
MAX_LAYERS = 32 * HEADER["dense_layers"].shape[0]  # bits of a layer mask
FLOATS = [name for name in HEADER.names if HEADER[name] == np.float32]
# Header fields that leave a model plain; what is not here is 0 in a bare stack.
PLAIN = {"gated": 1, "num_groups": 1, "topk_groups": 1, "routed_scaling": 1.0, "residual_multiplier": 1.0,
         "embedding_multiplier": 1.0, "logits_multiplier": 1.0, "rope_attention_factor": 1.0, "dense_layers": [],
         "window_layers": [], "fp8_block": [128, 128], "mtp_layers": 0,
         "interleave_rows": CODES["PANEL_ROWS"]}


# Header fields from a config.json

def zeros():
    """Every field of the header that is a number, and `rope_interleaved`, of the checkpoint's rows, as 0."""
    return {**dict.fromkeys(HEADER.names, 0), "rope_interleaved": 0}


def basics(c, **fields):
    """Every header field of the plainest family, GQA with RMS norms, then `fields` in their place."""
    hidden, num_heads = c.need("hidden_size|d_model"), c.need("num_attention_heads|n_heads")
    if not num_heads:
        raise c.bad("num_attention_heads", num_heads, "at least one")
    head_dim = fields.get("head_dim") or c.get("head_dim") or hidden // num_heads
    eps = fields.pop("norm_eps", None) or c.need("rms_norm_eps", float)
    base = {
        **zeros(), **PLAIN,
        "num_layers": num_layers(c), "hidden": hidden, "num_heads": num_heads, "head_dim": head_dim,
        "v_head_dim": head_dim, "num_kv_heads": c.get("num_key_value_heads", default=num_heads),
        "vocab_size": c.need("vocab_size"), "max_positions": c.need("max_position_embeddings|max_seq_len"),
        "activation": activation(c), "attention_scale": head_dim ** -0.5, "norm_kind": NORM_RMS, "norm_eps": eps,
        "final_norm_eps": eps, "latent_norm_eps": LATENT_EPS, "tied_embeddings": c.flag("tie_word_embeddings"),
        "mtp_layers": c.get("num_nextn_predict_layers|num_mtp_layers", default=0)}
    if "num_experts" not in fields:
        fields["num_experts"] = c.need("num_local_experts|num_experts|n_routed_experts|moe_num_experts")
    if "k" not in fields:
        fields["k"] = c.need("num_experts_per_tok|moe_k")
    rotary = rope(c, dim=fields.pop("rope_dim", head_dim), theta=fields.pop("rope_theta", 10000.0),
                  partial=fields.pop("rope_partial", None), mscales=fields.pop("rope_mscales", False))
    return {**base, **rotary, **fields}


def num_layers(c):
    """Checked at once: lists as long as this are made of it."""
    layers = c.need("num_hidden_layers|n_layers")
    if not 1 <= layers <= MAX_LAYERS:
        raise c.bad("num_hidden_layers", layers, f"1 to {MAX_LAYERS}")
    return layers


def activation(c):
    name = c.get("hidden_act|activation_function|ffn_config.ffn_act_fn.name|activation", str, "silu")
    if name not in ACTIVATIONS:
        raise c.bad("hidden_act", name, "one of " + ", ".join(ACTIVATIONS))
    return ACTIVATIONS[name]


def window(c, size, layers=None):
    """The sliding window, on all layers, or on those that layer_types calls so."""
    types = c.get("layer_types", list)
    if types is None:
        types = layers or ["sliding_attention"] * num_layers(c)
    if len(types) != num_layers(c) or not {*map(str, types)} <= {"sliding_attention", "full_attention"}:
        raise c.bad("layer_types", types, "sliding_attention or full_attention for each layer")
    sliding = [layer for layer, kind in enumerate(types) if kind == "sliding_attention"]
    if sliding and not size:
        raise c.bad("sliding_window", size, "at least 1 with sliding_attention layers")
    return {"window": size, "window_layers": sliding} if sliding else {}


def first_dense(c, default):
    return [*range(min(c.get("first_k_dense_replace", default=default), num_layers(c)))]


def dense_layers(c):
    """Qwen's choice of dense layers."""
    step, listed = c.get("decoder_sparse_step", default=1), c.get("mlp_only_layers", list, [])
    return [i for i in range(num_layers(c)) if i in listed or not step or (i + 1) % step]


def bias(c, key="attention_bias", default=False):
    flag = c.flag(key, default)
    return {"qkv_bias": flag, "attention_out_bias": flag}


def quantization(c):
    """Rows and columns of one fp8 scale; a quantization that cannot be decoded is refused."""
    c.accept("quantization_config.quant_method", ["fp8", "mxfp4"])
    c.accept("quantization_config.fmt", ["e4m3", "float8_e4m3fn"])
    block = c.get("quantization_config.weight_block_size", list, [128, 128])
    if len(block) != 2 or not all(type(size) is int and size > 0 for size in block):
        raise c.bad("quantization_config.weight_block_size", block, "two sizes")
    return block


def mixtral(c):
    size = c.get("sliding_window")
    return basics(c, ffn=c.need("intermediate_size"), renormalize=1, rope_theta=1e6,
                  **(window(c, size) if size else {}))


def olmoe(c):
    return basics(c, ffn=c.need("intermediate_size"), renormalize=c.flag("norm_topk_prob"), qk_norm=QK_NORM_ALL,
                  clip_qkv=c.get("clip_qkv", float, 0.0), **bias(c))


def qwen2_moe(c):
    alternate = ["sliding_attention" if i % 2 == 0 and i < c.get("max_window_layers", default=28) else "full_attention"
                 for i in range(num_layers(c))]
    sliding = window(c, c.get("sliding_window", default=4096), alternate) if c.flag("use_sliding_window") else {}
    return basics(c, ffn=c.need("moe_intermediate_size"), renormalize=c.flag("norm_topk_prob"),
                  qkv_bias=c.flag("qkv_bias", True), dense_layers=dense_layers(c),
                  dense_ffn=c.need("intermediate_size"), shared_gate=1,
                  shared_ffn=c.need("shared_expert_intermediate_size"), **sliding)


def qwen3_moe(c):
    sliding = window(c, c.get("sliding_window", default=4096)) if c.flag("use_sliding_window") else {}
    return basics(c, ffn=c.need("moe_intermediate_size"), renormalize=c.flag("norm_topk_prob"), qk_norm=QK_NORM_HEAD,
                  dense_ffn=c.need("intermediate_size"), dense_layers=dense_layers(c), **bias(c), **sliding)


def granitemoe(c):
    return basics(c, ffn=c.need("intermediate_size"), router_kind=ROUTER_TOPK_SOFTMAX, **bias(c),
                  attention_scale=c.get("attention_multiplier", float, 1.0),
                  embedding_multiplier=c.get("embedding_multiplier", float, 1.0),
                  residual_multiplier=c.get("residual_multiplier", float, 1.0),
                  logits_multiplier=1 / c.get("logits_scaling", float, 1.0))


def phimoe(c):
    size = c.get("sliding_window")
    return basics(c, ffn=c.need("intermediate_size"), router_kind=ROUTER_SPARSEMIXER, norm_kind=NORM_LAYER, norm_bias=1,
                  router_jitter=c.get("router_jitter_noise", float, 0.01), lm_head_bias=c.flag("lm_head_bias"),
                  rope_theta=1e6, rope_mscales=True, **bias(c), **(window(c, size) if size else {}))


def gpt_oss(c):
    if not c.get("rope_scaling|rope_parameters", dict):
        c = Values({**c.values, "rope_parameters": {"rope_type": "yarn", "factor": 32.0, "truncate": False,
                                                    "original_max_position_embeddings": 4096}}, c.where)
    alternate = ["full_attention" if i % 2 else "sliding_attention" for i in range(num_layers(c))]
    return basics(c, ffn=c.need("intermediate_size"), router_kind=ROUTER_TOPK_SOFTMAX, router_logit_bias=1,
                  expert_bias=1, activation=ACTIVATION_CLAMPED, swiglu_alpha=c.get("swiglu_alpha", float, 1.702),
                  swiglu_limit=c.get("swiglu_limit", float, 7.0), sinks=1, rope_theta=150000.0,
                  **bias(c, default=True), **window(c, c.get("sliding_window", default=128), alternate))


def deepseek(c, num_groups=1, topk_groups=1, routed_scaling=1.0, **fields):
    """num_groups, topk_groups, routed_scaling: where the config does not tell."""
    rotated, v_dim = c.need("qk_rope_head_dim"), c.need("v_head_dim")
    dim = c.need("qk_nope_head_dim") + rotated
    scaling = Values(c.get("rope_scaling|rope_parameters", dict, {}), c.where)
    scaled = scaling.get("rope_type|type", str, "default") != "default"
    mscale = scaling.get("mscale_all_dim", float, 0.0) if scaled else 0.0
    scale = dim ** -0.5 * (yarn_mscale(scaling.need("factor", float), mscale) ** 2 if mscale else 1)
    heads, ffn = c.need("num_attention_heads"), c.need("moe_intermediate_size")
    if c.get("num_key_value_heads", default=heads) != heads:
        raise c.bad("num_key_value_heads", c.get("num_key_value_heads"), f"num_attention_heads={heads}")
    return basics(c, head_dim=dim, v_head_dim=v_dim, num_kv_heads=heads, rope_dim=rotated, attention_scale=scale,
                  ffn=ffn, attention_kind=ATTENTION_LATENT, q_lora_rank=c.get("q_lora_rank", default=0),
                  kv_lora_rank=c.need("kv_lora_rank"), num_groups=c.get("n_group", default=num_groups),
                  topk_groups=c.get("topk_group", default=topk_groups),
                  routed_scaling=c.get("routed_scaling_factor", float, routed_scaling),
                  dense_ffn=c.need("intermediate_size"), shared_ffn=ffn * c.get("n_shared_experts", default=0),
                  dense_layers=first_dense(c, 0), **fields)


def deepseek_v2(c):
    limited = c.get("topk_method", str, "greedy") == "group_limited_greedy"
    groups = {} if limited else {"num_groups": 1, "topk_groups": 1}
    return {**deepseek(c, rope_interleaved=1), **groups}


def deepseek_v3(c):
    return deepseek(c, num_groups=8, topk_groups=4, routed_scaling=2.5, router_kind=ROUTER_SIGMOID, router_bias=1,
                    renormalize=c.flag("norm_topk_prob", True),
                    renormalize_min=1e-20, rope_interleaved=c.flag("rope_interleave", True))


def glm4_moe(c):
    ffn = c.need("moe_intermediate_size")
    return basics(c, ffn=ffn, router_kind=ROUTER_SIGMOID, router_bias=1, renormalize=c.flag("norm_topk_prob", True),
                  renormalize_min=1e-20, num_groups=c.get("n_group", default=1),
                  topk_groups=c.get("topk_group", default=1), routed_scaling=c.get("routed_scaling_factor", float, 1.0),
                  qkv_bias=c.flag("attention_bias"),
                  qk_norm=QK_NORM_HEAD * c.flag("use_qk_norm"), rope_partial=0.5, dense_ffn=c.need("intermediate_size"),
                  dense_layers=first_dense(c, 1),
                  shared_ffn=ffn * c.get("n_shared_experts", default=1))


def ernie4_5_moe(c):
    layers, ffn = num_layers(c), c.need("moe_intermediate_size")
    first, step = c.get("moe_layer_start_index", default=1), c.get("moe_layer_interval", default=1)
    last = c.values.get("moe_layer_end_index", -1)
    last = layers - 1 if last == -1 else c.need("moe_layer_end_index")
    return basics(c, ffn=ffn, router_bias=1, renormalize=1, renormalize_min=c.get("moe_norm_min", float, 1e-12),
                  tied_embeddings=c.flag("tie_word_embeddings", True), rope_theta=500000.0, rope_interleaved=1,
                  dense_ffn=c.need("intermediate_size"), shared_ffn=ffn * c.get("moe_num_shared_experts", default=2),
                  dense_layers=[i for i in range(layers) if (i + 1) % step or not first <= i <= last])


def minimax_m2(c):
    partial = c.get("rotary_dim") / c.need("head_dim") if c.get("rotary_dim") else 1.0
    return basics(c, ffn=c.need("intermediate_size"), router_kind=ROUTER_SIGMOID, router_bias=1, renormalize=1,
                  qk_norm=QK_NORM_ALL, rope_theta=5e6, rope_partial=partial)


def dbrx(c):
    theta = c.get("rope_parameters.rope_theta|rope_theta|attn_config.rope_theta", float, 10000.0)
    return basics(c, num_kv_heads=c.need("attn_config.kv_n_heads"), clip_qkv=c.get("attn_config.clip_qkv", float, 0.0),
                  ffn=c.need("ffn_config.ffn_hidden_size"), num_experts=c.need("ffn_config.moe_num_experts"),
                  k=c.need("ffn_config.moe_top_k"), norm_kind=NORM_LAYER, norm_eps=1e-5, rope_theta=theta,
                  renormalize=int("moe_normalize_expert_weights" not in c.values["ffn_config"]
                                  or c.values["ffn_config"]["moe_normalize_expert_weights"] is not None))


def jetmoe(c):
    k, kv_heads, dim = c.need("num_experts_per_tok"), c.need("num_key_value_heads"), c.need("kv_channels")
    c = Values({"num_attention_heads": k * kv_heads, **c.values}, c.where)
    c.accept("num_attention_heads", [k * kv_heads])
    return basics(c, head_dim=dim, ffn=c.need("intermediate_size"), router_kind=ROUTER_TOPK_SOFTMAX, norm_eps=1e-6,
                  final_norm_eps=c.need("rms_norm_eps", float), attention_kind=ATTENTION_MOA, attention_out_bias=1,
                  ffn_out_bias=1, tied_embeddings=c.flag("tie_word_embeddings", True))


def load(option, checkpoint):
    """A checkpoint's config as Values: --config FILE, else config.json in the folder or NAME.json, then config.json
    beside the file, else an empty one."""
    checkpoint = Path(checkpoint)
    beside = [checkpoint / "config.json"] if checkpoint.is_dir() else [checkpoint.with_suffix(".json"),
                                                                       checkpoint.parent / "config.json"]
    path = option or next((path for path in beside if path != checkpoint and is_there(path)), None)
    return Values({}, None) if path is None else Values(read_json(path), str(path))


def is_there(path):
    """Whether there is anything at a path, be it a link to nothing."""
    return path.exists() or path.is_symlink()


def read_json(path):
    """The JSON object in a small file."""
    if os.path.exists(path) and not os.path.isfile(path):  # a pipe might never end
        raise ColibriError(f"{path}: not a regular file, expected a JSON config; check --config")
    try:
        with open(path, "rb") as file:
            text = file.read(MAX_CONFIG_BYTES + 1)
        values = json.loads(text, object_pairs_hook=once) if len(text) <= MAX_CONFIG_BYTES else None
    except OSError as error:
        raise ColibriError(f"{path}: {error.strerror}, expected a readable JSON config; check --config") from None
    except (ValueError, RecursionError) as error:
        raise ColibriError(f"{path}: not JSON ({str(error)[:80]}), expected an object with each key once; "
                           "check --config") from None
    if type(values) is not dict:
        raise ColibriError(f"{path}: expected a JSON object of at most {MAX_CONFIG_BYTES} bytes; check --config")
    return values


# Bare MoE layers

# Header field -> the names that a config may use for it, its kind, its flag, and what it is where nothing tells; None:
# it is asked for.
ASKED = {"k": ("num_experts_per_tok|k", int, "--k", None),
         "activation": ("hidden_act|activation", str, "--activation", None),
         "renormalize": ("norm_topk_prob|renormalize", bool, "--renormalize or --no-renormalize", None),
         "num_groups": ("n_group|num_groups", int, "--num-groups", 1),
         "topk_groups": ("topk_group|topk_groups", int, "--topk-groups", 1),
         "routed_scaling": ("routed_scaling_factor|routed_scaling", float, "--routed-scaling", 1.0)}
SCORES = {"softmax": ROUTER_SOFTMAX, "sigmoid": ROUTER_SIGMOID}
SIZES = {"num_experts": "num_local_experts|num_experts", "hidden": "hidden_size|hidden",
         "ffn": "intermediate_size|ffn", "num_layers": "num_hidden_layers|num_layers"}


def bare_fields(family, sizes, c, flags, unknown=None):
    """The header fields of bare MoE layers: `sizes` from their tensors (a config's go before), routing from the family,
    a config without model_type, or flags {field: value or None}; a choice that nothing tells is asked for, or put into
    the list `unknown` by its flag."""
    fields, missing = {**zeros(), **PLAIN, **sizes, **family.routing}, []
    for field, keys in SIZES.items():
        fields[field] = c.get(keys, default=fields[field])
    for field, (keys, kind, flag, default) in ASKED.items():
        given, known = flags.get(field), c.get(keys, kind)
        if given is not None and known is not None and given != known:
            raise ColibriError(f"{flag}: {given}, but {c.where} says {json.dumps(known)[:80]}; drop the flag or "
                               "correct the config")
        value = next((each for each in (given, known, default) if each is not None), None)
        if field == "activation" and value is not None:
            value = _activation_code(value, flag if given is not None else c.where)
        if field in family.routing:
            if not (value in (None, family.routing[field]) or _means_nothing(field, value, fields)):
                raise ColibriError(f"{c.where or flag}: {field}={value}, expected {family.routing[field]}, as always "
                                   f"in {family.name}; drop it")
        elif value is None:
            missing.append(flag)
            fields["k"] = fields["k"] or 1
        else:
            fields[field] = float(value) if kind is float else int(value)
    scores = c.get("scoring_func", str)
    if scores is not None and SCORES.get(scores) != family.routing.get("router_kind", SCORES.get(scores, -1)):
        raise c.bad("scoring_func", scores, " or ".join(SCORES) + f", as {family.name} has it")
    fields["router_kind"] = SCORES.get(scores, fields["router_kind"])
    if missing and unknown is None:
        raise ColibriError(f"{c.where or 'no config file'}: how experts are used is not known, expected it from a "
                           f"config or flags; give {', '.join(missing)}")
    if unknown is not None:
        unknown += missing
    return fields


def missing_flags(c, flags, fields):
    """The flags of those fields of ASKED that neither a config nor a flag tells."""
    return [ASKED[field][2] for field in fields if flags.get(field) is None and c.get(*ASKED[field][:2]) is None]


def _means_nothing(field, value, fields):
    """Whether a choice is the family's own: a softmax over the chosen adds up to 1, a clamped SwiGLU is a SwiGLU."""
    return (field == "renormalize" and value and fields["router_kind"] == ROUTER_TOPK_SOFTMAX
            or field == "activation" and value == SILU and fields["activation"] == ACTIVATION_CLAMPED)


def _activation_code(name, where):
    if name not in ACTIVATIONS:
        raise ColibriError(f"{where}: activation={name[:80]}, expected one of silu, gelu, relu; Colibri has no other")
    return ACTIVATIONS[name]


def check_flags(fields, c, flags):
    """Flags may repeat what a config says, and nothing else."""
    for field, (_, _, flag, _) in ASKED.items():
        given = flags.get(field)
        value = _activation_code(given, flag) if field == "activation" and given is not None else given
        if value is not None and value != fields[field]:
            raise ColibriError(f"{flag}: {given}, but {c.where} makes {field} {fields[field]}; drop the flag or "
                               "correct the config")


def check_own_names(fields, c):
    """A config with a model_type may repeat what it means in the names of bare MoE layers, and nothing else."""
    for field in ("k", "hidden", "ffn", "num_layers", "renormalize"):
        c.accept(field, [fields[field]])


def _held(value):
    """Whether float32 rounds a number to a finite one, and to 0 none but 0."""
    with np.errstate(over="ignore", under="ignore"):
        rounded = np.float32(value)
    return np.isfinite(rounded) and (rounded != 0 or value == 0)


def check_limits(fields, where):
    """Refuses a model that no library can be built for, or whose numbers a file cannot hold."""
    broken = headers.default().broken_rule(fields)
    heads, layers = fields["num_heads"], fields["num_layers"]
    rules = [("num_layers", 1 <= layers <= MAX_LAYERS, f"1 to {MAX_LAYERS}"),
             ("norm_eps", heads == 0 or fields["norm_eps"] > 0, "above 0"),
             ("final_norm_eps", heads == 0 or fields["final_norm_eps"] > 0, "above 0"),
             *((name, _held(fields[name]), "a number that float32 holds") for name in FLOATS)]
    for field, rule in [*filter(None, [broken]), *((field, rule) for field, holds, rule in rules if not holds)]:
        raise ColibriError(f"{where}: {field}={fields[field]}, expected {rule}; correct the config or the flag")
