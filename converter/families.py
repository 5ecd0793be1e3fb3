"""Lists the families of Mixture-of-Experts models. A family's row stands above the function that reads its config.

Every family is computed as one canonical model. Families differ in header values, and in which tensors there are. A row
says which tensor of a checkpoint becomes which of Colibri's. Orientation and meaning come from the row, never from a
shape. Views are strided, so nothing is read here. First comes what families share, then each family, then the names of
bare MoE layers.
"""

from collections import namedtuple

from converter import config, views
from converter.config import basics
from converter.rope import yarn_mscale
from converter.values import Values

# fields: the function that makes header fields from a config's Values; None where only bare MoE layers are known.
# accepts: {config key: the values that the row is right for}; any other is refused. prefix: may stand before all names,
# or not. ignored: templates of tensors that change nothing. routing: header fields that the family's name decides; bare
# layers have to be given the rest.
Family = namedtuple("Family", "name fields tensors prefix accepts ignored routing")
# template: a checkpoint name with N for the layer and E for the expert. shape: the checkpoint tensor's, written in
# header fields and the layer's values of format.h; with a zero in it, the tensor is not there. view(tensor, fields,
# expert) returns the rows to stack.
Part = namedtuple("Part", "template shape view")


# Tensors that several families have: {Colibri's name: alternatives}. An alternative is a list of parts to be stacked;
# those of a gated matrix are gate, then up.

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
    """Returns the MLP that every token takes: a dense layer's whole FFN, or a MoE layer's shared expert."""
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


# Header fields that several families have

def window(c, size, layers=None):
    """Returns the fields of a sliding window, on all layers, or on those that layer_types calls sliding.

    layers: the types of layers where the config has no layer_types.
    """
    types = c.get("layer_types", list)
    if types is None:
        types = layers or ["sliding_attention"] * config.num_layers(c)
    if len(types) != config.num_layers(c) or not {*map(str, types)} <= {"sliding_attention", "full_attention"}:
        raise c.bad("layer_types", types, "sliding_attention or full_attention for each layer")
    sliding = [layer for layer, kind in enumerate(types) if kind == "sliding_attention"]
    if sliding and not size:
        raise c.bad("sliding_window", size, "at least 1 with sliding_attention layers")
    return {"window": size, "window_layers": sliding} if sliding else {}


def first_dense(c, default):
    """Returns the dense layers where these come before all MoE layers."""
    return [*range(min(c.get("first_k_dense_replace", default=default), config.num_layers(c)))]


def dense_layers(c):
    """Returns the dense layers as Qwen's configs choose them."""
    step, listed = c.get("decoder_sparse_step", default=1), c.get("mlp_only_layers", list, [])
    return [i for i in range(config.num_layers(c)) if i in listed or not step or (i + 1) % step]


def bias(c, key="attention_bias", default=False):
    flag = c.flag(key, default)
    return {"qkv_bias": flag, "attention_out_bias": flag}


SWIGLU = {"activation": config.SILU}
SIGMOID = {**SWIGLU, "router_kind": config.ROUTER_SIGMOID, "router_bias": 1}
TOPK_SOFTMAX = {**SWIGLU, "router_kind": config.ROUTER_TOPK_SOFTMAX, "renormalize": 0}


# The table

ROWS = []
ROTARY = [L + "self_attn.rotary_emb.inv_freq", "rotary_emb.inv_freq"]  # computed from the config


def row(name, fields, *tensors, prefix="model.", accepts=(), ignored=(), routing=()):
    merged = {key: value for table in tensors for key, value in table.items()}
    return Family(name, fields, merged, prefix, dict(accepts), [*ROTARY, *ignored], dict(routing))


def family(*tensors, **rest):
    """Adds a family to the table. The function below gives it its name, and makes its header fields."""
    def add(fields):
        ROWS.append(row(fields.__name__, fields, *tensors, **rest))
        return fields
    return add


@family(COMMON, gqa(), router("block_sparse_moe.gate.weight", "mlp.gate.weight"), MIXTRAL_EXPERTS,
        routing={**SWIGLU, "renormalize": 1})
