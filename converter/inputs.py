"""What a user points the converter at: a file, a Hugging Face folder, a DeepSpeed-MoE folder, or a version 1 .bin."""

from collections import namedtuple
from pathlib import Path

from colibri.errors import ColibriError
from converter import bin_writer, deepspeed, folders, pt_reader, safetensors_reader, text_files

# tensors: {name: Tensor}. left_out: names that are no part of it. warnings: lines for the user. lost: {tensor name:
# safetensors_reader.Lost}, an error where the tensor is needed.
Input = namedtuple("Input", "tensors left_out warnings lost")


def read(path, absent=None):
    """The Input at `path`. absent: a list for files that are not there, which are an error without it."""
    path, left_out, warnings, lost = Path(path), [], [], {}
    folders.refuse_adapter(path)
    if path.is_dir() and _is_deepspeed(path):
        tensors, left_out, warnings = deepspeed.read(path, absent)
    elif path.is_dir():
        tensors, lost, warnings = folders.read(path, absent)
    elif path.name.endswith(folders.INDEX):
        tensors, lost = folders.read_index(path)
    else:
        folders.refuse_foreign(path)
        folders.refuse_shard(path)
        tensors = (safetensors_reader.read_file if path.suffix == ".safetensors" else pt_reader.read_checkpoint)(path)
    folders.refuse_adapter(path, tensors)
    return Input(tensors, left_out, warnings, lost)


def _is_deepspeed(folder):
    """Whether a folder is a DeepSpeed-MoE checkpoint, and not a Trainer's: weights beside the state of an optimizer."""
    if not deepspeed.is_checkpoint(folder):
        return False
    weights, experts = folders.found(folder), deepspeed.has_experts(folder)
    whole = [each.name for each in weights if not each.absent]
    if experts and whole:
        raise ColibriError(f"{folder}: {whole[0]} and the experts of a DeepSpeed-MoE checkpoint: two sets of weights, "
                           "expected one; move the one that is not meant away")
    return experts or not weights


def check_lost(lost, absent):
    """Raises why a tensor is lost. absent: a list for the files that are not there, which are an error without it."""
    for why in lost.values():
        if why.file is None or absent is None:
            raise why.error
        if why.file not in absent:
            absent.append(why.file)


def is_input(output, checkpoint, config_path):
    """Whether an existing output is what a conversion reads: the checkpoint, its config and what stands beside that, or
    whatever is in the checkpoint's folder but a .bin that a conversion made."""
    beside = [Path(config_path).with_name(name) for name in text_files.NAMES] if config_path else []
    if any(file.exists() and output.samefile(file) for file in (checkpoint, Path(config_path or checkpoint), *beside)):
        return True
    folder = checkpoint if checkpoint.is_dir() else checkpoint.parent
    if folder == checkpoint or checkpoint.name.endswith(".index.json"):
        with open(output, "rb") as file:
            return folder.resolve() in output.resolve().parents and file.read(4) != bin_writer.MAGIC
    return False
