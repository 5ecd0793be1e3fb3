"""Maps a checkpoint's tensors to Colibri's: every tensor is used, left out by name, or named in an error."""

import re
from collections import namedtuple

import numpy as np

from colibri import headers
from colibri.errors import ColibriError
from colibri.headers import evaluate
from converter import config, families, interleave, quantized, rope, views
from converter.families import L
from converter.quantized import decoded
from converter.scheme import NONE, scheme
from converter.tensor import Storage, Tensor

# What wrappers of modules add to names: DataParallel, compile, FSDP, activation checkpoints, Lightning's strategies.
WRAPPERS = {"module", "_orig_mod", "_fsdp_wrapped_module", "_fpw_module", "_checkpoint_wrapped_module",
            "_forward_module"}
LIGHTNING = "model."  # an attribute of Lightning's modules, and also the prefix of many models
INNER = (LIGHTNING + "model.", LIGHTNING + "transformer.")  # how names begin of a model in that attribute
Bound = namedtuple("Bound", "sources ignored missing extra")
NUMBER = re.compile(r"0|[1-9]\d{0,5}")
FLOATS = tuple(interleave.FLOATS)


def header_fields(c):
    """Returns (Family, header fields) of a config with a model_type.

    rope.TENSORS are arrays, and sets of layers are lists. rope_interleaved describes the checkpoint; its rows come out
    as halves. ColibriError names a field that Colibri cannot honour.
    """
    name = c.need("model_type", str)
    if name not in families.FAMILIES:
        raise ColibriError(c.where, f"model_type={name[:80]}", f"one of {', '.join(families.FAMILIES)}",
                           "Colibri has no other")
    family = families.FAMILIES[name]
    for key, allowed in family.accepts.items():
        c.accept(key, allowed)
    try:
        fields = family.fields(c)
    except (ZeroDivisionError, OverflowError):
        raise ColibriError(c.where, f"a size or factor that {name} divides by is 0, or one is too large", "a model's",
                           "correct the config") from None
    config.check_own_names(fields, c)
    fields["scheme"] = scheme(c)
    types = c.get("layer_types", list, [])
    if fields["window_layers"] != [i for i, kind in enumerate(types) if kind != "full_attention"] and types:
        layers = fields["window_layers"]
        raise c.bad("layer_types", types, f"sliding_attention for layers {layers} alone" if layers else
                    f"full_attention alone, since others are not supported in {name} without a sliding window")
    if not fields["dense_layers"]:
        fields["dense_ffn"] = 0
    if fields["window"] >= fields["max_positions"] > 0:  # hides nothing
        fields.update(window=0, window_layers=[])
    return family, fields


# The tensors of bare MoE layers.
MOE = [L + key for key in ("router", "router_bias", "router_logit_bias", "experts_up", "experts_up_bias",
                           "experts_down", "experts_down_bias", "mlp_up", "mlp_down", "shared_gate", "ffn_out_bias")]
GROUPED = ("deepseek_v2", "deepseek_v3", "glm4_moe")  # families whose models have groups or scaling
# A header field that a family's row decides -> the tensor that the family then has.
BROUGHT = {"router_bias": "router_bias", "router_logit_bias": "router_logit_bias", "expert_bias": "experts_up_bias",
           "ffn_out_bias": "ffn_out_bias", "shared_gate": "shared_gate"}


def bare_family(tensors, where):
    """Returns (Family, header fields of sizes) of MoE layers without attention and config.

    The names decide the family, whose row says where the sizes are. Where names fit several families, `routing` keeps
    what holds for all of them.
    """
    if not tensors:
        raise ColibriError(where, "0 tensors", "those of a model", "download or save the checkpoint again")
    candidates = []
    for family in families.ROWS:
        templates = {_template(name.removeprefix(family.prefix))[0] for name in tensors}
        present = {key: next((parts for parts in family.tensors[key] if any(part.template in templates
                                                                          for part in parts)), [])
                   for key in MOE if key in family.tensors}
        always = ["router", "experts_up", "experts_down"] + [key for field, key in BROUGHT.items()
                                                             if family.routing.get(field)]
        if not all(present.get(L + key) for key in always):
            continue
        there = {part.template for parts in present.values() for part in parts}
        fields = _sizes(family, present, tensors)
        if fields:
            matched = sum(_template(name.removeprefix(family.prefix))[0] in there for name in tensors)
            candidates.append((matched, family, fields))
    if not candidates:
        raise ColibriError(where, f"family not known by its tensor names ({next(iter(tensors))[:100]}{more(tensors)})",
                           "the MoE layers of one of "
                           f"{', '.join(dict.fromkeys(family.name for family in families.ROWS))}")
    best = max(matched for matched, _, _ in candidates)
    same = [(family, fields) for matched, family, fields in candidates if matched == best]
    family, fields = same[0]
    foreign = {part.template for other, _ in same for key in ("embed", L + "qkv")
               for parts in other.tensors.get(key, []) for part in parts}
    whole = [name for name in tensors if _template(name.removeprefix(family.prefix))[0] in foreign]
    if whole:
        raise ColibriError(where, f"{whole[0]}{more(whole)} of a whole language model, but no config with model_type",
                           "its config.json beside it", "put it there, or name it with --config")
    routing = {key: value for key, value in family.routing.items()
               if all(other.routing.get(key) == value for other, _ in same)}
    return family._replace(name="/".join(other.name for other, _ in same), routing=routing), fields


