"""The families of Mixture-of-Experts models, one row each: config.json -> header fields, checkpoint names -> tensors.

All families are one canonical model; what differs is in header values and in which tensors there are. Orientation and
meaning come from the row, never from a shape. Sources are strided views of mapped tensors: nothing is read here.
"""

import re
from collections import namedtuple

import numpy as np

from colibri.errors import ColibriError
from colibri.headers import evaluate
from converter import views
from converter.pt_reader import Storage, Tensor
from converter.quantized import decoded
from converter.rope import rope, yarn_mscale
from converter.values import Values

ROUTER_SOFTMAX, ROUTER_TOPK_SOFTMAX, ROUTER_SIGMOID, ROUTER_SPARSEMIXER = range(4)
ATTENTION_GQA, ATTENTION_LATENT, ATTENTION_MOA = range(3)
QK_NORM_NONE, QK_NORM_HEAD, QK_NORM_ALL = range(3)
NORM_RMS, NORM_LAYER = 1, 2
ACTIVATION_CLAMPED = 3
ACTIVATIONS = {"silu": 0, "swish": 0, "gelu": 1, "relu": 2}
MAX_LAYERS = 128  # bits of a layer mask
LATENT_EPS = 1e-6  # the latent norms have an epsilon of their own, whatever the config says

# fields: Values -> header fields. accepts: config key -> values under which the row is right; another is refused.
# prefix: may or may not stand before every name. ignored: templates of tensors that change nothing.
Family = namedtuple("Family", "name fields tensors prefix accepts ignored")
# template: a checkpoint name, N the layer, E the expert. shape: of the checkpoint's tensor, in header fields and the
# layer's `moe` and `mlp_ffn`; a zero means that it is not there. view(tensor, fields, expert) -> the rows to stack.
Part = namedtuple("Part", "template shape view")


# Tensors by Colibri name: alternatives, each a list of parts; those of a gated matrix are gate, then up.

def P(template, shape, view=views.whole):
    return Part(template, tuple(dim.strip() for dim in shape.split(",")), view)


L = "layers.N."
COMMON = {
    "embed": [[P("embed_tokens.weight", "vocab_size, hidden")]],
    "final_norm": [[P("norm.weight", "hidden")]],
    "final_norm_bias": [[P("norm.bias", "hidden * norm_bias")]],
    "lm_head": [[P("lm_head.weight", "vocab_size * (1 - tied_embeddings), hidden")]],
    "lm_head_bias": [[P("lm_head.bias", "vocab_size * lm_head_bias")]],
    L + "attention_norm": [[P(L + "input_layernorm.weight", "hidden")]],
    L + "attention_norm_bias": [[P(L + "input_layernorm.bias", "hidden * norm_bias")]],
    L + "ffn_norm": [[P(L + "post_attention_layernorm.weight", "hidden")]],
    L + "ffn_norm_bias": [[P(L + "post_attention_layernorm.bias", "hidden * norm_bias")]]}
Q, KV, A = "num_heads * head_dim", "num_kv_heads * head_dim", L + "self_attn."


def gqa(qk_view=views.whole):
    return {
        L + "qkv": [[P(A + "q_proj.weight", Q + ", hidden", qk_view), P(A + "k_proj.weight", KV + ", hidden", qk_view),
                     P(A + "v_proj.weight", KV + ", hidden")]],
        L + "qkv_bias": [[P(A + f"{x}_proj.bias", n + " * qkv_bias") for x, n in zip("qkv", (Q, KV, KV))]],
        L + "q_norm": [[P(A + "q_norm.weight", f"head_dim * (qk_norm == 1) + {Q} * (qk_norm == 2)")]],
        L + "k_norm": [[P(A + "k_norm.weight", f"head_dim * (qk_norm == 1) + {KV} * (qk_norm == 2)")]],
        L + "sinks": [[P(A + "sinks", "num_heads * sinks")]],
        L + "attention_out": [[P(A + "o_proj.weight", "hidden, " + Q)]],
        L + "attention_out_bias": [[P(A + "o_proj.bias", "hidden * attention_out_bias")]]}


