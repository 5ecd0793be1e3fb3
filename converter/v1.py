"""Reads and writes version 1 of the .bin: one layer of 2-matrix experts in f16, every column interleaved by expert.

The file begins with 16 bytes: COLI, u32 version 1, u32 num_experts, u32 k. Then come ff1 [ffn, hidden * E], ff2
[hidden, ffn * E] and router [hidden, E], row-major f16, where column j * E + e is expert e's column j. The file does
not say hidden or ffn.
"""

import os
import struct

import numpy as np

from colibri.errors import ColibriError
from colibri.program import writing_stdout
from converter import bin_writer, interleave, sources
from converter.mapped import map_file
from converter.tensor import Storage, Tensor

HEADER = struct.Struct("<4s3I")
NAME = "transformer.h.0.mlp."
WRITE_BYTES = 8 << 20


def is_v1(path):
    """Returns whether a file begins as a version 1 .bin."""
    return os.path.isfile(path) and map_file(path)[:8] == HEADER.pack(bin_writer.MAGIC, 1, 0, 0)[:8]


def read(path, hidden, ffn, k, missing=()):
    """Reads a version 1 file. Returns ({name: Tensor} in GPT-style names, k).

    hidden, ffn: must give the file's size exactly. missing: other flags that the conversion needs, named in the same
    error.
    """
    data = map_file(path)
    sizes = [flag for flag, size in (("--hidden", hidden), ("--ffn", ffn)) if size is None or size < 1]
    if sizes:
        raise ColibriError(path, "a version 1 file does not tell its dimensions, nor how its experts are used",
                           "flags", f"give {', '.join([*sizes, *missing])}")
    if len(data) < HEADER.size:
        raise ColibriError(path, f"truncated: {len(data)} bytes", f"a header of {HEADER.size}")
    _, _, experts, stored_k = HEADER.unpack_from(data)
    expected = HEADER.size + 2 * experts * (2 * ffn * hidden + hidden)
    if len(data) != expected:
        raise ColibriError(path, f"{len(data)} bytes",
                           f"{expected} from num_experts={experts}, hidden={hidden}, ffn={ffn}",
                           "correct --hidden and --ffn")
    if k not in (None, stored_k):
        raise ColibriError(path, f"k={stored_k}, but --k says {k}", fix="drop the flag")
    storage = Storage(str(path), data, 0, len(data))

    def tensor(name, shape, strides, first):
        return name, Tensor(name, "float16", shape, strides, storage, HEADER.size + 2 * first)

    up, down = 0, ffn * hidden * experts
    tensors = [tensor(NAME + "router.weight", (experts, hidden), (1, experts), 2 * down)]
    for e in range(experts):
        tensors.append(tensor(f"{NAME}experts.{e}.w1.weight", (ffn, hidden), (hidden * experts, experts), up + e))
        tensors.append(tensor(f"{NAME}experts.{e}.w2.weight", (hidden, ffn), (ffn * experts, experts), down + e))
    return dict(tensors), stored_k


def convert(family, fields, bound, options):
    """Writes one layer of a checkpoint as version 1."""
    if fields["gated"]:
        raise ColibriError("--format v1", f"{family.name} has gated experts", "2-matrix ones", "write v2")
    if options.layer is None or not 0 <= options.layer < fields["num_layers"]:
        given = "missing" if options.layer is None else options.layer
        raise ColibriError("--layer", given, f"0 to {fields['num_layers'] - 1} with --format v1")
    if options.dtype not in ("keep", "f16"):
        raise ColibriError("--dtype", options.dtype, "f16 with --format v1, which has no other")
    experts, hidden, ffn = fields["num_experts"], fields["hidden"], fields["ffn"]
    num_bytes = HEADER.size + 2 * experts * (2 * ffn * hidden + hidden)
    if options.dry_run:
        return _print(f"would write: {num_bytes} bytes, layer {options.layer} in version 1")
    up, down, router = ([parts[0] for parts in bound.sources[f"layers.{options.layer}.{name}"]]
                        for name in ("experts_up", "experts_down", "router"))
    with bin_writer.replacing(options.output, num_bytes, options.force) as file:
        bin_writer.write_all(file, HEADER.pack(bin_writer.MAGIC, 1, experts, fields["k"]))
        for matrices in (up, down):
            for piece in _interleaved(matrices):
                bin_writer.write_all(file, piece)
        bin_writer.write_all(file, np.ascontiguousarray(interleave.converted(router[0], 0, experts, "f16").T))
        sources.check_storages({options.layer: [up, down, router]})
    _print(f"{options.output}: {num_bytes} bytes, version 1, layer {options.layer}, "
           f"{experts} expert{'s' if experts != 1 else ''}, k={fields['k']}")


@writing_stdout()
def _print(text):
    print(text)


def _interleaved(matrices):
    """Yields the rows of all experts' matrices side by side, [rows, columns, E], a few rows at a time."""
    rows, columns = matrices[0].shape
    step = max(1, WRITE_BYTES // (2 * columns * len(matrices)))
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        piece = np.empty((stop - start, columns, len(matrices)), "<f2")
        for expert, tensor in enumerate(matrices):
            piece[:, :, expert] = interleave.converted(tensor, start, stop, "f16")
            tensor.drop((stop - start) * columns * tensor.numpy_dtype.itemsize)
        yield piece