def doubts(family, c, flags, where):
    """Returns lines for the user about bare layers: what is assumed, although some models with such names differ."""
    rows, lines = [families.FAMILIES.get(name) for name in family.name.split("/")], []
    asked = config.missing_flags(c, flags, ["num_groups", "topk_groups", "routed_scaling"])
    if len(asked) == 3 and all(row and row.name in GROUPED for row in rows):
        lines.append(f"{where}: {family.name} without a config: taken to choose from all experts and not to scale; if "
                     f"it does otherwise, give {', '.join(asked)}")
    kinds = {row.routing.get("router_kind", config.ROUTER_SOFTMAX) for row in rows if row}
    if len(kinds) > 1:
        lines.append(f"{where}: {family.name}: names of families that route differently: taken to route by softmax; "
                     "if it does otherwise, convert it with its config.json")
    return lines


def are_joined(tensors):
    """Returns whether a layer's experts are one matrix, Megatron's weight1. Their number then shows in no shape."""
    return any(name.endswith("experts.weight1") for name in tensors)


def check_joined(fields, ffn, where, unknown):
    """Checks that such a matrix has all of the router's experts, and not one rank's share.

    ffn: the rows of each expert, or None where they are not known.
    """
    experts, rows = fields["num_experts"], fields["ffn"]
    if ffn is None and unknown is not None:
        unknown.append("--ffn")
    elif ffn is None:
        raise ColibriError(where, "experts.weight1: no ffn given",
                           f"it, since {experts} experts of {rows} rows look like a rank's share of larger ones",
                           f"give --ffn {rows} if these are all")
    elif ffn != rows:
        raise ColibriError(where, f"experts.weight1: rows for {experts} experts of ffn={rows}", f"ffn={ffn}",
                           "it has one rank's experts alone, join those of all ranks")


def _sizes(family, present, tensors):
    """Returns the header fields that the shapes give, each read where the family's row puts it.

    Returns None where up and down projections do not fit each other that way.
    """
    places = {}
    for name, tensor in tensors.items():
        template, layer, _ = _template(name.removeprefix(family.prefix))
        if layer is not None:
            places.setdefault(template, {}).setdefault(layer, tensor)
    biased = bool(present.get(L + "router_bias"))  # comes with sigmoid scores, where a family does not say otherwise
    fields = {"num_layers": 1 + max(max(layers) for layers in places.values()), "moe": 1, "mlp_ffn": 0,
              "gated": family.routing.get("gated", int(len(present[L + "experts_up"]) == 2)),
              "router_bias": int(biased), "router_kind": config.ROUTER_SIGMOID if biased else config.ROUTER_SOFTMAX,
              "expert_bias": int(bool(present.get(L + "experts_up_bias")))}
    for key in ("router", "experts_down", "experts_up", "mlp_up"):
        for part in present.get(L + key, []):
            tensor = next(iter(places.get(part.template, {}).values()), None)
            for expression, size in zip(part.shape, tensor.shape if tensor else ()):
                unknown = [field for field in ("hidden", "num_experts", "ffn", "mlp_ffn")
                           if re.search(rf"\b{field}\b", expression) and not fields.get(field)]
                if len(unknown) == 1 and (unit := evaluate(expression, {**fields, unknown[0]: 1})):
                    fields[unknown[0]] = size // unit
                elif (not unknown and key == "experts_up" and "gated" in family.routing
                        and evaluate(expression, fields) != size):
                    return None
    fields["shared_ffn"] = fields["mlp_ffn"]
    return fields