LATENT = {
    L + "qkv": [[P(A + "q_a_proj.weight", "q_lora_rank, hidden"),
                 P(A + "q_proj.weight", Q + " * (q_lora_rank == 0), hidden", views.latent_q),
                 P(A + "kv_a_proj_with_mqa.weight", "kv_lora_rank + rotary_dim, hidden", views.latent_kv_a)]],
    L + "q_a_norm": [[P(A + "q_a_layernorm.weight", "q_lora_rank")]],
    L + "q_b": [[P(A + "q_b_proj.weight", Q + " * (q_lora_rank > 0), q_lora_rank", views.latent_q)]],
    L + "kv_a_norm": [[P(A + "kv_a_layernorm.weight", "kv_lora_rank")]],
    L + "kv_b": [[P(A + "kv_b_proj.weight", "num_heads * (head_dim - rotary_dim + v_head_dim), kv_lora_rank",
                    views.latent_kv_b)]],
    L + "attention_out": [[P(A + "o_proj.weight", "hidden, num_heads * v_head_dim")]]}


def mlps(shared):
    """Colibri's mlp, which every token takes: a dense layer's whole FFN, or a MoE layer's shared expert."""
    places = (f"{L}mlp.", "mlp_ffn * (1 - moe)"), (f"{L}mlp.{shared}.", "mlp_ffn * moe")
    return {L + "mlp_up": [[P(f"{at}{x}_proj.weight", f"{n}, hidden") for x in ("gate", "up") for at, n in places]],
            L + "mlp_down": [[P(f"{at}down_proj.weight", f"hidden, {n}") for at, n in places]]}


def experts_on_disk(block, gate="gate_proj", up="up_proj", down="down_proj"):
    one = f"{L}{block}.experts.E."
    return ([P(f"{one}{gate}.weight", "ffn * moe, hidden"), P(f"{one}{up}.weight", "ffn * moe, hidden")],
            [P(f"{one}{down}.weight", "hidden * moe, ffn")])


def experts_fused(up="mlp.experts.gate_up_proj", down="mlp.experts.down_proj"):
    shape = "num_experts * moe, 2 * ffn, hidden"
    return ([P(L + up, shape, views.gate_rows), P(L + up, shape, views.up_rows)],
            [P(L + down, "num_experts * moe, hidden, ffn", views.expert)])


def experts(*layouts):
    return {L + "experts_up": [up for up, _ in layouts], L + "experts_down": [down for _, down in layouts]}


def router(*templates):
    return {L + "router": [[P(L + template, "num_experts * moe, hidden")] for template in templates]}


def correction(*templates):
    return {L + "router_bias": [[P(L + template, "num_experts * router_bias * moe")] for template in templates]}


QWEN = {**router("mlp.gate.weight"), **experts(experts_on_disk("mlp"), experts_fused())}
MIXTRAL_EXPERTS = experts(experts_on_disk("block_sparse_moe", "w1", "w3", "w2"), experts_fused())
GPT_OSS = {
    **router("mlp.router.weight"), L + "router_logit_bias": [[P(L + "mlp.router.bias", "num_experts")]],
    L + "experts_up": [[P(L + "mlp.experts.gate_up_proj", "num_experts, hidden, 2 * ffn", view)
                        for view in (views.even_columns, views.odd_columns)],
                       [P(L + "mlp.experts.gate_up_proj_blocks", "num_experts, 2 * ffn, hidden", view)  # MXFP4
                        for view in (views.even_rows, views.odd_rows)]],
    L + "experts_up_bias": [[P(L + "mlp.experts.gate_up_proj_bias", "num_experts, 2 * ffn", view)
                             for view in (views.even_columns, views.odd_columns)]],
    L + "experts_down": [[P(L + "mlp.experts.down_proj", "num_experts, ffn, hidden", views.expert_transposed)],
                         [P(L + "mlp.experts.down_proj_blocks", "num_experts, hidden, ffn", views.expert)]],
    L + "experts_down_bias": [[P(L + "mlp.experts.down_proj_bias", "num_experts, hidden", views.expert)]]}
GRANITE = {
    **router("block_sparse_moe.router.layer.weight", "block_sparse_moe.router.weight"),
    **experts(experts_fused("block_sparse_moe.input_linear.weight", "block_sparse_moe.output_linear.weight"),
              experts_fused("block_sparse_moe.experts.gate_up_proj", "block_sparse_moe.experts.down_proj"))}
