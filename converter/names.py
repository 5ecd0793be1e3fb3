"""The families of Mixture-of-Experts models, one row each: which tensor of a checkpoint is which of Colibri's.

All families are one canonical model; what differs is in header values (converter/config.py) and in which tensors there
are. Orientation and meaning come from the row, never from a shape. Views are strided: nothing is read here.
"""

from collections import namedtuple

from converter import config, views

# fields: Values -> header fields; None: known as bare MoE layers only. accepts: config key -> values under which the
# row is right; another is refused. prefix: may or may not stand before every name. ignored: templates of tensors that
# change nothing. routing: header fields that the family's name settles; other choices of routing are asked for.
Family = namedtuple("Family", "name fields tensors prefix accepts ignored routing")
# template: a checkpoint name, N the layer, E the expert. shape: of the checkpoint's tensor, in header fields and the
# layer's values of format.h; a zero means that it is not there. view(tensor, fields, expert) -> the rows to stack.
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


# Bare MoE layers, whose names come without a config

def ungated(layer, router_name, up, down, up_bias=None, down_bias=None):
    """Experts of two matrices, [outputs, inputs] each."""
    vectors = {"experts_up_bias": (up_bias, "ffn * expert_bias"),
               "experts_down_bias": (down_bias, "hidden * expert_bias")}
    return {L + "router": [[P(layer + router_name, "num_experts, hidden")]],
            L + "experts_up": [[P(layer + up, "ffn, hidden")]], L + "experts_down": [[P(layer + down, "hidden, ffn")]],
            **{L + key: [[P(layer + template, size)]] for key, (template, size) in vectors.items() if template}}


def megatron(gated):
    """Experts as linear_fc1 and linear_fc2, in modules of their own or with their number at the end of the name, or all
    as weight1 and weight2, which multiply rows from the right."""
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


# The table

SILU = {"activation": config.SILU}
SIGMOID = {**SILU, "router_kind": config.ROUTER_SIGMOID, "router_bias": 1}
TOPK_SOFTMAX = {**SILU, "router_kind": config.ROUTER_TOPK_SOFTMAX, "renormalize": 0}
ROTARY = [L + "self_attn.rotary_emb.inv_freq", "rotary_emb.inv_freq"]  # computed from the config


def row(name, fields, *tensors, prefix="model.", accepts=(), ignored=(), routing=()):
    merged = {key: value for table in tensors for key, value in table.items()}
    return Family(name, fields, merged, prefix, dict(accepts), [*ROTARY, *ignored], dict(routing))


ROWS = [
    row("mixtral", config.mixtral, COMMON, gqa(), router("block_sparse_moe.gate.weight", "mlp.gate.weight"),
        MIXTRAL_EXPERTS, routing={**SILU, "renormalize": 1}),
    row("olmoe", config.olmoe, COMMON, gqa(), QWEN, accepts={"sliding_window": [], "head_dim": []},
        routing=SILU),
    row("qwen2_moe", config.qwen2_moe, COMMON, gqa(), QWEN, mlps("shared_expert"), {
        L + "shared_gate": [[P(L + "mlp.shared_expert_gate.weight", "moe, hidden", views.row_of_one)]]},
        routing={**SILU, "shared_gate": 1}),
    row("qwen3_moe", config.qwen3_moe, COMMON, gqa(), QWEN, mlps("shared_expert"), routing=SILU),
    row("granitemoe", config.granitemoe, COMMON, gqa(), GRANITE, accepts={"sliding_window": []}, routing=TOPK_SOFTMAX),
    row("phimoe", config.phimoe, COMMON, gqa(), router("block_sparse_moe.gate.weight", "mlp.router.weight"),
        MIXTRAL_EXPERTS, accepts={"num_experts_per_tok": [2]}, routing={
            **SILU, "router_kind": config.ROUTER_SPARSEMIXER, "router_jitter": 0.01, "k": 2, "renormalize": 0}),
    row("gpt_oss", config.gpt_oss, COMMON, gqa(), GPT_OSS, accepts={"hidden_act": ["silu", "swish"]}, routing={
        **TOPK_SOFTMAX, "activation": config.ACTIVATION_CLAMPED, "swiglu_alpha": 1.702, "swiglu_limit": 7.0,
        "router_logit_bias": 1, "expert_bias": 1}),
    row("deepseek_v2", config.deepseek_v2, COMMON, LATENT, QWEN, mlps("shared_experts"), accepts={
        "topk_method": ["greedy", "group_limited_greedy"], "scoring_func": ["softmax"], "norm_topk_prob": [False],
        "attention_bias": [False], "mlp_bias": [False], "moe_layer_freq": [1]},
        routing={**SILU, "renormalize": 0}),
    row("deepseek_v3", config.deepseek_v3, COMMON, LATENT, QWEN, mlps("shared_experts"),
        correction("mlp.gate.e_score_correction_bias"), accepts={
            "topk_method": ["noaux_tc"], "scoring_func": ["sigmoid"], "attention_bias": [False],
            "moe_layer_freq": [1]}, routing={**SIGMOID, "renormalize_min": 1e-20}),
    row("glm4_moe", config.glm4_moe, COMMON, gqa(), QWEN, mlps("shared_experts"),
        correction("mlp.gate.e_score_correction_bias"), accepts={"scoring_func": ["sigmoid"], "moe_layer_freq": [1]},
        routing={**SIGMOID, "renormalize_min": 1e-20}),
    row("ernie4_5_moe", config.ernie4_5_moe, COMMON, gqa(views.rotary_pairs), QWEN, mlps("shared_experts"), {
        L + "router_bias": [[P(L + f"mlp.{gate}moe_statics.e_score_correction_bias", "moe, num_experts",
                               views.row_of_one)] for gate in ("", "gate.")]},
        accepts={"use_bias": [False]}, ignored=["mtp*"],
        routing={
            **SILU, "router_kind": config.ROUTER_SOFTMAX, "router_bias": 1, "renormalize": 1,
            "renormalize_min": 1e-12}),
    row("minimax_m2", config.minimax_m2, COMMON, gqa(), router("block_sparse_moe.gate.weight", "mlp.gate.weight"),
        MIXTRAL_EXPERTS, correction("block_sparse_moe.e_score_correction_bias", "mlp.e_score_correction_bias"),
        accepts={"scoring_func": ["sigmoid"], "use_qk_norm": [True], "qk_norm_type": ["per_layer"],
                 "use_routing_bias": [True], "shared_intermediate_size": [0]}, ignored=["mtp*"],
        routing={**SIGMOID, "renormalize": 1}),
    row("dbrx", config.dbrx, DBRX, prefix="transformer.", accepts={
        "tie_word_embeddings": [False], "ffn_config.moe_normalize_expert_weights": [1]},
        routing={**SILU, "renormalize": 1}),
    row("jetmoe", config.jetmoe, COMMON, JETMOE, routing={**TOPK_SOFTMAX, "ffn_out_bias": 1}),
    # Bare MoE layers alone. GPT-style names count their layers as h.
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
FAMILIES = {family.name: family for family in ROWS if family.fields}
