"""Reads the weights in a folder: a whole file, or shards that an index names or that are numbered.

Decides which of them are read, and refuses what is no model of PyTorch's.
"""

import re
from collections import namedtuple

from colibri.errors import ColibriError
from converter import pt_reader, safetensors_reader
from converter.sources import more

# read(file) returns {name: Tensor}. Where a folder has both formats, the first one is read.
Format = namedtuple("Format", "stem suffix read")
FORMATS = (Format("model", ".safetensors", safetensors_reader.read_file),
           Format("pytorch_model", ".bin", pt_reader.read_checkpoint))
INDEX = ".index.json"
# One set of weights. name: its file or index, or a name with * for a number. absent: those of `files` that are not
# there.
Weights = namedtuple("Weights", "format name files absent")
NUMBERED = re.compile(r"(.+)-(\d{1,6})-of-(\d{1,6})(\.\w+)")
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin")
ADAPTER_NAME = re.compile(r"(?:^|\.)(?:base_model\.model\.|lora_)")
# What is no checkpoint of PyTorch: its suffixes and first bytes.
FOREIGN = {"a GGUF file": ((".gguf",), b"GGUF"), "an ONNX model": ((".onnx", ".onnx_data"), None),
           "weights of Keras or TensorFlow": ((".h5", ".keras"), b"\x89HDF\r\n\x1a\n"),
           "weights of Flax": ((".msgpack",), None)}


def read(folder, absent=None):
    """Reads a folder's weights. Returns ({name: Tensor}, lost as in safetensors_reader.read_shards, warnings).

    absent: a list that gets the numbered shards which are not there; without a list, such a shard is an error.
    """
    chosen = [each for each in (_choose(folder, format) for format in FORMATS) if each]
    if not chosen:
        refuse_foreign(*sorted(folder.iterdir()))
        raise ColibriError(folder, "a directory without weights",
                           f"one of {', '.join(f.stem + f.suffix + end for f in FORMATS for end in (INDEX, ''))}, "
                           "or a DeepSpeed-MoE checkpoint", "name another")
    taken = next((each for each in chosen if not each[0].absent), chosen[0])
    weights, left_out = taken[0], taken[1] + [each[0] for each in chosen[:chosen.index(taken)]]
    warnings = [f"{folder / weights.name}: taken, because {other.name} lacks {other.absent[0]}{more(other.absent)}"
                for other in left_out]
    tensors, lost = _read(folder, weights, absent)
    for other, _ in chosen[chosen.index(taken) + 1:]:
        if not other.absent:
            _check_same(folder, weights, tensors, other)
    return tensors, lost, warnings


def found(folder):
    """Returns the Weights of a folder in every format, whole or not."""
    return [weights for format in FORMATS for weights in _sets(folder, format)]


def read_index(path):
    """Reads an index and its shards. Returns ({name: Tensor}, lost)."""
    format = next((each for each in FORMATS if path.name == each.stem + each.suffix + INDEX), FORMATS[0])
    return safetensors_reader.read_shards(path, format.read)


def _sets(folder, format):
    """Returns the Weights of one format, whole or not."""
    there = {entry.name for entry in folder.iterdir() if entry.is_file()}
    whole, named, result = format.stem + format.suffix, (), []
    if whole + INDEX in there:
        named = list(dict.fromkeys(safetensors_reader.read_index(folder / (whole + INDEX)).values()))
        result += [Weights(format, whole + INDEX, named, [name for name in named if name not in there])] * bool(named)
    if whole in there and whole not in named:
        result.append(Weights(format, whole, [whole], []))
    numbered = {}
    for match in filter(None, map(NUMBERED.fullmatch, sorted(there))):
        if match[1] == format.stem and match[4] == format.suffix:
            numbered.setdefault(match[3], []).append(match)
    of_index = {match[3] for match in map(NUMBERED.fullmatch, named) if match}
    return result + [_series(folder, format, matches) for total, matches in numbered.items() if total not in of_index]


