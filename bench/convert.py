"""Measures conversion speed and memory against cp: python -m bench.convert [--gib 1] [--runs 5] [--dtype int4]

Makes a GPT-style checkpoint of f16 noise, one .pt or a folder of safetensors shards. Then runs in turns cp, cp followed
by sync of the copy, and the converter, each a process of its own with the checkpoint in the page cache. Ratios are
medians over neighbouring runs, so a busy machine slows both. The converter waits until its output is on the disk; so
does the second cp, but not the first.
"""

import json
import math
import os
import shutil
import statistics
import struct
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

import numpy as np

from bench.program import amount, count, make_parser, run

EXPERTS, HIDDEN, FFN = 32, 1024, 3584
LAYER_BYTES = 2 * EXPERTS * 2 * HIDDEN * FFN
SHARD_BYTES = 1 << 30


def tensors(num_layers):
    """Returns ({name: shape}, what matrices' values are cut from): two f16 matrices for each expert, and routers."""
    shapes = {}
    for layer in range(num_layers):
        name = f"transformer.h.{layer}.mlp."
        shapes[name + "router.weight"] = (EXPERTS, HIDDEN)
        for expert in range(EXPERTS):
            shapes[f"{name}experts.{expert}.w1.weight"] = (FFN, HIDDEN)
            shapes[f"{name}experts.{expert}.w2.weight"] = (HIDDEN, FFN)
    return shapes, np.random.default_rng(0).standard_normal(FFN * HIDDEN, np.float32).astype(np.float16)


def write_shards(folder, num_layers):
    """Writes a folder of safetensors shards and their index. Each shard is full up to the tensor that no longer fits.
    """
    shapes, noise = tensors(num_layers)
    shards, home = [], {}
    for name, (rows, columns) in shapes.items():
        if not shards or shards[-1][1] + 2 * rows * columns > SHARD_BYTES:
            shards.append([{}, 0])
        header, end = shards[-1]
        shards[-1][1] += 2 * rows * columns
        header[name] = {"dtype": "F16", "shape": [rows, columns], "data_offsets": [end, shards[-1][1]]}
        home[name] = len(shards)
    files = {number: f"model-{number:05}-of-{len(shards):05}.safetensors" for number in set(home.values())}
    folder.mkdir()
    for number, (header, _) in enumerate(shards, 1):
        with open(folder / files[number], "wb") as file:
            text = json.dumps(header).encode()
            file.write(len(text).to_bytes(8, "little") + text)
            file.writelines(np.roll(noise, key)[:math.prod(entry["shape"])].tobytes()
                            for key, entry in enumerate(header.values()))
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {name: files[number] for name, number in home.items()}}))


def write_pt(path, num_layers):
    """Writes a .pt in torch.save's form, a matrix at a time."""
    shapes, noise = tensors(num_layers)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02}(" + b"".join(
            _string(name) + b"ctorch._utils\n_rebuild_tensor_v2\n((" + _string("storage") + b"ctorch\nHalfStorage\n"
            + _string(str(key)) + _string("cpu") + _int(rows * columns) + b"tQK\0" + _int(rows) + _int(columns)
            + b"\x86" + _int(columns) + b"K\1\x86\x89NtR"
            for key, (name, (rows, columns)) in enumerate(shapes.items())) + b"u.")
        for key, (rows, columns) in enumerate(shapes.values()):
            with archive.open(f"archive/data/{key}", "w", force_zip64=True) as record:
                record.write(np.roll(noise, key)[:rows * columns].tobytes())


def _string(text):
    return b"X" + struct.pack("<I", len(text)) + text.encode()


def _int(value):
    return b"J" + struct.pack("<i", value)


def measure(command, output):
    """Runs a process that makes `output`, which is then removed. Returns (seconds, peak anonymous KiB sampled every 5
    ms, the output's bytes).
    """
    os.sync()  # or each would pay for what the one before left unwritten
    started, peak = time.perf_counter(), 0
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True)  # Ctrl-C is the benchmark's
    try:
        while process.poll() is None:
            status = Path(f"/proc/{process.pid}/status").read_text()
            peak = max([peak] + [int(line.split()[1]) for line in status.splitlines() if line.startswith("RssAnon")])
            time.sleep(0.005)
    finally:
        process.kill()
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    seconds = time.perf_counter() - started
    size = 0 if output.is_dir() else output.stat().st_size
    shutil.rmtree(output) if output.is_dir() else output.unlink()
    return seconds, peak, size


def main():
    parser = make_parser("convert", __doc__)
    parser.add_argument("--gib", type=amount, default=1, metavar="N",
                        help="least size of the checkpoint, in whole layers (default 1)")
    parser.add_argument("--sharded", action="store_true", help="a folder of safetensors instead of a .pt")
    parser.add_argument("--runs", type=count, default=5, metavar="N")
    parser.add_argument("--dtype", default="keep", help="the converter's option")
    parser.add_argument("--directory", help="where to work (default: the temporary directory)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        checkpoint, copy, output = (Path(directory) / name for name in ("moe.pt", "copy.pt", "moe.bin"))
        (write_shards if options.sharded else write_pt)(checkpoint, math.ceil(options.gib * 2 ** 30 / LAYER_BYTES))
        files = checkpoint.iterdir() if options.sharded else [checkpoint]
        megabytes = sum(file.stat().st_size for file in files) / 1e6
        convert = [sys.executable, "-m", "converter", checkpoint, output, "--k", "2", "--activation", "gelu",
                   "--renormalize", "--dtype", options.dtype]
        cp, synced, converter, peaks = [], [], [], []
        for _ in range(options.runs):
            cp.append(measure(["cp", "-rT", checkpoint, copy], copy)[0])
            synced.append(measure(["sh", "-c", 'cp -rT "$0" "$1" && find "$1" -type f -exec sync {} +', checkpoint,
                                   copy], copy)[0])
            seconds, peak, size = measure(convert, output)
            converter.append(seconds)
            peaks.append(peak)
        for name, other in (("cp", cp), ("cp and sync", synced)):
            ratio = statistics.median(a / b for a, b in zip(converter, other))
            print(f"converter / {name}: {ratio:.2f} (median of {options.runs})")
        for name, seconds in (("cp", cp), ("cp and sync", synced), ("converter", converter)):
            print(f"{name}: {statistics.median(seconds):.2f} s, {megabytes / statistics.median(seconds):.0f} MB/s, "
                  f"{min(seconds):.2f} to {max(seconds):.2f} s")
        print(f"output: {size / 1e6:.0f} MB, {size / 1e6 / statistics.median(converter):.0f} MB/s")
        print(f"peak RssAnon of the converter: {max(peaks) / 1024:.0f} MiB for {megabytes:.0f} MB")


if __name__ == "__main__":
    run(main)