D, F = "blocks.N.norm_attn_norm.", "blocks.N.ffn."
DBRX = {
    "embed": [[P("wte.weight", "vocab_size, hidden")]], "final_norm": [[P("norm_f.weight", "hidden")]],
    "lm_head": COMMON["lm_head"],
    L + "attention_norm": [[P(D + "norm_1.weight", "hidden")]], L + "ffn_norm": [[P(D + "norm_2.weight", "hidden")]],
    L + "qkv": [[P(D + "attn.Wqkv.weight", f"{Q} + 2 * {KV}, hidden")]],
    L + "attention_out": [[P(D + "attn.out_proj.weight", "hidden, " + Q)]],
    L + "router": [[P(F + "router.layer.weight", "num_experts, hidden")]],
    L + "experts_up": [[P(F + f"experts.mlp.{w}", "num_experts * ffn, hidden", views.block) for w in ("w1", "v1")]],
    L + "experts_down": [[P(F + "experts.mlp.w2", "num_experts * ffn, hidden", views.block_transposed)]]}
J = L + "self_attention."
JETMOE = {
    L + "qkv": [[P(J + "kv_proj.weight", f"2 * {KV}, hidden")]],
    L + "attention_router": [[P(J + "experts.router.layer.weight", "num_experts, hidden")]],
    L + "attention_experts_in": [[P(J + "experts.input_linear.weight", f"num_experts, {KV}, hidden", views.expert)]],
    L + "attention_experts_out": [[P(J + "experts.output_linear.weight", f"num_experts, hidden, {KV}", views.expert)]],
    L + "attention_out_bias": [[P(J + "experts.bias", "hidden")]],
    **router("mlp.router.layer.weight"), L + "ffn_out_bias": [[P(L + "mlp.bias", "hidden")]],
    **experts(experts_fused("mlp.input_linear.weight", "mlp.output_linear.weight"))}


# Header fields from a config.json

def basics(c, **fields):
    """Every header field of the plainest family, GQA with RMS norms, then `fields` in their place."""
    hidden, num_heads = c.need("hidden_size|d_model"), c.need("num_attention_heads|n_heads")
    layers = c.need("num_hidden_layers|n_layers")
    if not (1 <= layers <= MAX_LAYERS and num_heads):
        raise c.bad("num_hidden_layers", layers, f"1 to {MAX_LAYERS}, and at least one head")
    head_dim = fields.get("head_dim") or c.get("head_dim") or hidden // num_heads
    eps = fields.pop("norm_eps", None) or c.need("rms_norm_eps", float)
    base = {
        "num_layers": layers, "hidden": hidden, "num_heads": num_heads, "head_dim": head_dim, "v_head_dim": head_dim,
        "num_kv_heads": c.get("num_key_value_heads", default=num_heads), "vocab_size": c.need("vocab_size"),
        "max_positions": c.need("max_position_embeddings|max_seq_len"), "k": 0, "ffn": 0, "gated": 1,
        "activation": activation(c), "swiglu_alpha": 0.0, "swiglu_limit": 0.0,
        "router_kind": ROUTER_SOFTMAX, "router_bias": 0, "router_logit_bias": 0, "router_jitter": 0.0, "renormalize": 0,
        "renormalize_min": 0.0, "num_groups": 1, "topk_groups": 1, "routed_scaling": 1.0, "expert_bias": 0,
        "dense_ffn": 0, "dense_layers": [], "shared_ffn": 0, "shared_gate": 0, "ffn_out_bias": 0,
        "attention_kind": ATTENTION_GQA, "q_lora_rank": 0, "kv_lora_rank": 0, "qkv_bias": 0, "attention_out_bias": 0,
        "qk_norm": QK_NORM_NONE, "sinks": 0, "attention_scale": head_dim ** -0.5, "clip_qkv": 0.0, "window": 0,
        "window_layers": [], "norm_kind": NORM_RMS, "norm_bias": 0, "norm_eps": eps, "final_norm_eps": eps,
        "latent_norm_eps": LATENT_EPS,
        "embedding_multiplier": 1.0, "residual_multiplier": 1.0, "logits_multiplier": 1.0,
        "tied_embeddings": c.flag("tie_word_embeddings"), "lm_head_bias": 0, "rope_kind": 1, "rope_interleaved": 0,
        "mtp_layers": c.get("num_nextn_predict_layers|num_mtp_layers", default=0)}
    if "num_experts" not in fields:
        fields["num_experts"] = c.need("num_local_experts|num_experts|n_routed_experts|moe_num_experts")
    if "k" not in fields:
        fields["k"] = c.need("num_experts_per_tok|moe_k")
    rotary = rope(c, dim=fields.pop("rope_dim", head_dim), theta=fields.pop("rope_theta", 10000.0),
                  partial=fields.pop("rope_partial", None))
    return {**base, **rotary, **fields}