def stripped(tensors, where):
    """Returns {name without what wrappers put into it: Tensor}."""
    result = {}
    for full, tensor in tensors.items():
        *words, last = full.split(".")
        _add(tensor, ".".join([word for word in words if word not in WRAPPERS] + [last]), result, where)
    wrapped = next((name for name in result if name.startswith(INNER)), None)
    return _without_lightning(result, wrapped, where) if wrapped else result


def _without_lightning(tensors, wrapped, where):
    """Returns the tensors without the name of Lightning's attribute in front of the model's own names.

    wrapped: one of the names with that attribute.
    """
    result = {}
    for full, tensor in tensors.items():
        name = full.removeprefix(LIGHTNING)
        if name != full and not full.startswith(INNER) and not name.startswith("lm_head."):
            raise ColibriError(where,
                               f"{tensor.name} beside {tensors[wrapped].name}: {LIGHTNING} is the model's own "
                               "prefix in one and a wrapper's in the other",
                               "one model", "save it apart")
        _add(tensor, name, result, where)
    return result


def _add(tensor, name, tensors, where):
    if name in tensors:
        raise ColibriError(where, f"{tensor.name}: stands for {name}, as {tensors[name].name} does",
                           fix="expected each tensor once")
    tensors[name] = tensor


def bind(family, tensors, fields, where, keys=None):
    """Finds the tensors of each of Colibri's, and returns a Bound.

    tensors: {name: Tensor}. keys: those of MOE alone, for bare MoE layers. Each entry of `sources`, such as
    "layers.3.experts_up", has one list of Tensors for each expert, to be stacked; what has no experts has one list. The
    list of a gated matrix is gate rows, then up rows. Every tensor is used, left out by name, missing or extra.
    """
    result, missing, used, halves = {}, [], set(), []
    whole = decoded(tensors, fields.get("scheme", NONE), where, halves)
    found, ignored = _by_template(family, whole, fields, where)
    prefix = family.prefix if any(name.startswith(family.prefix) for name in tensors) else ""
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
        result.update((name, [[in_memory(name, fields[name])]]) for name in rope.TENSORS if name in fields)
    extra = [t.name for places in found.values() for t in places.values() if t.name not in used]
    missing = halves + [name if name.startswith("lm_head.") else prefix + name for name in missing]
    return Bound(result, ignored, missing, extra)


def sources(family, tensors, fields, where, keys=None):
    """Calls bind, and raises ColibriError for a tensor that is missing or extra."""
    bound = bind(family, tensors, fields, where, keys)
    if bound.missing:
        layers = {_template(name.removeprefix(family.prefix))[1] for name in tensors} - {None}
        if keys and min(layers) > 0:
            raise ColibriError(where, f"layers from {min(layers)} on", "the first to be 0",
                               "convert the checkpoint that has those before it, or rename these")
        raise ColibriError(where, f"missing tensor {bound.missing[0]}{more(bound.missing)}",
                           f"{fields['num_experts']} experts in each MoE layer of {fields['num_layers']} layers",
                           "the checkpoint is incomplete")
    if bound.extra:
        raise ColibriError(where, f"extra tensor {bound.extra[0]}{more(bound.extra)}",
                           f"none from {family.name} with num_layers={fields['num_layers']} and "
                           f"num_experts={fields['num_experts']}",
                           "the checkpoint and its config disagree")
    return bound


def check_storages(sources):
    """Carries the checksum of every storage in use to its end, since a tensor need not reach so far."""
    storages = {id(tensor.storage): tensor.storage
                for experts in sources.values() for parts in experts for tensor in parts}
    for storage in storages.values():
        storage.check()


def _by_template(family, tensors, fields, where):
    """Returns {(template, layer): {expert or None: Tensor}} and the names left out."""
    templates = {part.template for alternatives in family.tensors.values() for parts in alternatives for part in parts}
    found, ignored = {}, []
    for full, tensor in tensors.items():
        name = full.removeprefix(family.prefix)
        template, layer, expert_id = _template(name)
        if (_left_out(name, family, fields)
                and (template != "lm_head.weight" or _same(tensor, tensors, family, where))):
            ignored.append(full)
        elif template not in templates:
            raise ColibriError(where, f"unknown tensor {full[:100]}", f"{family.name}'s names alone",
                               "this converter would have to leave it out")
        else:
            places = found.setdefault((template, layer), {})
            if expert_id in places:
                raise ColibriError(where, f"{full}: stands for {places[expert_id].name}, which is there too",
                                   fix="expected each tensor once")
            places[expert_id] = tensor
    return found, ignored


