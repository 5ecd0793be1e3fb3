"""What a user points the converter at: a file, a Hugging Face folder, a DeepSpeed-MoE folder, or a version 1 .bin."""

from collections import namedtuple
from pathlib import Path

from colibri.errors import ColibriError
from converter import bin_writer, deepspeed, pt_reader, safetensors_reader, text_files

# tensors: {name: Tensor}. left_out: names that are no part of it. warnings: lines for the user.
Input = namedtuple("Input", "tensors left_out warnings")
# A folder's weights, the first that is there.
WEIGHTS = (("model.safetensors.index.json", safetensors_reader.read_file),
           ("model.safetensors", safetensors_reader.read_file),
           ("pytorch_model.bin.index.json", pt_reader.read_checkpoint),
           ("pytorch_model.bin", pt_reader.read_checkpoint))


def read(path, absent=None):
    """The Input at `path`. absent: a list for files that are not there, which are an error without it."""
    path = Path(path)
    if path.is_dir() and deepspeed.is_checkpoint(path):
        return Input(*deepspeed.read(path, absent))
    if path.is_dir():
        return Input(_read_folder(path, absent), [], [])
    if path.name.endswith(".index.json"):
        return Input(_read_shards(path, absent), [], [])
    reader = safetensors_reader.read_file if path.suffix == ".safetensors" else pt_reader.read_checkpoint
    return Input(reader(path), [], [])


def _read_folder(folder, absent):
    for name, reader in WEIGHTS:
        if (folder / name).is_file():
            return _read_shards(folder / name, absent) if name.endswith(".index.json") else reader(folder / name)
    raise ColibriError(f"{folder}: a directory without weights, expected one of "
                       f"{', '.join(name for name, _ in WEIGHTS)}, or a DeepSpeed-MoE checkpoint; name another")


def _read_shards(index, absent):
    reader = dict(WEIGHTS).get(index.name, safetensors_reader.read_file)
    return safetensors_reader.read_shards(index, reader, absent)


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
