"""A model's header fields from its config file, its flags and its family; what is not known is asked for by name."""

import json
from pathlib import Path

from colibri import headers
from colibri.errors import ColibriError

MAX_CONFIG_BYTES = 16 << 20
# Header field -> the names that a config file may use for it.
KEYS = {"k": ("num_experts_per_tok", "k"), "activation": ("hidden_act", "activation"),
        "renormalize": ("norm_topk_prob", "renormalize"), "num_experts": ("num_local_experts", "num_experts"),
        "hidden": ("hidden_size", "hidden"), "ffn": ("intermediate_size", "ffn"),
        "num_layers": ("num_hidden_layers", "num_layers"), "num_heads": ("num_attention_heads", "num_heads"),
        "num_kv_heads": ("num_key_value_heads", "num_kv_heads"), "head_dim": ("head_dim",),
        "vocab_size": ("vocab_size",), "max_positions": ("max_position_embeddings", "max_positions"),
        "norm_eps": ("rms_norm_eps", "norm_eps"), "tied_embeddings": ("tie_word_embeddings", "tied_embeddings")}
ACTIVATION_ALIASES = {"swish": "silu"}
FLAGS = {"k": "--k", "activation": "--activation", "renormalize": "--renormalize or --no-renormalize"}


class Config:
    """A config file's values, or none, under Colibri's field names; flags fill in what it lacks."""

    def __init__(self, values, where, flags):
        """values: the JSON object. where: its path, or None. flags: {field: value or None}."""
        self.values, self.where, self.flags = values, where, flags

    def get(self, field, kind=int):
        """The field's value, or None. bool counts as its own kind; int is taken where float is asked for."""
        value, key = None, None
        for key in KEYS[field]:
            if self.values.get(key) is not None:
                value = self.values[key]
                break
        if kind is float and type(value) is int:
            value = float(value)
        if value is not None and type(value) is not kind:
            raise ColibriError(f"{self.where}: {key}={json.dumps(value)[:80]}, expected {kind.__name__}; correct the "
                               "config")
        if kind in (int, float) and value is not None and not 0 <= value < 2 ** 32:
            raise ColibriError(f"{self.where}: {key}={value}, expected 0 to 2^32 - 1; correct the config")
        flag = self.flags.get(field)
        if flag is not None and value is not None and flag != value:
            raise ColibriError(f"{FLAGS[field]}: {flag}, but {self.where} says {key}={json.dumps(value)[:80]}; drop "
                               "the flag or correct the config")
        return value if flag is None else flag

    def need(self, field, kind=int):
        """The field's value; an error that names its flag or its key where nothing tells it."""
        value = self.get(field, kind)
        if value is None:
            fix = f"give {FLAGS[field]}" if field in FLAGS else "give a config file that has it with --config"
            raise ColibriError(f"{self.where or 'no config file'}: {KEYS[field][0]} is not known, expected it from a "
                               f"config or a flag; {fix}")
        return value

    def missing(self, fields):
        """The flags of those fields that nothing tells."""
        kinds = {"activation": str, "renormalize": bool}
        return [FLAGS[field] for field in fields if self.get(field, kinds.get(field, int)) is None]

    def activation(self):
        """The activation's code in the header."""
        codes, name = headers.default().codes("ACTIVATION"), self.need("activation", str)
        name = ACTIVATION_ALIASES.get(name, name)
        if name not in codes:
            raise ColibriError(f"{self.where or '--activation'}: activation={name[:80]}, expected one of "
                               f"{', '.join(codes)}; Colibri has no other")
        return codes[name]


def load(option, checkpoint, flags):
    """The Config of a checkpoint: --config FILE, else NAME.json, else config.json beside it, else flags alone."""
    beside = [Path(checkpoint).with_suffix(".json"), Path(checkpoint).parent / "config.json"]
    path = option or next((path for path in beside if path.is_file()), None)
    if path is None:
        return Config({}, None, flags)
    try:
        with open(path, "rb") as file:
            text = file.read(MAX_CONFIG_BYTES + 1)
        values = json.loads(text) if len(text) <= MAX_CONFIG_BYTES else None
    except OSError as error:
        raise ColibriError(f"{path}: {error.strerror}, expected a readable JSON config; check --config") from None
    except (ValueError, RecursionError) as error:
        raise ColibriError(f"{path}: not JSON ({str(error)[:80]}), expected a config.json; check --config") from None
    if type(values) is not dict:
        raise ColibriError(f"{path}: expected a JSON object of at most {MAX_CONFIG_BYTES} bytes; check --config")
    return Config(values, str(path), flags)