def activation(c):
    name = c.get("hidden_act|activation_function|ffn_config.ffn_act_fn.name", str, "silu")
    if name not in ACTIVATIONS:
        raise c.bad("hidden_act", name, "one of " + ", ".join(ACTIVATIONS))
    return ACTIVATIONS[name]


def window(c, size, layers=None):
    """The sliding window, on all layers, or on those that layer_types calls so."""
    types = c.get("layer_types", list)
    if types is None:
        types = layers or ["sliding_attention"] * c.need("num_hidden_layers")
    if len(types) != c.need("num_hidden_layers") or not {*map(str, types)} <= {"sliding_attention", "full_attention"}:
        raise c.bad("layer_types", types, "sliding_attention or full_attention for each layer")
    sliding = [layer for layer, kind in enumerate(types) if kind == "sliding_attention"]
    if sliding and not size:
        raise c.bad("sliding_window", size, "at least 1 with sliding_attention layers")
    return {"window": size, "window_layers": sliding} if sliding else {}


def dense_layers(c):
    """Qwen's choice of dense layers."""
    step, listed = c.get("decoder_sparse_step", default=1), c.get("mlp_only_layers", list, [])
    return [i for i in range(c.need("num_hidden_layers")) if i in listed or not step or (i + 1) % step]


def bias(c, key="attention_bias", default=False):
    flag = c.flag(key, default)
    return {"qkv_bias": flag, "attention_out_bias": flag}


def quantization(c):
    """Rows and columns of one fp8 scale; a quantization that cannot be decoded is refused."""
    c.accept("quantization_config.quant_method", ["fp8", "mxfp4"])
    c.accept("quantization_config.fmt", ["e4m3"])
    block = c.get("quantization_config.weight_block_size", list, [128, 128])
    if len(block) != 2 or not all(type(size) is int and size > 0 for size in block):
        raise c.bad("quantization_config.weight_block_size", block, "two sizes")
    return block


def mixtral(c):
    size = c.get("sliding_window")
    return basics(c, ffn=c.need("intermediate_size"), renormalize=1, **(window(c, size) if size else {}))


def olmoe(c):
    return basics(c, ffn=c.need("intermediate_size"), renormalize=c.flag("norm_topk_prob"), qk_norm=QK_NORM_ALL,
                  clip_qkv=c.get("clip_qkv", float, 0.0), **bias(c))


def qwen2_moe(c):
    alternate = ["sliding_attention" if i % 2 == 0 and i < c.get("max_window_layers", default=28) else "full_attention"
                 for i in range(c.need("num_hidden_layers"))]
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
                  rope_theta=1e6, **bias(c), **(window(c, size) if size else {}))


def gpt_oss(c):
    if not c.get("rope_scaling", dict) and not c.get("rope_parameters", dict):
        c = Values({**c.values, "rope_parameters": {"rope_type": "yarn", "factor": 32.0, "truncate": False,
                                                    "original_max_position_embeddings": 4096}}, c.where)
    alternate = ["full_attention" if i % 2 else "sliding_attention" for i in range(c.need("num_hidden_layers"))]
    return basics(c, ffn=c.need("intermediate_size"), router_kind=ROUTER_TOPK_SOFTMAX, router_logit_bias=1,
                  expert_bias=1, activation=ACTIVATION_CLAMPED, swiglu_alpha=c.get("swiglu_alpha", float, 1.702),
                  swiglu_limit=c.get("swiglu_limit", float, 7.0), sinks=1, rope_theta=150000.0,
                  **bias(c, default=True), **window(c, c.get("sliding_window", default=128), alternate))


