"""Finds models of the Hugging Face Hub by their id: fetches what the converter reads, or finds it in the Hub's cache.
"""

import glob
import os
import re
import sys
from pathlib import Path

from colibri.errors import ColibriError
from converter import folders
from converter.safetensors_reader import read_index

ID = re.compile(r"([A-Za-z0-9][\w.-]*/[\w.-]+)(?:@([^@\s]+))?")
FILES = (".pt", ".pth", ".bin", ".safetensors", ".json", ".ckpt", *(suffix for suffixes, _ in folders.FOREIGN.values()
                                                                    for suffix in suffixes))
TEXT = ["config.json", "generation_config.json", "adapter_config.json", "tokenizer*", "special_tokens_map.json",
        "added_tokens.json", "chat_template*"]
YES = ("1", "ON", "YES", "TRUE")  # what huggingface_hub takes HF_HUB_OFFLINE to be set by
# An error of huggingface_hub -> what was found, what was expected, what to do; {}: about HF_HUB_OFFLINE. Derived classes
# come first.
ERRORS = {
    "GatedRepoError": ("a gated model", "access to it", "ask for it on the model's page, then run hf auth login"),
    "RepositoryNotFoundError": ("no such path, and no such model on the Hugging Face Hub", "one of them",
                                "check the name; a private model needs hf auth login"),
    "RevisionNotFoundError": ("no such revision", "a branch, a tag or a commit after @", "check it"),
    "IncompleteSnapshotError": ("only a part of it is in the Hub's cache, and the Hub is not reached", "all of it",
                                "check the network,{} or name a folder"),
    "LocalEntryNotFoundError": ("no such path, not in the Hub's cache, and the Hub is not reached", "one of them",
                                "check name and network,{} or name a folder"),
    "HFValidationError": ("no such path, and no id of the Hugging Face Hub", "ORG/NAME or ORG/NAME@REVISION",
                          "check the name")}


def resolve(name):
    """Returns the path that is given, or the folder of the model that has this id."""
    match = ID.fullmatch(str(name))
    if os.path.lexists(name) or not match or Path(name).suffix in FILES:
        return name
    for format in folders.FORMATS:
        folder = _fetch(name, *match.groups(), [*TEXT, f"{format.stem}*{format.suffix}",
                                                format.stem + format.suffix + folders.INDEX])
        index = folder / (format.stem + format.suffix + folders.INDEX)
        named = set(read_index(index).values()) if index.is_file() else ()
        others = [glob.escape(shard) for shard in named if not (folder / shard).exists()]
        if others:
            _fetch(name, *match.groups(), others)
        weights = [*folder.glob(f"{format.stem}*{format.suffix}"), *(folder / shard for shard in named)]
        if any(file.exists() for file in [*weights, folder / "adapter_config.json"]):
            return str(folder)
    raise ColibriError(name,
                       "no model*.safetensors and no pytorch_model*.bin there, or not in the Hub's cache where the "
                       "Hub is not reached", "one of them",
                       "download them, or name the model itself where this holds GGUF or ONNX files")


def _fetch(name, model, revision, patterns):
    """Fetches the files of these patterns, and returns the folder of the model's revision."""
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise ColibriError(name, "no such path, and no huggingface_hub to look for that model", "one of them",
                           "pip install huggingface_hub, or git clone the model and name its folder") from None
    try:
        return Path(snapshot_download(model, revision=revision, allow_patterns=patterns))
    except Exception as error:  # of the Hub, of its HTTP client, or of the disk
        kinds = [kind.__name__ for kind in type(error).__mro__]
        got, expected, fix = next((ERRORS[kind] for kind in kinds if kind in ERRORS), (
            f"{kinds[0]}: {(str(error).strip().splitlines() or [''])[0][:200]}", "the model from the Hugging Face Hub",
            "try again, or name a folder"))
        is_offline = os.environ.get("HF_HUB_OFFLINE", "").upper() in YES
        fix = fix.format(" unset HF_HUB_OFFLINE," if is_offline else "")
        raise ColibriError(name, got, expected, fix) from error
