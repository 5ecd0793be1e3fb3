"""The model in NumPy, from its logical weights: what every backend is compared with.

A model is a dict of its configuration (BinHeader's field names; codes as in native/format.h) and of arrays:
    embed (vocab_size, hidden), final_norm (hidden,), lm_head (vocab_size, hidden) or None when tied,
    layers: a list of dicts with attention_norm (hidden,), qkv (rows, hidden), attention_out (hidden, num_heads *
    head_dim), ffn_norm (hidden,), router (num_experts, hidden), router_bias (num_experts,) or None,
    router_logit_bias likewise, gate (num_experts, ffn, hidden) or None, up (num_experts, ffn, hidden),
    down (num_experts, hidden, ffn), and with expert_bias gate_bias, up_bias, down_bias of the same rows, else None
Arithmetic follows the dtype of the inputs: float64 in, float64 out. No SciPy: erf is math.erf.
"""

import math

import numpy as np
import reference_formats

from colibri import headers

CONSTANTS = headers.default().constants
PANEL_ROWS, GATE_GROUP = CONSTANTS["PANEL_ROWS"], CONSTANTS["GATE_GROUP"]
F32, F16, BF16 = CONSTANTS["DTYPE_F32"], CONSTANTS["DTYPE_F16"], CONSTANTS["DTYPE_BF16"]
SILU, GELU, RELU, CLAMPED_SWIGLU = (CONSTANTS[f"ACTIVATION_{name}"]
                                    for name in ("SILU", "GELU", "RELU", "CLAMPED_SWIGLU"))
SOFTMAX, TOPK_SOFTMAX, SIGMOID, SPARSEMIXER = (CONSTANTS[f"ROUTER_{name}"]
                                               for name in ("SOFTMAX", "TOPK_SOFTMAX", "SIGMOID", "SPARSEMIXER"))

FORM_FIELDS = [f"{matrices}_{field}" for matrices in ("expert", "dense", "embed")
               for field in ("dtype", "group", "zero_points")] + ["compute_dtype"]
erfc = np.vectorize(math.erfc, otypes=[np.float64])


def fields(**values):
    return values


ROUTERS = {  # the kinds of routing that each backend is held to
    "softmax": fields(num_experts=32, k=2),
    "not renormalised": fields(num_experts=3, k=2, renormalize=0),
    "k=16 of 60": fields(num_experts=60, k=16, router_kind=TOPK_SOFTMAX),
    "k=E=16": fields(num_experts=16, k=16, router_kind=SIGMOID, renormalize=0),
    "sigmoid": fields(num_experts=33, k=3, router_kind=SIGMOID, routed_scaling=1.5),
    "softmax, bias": fields(num_experts=64, k=6, router_bias=1, renormalize=0),
    "softmax, groups": fields(num_experts=160, k=6, num_groups=8, topk_groups=3, renormalize=0, routed_scaling=16.0),
    "sigmoid, groups": fields(num_experts=256, k=8, router_kind=SIGMOID, router_bias=1, num_groups=8, topk_groups=4),
    "sigmoid, groups, no bias": fields(num_experts=24, k=4, router_kind=SIGMOID, num_groups=6, topk_groups=2),
    "groups of one": fields(num_experts=64, k=2, router_kind=SIGMOID, router_bias=1, num_groups=64, topk_groups=40),
    "many groups": fields(num_experts=256, k=8, num_groups=128, topk_groups=50),
    "softmax, a least sum": fields(num_experts=64, k=6, renormalize_min=0.7),
    "sigmoid, a least sum": fields(num_experts=33, k=3, router_kind=SIGMOID, router_bias=1, renormalize_min=1.5,
                                 routed_scaling=2.5),
    "logit bias": fields(num_experts=40, k=4, router_kind=TOPK_SOFTMAX, router_logit_bias=1),
    "sparsemixer": fields(num_experts=16, k=2, router_kind=SPARSEMIXER, router_jitter=0.25),
    "sparsemixer of 200": fields(num_experts=200, k=2, router_kind=SPARSEMIXER, router_jitter=0.125,
                               router_logit_bias=1),
}


def rms_norm(x, weight, eps):
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def softmax(x):
    with np.errstate(invalid="ignore"):
        e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def sigmoid(x):
    return np.exp(np.minimum(x, 0)) / (1 + np.exp(-np.abs(x)))


