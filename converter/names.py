"""From a checkpoint's tensor names to Colibri's: every tensor is used, ignored by name, or named in an error."""

import re
from collections import Counter, namedtuple

from colibri.errors import ColibriError
from colibri.headers import evaluate

PREFIXES = ("module.", "_orig_mod.")
FLOATS = ("float16", "bfloat16", "float32", "float64")
NUMBER = r"(0|[1-9]\d{0,5})"

# A family's names: Colibri name -> its parts, each (checkpoint name, rows, columns). N is the layer, E the expert.
# The parts of a qkv follow each other; those of a gated experts_up are gate, then up. Shapes are [outputs, inputs].
Family = namedtuple("Family", "name gated parts ignored")
Part = namedtuple("Part", "template rows columns")
Found = namedtuple("Found", "family num_layers num_experts bare tensors ignored renamed")

ATTENTION = "model.layers.N.self_attn."
MIXTRAL_EXPERT = "model.layers.N.block_sparse_moe.experts.E."
MIXTRAL = Family("mixtral", 1, {
    "embed": [Part("model.embed_tokens.weight", "vocab_size", "hidden")],
    "final_norm": [Part("model.norm.weight", "hidden", None)],
    "lm_head": [Part("lm_head.weight", "vocab_size", "hidden")],
    "layers.N.attention_norm": [Part("model.layers.N.input_layernorm.weight", "hidden", None)],
    "layers.N.qkv": [Part(ATTENTION + "q_proj.weight", "num_heads * head_dim", "hidden"),
                     Part(ATTENTION + "k_proj.weight", "num_kv_heads * head_dim", "hidden"),
                     Part(ATTENTION + "v_proj.weight", "num_kv_heads * head_dim", "hidden")],
    "layers.N.attention_out": [Part(ATTENTION + "o_proj.weight", "hidden", "num_heads * head_dim")],
    "layers.N.ffn_norm": [Part("model.layers.N.post_attention_layernorm.weight", "hidden", None)],
    "layers.N.router": [Part("model.layers.N.block_sparse_moe.gate.weight", "num_experts", "hidden")],
    "layers.N.experts_up": [Part(MIXTRAL_EXPERT + "w1.weight", "ffn", "hidden"),
                            Part(MIXTRAL_EXPERT + "w3.weight", "ffn", "hidden")],
    "layers.N.experts_down": [Part(MIXTRAL_EXPERT + "w2.weight", "hidden", "ffn")],
}, [ATTENTION + "rotary_emb.inv_freq", "model.rotary_emb.inv_freq"])  # computed from rope_theta

GPT_EXPERT = "transformer.h.N.mlp.experts.E."
GPT = Family("gpt", 0, {
    "layers.N.router": [Part("transformer.h.N.mlp.router.weight", "num_experts", "hidden")],
    "layers.N.experts_up": [Part(GPT_EXPERT + "w1.weight", "ffn", "hidden")],
    "layers.N.experts_down": [Part(GPT_EXPERT + "w2.weight", "hidden", "ffn")],
}, ["transformer.wte.weight"])  # a stack of MoE layers takes hidden states

FAMILIES = (MIXTRAL, GPT)
STACK = ("layers.N.router", "layers.N.experts_up", "layers.N.experts_down")  # what a bare MoE stack has


def collect(checkpoint, path):
    """Sorts a checkpoint's {name: Tensor} into a Found.

    Found.tensors maps a Colibri template to {(layer, expert): [Tensor of each part]}, complete as far as names tell;
    layer and expert are None where the template has none. bare: a stack of MoE layers alone.
    """
    tensors, renamed = _strip_prefixes(checkpoint, path)
    family = _family(tensors, path)
    patterns = [(re.compile(_pattern(part.template) + r"\Z"), name, index)
                for name, parts in family.parts.items() for index, part in enumerate(parts)]
    ignored_patterns = [re.compile(_pattern(template) + r"\Z") for template in family.ignored]
    found, ignored, unknown = {}, [], []
    for name, tensor in tensors.items():
        matches = [(match, key, index) for pattern, key, index in patterns if (match := pattern.match(name))]
        if matches:
            match, key, index = matches[0]
            numbers = match.groupdict()
            place = tuple(int(numbers[n]) if numbers.get(n) else None for n in "NE")
            found.setdefault(key, {}).setdefault(place, {})[index] = tensor
        elif any(pattern.match(name) for pattern in ignored_patterns):
            ignored.append(name)
        else:
            unknown.append(name)
    if unknown:
        raise ColibriError(f"{path}: unknown tensor {unknown[0]}{_more(unknown)}, expected {family.name}'s names "
                           "alone; this converter would have to leave it out")
    layers = {layer for places in found.values() for layer, _ in places if layer is not None}
    experts = {expert for places in found.values() for _, expert in places if expert is not None}
    return Found(family, len(layers), max(experts) + 1, set(found) <= set(STACK), found, ignored, renamed)


def _pattern(template):
    """A template as a regular expression, with groups N and E."""
    words = {"N": f"(?P<N>{NUMBER})", "E": f"(?P<E>{NUMBER})"}
    return r"\.".join(words.get(word, re.escape(word)) for word in template.split("."))