def mixtral(c):
    size = c.get("sliding_window")
    return basics(c, ffn=c.need("intermediate_size"), renormalize=1, rope_theta=1e6,
                  **(window(c, size) if size else {}))


@family(COMMON, gqa(), QWEN, accepts={"sliding_window": [], "head_dim": []}, routing=SWIGLU)
def olmoe(c):
    return basics(c, ffn=c.need("intermediate_size"), renormalize=c.flag("norm_topk_prob"), qk_norm=config.QK_NORM_ALL,
                  clip_qkv=c.get("clip_qkv", float, 0.0), **bias(c))


@family(COMMON, gqa(), QWEN, mlps("shared_expert"),
        {L + "shared_gate": [[P(L + "mlp.shared_expert_gate.weight", "moe, hidden", views.row_of_one)]]},
        routing={**SWIGLU, "shared_gate": 1})
def qwen2_moe(c):
    alternate = ["sliding_attention" if i % 2 == 0 and i < c.get("max_window_layers", default=28) else "full_attention"
                 for i in range(config.num_layers(c))]
    sliding = window(c, c.get("sliding_window", default=4096), alternate) if c.flag("use_sliding_window") else {}
    return basics(c, ffn=c.need("moe_intermediate_size"), renormalize=c.flag("norm_topk_prob"),
                  qkv_bias=c.flag("qkv_bias", True), dense_layers=dense_layers(c),
                  dense_ffn=c.need("intermediate_size"), shared_gate=1,
                  shared_ffn=c.need("shared_expert_intermediate_size"), **sliding)


@family(COMMON, gqa(), QWEN, mlps("shared_expert"), routing=SWIGLU)
def qwen3_moe(c):
    sliding = window(c, c.get("sliding_window", default=4096)) if c.flag("use_sliding_window") else {}
    return basics(c, ffn=c.need("moe_intermediate_size"), renormalize=c.flag("norm_topk_prob"),
                  qk_norm=config.QK_NORM_HEAD, dense_ffn=c.need("intermediate_size"), dense_layers=dense_layers(c),
                  **bias(c), **sliding)


GRANITE = {
    **router("block_sparse_moe.router.layer.weight", "block_sparse_moe.router.weight"),
    **experts(experts_fused("block_sparse_moe.input_linear.weight", "block_sparse_moe.output_linear.weight"),
              experts_fused("block_sparse_moe.experts.gate_up_proj", "block_sparse_moe.experts.down_proj"))}


@family(COMMON, gqa(), GRANITE, accepts={"sliding_window": []}, routing=TOPK_SOFTMAX)
def granitemoe(c):
    return basics(c, ffn=c.need("intermediate_size"), router_kind=config.ROUTER_TOPK_SOFTMAX, **bias(c),
                  attention_scale=c.get("attention_multiplier", float, 1.0),
                  embedding_multiplier=c.get("embedding_multiplier", float, 1.0),
                  residual_multiplier=c.get("residual_multiplier", float, 1.0),
                  logits_multiplier=1 / c.get("logits_scaling", float, 1.0))


@family(COMMON, gqa(), router("block_sparse_moe.gate.weight", "mlp.router.weight"), MIXTRAL_EXPERTS,
        accepts={"num_experts_per_tok": [2]},
        routing={**SWIGLU, "router_kind": config.ROUTER_SPARSEMIXER, "router_jitter": 0.01, "k": 2, "renormalize": 0})
def phimoe(c):
    size = c.get("sliding_window")
    return basics(c, ffn=c.need("intermediate_size"), router_kind=config.ROUTER_SPARSEMIXER,
                  router_jitter=c.get("router_jitter_noise", float, 0.01), norm_kind=config.NORM_LAYER, norm_bias=1,
                  lm_head_bias=c.flag("lm_head_bias"), rope_theta=1e6, rope_mscales=True, **bias(c),
                  **(window(c, size) if size else {}))


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


@family(COMMON, gqa(), GPT_OSS, accepts={"hidden_act": ["silu", "swish"]},
        routing={**TOPK_SOFTMAX, "activation": config.ACTIVATION_CLAMPED, "swiglu_alpha": 1.702, "swiglu_limit": 7.0,
                 "router_logit_bias": 1, "expert_bias": 1})
