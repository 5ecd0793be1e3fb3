"""The canonical model in NumPy: header fields and canonical tensors -> logits. One small function an op.

Whole sequences, no cache: x is (tokens, hidden). Tensors are float arrays by Colibri name, matrices [rows, columns],
experts' matrices [num_experts, rows, columns]; a gated one is gate rows, then up rows.
"""

import math

import numpy as np

SOFTMAX, TOPK_SOFTMAX, SIGMOID, SPARSEMIXER = range(4)
GQA, LATENT, MOA = range(3)
NORM_LAYER, QK_HEAD, QK_ALL = 2, 1, 2
ROPE_LONG, ROPE_DYNAMIC = 2, 3
_erf = np.vectorize(math.erf, otypes=[float])


def logits(h, weights, ids, dtype=np.float32, lengths=None):
    """(tokens, vocab_size) of one sequence. weights: {name: array}. lengths: for each token, that of the sequence in
    which it was computed; None: one prompt."""
    w = {name: array.astype(dtype) for name, array in weights.items()}
    rotation = frequencies(h, weights, np.full(len(ids), len(ids)) if lengths is None else np.array(lengths))
    x = w["embed"][ids] * dtype(h["embedding_multiplier"])
    for index in range(h["num_layers"]):
        prefix = f"layers.{index}."
        layer = {name[len(prefix):]: array for name, array in w.items() if name.startswith(prefix)}
        normed = norm(h, x, layer["attention_norm"], layer.get("attention_norm_bias"), h["norm_eps"])
        window = h["window"] if index in h["window_layers"] else 0
        x = x + attention_block(h, layer, normed, rotation, window) * dtype(h["residual_multiplier"])
        normed = norm(h, x, layer["ffn_norm"], layer.get("ffn_norm_bias"), h["norm_eps"])
        x = x + ffn_block(h, layer, normed, index) * dtype(h["residual_multiplier"])
    x = norm(h, x, w["final_norm"], w.get("final_norm_bias"), h["final_norm_eps"])
    head = w["embed"] if h["tied_embeddings"] else w["lm_head"]
    return (x @ head.T + w.get("lm_head_bias", dtype(0))) * dtype(h["logits_multiplier"])


def norm(h, x, weight, bias, eps):
    if h["norm_kind"] == NORM_LAYER:
        x = x - x.mean(-1, keepdims=True)
    y = x / np.sqrt((x * x).mean(-1, keepdims=True) + x.dtype.type(eps)) * weight
    return y if bias is None else y + bias


def rms(x, weight, eps):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + x.dtype.type(eps)) * weight


# Attention

def attention_block(h, layer, x, rotation, window):
    qkv = x @ layer["qkv"].T + layer.get("qkv_bias", x.dtype.type(0))
    q, k, v, routing = {GQA: split_gqa, LATENT: split_latent, MOA: split_moa}[h["attention_kind"]](h, layer, x, qkv)
    if h["clip_qkv"]:
        q, k, v = (np.clip(part, -h["clip_qkv"], h["clip_qkv"]) for part in (q, k, v))
    q, k = (rope(part, *rotation) for part in (q, k))
    out = attention(h, q, k, v, layer.get("sinks"), window)
    if h["attention_kind"] == MOA:
        ids, weights = routing
        out = out.reshape(len(x), h["k"], -1)
        y = combine(np.einsum("tkr,tkhr->tkh", out, layer["attention_experts_out"][ids]), weights)
    else:
        y = out.reshape(len(x), -1) @ layer["attention_out"].T
    return y + layer.get("attention_out_bias", x.dtype.type(0))


def split_gqa(h, layer, x, qkv):
    """(tokens, heads, head_dim) each of q, k, v."""
    sizes = np.cumsum([h["num_heads"] * h["head_dim"], h["num_kv_heads"] * h["head_dim"]])
    q, k, v = np.split(qkv, sizes, axis=1)
    if h["qk_norm"] == QK_ALL:
        q, k = rms(q, layer["q_norm"], h["norm_eps"]), rms(k, layer["k_norm"], h["norm_eps"])
    q, k, v = (part.reshape(len(x), -1, h["head_dim"]) for part in (q, k, v))
    if h["qk_norm"] == QK_HEAD:
        q, k = rms(q, layer["q_norm"], h["norm_eps"]), rms(k, layer["k_norm"], h["norm_eps"])
    return q, k, v, None