def deepseek(c, **fields):
    rotated, v_dim = c.need("qk_rope_head_dim"), c.need("v_head_dim")
    dim = c.need("qk_nope_head_dim") + rotated
    scaling = Values(c.get("rope_scaling", dict) or c.get("rope_parameters", dict) or {}, c.where)
    scaled = scaling.get("rope_type|type", str, "default") != "default"
    mscale = scaling.get("mscale_all_dim", float, 0.0) if scaled else 0.0
    scale = dim ** -0.5 * (yarn_mscale(scaling.need("factor", float), mscale) ** 2 if mscale else 1)
    heads, ffn = c.need("num_attention_heads"), c.need("moe_intermediate_size")
    if c.get("num_key_value_heads", default=heads) != heads:
        raise c.bad("num_key_value_heads", c.get("num_key_value_heads"), f"num_attention_heads={heads}")
    return basics(c, head_dim=dim, v_head_dim=v_dim, num_kv_heads=heads, rope_dim=rotated, attention_scale=scale,
                  ffn=ffn, attention_kind=ATTENTION_LATENT, q_lora_rank=c.get("q_lora_rank", default=0),
                  kv_lora_rank=c.need("kv_lora_rank"), num_groups=c.get("n_group", default=1),
                  topk_groups=c.get("topk_group", default=1), routed_scaling=c.get("routed_scaling_factor", float, 1.0),
                  dense_ffn=c.need("intermediate_size"), shared_ffn=ffn * c.get("n_shared_experts", default=0),
                  dense_layers=[*range(c.get("first_k_dense_replace", default=0))], **fields)


def deepseek_v2(c):
    limited = c.get("topk_method", str, "greedy") == "group_limited_greedy"
    groups = {} if limited else {"num_groups": 1, "topk_groups": 1}
    return {**deepseek(c, rope_interleaved=1), **groups}


def deepseek_v3(c):
    return deepseek(c, router_kind=ROUTER_SIGMOID, router_bias=1, renormalize=c.flag("norm_topk_prob", True),
                    renormalize_min=1e-20, rope_interleaved=c.flag("rope_interleave", True))


def glm4_moe(c):
    ffn = c.need("moe_intermediate_size")
    return basics(c, ffn=ffn, router_kind=ROUTER_SIGMOID, router_bias=1, renormalize=c.flag("norm_topk_prob", True),
                  renormalize_min=1e-20, num_groups=c.get("n_group", default=1),
                  topk_groups=c.get("topk_group", default=1), routed_scaling=c.get("routed_scaling_factor", float, 1.0),
                  qkv_bias=c.flag("attention_bias"),
                  qk_norm=QK_NORM_HEAD * c.flag("use_qk_norm"), rope_partial=0.5, dense_ffn=c.need("intermediate_size"),
                  dense_layers=[*range(c.get("first_k_dense_replace", default=1))],
                  shared_ffn=ffn * c.get("n_shared_experts", default=1))


def ernie4_5_moe(c):
    layers, ffn = c.need("num_hidden_layers"), c.need("moe_intermediate_size")
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


# The table

ROTARY = [L + "self_attn.rotary_emb.inv_freq", "rotary_emb.inv_freq"]  # computed from the config


def row(name, fields, *tensors, prefix="model.", accepts=(), ignored=()):
    merged = {key: value for table in tensors for key, value in table.items()}
    return Family(name, fields, merged, prefix, dict(accepts), [*ROTARY, *ignored])


