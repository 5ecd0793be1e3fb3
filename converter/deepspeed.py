"""Reads a DeepSpeed-MoE checkpoint folder as one set of tensors: the dense part's routers, and a file for each expert.

An expert's file is layer_<moe>_expert_<global>_mp_rank_00_model_states.pt. <moe> counts the MoE layers alone, in the
order of their transformer layers, and is the layer of the stack. <global> is the expert's number over all ranks.
"""

import re
from pathlib import Path

import numpy as np

from colibri.errors import ColibriError
from converter import pt_reader, sources

MAIN = re.compile(r"mp_rank_(\d+)_model_states\.pt")
EXPERT = re.compile(r"layer_(\d+)_expert_(\d+)_mp_rank_(\d+)_model_states\.pt")
ROUTER = re.compile(r"(.*?)(\d+)(\D*)\.deepspeed_moe\.gate\.wg\.weight")
LEAF = re.compile(r"(.*)\.deepspeed_moe\.experts\.deepspeed_experts\.(\d+)\.(dense_\w+\.(?:weight|bias))")


def is_checkpoint(folder):
    return (folder / "latest").is_file() or any(MAIN.fullmatch(entry.name) or EXPERT.fullmatch(entry.name)
                                                for entry in folder.iterdir())


def has_experts(folder):
    """Returns whether files of experts are in a folder, or in a folder within it."""
    return any(EXPERT.fullmatch(file.name) for pattern in ("*", "*/*") for file in folder.glob(pattern))


def read(folder, absent=None):
    """Reads a checkpoint folder, or one of its global_stepN folders.

    Returns ({name: Tensor} in the deepspeed names of families.py, names left out, warnings). absent: a list that gets
    the files of experts which are not there; without a list, such a file is an error.
    """
    folder = _step(Path(folder))
    ranks = [int(match[match.lastindex]) for entry in folder.iterdir()
             if (match := MAIN.fullmatch(entry.name) or EXPERT.fullmatch(entry.name))]
    if not ranks:
        raise ColibriError(folder, "no mp_rank_00_model_states.pt", "one in a DeepSpeed-MoE checkpoint",
                           "name another folder")
    if {*ranks} != {0}:
        raise ColibriError(folder, f"mp_rank_{max(ranks):02}", "mp_rank_00 alone",
                           "merge the tensor-parallel ranks with DeepSpeed first")
    main = pt_reader.read_checkpoint(folder / "mp_rank_00_model_states.pt")
    routers = {match[0]: match for name in main if (match := ROUTER.fullmatch(name))}
    blocks = sorted(routers, key=lambda name: (routers[name][1], int(routers[name][2])))
    if not blocks:
        raise ColibriError(folder, "no deepspeed_moe.gate.wg.weight in mp_rank_00_model_states.pt",
                           "a router for each MoE layer", "this is no DeepSpeed-MoE checkpoint")
    grid, tensors, warnings = _grid(folder), {}, []
    for moe, name in enumerate(blocks):
        tensors[f"layers.{moe}.gate.wg.weight"] = main[name]
        num_experts, numbers = main[name].shape[0] if main[name].shape else 0, {}
        for expert in range(num_experts):
            file = f"layer_{moe}_expert_{expert}_mp_rank_00_model_states.pt"
            if (moe, expert) not in grid and absent is not None:
                absent.append(file)
                continue
            if (moe, expert) not in grid:
                raise ColibriError(folder, f"missing expert {expert} of MoE layer {moe}: no {file}",
                                   f"{num_experts} from {name}", "copy it there")
            path = grid.pop((moe, expert))
            numbers[path] = expert, _read_expert(path, name.split(".deepspeed_moe.")[0], moe, expert, tensors, warnings)
        _check_numbers(numbers, num_experts)
    if grid:
        raise ColibriError(next(iter(grid.values())), "extra expert",
                           f"those of {len(blocks)} MoE layers as wide as their routers",
                           "the folder holds files of another checkpoint")
    return tensors, [name for name in main if name not in routers], warnings


def _step(folder):
    """Returns the folder that `latest` names, or this one."""
    if not (folder / "latest").is_file():
        return folder
    name = (folder / "latest").read_text("utf-8", "replace").strip()
    if Path(name).name != name or not (folder / name).is_dir():
        raise ColibriError(folder / "latest", repr(name[:80]), "the name of a folder beside it", "copy it there")
    return folder / name


def _grid(folder):
    """Returns {(MoE layer, expert): file}."""
    grid = {}
    for entry in sorted(folder.iterdir()):
        if match := EXPERT.fullmatch(entry.name):
            other = grid.setdefault((int(match[1]), int(match[2])), entry)
            if other != entry:
                raise ColibriError(folder, f"{other.name} and {entry.name}: the same expert twice", "it once",
                                   "move one of them away")
    return grid


def _check_numbers(numbers, num_experts):
    """Checks that the numbers in the experts' names are theirs, over all ranks, or on ranks of equally many experts.

    numbers: of one layer, {file: (the expert's number in the file's name, that in its tensors' names)}.
    """
    wrong = min(([path for path, (expert, number) in numbers.items() if number != expert % size]
                 for size in range(num_experts, 0, -1) if num_experts % size == 0), key=len, default=[])
    if wrong:
        expert, number = numbers[wrong[0]]
        raise ColibriError(wrong[0], f"expert {number} by the names in it",
                           f"{expert} by its own, or that expert's number on its rank",
                           "it is a copy of another's file, copy the right one there")


def _read_expert(path, block, moe, expert, tensors, warnings):
    """Reads one expert's tensors. Returns the number in their names: the expert's, or its number on its rank."""
    number = None
    for name, tensor in pt_reader.read_checkpoint(path).items():
        match = LEAF.fullmatch(name)
        if not match or match[1] != block:
            raise ColibriError(path, f"unknown tensor {name[:100]}", f"{block}.deepspeed_moe.experts. alone",
                               "the file belongs to another layer")
        target = f"layers.{moe}.experts.{expert}.{match[3]}"
        if target in tensors:
            raise ColibriError(path, f"{name[:100]}: a second expert", "one in each file")
        if match[3] == "dense_4h_to_h.bias":  # DeepSpeed adds it nowhere
            if np.any(tensor.array()):
                warnings.append(f"{path}: {name}: not zero, but DeepSpeed does not add it either: left out")
            tensor = sources.in_memory(target, np.zeros(tensor.shape, np.float32))
        tensors[target] = tensor
        number = int(match[2])
    return number
