"""Makes a model's header fields from its config.json, or from flags for bare MoE layers. Refuses what Colibri lacks."""

import json
import os
from pathlib import Path

import numpy as np

from colibri import headers
from colibri.errors import ColibriError
from converter.rope import rope
from converter.values import Values, once

CODES = headers.default().constants
ROUTER_SOFTMAX, ROUTER_TOPK_SOFTMAX, ROUTER_SIGMOID, ROUTER_SPARSEMIXER = (
    CODES[f"ROUTER_{kind}"] for kind in ("SOFTMAX", "TOPK_SOFTMAX", "SIGMOID", "SPARSEMIXER"))
ATTENTION_LATENT, ATTENTION_MOA = CODES["ATTENTION_LATENT"], CODES["ATTENTION_MOA"]
QK_NORM_HEAD, QK_NORM_ALL = CODES["QK_NORM_HEAD"], CODES["QK_NORM_ALL"]
NORM_RMS, NORM_LAYER = CODES["NORM_RMS"], CODES["NORM_LAYER"]
SILU, ACTIVATION_CLAMPED = CODES["ACTIVATION_SILU"], CODES["ACTIVATION_CLAMPED_SWIGLU"]
ACTIVATIONS = {"silu": SILU, "swish": SILU, "gelu": CODES["ACTIVATION_GELU"], "relu": CODES["ACTIVATION_RELU"]}
LATENT_EPS = 1e-6  # of the norms of latents, whatever the config says
MAX_CONFIG_BYTES = 16 << 20
HEADER = headers.default().structs["BinHeader"]
MAX_LAYERS = 32 * HEADER["dense_layers"].shape[0]  # bits of a layer mask
FLOATS = [name for name in HEADER.names if HEADER[name] == np.float32]
# What header fields are in a plain model. A field that is not here is 0 in a bare stack.
PLAIN = {"gated": 1, "num_groups": 1, "topk_groups": 1, "routed_scaling": 1.0, "residual_multiplier": 1.0,
         "embedding_multiplier": 1.0, "logits_multiplier": 1.0, "rope_attention_factor": 1.0, "dense_layers": [],
         "window_layers": [], "mtp_layers": 0,
         "interleave_rows": CODES["PANEL_ROWS"]}


# Header fields from a config.json

def zeros():
    """Returns every number of the header as 0, and `rope_interleaved`, which describes the checkpoint's rows."""
    return {**dict.fromkeys(HEADER.names, 0), "rope_interleaved": 0}


def basics(c, **fields):
    """Returns every header field of the plainest family, with grouped-query attention and RMS norms.

    fields: values that replace those, or come on top.
    """
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
    """Returns the number of layers. It is checked here, because lists of this length are made."""
    layers = c.need("num_hidden_layers|n_layers")
    if not 1 <= layers <= MAX_LAYERS:
        raise c.bad("num_hidden_layers", layers, f"1 to {MAX_LAYERS}")
    return layers


def activation(c):
    name = c.get("hidden_act|activation_function|ffn_config.ffn_act_fn.name|activation", str, "silu")
    if name not in ACTIVATIONS:
        raise c.bad("hidden_act", name, "one of " + ", ".join(ACTIVATIONS))
    return ACTIVATIONS[name]


def load(option, checkpoint):
    """Reads a checkpoint's config as Values.

    The file is --config FILE. Without that option it is config.json in a folder; beside a file it is NAME.json, or else
    config.json. Where there is no such file, the Values are empty.
    """
    checkpoint = Path(checkpoint)
    beside = [checkpoint / "config.json"] if checkpoint.is_dir() else [checkpoint.with_suffix(".json"),
                                                                       checkpoint.parent / "config.json"]
    path = option or next((path for path in beside if path != checkpoint and is_there(path)), None)
    return Values({}, None) if path is None else Values(read_json(path), str(path))


def is_there(path):
    """Returns whether something is at a path. A link to nothing counts."""
    return path.exists() or path.is_symlink()