def split_latent(h, layer, x, qkv):
    """k and v of each head from the latent; its first rotary_dim dimensions rotate, k's the same in all heads."""
    heads, rotary, nope = h["num_heads"], h["rotary_dim"], h["head_dim"] - h["rotary_dim"]
    first = h["q_lora_rank"] or heads * h["head_dim"]
    q, latent, k_rotary = np.split(qkv, [first, first + h["kv_lora_rank"]], axis=1)
    if h["q_lora_rank"]:
        q = rms(q, layer["q_a_norm"], h["latent_norm_eps"]) @ layer["q_b"].T
    kv = rms(latent, layer["kv_a_norm"], h["latent_norm_eps"]) @ layer["kv_b"].T
    k, v = np.split(kv, [heads * nope], axis=1)
    shared = np.broadcast_to(k_rotary[:, None], (len(x), heads, rotary))
    k = np.concatenate([shared, k.reshape(len(x), heads, nope)], axis=2)
    return q.reshape(len(x), heads, -1), k, v.reshape(len(x), heads, -1), None


def split_moa(h, layer, x, qkv):
    """Each chosen attention expert makes num_kv_heads query heads; q head s * num_kv_heads + j looks at kv head j."""
    ids, weights = route(h, x @ layer["attention_router"].T, None)
    q = np.einsum("th,tkrh->tkr", x, layer["attention_experts_in"][ids])
    k, v = (part.reshape(len(x), -1, h["head_dim"]) for part in np.split(qkv, 2, axis=1))
    return q.reshape(len(x), -1, h["head_dim"]), k, v, (ids, weights)


def frequencies(h, weights, lengths):
    """(each token's frequencies, float32 (tokens, rotary_dim / 2), the factor of their cosines and sines)."""
    factor, original, dim = h["rope_attention_factor"], h["rope_original_positions"], h["rotary_dim"]
    table = np.repeat(weights["rope_frequencies"][None], len(lengths), 0)
    if h["rope_kind"] == ROPE_LONG and lengths.max() > original:
        return np.repeat(weights["rope_long_frequencies"][None], len(lengths), 0), h["rope_long_attention_factor"]
    for t, length in enumerate(lengths if h["rope_kind"] == ROPE_DYNAMIC else ()):
        if length > original:
            stretch = h["rope_dynamic_factor"] * length / original - (h["rope_dynamic_factor"] - 1)
            base = h["rope_theta"] * stretch ** (dim / (dim - 2))
            table[t] = [base ** (-i / dim) for i in range(0, dim, 2)]
    return table, factor


def rope(x, frequencies, factor):
    """Rotates pairs (i, i + rotary_dim / 2) of each head's first rotary_dim dimensions."""
    half = frequencies.shape[1]
    angles = (np.arange(len(x), dtype=x.dtype)[:, None] * frequencies.astype(x.dtype))[:, None]
    cos, sin = np.cos(angles) * x.dtype.type(factor), np.sin(angles) * x.dtype.type(factor)
    a, b = x[..., :half], x[..., half:2 * half]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin, x[..., 2 * half:]], axis=-1)


def attention(h, q, k, v, sinks, window):
    tokens, heads, kv_heads = len(q), q.shape[1], k.shape[1]
    kv_head = np.arange(heads) % kv_heads if h["attention_kind"] == MOA else np.arange(heads) // (heads // kv_heads)
    scores = np.einsum("thd,shd->hts", q, k[:, kv_head]) * q.dtype.type(h["attention_scale"])
    distance = np.arange(tokens)[:, None] - np.arange(tokens)
    hidden = (distance < 0) | ((distance >= window) & (window > 0))
    scores = np.where(hidden, -np.inf, scores)
    if sinks is not None:
        scores = np.concatenate([scores, np.broadcast_to(sinks[:, None, None], (heads, tokens, 1))], axis=2)
    weights = softmax(scores)[..., :tokens]
    return np.einsum("hts,shd->thd", weights, v[:, kv_head])


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


# Mixture of experts

