"""Reads what a user points the converter at: a file, an index, a Hugging Face folder or a DeepSpeed-MoE folder."""

from collections import namedtuple
from pathlib import Path

from colibri.errors import ColibriError
from converter import bin_writer, deepspeed, folders, pt_reader, safetensors_reader, text_files

# tensors: {name: Tensor}. left_out: names of what is not used. warnings: lines for the user. lost: {tensor name:
# safetensors_reader.Lost}; such a tensor is an error where it is needed.
Input = namedtuple("Input", "tensors left_out warnings lost")


def read(path, absent=None):
    """Returns the Input at `path`. absent: a list that gets the files which are not there; without a list they are
    errors.
    """
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
    """Returns whether a folder is a DeepSpeed-MoE checkpoint. A Trainer's weights beside an optimizer's state are not
    one.
    """
    if not deepspeed.is_checkpoint(folder):
        return False
    weights, experts = folders.found(folder), deepspeed.has_experts(folder)
    whole = [each.name for each in weights if not each.absent]
    if experts and whole:
        raise ColibriError(folder, f"{whole[0]} and the experts of a DeepSpeed-MoE checkpoint: two sets of weights",
                           "one", "move the one that is not meant away")
    return experts or not weights


def check_lost(lost, absent):
    """Raises why a tensor is lost. absent: a list that gets the files which are not there, in place of the error."""
    for why in lost.values():
        if why.file is None or absent is None:
            raise why.error
        if why.file not in absent:
            absent.append(why.file)


def is_input(output, checkpoint, config_path):
    """Returns whether an existing output is something that a conversion reads.

    That is the checkpoint, its config and what stands beside that, or whatever is in the checkpoint's folder but a .bin
    that a conversion made.
    """
    beside = [Path(config_path).with_name(name) for name in text_files.NAMES] if config_path else []
    if any(file.exists() and output.samefile(file) for file in (checkpoint, Path(config_path or checkpoint), *beside)):
        return True
    folder = checkpoint if checkpoint.is_dir() else checkpoint.parent
    if folder == checkpoint or checkpoint.name.endswith(".index.json"):
        with open(output, "rb") as file:
            return folder.resolve() in output.resolve().parents and file.read(4) != bin_writer.MAGIC
    return False