def gpt_oss(c):
    if not c.get("rope_scaling|rope_parameters", dict):
        c = Values({**c.values, "rope_parameters": {"rope_type": "yarn", "factor": 32.0, "truncate": False,
                                                    "original_max_position_embeddings": 4096}}, c.where)
    alternate = ["full_attention" if i % 2 else "sliding_attention" for i in range(config.num_layers(c))]
    return basics(c, ffn=c.need("intermediate_size"), router_kind=config.ROUTER_TOPK_SOFTMAX, router_logit_bias=1,
                  expert_bias=1, activation=config.ACTIVATION_CLAMPED, swiglu_alpha=c.get("swiglu_alpha", float, 1.702),
                  swiglu_limit=c.get("swiglu_limit", float, 7.0), sinks=1, rope_theta=150000.0,
                  **bias(c, default=True), **window(c, c.get("sliding_window", default=128), alternate))


def deepseek(c, num_groups=1, topk_groups=1, routed_scaling=1.0, **fields):
    """Returns the header fields of a model with latent attention.

    num_groups, topk_groups, routed_scaling: the values where the config has none.
    """
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
                  ffn=ffn, attention_kind=config.ATTENTION_LATENT, q_lora_rank=c.get("q_lora_rank", default=0),
                  kv_lora_rank=c.need("kv_lora_rank"), num_groups=c.get("n_group", default=num_groups),
                  topk_groups=c.get("topk_group", default=topk_groups),
                  routed_scaling=c.get("routed_scaling_factor", float, routed_scaling),
                  dense_ffn=c.need("intermediate_size"), shared_ffn=ffn * c.get("n_shared_experts", default=0),
                  dense_layers=first_dense(c, 0), **fields)


@family(COMMON, LATENT, QWEN, mlps("shared_experts"),
        accepts={"topk_method": ["greedy", "group_limited_greedy"], "scoring_func": ["softmax"],
                 "norm_topk_prob": [False], "attention_bias": [False], "mlp_bias": [False], "moe_layer_freq": [1]},
        routing={**SWIGLU, "renormalize": 0})
def deepseek_v2(c):
    limited = c.get("topk_method", str, "greedy") == "group_limited_greedy"
    groups = {} if limited else {"num_groups": 1, "topk_groups": 1}
    return {**deepseek(c, rope_interleaved=1), **groups}


@family(COMMON, LATENT, QWEN, mlps("shared_experts"), correction("mlp.gate.e_score_correction_bias"),
        accepts={"topk_method": ["noaux_tc"], "scoring_func": ["sigmoid"], "attention_bias": [False],
                 "moe_layer_freq": [1]},
        routing={**SIGMOID, "renormalize_min": 1e-20})
def deepseek_v3(c):
    return deepseek(c, num_groups=8, topk_groups=4, routed_scaling=2.5, router_kind=config.ROUTER_SIGMOID,
                    router_bias=1, renormalize=c.flag("norm_topk_prob", True), renormalize_min=1e-20,
                    rope_interleaved=c.flag("rope_interleave", True))


@family(COMMON, gqa(), QWEN, mlps("shared_experts"), correction("mlp.gate.e_score_correction_bias"),
        accepts={"scoring_func": ["sigmoid"], "moe_layer_freq": [1]},
        routing={**SIGMOID, "renormalize_min": 1e-20})
def glm4_moe(c):
    ffn = c.need("moe_intermediate_size")
    return basics(c, ffn=ffn, router_kind=config.ROUTER_SIGMOID, router_bias=1,
                  renormalize=c.flag("norm_topk_prob", True), renormalize_min=1e-20,
                  num_groups=c.get("n_group", default=1), topk_groups=c.get("topk_group", default=1),
                  routed_scaling=c.get("routed_scaling_factor", float, 1.0), qkv_bias=c.flag("attention_bias"),
                  qk_norm=config.QK_NORM_HEAD * c.flag("use_qk_norm"),
                  rope_partial=0.5, dense_ffn=c.need("intermediate_size"), dense_layers=first_dense(c, 1),
                  shared_ffn=ffn * c.get("n_shared_experts", default=1))