FAMILIES = {family.name: family for family in [
    row("mixtral", mixtral, COMMON, gqa(), router("block_sparse_moe.gate.weight", "mlp.gate.weight"), MIXTRAL_EXPERTS),
    row("olmoe", olmoe, COMMON, gqa(), QWEN, accepts={"sliding_window": [], "head_dim": []}),
    row("qwen2_moe", qwen2_moe, COMMON, gqa(), QWEN, mlps("shared_expert"), {
        L + "shared_gate": [[P(L + "mlp.shared_expert_gate.weight", "moe, hidden", views.row_of_one)]]}),
    row("qwen3_moe", qwen3_moe, COMMON, gqa(), QWEN, mlps("shared_expert")),
    row("granitemoe", granitemoe, COMMON, gqa(), GRANITE, accepts={"sliding_window": []}),
    row("phimoe", phimoe, COMMON, gqa(), router("block_sparse_moe.gate.weight", "mlp.router.weight"), MIXTRAL_EXPERTS,
        accepts={"num_experts_per_tok": [2]}),
    row("gpt_oss", gpt_oss, COMMON, gqa(), GPT_OSS, accepts={"hidden_act": ["silu", "swish"]}),
    row("deepseek_v2", deepseek_v2, COMMON, LATENT, QWEN, mlps("shared_experts"), accepts={
        "topk_method": ["greedy", "group_limited_greedy"], "scoring_func": ["softmax"], "norm_topk_prob": [False],
        "attention_bias": [False], "mlp_bias": [False], "moe_layer_freq": [1]}),
    row("deepseek_v3", deepseek_v3, COMMON, LATENT, QWEN, mlps("shared_experts"),
        correction("mlp.gate.e_score_correction_bias"), accepts={
            "topk_method": ["noaux_tc"], "scoring_func": ["sigmoid"], "attention_bias": [False],
            "moe_layer_freq": [1]}),
    row("glm4_moe", glm4_moe, COMMON, gqa(), QWEN, mlps("shared_experts"),
        correction("mlp.gate.e_score_correction_bias"), accepts={"scoring_func": ["sigmoid"], "moe_layer_freq": [1]}),
    row("ernie4_5_moe", ernie4_5_moe, COMMON, gqa(views.rotary_pairs), QWEN, mlps("shared_experts"), {
        L + "router_bias": [[P(L + f"mlp.{gate}moe_statics.e_score_correction_bias", "moe, num_experts",
                               views.row_of_one)] for gate in ("", "gate.")]},
        accepts={"use_bias": [False]}, ignored=["mtp*"]),
    row("minimax_m2", minimax_m2, COMMON, gqa(), router("block_sparse_moe.gate.weight", "mlp.gate.weight"),
        MIXTRAL_EXPERTS, correction("block_sparse_moe.e_score_correction_bias", "mlp.e_score_correction_bias"),
        accepts={"scoring_func": ["sigmoid"], "use_qk_norm": [True], "qk_norm_type": ["per_layer"],
                 "use_routing_bias": [True], "shared_intermediate_size": [0]}, ignored=["mtp*"]),
    row("dbrx", dbrx, DBRX, prefix="transformer.", accepts={
        "tie_word_embeddings": [False], "ffn_config.moe_normalize_expert_weights": [1]}),
    row("jetmoe", jetmoe, COMMON, JETMOE),
]}


# From a checkpoint to sources

Bound = namedtuple("Bound", "sources ignored")
NUMBER = re.compile(r"0|[1-9]\d{0,5}")
FLOATS = ("float16", "bfloat16", "float32", "float64")


def header_fields(config, where):
    """(Family, header fields) of a config.json's values. rope_frequencies is an array, layer sets are lists, and
    rope_interleaved speaks of the checkpoint: its rows come out as halves. ColibriError names a field that Colibri
    cannot honour."""
    c = Values(config, where)
    name = c.need("model_type", str)
    if name not in FAMILIES:
        raise ColibriError(f"{where}: model_type={name[:80]}, expected one of {', '.join(FAMILIES)}; "
                           "Colibri has no other")
    family = FAMILIES[name]
    for key, allowed in family.accepts.items():
        c.accept(key, allowed)
    fields = family.fields(c)
    fields["fp8_block"] = quantization(c)
    types = c.get("layer_types", list, [])
    if fields["window_layers"] != [i for i, kind in enumerate(types) if kind != "full_attention"] and types:
        raise c.bad("layer_types", types, f"sliding_attention for layers {fields['window_layers']} alone")
    return family, fields


MOE = [L + key for key in ("router", "router_bias", "router_logit_bias", "experts_up", "experts_up_bias",
                           "experts_down", "experts_down_bias", "mlp_up", "mlp_down", "shared_gate", "ffn_out_bias")]