def _strip_prefixes(checkpoint, path):
    """Without the prefixes that wrappers put before a name: ({name: Tensor}, number of names that had one)."""
    tensors, renamed = {}, 0
    for full, tensor in checkpoint.items():
        name = full
        while name.startswith(PREFIXES):
            name = name.split(".", 1)[1]
        if name in tensors:
            raise ColibriError(f"{path}: {full}: stands for {name}, which is there too; expected each tensor once")
        tensors[name] = tensor
        renamed += name != full
    return tensors, renamed


def _family(tensors, path):
    for family in FAMILIES:
        pattern = re.compile(_pattern(family.parts["layers.N.experts_up"][0].template) + r"\Z")
        if any(pattern.match(name) for name in tensors):
            return family
    known = ", ".join(f"{family.name} ({family.parts['layers.N.experts_up'][0].template})" for family in FAMILIES)
    raise ColibriError(f"{path}: family not known by its tensor names ({next(iter(tensors))[:100]}{_more(tensors)}), "
                       f"expected one of: {known}")


def sources(found, header, path):
    """{"layers.3.experts_up": one list of parts per expert, ...} for all tensors of `header`, each part's presence,
    shape and dtype checked. header: BinHeader's fields by name; a matrix without experts has one list."""
    names = STACK if found.bare and not header["num_heads"] else found.family.parts
    names = [name for name in names if not (name == "lm_head" and header["tied_embeddings"])]
    result, missing = {}, []
    for name in names:
        parts = found.family.parts[name]
        layers = range(min(header["num_layers"], found.num_layers + 1))  # one too many is enough to see it missing
        for layer in layers if "N" in name.split(".") else [None]:
            experts = range(header["num_experts"]) if "E" in parts[0].template.split(".") else [None]
            there = [found.tensors.get(name, {}).get((layer, expert), {}) for expert in experts]
            missing += [_filled(part.template, layer, expert) for expert, place in zip(experts, there)
                        for index, part in enumerate(parts) if index not in place]
            filled = [[place.get(index) for index in range(len(parts))] for place in there]
            result[name.replace("N", str(layer))] = filled
    if missing:
        raise ColibriError(f"{path}: missing tensor {missing[0]}{_more(missing)}, expected {header['num_experts']} "
                           f"experts in each of {header['num_layers']} layers; the checkpoint is incomplete")
    _check_extra(found, header, path)
    for name in names:
        for place in found.tensors[name].values():
            for index, tensor in place.items():
                _check(tensor, found.family.parts[name][index], header, path)
    return result


def settle_ties(found, header, path):
    """Leaves the LM head out where the config ties it to the embedding, once it is seen to be the same."""
    if not header["tied_embeddings"] or "lm_head" not in found.tensors:
        return
    head, embed = (found.tensors[name][None, None][0] for name in ("lm_head", "embed"))
    same = head.shape == embed.shape and head.dtype == embed.dtype and all(
        head.rows(row, row + 1).tobytes() == embed.rows(row, row + 1).tobytes() for row in range(head.shape[0]))
    if not same:
        raise ColibriError(f"{path}: {head.name}: differs from {embed.name}, expected the same from "
                           "tie_word_embeddings=true; the checkpoint and its config disagree")
    del found.tensors["lm_head"]


def _check(tensor, part, header, path):
    expressions = [part.rows] + ([part.columns] if part.columns else [])
    expected = tuple(evaluate(expression, header) for expression in expressions)
    if tensor.shape != expected:
        fields = sorted(set(re.findall(r"[a-z_]+", " ".join(expressions))))
        raise ColibriError(f"{path}: {tensor.name}: shape={tensor.shape}, expected {expected} from "
                           f"{', '.join(f'{field}={header[field]}' for field in fields)}; the checkpoint and its "
                           "config disagree")
    if tensor.dtype not in FLOATS:
        raise ColibriError(f"{path}: {tensor.name}: dtype={tensor.dtype}, expected one of {', '.join(FLOATS)}; "
                           "convert the checkpoint to one of them first")


def _check_extra(found, header, path):
    """Layers and experts that the config does not know of."""
    for places in found.tensors.values():
        for (layer, expert), tensors in places.items():
            if (layer or 0) >= header["num_layers"] or (expert or 0) >= header["num_experts"]:
                raise ColibriError(f"{path}: extra tensor {next(iter(tensors.values())).name}, expected "
                                   f"num_layers={header['num_layers']} and num_experts={header['num_experts']}; "
                                   "the checkpoint and its config disagree")


def _filled(template, layer, expert):
    words = {"N": str(layer), "E": str(expert)}
    return ".".join(words.get(word, word) for word in template.split("."))


def census(found):
    """Counter of (name with N and E, shape, dtype): the checkpoint's tensors by family name."""
    return Counter((found.family.parts[name][index].template, tensor.shape, tensor.dtype)
                   for name, places in found.tensors.items() for place in places.values()
                   for index, tensor in place.items())


def _more(items):
    return f" (and {len(items) - 1} more)" if len(items) > 1 else ""