def read_json(path):
    """Reads the JSON object in a small file."""
    if os.path.exists(path) and not os.path.isfile(path):  # a pipe might never end
        raise ColibriError(path, "not a regular file", "a JSON config", "check --config")
    try:
        with open(path, "rb") as file:
            text = file.read(MAX_CONFIG_BYTES + 1)
        values = json.loads(text, object_pairs_hook=once) if len(text) <= MAX_CONFIG_BYTES else None
    except OSError as error:
        raise ColibriError(path, error.strerror, "a readable JSON config", "check --config") from None
    except (ValueError, RecursionError) as error:
        raise ColibriError(path, f"not JSON ({str(error)[:80]})", "an object with each key once",
                           "check --config") from None
    if type(values) is not dict:
        raise ColibriError(path, expected=f"a JSON object of at most {MAX_CONFIG_BYTES} bytes", fix="check --config")
    return values


# Bare MoE layers

# Header field -> its names in a config, its kind, its flag, and its default. None: there is no default, so that it must
# be given.
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
    """Returns the header fields of bare MoE layers.

    sizes: those that the tensors' shapes give; a config's sizes replace them. flags: {field: value or None}. Routing
    comes from the family, from a config without model_type, or from flags. unknown: a list that gets the flags of
    choices which nothing settles; without a list, such a choice is an error.
    """
    fields, missing = {**zeros(), **PLAIN, **sizes, **family.routing}, []
    for field, keys in SIZES.items():
        fields[field] = c.get(keys, default=fields[field])
    for field, (keys, kind, flag, default) in ASKED.items():
        given, known = flags.get(field), c.get(keys, kind)
        if given is not None and known is not None and given != known:
            raise ColibriError(flag, f"{given}, but {c.where} says {json.dumps(known)[:80]}",
                               fix="drop the flag or correct the config")
        value = next((each for each in (given, known, default) if each is not None), None)
        if field == "activation" and value is not None:
            value = _activation_code(value, flag if given is not None else c.where)
        if field in family.routing:
            if not (value in (None, family.routing[field]) or _means_nothing(field, value, fields)):
                raise ColibriError(c.where or flag, f"{field}={value}",
                                   f"{family.routing[field]}, as always in {family.name}", "drop it")
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
        raise ColibriError(c.where or "no config file", "how experts are used is not known",
                           "it from a config or flags", f"give {', '.join(missing)}")
    if unknown is not None:
        unknown += missing
    return fields


def missing_flags(c, flags, fields):
    """Returns the flags of those fields of ASKED that neither a config nor a flag settles."""
    return [ASKED[field][2] for field in fields if flags.get(field) is None and c.get(*ASKED[field][:2]) is None]


def _means_nothing(field, value, fields):
    """Returns whether a choice changes nothing in this family.

    Weights of a softmax over the chosen experts sum to 1 already. A clamped SwiGLU has SiLU in it.
    """
    return (field == "renormalize" and value and fields["router_kind"] == ROUTER_TOPK_SOFTMAX
            or field == "activation" and value == SILU and fields["activation"] == ACTIVATION_CLAMPED)


def _activation_code(name, where):
    if name not in ACTIVATIONS:
        raise ColibriError(where, f"activation={name[:80]}", "one of silu, gelu, relu", "Colibri has no other")
    return ACTIVATIONS[name]


def check_flags(fields, c, flags):
    """Checks that flags only repeat what a config says."""
    for field, (_, _, flag, _) in ASKED.items():
        given = flags.get(field)
        value = _activation_code(given, flag) if field == "activation" and given is not None else given
        if value is not None and value != fields[field]:
            raise ColibriError(flag, f"{given}, but {c.where} makes {field} {fields[field]}",
                               fix="drop the flag or correct the config")


def check_own_names(fields, c):
    """Checks that a config with a model_type means the same where it uses the names for bare MoE layers, too."""
    for field in ("k", "hidden", "ffn", "num_layers", "renormalize"):
        c.accept(field, [fields[field]])


def _held(value):
    """Returns whether float32 holds a number: it must not overflow, and only 0 may round to 0."""
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
        raise ColibriError(where, f"{field}={fields[field]}", rule, "correct the config or the flag")