def bare_fields(tensors, where):
    """(Family, header fields) of MoE layers without attention and config: the family by its names, the sizes by its
    rows. How tokens are routed cannot be seen in tensors; k and what else the names leave open is the caller's."""
    names = {_template(name.removeprefix(prefix))[0] for name in tensors for prefix in ("model.", "transformer.")}
    for family in FAMILIES.values():
        moe = {key: alternatives for key, alternatives in family.tensors.items() if key in MOE}
        present = {key: next((parts for parts in alternatives if any(part.template in names for part in parts)), None)
                   for key, alternatives in moe.items()}
        there = {part.template for parts in present.values() if parts for part in parts}
        if all(present[L + key] for key in ("router", "experts_up", "experts_down")) and all(
                _template(name.removeprefix(family.prefix))[0] in there for name in tensors):
            return family, _sizes(family, present, tensors, where)
    raise ColibriError(f"{where}: family not known by its tensor names ({next(iter(tensors))[:100]}{_more(tensors)}), "
                       f"expected the MoE layers of one of {', '.join(FAMILIES)}")


def _sizes(family, present, tensors, where):
    """The header fields that the shapes give, each read where the family's row puts it."""
    places = {}
    for name, tensor in tensors.items():
        template, layer, _ = _template(name.removeprefix(family.prefix))
        places.setdefault(template, {})[layer] = tensor
    fields = {"num_layers": 1 + max(max(layers) for layers in places.values()), "dense_layers": [], "dense_ffn": 0,
              "gated": 1, "tied_embeddings": 0, "mtp_layers": 0, "moe": 1, "mlp_ffn": 0, "fp8_block": [128, 128],
              "router_bias": int(bool(present.get(L + "router_bias"))),
              "expert_bias": int(bool(present.get(L + "experts_up_bias")))}
    for key in (L + "router", L + "experts_up", L + "mlp_up"):
        for part in present.get(key) or []:
            tensor = next(iter(places.get(part.template, {}).values()), None)
            for expression, size in zip(part.shape, tensor.shape if tensor else ()):
                unknown = next((field for field in ("hidden", "num_experts", "ffn", "mlp_ffn")
                                if re.search(rf"\b{field}\b", expression) and not fields.get(field)), None)
                if unknown and (unit := evaluate(expression, {**fields, unknown: 1})):
                    fields[unknown] = size // unit
    fields["shared_ffn"] = fields["mlp_ffn"]
    return fields


def sources(family, tensors, fields, where, keys=None):
    """Bound: {"layers.3.experts_up": one list of Tensors an expert, to be stacked, ...} and the names left out.

    tensors: {name: Tensor}. A list of a gated matrix is gate rows, then up rows; what has no experts has one list.
    Every tensor is used, left out by name, or named in an error. keys: those of MOE alone, for bare MoE layers."""
    found, ignored = _by_template(family, decoded(tensors, fields["fp8_block"], where), fields, where)
    result, missing, used = {}, [], set()
    for key, alternatives in family.tensors.items():
        if keys and key not in keys:
            continue
        for layer in range(fields["num_layers"]) if key.startswith(L) else [None]:
            parts = next((parts for parts in alternatives if any((part.template, layer) in found for part in parts)),
                         alternatives[0])
            scope = _scope(fields, layer)
            parts = [part for part in parts if _shape(part, scope)]
            if parts:
                name = key.replace("N", str(layer), 1) if layer is not None else key
                result[name] = _experts(parts, layer, found, scope, missing, used, where)
    if not keys:
        result["rope_frequencies"] = [[_in_memory("rope_frequencies", fields["rope_frequencies"])]]
    if missing:
        raise ColibriError(f"{where}: missing tensor {missing[0]}{_more(missing)}, expected "
                           f"{fields['num_experts']} experts in each MoE layer of {fields['num_layers']} layers; "
                           "the checkpoint is incomplete")
    extra = [t.name for places in found.values() for t in places.values() if t.name not in used]
    if extra:
        raise ColibriError(f"{where}: extra tensor {extra[0]}{_more(extra)}, expected none from {family.name}'s "
                           "config; the checkpoint and its config disagree")
    return Bound(result, ignored)