@family(COMMON, gqa(views.rotary_pairs), QWEN, mlps("shared_experts"),
        {L + "router_bias": [[P(L + f"mlp.{gate}moe_statics.e_score_correction_bias", "moe, num_experts",
                                views.row_of_one)] for gate in ("", "gate.")]},
        accepts={"use_bias": [False]}, ignored=["mtp*"],
        routing={**SWIGLU, "router_kind": config.ROUTER_SOFTMAX, "router_bias": 1, "renormalize": 1,
                 "renormalize_min": 1e-12})
def ernie4_5_moe(c):
    layers, ffn = config.num_layers(c), c.need("moe_intermediate_size")
    first, step = c.get("moe_layer_start_index", default=1), c.get("moe_layer_interval", default=1)
    last = c.values.get("moe_layer_end_index", -1)
    last = layers - 1 if last == -1 else c.need("moe_layer_end_index")
    return basics(c, ffn=ffn, router_bias=1, renormalize=1, renormalize_min=c.get("moe_norm_min", float, 1e-12),
                  tied_embeddings=c.flag("tie_word_embeddings", True), rope_theta=500000.0, rope_interleaved=1,
                  dense_ffn=c.need("intermediate_size"), shared_ffn=ffn * c.get("moe_num_shared_experts", default=2),
                  dense_layers=[i for i in range(layers) if (i + 1) % step or not first <= i <= last])


@family(COMMON, gqa(), router("block_sparse_moe.gate.weight", "mlp.gate.weight"), MIXTRAL_EXPERTS,
        correction("block_sparse_moe.e_score_correction_bias", "mlp.e_score_correction_bias"),
        accepts={"scoring_func": ["sigmoid"], "use_qk_norm": [True], "qk_norm_type": ["per_layer"],
                 "use_routing_bias": [True], "shared_intermediate_size": [0]}, ignored=["mtp*"],
        routing={**SIGMOID, "renormalize": 1})
def minimax_m2(c):
    partial = c.get("rotary_dim") / c.need("head_dim") if c.get("rotary_dim") else 1.0
    return basics(c, ffn=c.need("intermediate_size"), router_kind=config.ROUTER_SIGMOID, router_bias=1, renormalize=1,
                  qk_norm=config.QK_NORM_ALL, rope_theta=5e6, rope_partial=partial)


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


@family(DBRX, prefix="transformer.",
        accepts={"tie_word_embeddings": [False], "ffn_config.moe_normalize_expert_weights": [1]},
        routing={**SWIGLU, "renormalize": 1})
def dbrx(c):
    theta = c.get("rope_parameters.rope_theta|rope_theta|attn_config.rope_theta", float, 10000.0)
    return basics(c, num_kv_heads=c.need("attn_config.kv_n_heads"), clip_qkv=c.get("attn_config.clip_qkv", float, 0.0),
                  ffn=c.need("ffn_config.ffn_hidden_size"), num_experts=c.need("ffn_config.moe_num_experts"),
                  k=c.need("ffn_config.moe_top_k"), norm_kind=config.NORM_LAYER, norm_eps=1e-5, rope_theta=theta,
                  renormalize=int("moe_normalize_expert_weights" not in c.values["ffn_config"]
                                  or c.values["ffn_config"]["moe_normalize_expert_weights"] is not None))


J = L + "self_attention."
JETMOE = {
    L + "qkv": [[P(J + "kv_proj.weight", f"2 * {KV}, hidden")]],
    L + "attention_router": [[P(J + "experts.router.layer.weight", "num_experts, hidden")]],
    L + "attention_experts_in": [[P(J + "experts.input_linear.weight", f"num_experts, {KV}, hidden", views.expert)]],
    L + "attention_experts_out": [[P(J + "experts.output_linear.weight", f"num_experts, hidden, {KV}", views.expert)]],
    L + "attention_out_bias": [[P(J + "experts.bias", "hidden")]],
    **router("mlp.router.layer.weight"), L + "ffn_out_bias": [[P(L + "mlp.bias", "hidden")]],
    **experts(experts_fused("mlp.input_linear.weight", "mlp.output_linear.weight"))}