def _series(folder, format, matches):
    """Returns the Weights of numbered shards. They count from 1, or from 0."""
    names, total = {}, matches[0][3]
    for match in matches:
        if int(match[2]) in names:
            raise ColibriError(folder, f"{names[int(match[2])]} and {match[0]}: the same shard twice", "it once",
                               "move one of them away")
        names[int(match[2])] = match[0]
    first = 0 if 0 in names else 1
    if max(names) >= first + int(total):
        raise ColibriError(folder, f"{names[max(names)]}: a number beyond {total}",
                           f"{first} to {first + int(total) - 1}", "give the shards their own names again")
    width = min(len(match[2]) for match in matches)
    every = {i: names.get(i, f"{format.stem}-{i:0{width}}-of-{total}{format.suffix}")
             for i in range(first, first + int(total))}
    return Weights(format, f"{format.stem}-*-of-{total}{format.suffix}", list(every.values()),
                   [name for i, name in every.items() if i not in names])


def _choose(folder, format):
    """Returns (Weights to read, those that are not whole and left out) of one format, or None where there are none.

    Refuses two that are whole, and numbered shards of two totals without an index: none is known to be meant.
    """
    found = _sets(folder, format)
    whole = [weights for weights in found if not weights.absent]
    sure = any("*" not in weights.name for weights in whole)
    begun = [weights for weights in found if len(weights.absent) < len(weights.files)]
    rivals = whole if sure else begun or found
    if len(rivals) > 1:
        raise ColibriError(folder, f"{rivals[0].name} and {rivals[1].name}: two sets of weights", "one",
                           "move the one that is not meant away")
    return (rivals[0], [weights for weights in found if weights is not rivals[0]]) if rivals else None


def _read(folder, weights, absent):
    """Reads one set of weights. Returns ({name: Tensor}, lost)."""
    if weights.name.endswith(INDEX):
        return read_index(folder / weights.name)
    if weights.absent and absent is None:
        raise ColibriError(folder, f"missing {weights.absent[0]}{more(weights.absent)}",
                           f"all {len(weights.files)} of {weights.name}", "download or save the checkpoint again")
    tensors = {}
    for name in weights.files:
        if name in weights.absent:
            absent.append(name)
            continue
        held = weights.format.read(folder / name)
        twice = next((each for each in held if each in tensors), None)
        if twice is not None:
            raise ColibriError(folder / name, f"{twice[:100]}: in another shard, too", "each tensor once",
                               "download or save the checkpoint again")
        tensors.update(held)
    return tensors, {}


def _check_same(folder, weights, tensors, other):
    """Refuses two formats that hold different models. Tensors of one name must be alike in their first rows."""
    try:
        others, _ = _read(folder, other, None)
    except ColibriError:
        return  # what cannot be read is not chosen either
    shared = [name for name in tensors if name in others]
    different = next((name for name in shared if _first(tensors[name]) != _first(others[name])), None)
    if different is not None or not shared:
        raise ColibriError(folder, f"{weights.name} and {other.name}: differ in {(different or 'every name')[:100]}",
                           "the same tensors", "move the one that is not meant away")


def _first(tensor):
    """Returns what tells a tensor from another: dtype, shape and its first row."""
    row = tensor.rows(0, min(1, tensor.shape[0])) if tensor.shape else tensor.array()
    return tensor.dtype, tensor.shape, row.tobytes()


def refuse_foreign(*paths):
    """Refuses files of other programs, and says what they are."""
    for path in paths:
        head = b""
        if path.is_file():
            with open(path, "rb") as file:
                head = file.read(8)
        for what, (suffixes, magic) in FOREIGN.items():
            if path.suffix in suffixes or (magic and head.startswith(magic)):
                raise ColibriError(path, what, "a checkpoint of PyTorch or safetensors",
                                   "get the safetensors of the model")


def refuse_shard(path):
    """Refuses one of several numbered shards."""
    match = NUMBERED.fullmatch(path.name)
    if match and int(match[3]) > 1:
        raise ColibriError(path, f"one of {int(match[3])} shards", "all of them", f"name the folder, {path.parent}")


def refuse_adapter(path, names=()):
    """Refuses an adapter, which changes a model and is none. Its files or the names of its tensors show it."""
    sign = next((name for name in ADAPTER_FILES if path.name == name or (path / name).is_file()), None)
    sign = sign or next((name for name in names if ADAPTER_NAME.search(name)), None)
    if sign:
        raise ColibriError(path, f"a LoRA or other PEFT adapter ({sign[:100]})", "a whole model",
                           "merge it into its base with PEFT's merge_and_unload, save that with save_pretrained, "
                           "and convert it")