def _by_template(family, tensors, fields, where):
    """{(template, layer): {expert or None: Tensor}} and the names left out."""
    templates = {part.template for alternatives in family.tensors.values() for parts in alternatives for part in parts}
    found, ignored = {}, []
    for full, tensor in tensors.items():
        name = full.removeprefix(family.prefix)
        template, layer, expert_id = _template(name)
        predicted = layer is not None and 0 <= layer - fields["num_layers"] < fields["mtp_layers"]
        tied = template == "lm_head.weight" and fields["tied_embeddings"] and _same(tensor, tensors, family)
        if predicted or tied or _ignored(template, family):
            ignored.append(full)
        elif template not in templates:
            raise ColibriError(f"{where}: unknown tensor {full[:100]}, expected {family.name}'s names alone; this "
                               "converter would have to leave it out")
        else:
            found.setdefault((template, layer), {})[expert_id] = tensor
    return found, ignored


def _ignored(template, family):
    return any(template == item or (item[-1] == "*" and template.startswith(item[:-1])) for item in family.ignored)


def _template(name):
    """("layers.N.mlp.experts.E.up_proj.weight", layer, expert); None where there is none."""
    words, numbers = name.split("."), []
    for index, word in enumerate(words):
        if NUMBER.fullmatch(word) and len(numbers) < 2:
            words[index] = "NE"[len(numbers)]
            numbers.append(int(word))
    return ".".join(words), *(numbers + [None, None])[:2]


def _experts(parts, layer, found, scope, missing, used, where):
    """One list of viewed Tensors an expert, or one list."""
    per_expert = any("E" in part.template.split(".") for part in parts)
    many = per_expert or any(part.view in views.EXPERT_VIEWS for part in parts)
    result = []
    for e in range(scope["num_experts"]) if many else [None]:
        row_parts = []
        for part in parts:
            tensor = found.get((part.template, layer), {}).get(e if per_expert else None)
            if tensor is None:
                missing.append(_filled(part.template, layer, e))
                continue
            _check(tensor, part, scope, where)
            used.add(tensor.name)
            row_parts += part.view(tensor, scope, e)
        result.append(row_parts)
    return result


def _scope(fields, layer):
    """The header's fields, and a layer's own two: whether it has experts, and the width of its mlp."""
    dense = layer in fields["dense_layers"]
    return {**fields, "moe": int(not dense), "mlp_ffn": fields["dense_ffn"] if dense else fields["shared_ffn"]}


def _shape(part, scope):
    """The expected shape; () where the tensor is not there."""
    shape = tuple(evaluate(expression, scope) for expression in part.shape)
    return shape if all(shape) else ()


def _check(tensor, part, scope, where):
    expected = _shape(part, scope)
    if tensor.shape != expected:
        names = sorted(set(re.findall(r"[a-z_]+", " ".join(part.shape))))
        raise ColibriError(f"{where}: {tensor.name}: shape={tensor.shape}, expected {expected} from "
                           f"{', '.join(f'{name}={scope[name]}' for name in names)}; the checkpoint and its config "
                           "disagree")
    if tensor.dtype not in FLOATS:
        raise ColibriError(f"{where}: {tensor.name}: dtype={tensor.dtype}, expected one of {', '.join(FLOATS)}; "
                           "convert the checkpoint to one of them first")


def _same(head, tensors, family):
    """Whether a tied LM head that is there all the same is the embedding."""
    embed = tensors.get(family.prefix + "embed_tokens.weight", tensors.get("embed_tokens.weight"))
    return embed is not None and (head.shape, head.dtype) == (embed.shape, embed.dtype) and all(
        head.rows(row, row + 1).tobytes() == embed.rows(row, row + 1).tobytes() for row in range(head.shape[0]))


def _in_memory(name, values):
    data = np.ascontiguousarray(values, "<f4").tobytes()
    return Tensor(name, "float32", values.shape, (1,), Storage(name, data, 0, len(data)), 0)


def _filled(template, layer, e):
    words = {"N": str(layer), "E": str(e)}
    return ".".join(words.get(word, word) for word in template.split("."))


def _more(items):
    return f" (and {len(items) - 1} more)" if len(items) > 1 else ""