@family(COMMON, JETMOE, routing={**TOPK_SOFTMAX, "ffn_out_bias": 1})
def jetmoe(c):
    k, kv_heads, dim = c.need("num_experts_per_tok"), c.need("num_key_value_heads"), c.need("kv_channels")
    c = Values({"num_attention_heads": k * kv_heads, **c.values}, c.where)
    c.accept("num_attention_heads", [k * kv_heads])
    return basics(c, head_dim=dim, ffn=c.need("intermediate_size"), router_kind=config.ROUTER_TOPK_SOFTMAX,
                  norm_eps=1e-6, final_norm_eps=c.need("rms_norm_eps", float), attention_kind=config.ATTENTION_MOA,
                  attention_out_bias=1, ffn_out_bias=1, tied_embeddings=c.flag("tie_word_embeddings", True))


# Bare MoE layers: names that come without a config

def ungated(layer, router_name, up, down, up_bias=None, down_bias=None):
    """Returns the tensors of experts with two matrices, each [outputs, inputs]."""
    vectors = {"experts_up_bias": (up_bias, "ffn * expert_bias"),
               "experts_down_bias": (down_bias, "hidden * expert_bias")}
    return {L + "router": [[P(layer + router_name, "num_experts, hidden")]],
            L + "experts_up": [[P(layer + up, "ffn, hidden")]], L + "experts_down": [[P(layer + down, "hidden, ffn")]],
            **{L + key: [[P(layer + template, size)]] for key, (template, size) in vectors.items() if template}}


def megatron(gated):
    """Returns a row for Megatron's names.

    Experts are linear_fc1 and linear_fc2, in modules of their own or with their number at the end of the name. Or all
    of them are joined as weight1 and weight2, which multiply rows from the right.
    """
    layouts = []
    for fc1, fc2 in (("local_experts.E.linear_fc1.weight", "local_experts.E.linear_fc2.weight"),
                     ("linear_fc1.weightE", "linear_fc2.weightE")):
        halves = (views.first_half, views.second_half) if gated else (views.whole,)
        rows = "2 * ffn, hidden" if gated else "ffn, hidden"
        layouts.append(([P(f"{L}mlp.experts.{fc1}", rows, view) for view in halves],
                        [P(f"{L}mlp.experts.{fc2}", "hidden, ffn")]))
    halves = (views.grouped_gate, views.grouped_up) if gated else (views.grouped_columns,)
    columns = "num_experts * ffn * 2" if gated else "num_experts * ffn"
    layouts.append(([P(f"{L}mlp.experts.weight1", f"hidden, {columns}", view) for view in halves],
                    [P(f"{L}mlp.experts.weight2", "num_experts * ffn, hidden", views.block_transposed)]))
    return row("megatron", None, router("mlp.router.weight"), correction("mlp.router.expert_bias"), experts(*layouts),
               prefix="decoder.", routing={"gated": int(gated)})


ROWS += [
    # GPT-style names count their layers as h.
    row("gpt", None, ungated("h.N.mlp.", "router.weight", "experts.E.w1.weight", "experts.E.w2.weight"),
        prefix="transformer.", ignored=["wte.weight"]),
    row("deepspeed", None, ungated(L, "gate.wg.weight", "experts.E.dense_h_to_4h.weight",
                                   "experts.E.dense_4h_to_h.weight", "experts.E.dense_h_to_4h.bias",
                                   "experts.E.dense_4h_to_h.bias"), prefix=""),
    row("fairseq", None, ungated(L + "moe_layer.", "gate.wg.weight", "experts.E.fc1.weight", "experts.E.fc2.weight",
                                 "experts.E.fc1.bias", "experts.E.fc2.bias"), prefix="decoder."),
    megatron(gated=True),
    megatron(gated=False),
]
FAMILIES = {each.name: each for each in ROWS if each.fields}