def activation(x, kind):
    if kind == RELU:
        return np.maximum(x, 0)
    if kind == GELU:
        return (x * 0.5 * erfc(-x.astype(np.float64) / math.sqrt(2))).astype(x.dtype)
    return x * sigmoid(x)


def frequencies(rotary_dim, theta):
    """The tensor rope_frequencies of the default kind, float32 (rotary_dim / 2,)."""
    return (theta ** (-np.arange(rotary_dim // 2) / (rotary_dim // 2))).astype(np.float32)


def neutral(model):
    """`model` with the header fields that a plain model has without being asked."""
    head_dim = model["head_dim"]
    return {**fields(v_head_dim=head_dim, rotary_dim=head_dim, attention_scale=head_dim ** -0.5 if head_dim else 0.0,
                   final_norm_eps=model["norm_eps"], rope_attention_factor=1.0, embedding_multiplier=1.0,
                   residual_multiplier=1.0, logits_multiplier=1.0), **model}


def rope(heads, positions, theta):
    """heads (tokens, num_heads, head_dim), rotated in pairs (i, i + head_dim / 2)."""
    half = heads.shape[-1] // 2
    angle = np.asarray(positions, np.float64)[:, None] * frequencies(2 * half, theta).astype(np.float64)
    cosine, sine = (f(angle)[:, None].astype(heads.dtype) for f in (np.cos, np.sin))
    a, b = heads[..., :half], heads[..., half:]
    return np.concatenate([a * cosine - b * sine, b * cosine + a * sine], axis=-1)


def attention(q, keys, values):
    """One token: q (num_heads, head_dim) over keys, values (positions, num_kv_heads, head_dim)."""
    group = q.shape[0] // keys.shape[1]
    keys, values = np.repeat(keys, group, axis=1), np.repeat(values, group, axis=1)
    scores = np.einsum("hd,phd->hp", q, keys) / math.sqrt(q.shape[-1])
    return np.einsum("hp,phd->hd", softmax(scores), values)


def choose(scores, count):
    """Indices of the `count` largest, largest first, equal ones by index; -inf is never chosen."""
    order = sorted((i for i in range(len(scores)) if scores[i] > -np.inf), key=lambda i: (-scores[i], i))
    return order[:count] if len(order) >= count else None


def route(logits, config, bias=None):
    """One token's (ids, weights), or None where the logits allow no choice."""
    if not np.all(logits < np.inf):
        return None
    kind, k = config["router_kind"], config["k"]
    if kind == SPARSEMIXER:
        return sparsemix(logits, config["router_jitter"])
    scores = logits.copy()
    finite = logits > -np.inf
    probabilities = {SOFTMAX: softmax, SIGMOID: sigmoid, TOPK_SOFTMAX: np.copy}[kind](logits)
    if bias is not None:
        scores[finite] = (probabilities + bias)[finite]
    if config["num_groups"] > 1:
        grouped = np.where(finite, probabilities + (0 if bias is None else bias), -np.inf)
        grouped = np.sort((grouped if kind == SIGMOID else scores).reshape(config["num_groups"], -1))[:, ::-1]
        group_scores = grouped[:, 0].copy()
        if kind == SIGMOID and grouped.shape[1] > 1:
            group_scores = np.where(grouped[:, 1] > -np.inf, grouped[:, 0] + grouped[:, 1], grouped[:, 0])
        order = sorted(range(len(group_scores)), key=lambda g: (-group_scores[g], g))
        allowed = np.isin(np.arange(config["num_groups"]), order[:config["topk_groups"]])
        scores[~np.repeat(allowed, len(logits) // config["num_groups"])] = -np.inf
    ids = choose(scores, k)
    if ids is None:
        return None
    chosen = logits[ids]
    if kind == SOFTMAX and config["renormalize"] and config["renormalize_min"]:
        weights = probabilities[ids] / max(probabilities[ids].sum(), config["renormalize_min"])
    elif kind == TOPK_SOFTMAX or (kind == SOFTMAX and config["renormalize"]):
        weights = softmax(chosen)
    elif kind == SOFTMAX:
        weights = probabilities[ids]
    elif config["renormalize"] and config["renormalize_min"]:
        weights = sigmoid(chosen)
        weights = weights / max(weights.sum(), config["renormalize_min"])
    else:
        weights = sigmoid(chosen)
        if config["renormalize"]:  # relative to the largest, so that they cannot all underflow
            weights = np.exp(np.minimum(chosen, 0) - min(chosen.max(), 0)) / (1 + np.exp(-np.abs(chosen)))
            weights = weights / weights.sum()
    return ids, weights * config["routed_scaling"]


def sparsemix(logits, jitter):
    """route() of SPARSEMIXER: the largest logit left, twice, weighed among those left that lie near it."""
    left, ids, weights = logits.copy(), [], []
    for _ in range(2):
        best = int(np.argmax(left))
        if left[best] == -np.inf:
            return None
        with np.errstate(invalid="ignore"):
            far = (left[best] - logits) / np.maximum(np.abs(logits), left[best]) > 2 * jitter
        weights.append(1 / np.exp(left - left[best])[~far].sum())
        ids.append(best)
        left[best] = -np.inf
    return ids, np.array(weights)


def product(x, layer, name, e):
    """Rows of x times expert e's matrix of that name, with its bias where there is one."""
    y = x @ layer[name][e].T
    return y if layer[f"{name}_bias"] is None else y + layer[f"{name}_bias"][e]


def middle(x, layer, e, config):
    """Rows of x (tokens, hidden) up to expert e's second matrix: (tokens, ffn)."""
    kind, up = config["activation"], product(x, layer, "up", e)
    if layer["gate"] is None:
        return activation(up, kind)
    gate, limit = product(x, layer, "gate", e), config["swiglu_limit"]
    if kind == CLAMPED_SWIGLU:
        gate = np.minimum(gate, limit)
        return gate * sigmoid(config["swiglu_alpha"] * gate) * (np.clip(up, -limit, limit) + 1)
    return activation(gate, kind) * up


def expert(x, layer, e, config):
    """Rows of x through expert e: (tokens, hidden) -> (tokens, hidden)."""
    return product(middle(x, layer, e, config), layer, "down", e)


def moe(x, layer, config):
    """(output, ids, weights) of (tokens, hidden); an error in routing gives None."""
    logits = x @ layer["router"].T + (0 if layer["router_logit_bias"] is None else layer["router_logit_bias"])
    routes = [route(row, config, layer["router_bias"]) for row in logits]
    if None in routes:
        return None
    ids = np.array([r[0] for r in routes])
    weights = np.array([r[1] for r in routes], x.dtype)
    out = np.zeros((*ids.shape, x.shape[1]), x.dtype)
    for e in np.unique(ids):
        tokens, slots = np.nonzero(ids == e)
        out[tokens, slots] = expert(x[tokens], layer, e, config)
    return np.einsum("tk,tkh->th", weights, out), ids, weights


def forward(model, tokens, positions, slots, cache):
    """Logits of every token. cache: a dict that remembers (layer, slot, position) -> (key, value) between calls."""
    x = model["embed"][tokens]
    num_heads, num_kv_heads, head_dim = model["num_heads"], model["num_kv_heads"], model["head_dim"]
    for number, layer in enumerate(model["layers"]):
        qkv = rms_norm(x, layer["attention_norm"], model["norm_eps"]) @ layer["qkv"].T
        qkv = qkv.reshape(len(x), num_heads + 2 * num_kv_heads, head_dim)
        q, k, v = np.split(qkv, [num_heads, num_heads + num_kv_heads], axis=1)
        q, k = (rope(heads, positions, model["rope_theta"]) for heads in (q, k))
        for t, where in enumerate(zip(slots, positions)):
            cache[(number, *where)] = k[t], v[t]
        mixed = []
        for t in range(len(x)):
            past = [cache[number, slots[t], position] for position in range(positions[t] + 1)]
            mixed.append(attention(q[t], *(np.array(part) for part in zip(*past))).ravel())
        x = x + np.array(mixed) @ layer["attention_out"].T
        x = x + moe(rms_norm(x, layer["ffn_norm"], model["norm_eps"]), layer, model)[0]
    head = model["embed"] if model["lm_head"] is None else model["lm_head"]
    return rms_norm(x, model["final_norm"], model["norm_eps"]) @ head.T


def sample(logits, temperature, top_k, top_p, uniform, min_p=0):
    """The token that one row of logits yields for the draw `uniform`."""
    best = int(np.argmax(logits))
    if temperature == 0:
        return best
    with np.errstate(invalid="ignore"):
        mass = np.exp((logits.astype(np.float64) - logits[best]) / temperature)
    mass[logits == logits[best]] = 1
    likely = [i for i in range(len(logits)) if mass[i] >= min_p]
    order = sorted(likely, key=lambda i: (-logits[i], i))[:top_k if top_k > 0 else None]
    if top_p < 1:
        reached = np.cumsum(mass[order])
        order = order[:np.searchsorted(reached, top_p * reached[-1]) + 1]
    order = sorted(order)
    reached = np.cumsum(mass[order])
    return order[min(np.searchsorted(reached, uniform * reached[-1], side="right"), len(order) - 1)]


def changed(logits, sampler, prompt, drawn, eos=()):
    """Logits with a Sampler's bias, penalties and barred tokens, in float32."""
    logits, bias = logits.astype(np.float32), dict(sampler.logit_bias)
    for token in range(len(logits)):
        count, value = drawn.count(token), logits[token] + np.float32(bias.get(token, 0))
        if count or token in prompt:
            penalty = np.float32(sampler.repetition_penalty)
            value = value / penalty if value > 0 else value * penalty
            value -= np.float32(sampler.frequency_penalty) * np.float32(count)
            value -= np.float32(sampler.presence_penalty if count else 0)
        logits[token] = value
    if len(drawn) < sampler.min_tokens:
        logits[sorted({*eos, *sampler.stop_token_ids})] = -np.inf
    return logits


def log_softmax(logits):
    logits = logits.astype(np.float64) - logits.max()
    return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


def to_bits(array, dtype):
    """float32 values as they are stored; they must be exact in that dtype."""
    if dtype == F32:
        return array.astype(np.float32)
    return array.astype(np.float16).view(np.uint16) if dtype == F16 else (array.view(np.uint32) >> 16).astype(np.uint16)


def round_to(array, dtype):
    """The nearest float32 values that the dtype can hold (bf16: towards zero)."""
    array = np.asarray(array, np.float32)
    if dtype == F16:
        return array.astype(np.float16).astype(np.float32)
    return (array.view(np.uint32) & 0xffff0000).view(np.float32) if dtype == BF16 else array


def to_panels(matrix):
    """(rows, columns) or (num_experts, rows, columns) as stored: [row panel][expert][column][PANEL_ROWS]."""
    matrix = matrix.reshape(-1, *matrix.shape[-2:])
    num_experts, rows, columns = matrix.shape
    num_panels = -(-rows // PANEL_ROWS)
    padded = np.zeros((num_experts, num_panels * PANEL_ROWS, columns), matrix.dtype)
    padded[:, :rows] = matrix
    panels = padded.reshape(num_experts, num_panels, PANEL_ROWS, columns).transpose(1, 0, 3, 2)
    return np.ascontiguousarray(panels)


def interleave_gate(gate, up):
    """Gate and up rows in alternating groups of GATE_GROUP, both filled up with zero rows to a multiple of it."""
    num_experts, ffn, hidden = up.shape
    groups = -(-ffn // GATE_GROUP)
    both = np.zeros((num_experts, groups, 2, GATE_GROUP, hidden), up.dtype)
    for half, rows in enumerate((gate, up)):
        padded = np.zeros((num_experts, groups * GATE_GROUP, hidden), up.dtype)
        padded[:, :ffn] = rows
        both[:, :, half] = padded.reshape(num_experts, groups, GATE_GROUP, hidden)
    return both.reshape(num_experts, -1, hidden)


def random_model(rng, **config):
    """A model of random weights that its dtypes hold exactly, as float32; config: BinHeader's fields."""
    model = {**fields(num_layers=1, num_experts=4, k=2, hidden=64, ffn=32, num_heads=0, num_kv_heads=0, head_dim=0,
                    vocab_size=0, weight_dtype=F16, activation=SILU, gated=1,
                    router_kind=SOFTMAX, router_bias=0, renormalize=1, num_groups=1, topk_groups=1, routed_scaling=1.0,
                    renormalize_min=0.0, router_logit_bias=0, expert_bias=0, swiglu_alpha=1.75,
                    swiglu_limit=1.5, norm_kind=1, norm_eps=1e-5, rope_kind=1, rope_theta=10000.0, tied_embeddings=0),
             **dict.fromkeys(FORM_FIELDS, 0), **config}
    model = neutral(model)
    hidden, ffn, experts = model["hidden"], model["ffn"], model["num_experts"]
    dense, expert, embed = (headers.form_of(kind, model) for kind in ("dense_t", "expert_t", "embed_t"))

    def matrix(*shape, form=dense):
        if headers.is_few(form.dtype):
            return reference_formats.random_few(rng, form, *shape)
        return round_to(rng.standard_normal(shape) / math.sqrt(shape[-1]), form.dtype)

    def vector(size, wanted=True):
        return rng.standard_normal(size).astype(np.float32) if wanted else None

    heads, qkv_rows = model["num_heads"], (model["num_heads"] + 2 * model["num_kv_heads"]) * model["head_dim"]
    model["embed"] = matrix(model["vocab_size"], hidden, form=embed)
    model["final_norm"] = vector(hidden)
    model["lm_head"] = None if model["tied_embeddings"] else matrix(model["vocab_size"], hidden, form=embed)
    model["layers"] = [fields(
        attention_norm=vector(hidden), qkv=matrix(qkv_rows, hidden), ffn_norm=vector(hidden),
        attention_out=matrix(hidden, heads * model["head_dim"]) if heads else None,
        router=matrix(experts, hidden, form=headers.form_of("float", model)) * 3,
        router_bias=vector(experts, model["router_bias"]),
        gate=matrix(experts, ffn, hidden, form=expert) if model["gated"] else None,
        up=matrix(experts, ffn, hidden, form=expert), down=matrix(experts, hidden, ffn, form=expert),
        router_logit_bias=vector(experts, model["router_logit_bias"]),
        gate_bias=vector((experts, ffn), model["expert_bias"] and model["gated"]),
        up_bias=vector((experts, ffn), model["expert_bias"]),
        down_bias=vector((experts, hidden), model["expert_bias"])) for _ in range(model["num_layers"])]
    return model


def as_float64(model):
    """The same model in float64."""
    if isinstance(model, list):
        return [as_float64(item) for item in model]
    if isinstance(model, dict):
        return {name: as_float64(value) for name, value in model.items()}
    return np.asarray(model).astype(np.float64) if isinstance(model, np.ndarray) else model


def stored_panels(matrix, dtype, gate=None):
    """The panels of a matrix, or of one with gate rows."""
    if isinstance(matrix, reference_formats.Few):
        if gate is None:
            return reference_formats.pack(*matrix.parts)
        return reference_formats.interleave(gate, matrix, interleave_gate)
    return to_panels(to_bits(matrix if gate is None else interleave_gate(gate, matrix), dtype))


def stored_tensors(model):
    """{name in the file: array as stored}: panels, bits, interleaved gate rows."""
    dtype, expert, embed = (headers.form_of(kind, model).dtype for kind in ("dense_t", "expert_t", "embed_t"))
    tensors = {}
    if model["num_heads"]:
        tensors["rope_frequencies"] = frequencies(model["rotary_dim"], model["rope_theta"])
        tensors["embed"], tensors["final_norm"] = stored_panels(model["embed"], embed), model["final_norm"]
        if model["lm_head"] is not None:
            tensors["lm_head"] = stored_panels(model["lm_head"], embed)
    for number, layer in enumerate(model["layers"]):
        matrices = {"experts_up": stored_panels(layer["up"], expert, layer["gate"]),
                    "experts_down": stored_panels(layer["down"], expert)}
        biases = [layer[name] for name in ("gate_bias", "up_bias") if layer[name] is not None]
        vectors = {"router": to_panels(layer["router"]), "router_bias": layer["router_bias"],
                   "router_logit_bias": layer["router_logit_bias"], "experts_down_bias": layer["down_bias"],
                   "experts_up_bias": np.concatenate(biases, axis=1) if biases else None}
        if model["num_heads"]:
            matrices |= {name: stored_panels(layer[name], dtype) for name in ("qkv", "attention_out")}
            vectors |= {"attention_norm": layer["attention_norm"], "ffn_norm": layer["ffn_norm"]}
        tensors |= {f"layers.{number}.{name}": array for name, array in (matrices | vectors).items()
                    if array is not None}
    return tensors