def header_fields(found, config, path):
    """BinHeader's fields that describe the model. found: names.Found. Shapes are checked later, by names.sources."""
    bare = found.bare and not (found.family.name == "mixtral" and config.get("num_heads"))
    family_renormalize = True if found.family.name == "mixtral" else None
    fields = dict.fromkeys(headers.default().structs["BinHeader"].names, 0)
    up = next(iter(found.tensors["layers.N.experts_up"].values()))
    missing = config.missing(["k", "activation"] + ["renormalize"] * (family_renormalize is None))
    if len(missing) > 1:
        raise ColibriError(f"{config.where or 'no config file'}: how experts are used is not known, expected it from a "
                           f"config or flags; give {', '.join(missing)}")
    ffn, hidden = next(iter(up.values())).shape if len(next(iter(up.values())).shape) == 2 else (0, 0)
    fields.update(num_experts=config.get("num_experts") or found.num_experts, k=config.need("k"),
                  num_layers=config.get("num_layers") or found.num_layers, hidden=config.get("hidden") or hidden,
                  ffn=config.get("ffn") or ffn, activation=config.activation(), gated=found.family.gated,
                  router_kind=headers.default().codes("ROUTER")["softmax"], num_groups=1, topk_groups=1,
                  routed_scaling=1.0, renormalize=int(_renormalize(config, family_renormalize)),
                  interleave_rows=headers.default().constants["PANEL_ROWS"])
    if found.family.name == "mixtral":
        _check_mixtral(config)
    if not bare:
        fields.update(_transformer_fields(config, fields["hidden"]))
    _check_limits(fields, config.where or path)
    return fields


def _renormalize(config, family):
    value = config.get("renormalize", bool)
    if family is not None and value not in (None, family):
        raise ColibriError(f"{config.where or '--no-renormalize'}: renormalize={value}, but mixtral is always "
                           "renormalized; drop it")
    return config.need("renormalize", bool) if family is None else family


def _check_mixtral(config):
    """Refuses what a config can ask for and this format cannot say."""
    kind = config.values.get("model_type", "mixtral")
    if kind != "mixtral":
        raise ColibriError(f"{config.where}: model_type={json.dumps(kind)[:80]}, expected mixtral for tensors of "
                           "these names; another model of the same names computes something else")
    rope = [config.values.get(key) for key in ("rope_scaling", "rope_parameters")]
    for scaling in rope:
        kind = (scaling.get("rope_type") or scaling.get("type") or "default") if type(scaling) is dict else scaling
        if kind not in (None, "default"):
            raise ColibriError(f"{config.where}: rope_scaling={json.dumps(kind)[:80]}, expected default; Colibri has "
                               "no other")
    if config.values.get("partial_rotary_factor") not in (None, 1):
        raise ColibriError(f"{config.where}: partial_rotary_factor, expected 1; Colibri rotates whole heads")
    window, positions = config.values.get("sliding_window"), config.get("max_positions")
    if window is not None and (positions is None or type(window) is not int or window < positions):
        raise ColibriError(f"{config.where}: sliding_window={json.dumps(window)[:80]}, expected none below "
                           f"max_position_embeddings={positions}; Colibri attends to all positions")


def _transformer_fields(config, hidden):
    num_heads = config.need("num_heads")
    rope = config.values.get("rope_parameters")
    theta = config.values.get("rope_theta", rope.get("rope_theta") if type(rope) is dict else None)
    if type(theta) not in (int, float) or not 0 < theta < 1e30:
        raise ColibriError(f"{config.where or 'no config file'}: rope_theta={json.dumps(theta)[:80]}, expected a "
                           "positive number; give a config file that has it with --config")
    tied = config.get("tied_embeddings", bool)
    return {"num_heads": num_heads, "num_kv_heads": config.need("num_kv_heads"),
            "head_dim": config.get("head_dim") or hidden // max(num_heads, 1), "vocab_size": config.need("vocab_size"),
            "max_positions": config.need("max_positions"), "norm_eps": config.need("norm_eps", float),
            "rope_theta": float(theta), "tied_embeddings": int(bool(tied)),
            "norm_kind": headers.default().codes("NORM")["rms"],
            "rope_kind": headers.default().codes("ROPE")["default"]}


def _check_limits(fields, where):
    """What native/config.h asserts of a model, in words."""
    heads, kv_heads, head_dim = fields["num_heads"], fields["num_kv_heads"], fields["head_dim"]
    rules = [("num_experts", 1 <= fields["num_experts"] <= 256, "1 to 256"),
             ("k", 1 <= fields["k"] <= min(16, fields["num_experts"]), "1 to 16, and at most num_experts"),
             ("hidden", fields["hidden"] >= 1, "at least 1"), ("ffn", fields["ffn"] >= 1, "at least 1"),
             ("num_layers", fields["num_layers"] >= 1, "at least 1"),
             ("num_kv_heads", heads == 0 or (kv_heads >= 1 and heads % kv_heads == 0),
              f"a divisor of num_heads={heads}"),
             ("head_dim", heads == 0 or (2 <= head_dim <= 512 and head_dim % 2 == 0), "an even number from 2 to 512"),
             ("vocab_size", heads == 0 or fields["vocab_size"] >= 1, "at least 1")]
    for field, holds, rule in rules:
        if not holds:
            raise ColibriError(f"{where}: {field}={fields[field]}, expected {rule}; correct the config or the flag")