def needed(lost, family, fields):
    """Returns those of the absent tensors, {name: why}, that are not left out by name."""
    return {full: why for full, why in lost.items() if not _left_out(full.removeprefix(family.prefix), family, fields)}


def _left_out(name, family, fields):
    """Returns whether the tensor of a name is not used.

    That is one that the family ignores, one of a layer that predicts further tokens, or an LM head that is the
    embedding.
    """
    template, layer, _ = _template(name)
    predicted = layer is not None and 0 <= layer - fields["num_layers"] < fields["mtp_layers"]
    tied = template == "lm_head.weight" and fields["tied_embeddings"]
    unused = template.rpartition(".")[2] in quantized.UNUSED and fields.get("scheme", NONE).method
    return predicted or tied or unused or any(template == item or (item[-1] == "*" and template.startswith(item[:-1]))
                                    for item in family.ignored)


def template(name):
    """Returns a checkpoint's name with N for its layer and E for its expert."""
    return _template(name)[0]


def _template(name):
    """Returns ("layers.N.mlp.experts.E.up_proj.weight", layer, expert), with None for a number that is not there."""
    words, numbers = name.split("."), []
    if re.fullmatch(r"linear_fc\d\.weight\d+", ".".join(words[-2:])):  # Megatron's weight7 is expert 7's
        words[-1:] = ["weight", words[-1].removeprefix("weight")]
    for index, word in enumerate(words):
        if NUMBER.fullmatch(word) and len(numbers) < 2:
            words[index] = "NE"[len(numbers)]
            numbers.append(int(word))
    return ".".join(words).replace("weight.E", "weightE"), *(numbers + [None, None])[:2]


def _experts(parts, layer, found, scope, missing, used, where):
    """Returns one list of viewed Tensors for each expert, or one list."""
    per_expert = any(part.template.endswith("weightE") or "E" in part.template.split(".") for part in parts)
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
    """Returns the header's fields and a layer's own values."""
    return headers.default().layer_scope(fields, layer in fields["dense_layers"])


def _shape(part, scope):
    """Returns the expected shape, or () where the tensor is not there."""
    shape = tuple(evaluate(expression, scope) for expression in part.shape)
    return shape if all(shape) else ()


def _check(tensor, part, scope, where):
    expected = _shape(part, scope)
    if tensor.shape != expected:
        fields = sorted({*re.findall(r"[a-z_]+", " ".join(part.shape))} - {"moe"})
        raise ColibriError(where, f"{tensor.name}: shape={tensor.shape}",
                           f"{expected} from {', '.join(f'{name}={scope[name]}' for name in fields)}",
                           "the checkpoint and its config disagree")
    if isinstance(tensor, Tensor) and tensor.dtype not in FLOATS:
        raise ColibriError(where, f"{tensor.name}: dtype={tensor.dtype}", f"one of {', '.join(FLOATS)}",
                           "convert the checkpoint to one of them first")


def _same(head, tensors, family, where):
    """Checks that a tied LM head is the embedding. Returns False where there is no embedding."""
    embed = tensors.get(family.prefix + "embed_tokens.weight", tensors.get("embed_tokens.weight"))
    if embed is None:
        return False
    if (head.shape, head.dtype) != (embed.shape, embed.dtype) or any(
            head.rows(row, row + 1).tobytes() != embed.rows(row, row + 1).tobytes() for row in range(head.shape[0])):
        raise ColibriError(where, f"{head.name}: differs from {embed.name}", "the same from tie_word_embeddings=true",
                           "the checkpoint and its config disagree")
    return True


def in_memory(name, values):
    data = np.ascontiguousarray(values, "<f4").tobytes()
    return Tensor(name, "float32", values.shape, (1,), Storage(name, data, 0, len(data)), 0)


def _filled(template, layer, e):
    words = {"N": str(layer), "E": str(e), "weightE": f"weight{e}"}
    return ".".join(words.get(word, word) for word in template.split("."))


def more(items):
    """Says how many items there are beside the first."""
    return f" (and {len(items) - 1} more)" if len(items) > 1 else ""