def ffn_block(h, layer, x, index):
    y = np.zeros_like(x)
    if index not in h["dense_layers"]:
        scores = x @ layer["router"].T + layer.get("router_logit_bias", x.dtype.type(0))
        y = experts(h, layer, x, *route(h, scores, layer.get("router_bias")))
    if "mlp_up" in layer:
        shared = activate(h, x @ layer["mlp_up"].T) @ layer["mlp_down"].T
        if "shared_gate" in layer:
            shared = shared * sigmoid(x @ layer["shared_gate"])[:, None]
        y = y + shared
    return y + layer.get("ffn_out_bias", x.dtype.type(0))


def route(h, logit, correction):
    """(ids, weights), (tokens, k), best first."""
    if h["router_kind"] == SPARSEMIXER:
        return sparsemixer(logit, h["router_jitter"])
    scores = {SOFTMAX: softmax, SIGMOID: sigmoid, TOPK_SOFTMAX: lambda x: x}[h["router_kind"]](logit)
    choice = scores if correction is None else scores + correction
    if h["num_groups"] > 1:
        choice = limited(h, choice)
    ids = np.argsort(-choice, axis=1, kind="stable")[:, :h["k"]]
    weights = np.take_along_axis(scores, ids, 1)
    if h["router_kind"] == TOPK_SOFTMAX:
        return ids, softmax(weights)
    if h["renormalize"]:
        weights = weights / np.maximum(weights.sum(1, keepdims=True), weights.dtype.type(h["renormalize_min"]))
    return ids, weights * weights.dtype.type(h["routed_scaling"])


def limited(h, choice):
    """-inf outside the topk_groups best groups: by their largest score (softmax), or the sum of their two largest."""
    groups = choice.reshape(len(choice), h["num_groups"], -1)
    count = 2 if h["router_kind"] == SIGMOID else 1
    best = np.argsort(-np.sort(groups, 2)[..., -count:].sum(2), axis=1, kind="stable")[:, :h["topk_groups"]]
    inside = np.zeros(groups.shape[:2], bool)
    np.put_along_axis(inside, best, True, 1)
    return np.where(inside[..., None], groups, -np.inf).reshape(choice.shape)


def sparsemixer(logit, jitter):
    """Two experts, one after the other, each weighted among those whose logits lie near the largest that is left."""
    left, ids, weights = logit.copy(), [], []
    for _ in range(2):
        best = left.argmax(1)[:, None]
        largest = np.take_along_axis(left, best, 1)
        with np.errstate(invalid="ignore", divide="ignore"):
            far = (largest - logit) / np.maximum(np.abs(logit), largest) > 2 * jitter
        near = np.where(far, 0, np.exp(left - largest))
        ids.append(best)
        weights.append(1 / near.sum(1, keepdims=True))
        np.put_along_axis(left, best, -np.inf, 1)
    return np.concatenate(ids, 1), np.concatenate(weights, 1).astype(logit.dtype)


def experts(h, layer, x, ids, weights):
    """Sums over slots in order. Experts one at a time, so that the gathered copies stay small."""
    y = np.zeros((*ids.shape, x.shape[1]), x.dtype)
    for e in np.unique(ids):
        token, slot = np.nonzero(ids == e)
        up = x[token] @ layer["experts_up"][e].T
        if h["expert_bias"]:
            up = up + layer["experts_up_bias"][e]
        out = activate(h, up) @ layer["experts_down"][e].T
        y[token, slot] = out + layer["experts_down_bias"][e] if h["expert_bias"] else out
    return combine(y, weights)


def combine(y, weights):
    total = np.zeros_like(y[:, 0])
    for slot in range(y.shape[1]):
        total = total + weights[:, slot, None] * y[:, slot]
    return total


def activate(h, gate_up):
    gate, up = np.split(gate_up, 2, axis=-1)
    if h["activation"] == 3:
        limit = gate.dtype.type(h["swiglu_limit"])
        gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
        return gate * sigmoid(gate * gate.dtype.type(h["swiglu_alpha"])) * (up + 1)
    if h["activation"] == 0:
        return gate * sigmoid(gate) * up
    if h["activation"] == 1:
        return (gate * (1 + _erf(gate / np.sqrt(2.0))) / 2).astype(gate.dtype) * up
    return np.maximum(gate, 0) * up


def sigmoid(x):
    return 1 / (1 + np.exp(-np.clip(x, -80, None)))
