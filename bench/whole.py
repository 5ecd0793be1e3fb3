"""Measures how the host decodes whole models of random weights, as CSV on stdout.

    python -m bench.whole --shapes mixtral

Each model is written to --folder, which must have the room, and is removed at the end. A round is a sequence of random
tokens. Its bytes are those of weights that a token touches. It is compared with the rate at which a plain sum reads the
same mapping, probed before and after, as in bench.host. COLIBRI_ISA=avx2 in the environment chooses the instructions.
"""

import csv
import os
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from bench.host import COLUMNS, against, medians
from bench.program import count, make_parser, run, several
from colibri import program
from colibri.engine import Engine
from colibri.headers import default, form_of, has_scale, panel_values
from colibri.report import percentile, resident_bytes, weight_bytes
from converter import bin_writer

SHAPES = {
    "mixtral": {"num_layers": 8, "num_experts": 32, "k": 2, "hidden": 1024, "ffn": 1792, "num_heads": 16,
                "num_kv_heads": 8, "head_dim": 64, "vocab_size": 32000},
    "olmoe": {"num_layers": 16, "num_experts": 64, "k": 8, "hidden": 2048, "ffn": 1024, "num_heads": 16,
              "num_kv_heads": 16, "head_dim": 128, "vocab_size": 50304, "qk_norm": 2},
    "qwen3-30b": {"num_layers": 48, "num_experts": 128, "k": 8, "hidden": 2048, "ffn": 768, "num_heads": 32,
                  "num_kv_heads": 4, "head_dim": 128, "vocab_size": 151936, "qk_norm": 1}}
COMMON = {"max_positions": 4096, "weight_dtype": 1, "gated": 1, "renormalize": 1, "num_groups": 1, "topk_groups": 1,
          "routed_scaling": 1.0, "norm_kind": 1, "norm_eps": 1e-5, "rope_kind": 1, "rope_theta": 1e4,
          "interleave_rows": 64, "final_norm_eps": 1e-5, "rope_attention_factor": 1.0, "embedding_multiplier": 1.0,
          "residual_multiplier": 1.0, "logits_multiplier": 1.0}
DTYPES = "f16", "int8", "int4"
GROUP = 64
BLOCK_BYTES = 8 << 20  # of random weights, over and over
READ_BYTES = 2 << 30


def fields_of(shape, dtype):
    """Returns a header's fields. int4: the experts' alone, the rest int8, as the converter's --dtype has it."""
    codes = default().codes("DTYPE")
    fields = {**dict.fromkeys(default().structs["BinHeader"].names, 0), "window_layers": [], "dense_layers": [],
              **COMMON, **SHAPES[shape]}
    fields["rotary_dim"] = fields["v_head_dim"] = fields["head_dim"]
    fields["attention_scale"] = fields["head_dim"] ** -0.5
    if dtype != "f16":
        fields.update(compute_dtype=codes["f16"] + 1, expert_dtype=codes[dtype] + 1, dense_dtype=codes["int8"] + 1,
                      expert_group=GROUP, dense_group=GROUP)
    return fields


def block_of(form, columns, rng):
    """Returns whole panels of random weights, whose products stay near 1."""
    sizes = panel_values(form, columns)
    num_panels = max(1, BLOCK_BYTES // sizes["panel_bytes"])
    if not sizes["is_few"]:
        values = rng.standard_normal(num_panels * 64 * columns, np.float32) / np.float32(columns ** 0.5)
        return values.astype(np.float16 if sizes["element_bytes"] == 2 else np.float32).view(np.uint8)
    groups = rng.integers(0, 256, (num_panels * sizes["column_groups"], sizes["panel_bytes"] // sizes["column_groups"]),
                          np.uint8)
    spread = 74 if sizes["unit"] == 4 else 4.6  # the standard deviation of random bytes, or nibbles
    groups[:, :sizes["table_bytes"]].view(np.float16)[:] = columns ** -0.5 / spread
    return groups.ravel()


def write_model(path, shape, dtype):
    """Writes a model as fast as its file system takes it, without the tensors' checksums, which no run reads."""
    header, directory = bin_writer.plan(fields_of(shape, dtype))
    rng, blocks = np.random.default_rng(0), {}
    tensors = {tensor.name: tensor for tensor in default().tensors(header)}
    with open(path, "wb") as file, ThreadPoolExecutor(8) as pool:
        os.truncate(path, int(header["file_bytes"]))
        for entry in directory:
            tensor = tensors[entry["name"].decode()]
            form = form_of(tensor.type, header)
            entry["scale"] = has_scale(form.dtype)
            key = form, tensor.shape[-1], len(tensor.shape) == 1
            if len(tensor.shape) == 1:
                block = np.ones(tensor.shape, np.float32).view(np.uint8)
                if tensor.name == "rope_frequencies":
                    block = (1e4 ** -np.linspace(0, 1, *tensor.shape)).astype(np.float32).view(np.uint8)
            else:
                block = blocks.setdefault(key, block_of(form, tensor.shape[-1], rng) if key not in blocks else None)
            start, end = int(entry["offset"]), int(entry["offset"] + entry["bytes"])
            pool.map(lambda at, block=block, end=end: os.pwrite(file.fileno(), block[:end - at], at),
                     range(start, end, block.size))
        header["header_crc32"] = 0
        header["header_crc32"] = bin_writer.zlib.crc32(header.tobytes() + directory.tobytes())
        file.write(header.tobytes() + directory.tobytes())


class Decoding:
    """Decodes a model with so many threads, one random token after another: greedy ones would soon be the same."""

    def __init__(self, engine, threads, num_tokens):
        self.engine, self.threads, self.num_tokens, self.seconds = engine, threads, num_tokens, []
        self.rng = np.random.default_rng(1)

    def read_rate(self):
        data = self.engine.checkpoint.data
        size = min(READ_BYTES, len(data))
        start = time.perf_counter()
        self.engine.library.read_sum(data[len(data) - size:].ctypes.data, size, self.threads)
        return size / (time.perf_counter() - start)

    def rate(self):
        """Returns the bytes of weights that a sequence's tokens touch a second, and keeps the seconds of each."""
        dense, expert = weight_bytes(self.engine.checkpoint)
        tokens = self.rng.integers(0, self.engine.checkpoint.header["vocab_size"], self.num_tokens + 8).tolist()
        with self.engine.session() as session:
            session.prefill(tokens[:8])
            reads, times = self._reads(), [time.perf_counter()]
            for token in tokens[8:]:
                session.decode(token)
                times.append(time.perf_counter())
        self.seconds += np.diff(times).tolist()
        return (dense * self.num_tokens + expert * (self._reads() - reads)) / (times[-1] - times[0])

    def _reads(self):
        return int(self.engine.state("experts_read")[0, 0])


def measure(path, threads, num_tokens, rounds):
    """Yields (what, unit, value, ceiling, ratio, cores that others used)."""
    with Engine(path, backend="host", threads=threads) as engine:
        decoding = Decoding(engine, threads, num_tokens)
        decoding.read_rate(), decoding.rate()  # page faults
        decoding.seconds.clear()
        value, ceiling, ratio, others = medians(rounds, lambda: against(decoding.rate, decoding.read_rate))
        yield "decode", "GB/s", f"{value:.1f}", f"{ceiling:.1f}", f"{ratio:.3f}", f"{others:.2f}"
        for percent in (50, 99):
            yield f"ITL P{percent}", "ms", f"{percentile(decoding.seconds, percent) * 1e3:.2f}", "", "", ""
        resident, size = resident_bytes(), os.path.getsize(path)
        yield "resident, to the file", "GB", f"{resident / 1e9:.2f}", f"{size / 1e9:.2f}", f"{resident / size:.3f}", ""


def main():
    parser = make_parser("whole", __doc__)
    parser.add_argument("--shapes", type=several(program.choice(SHAPES)), default=["mixtral"], help="default: mixtral")
    parser.add_argument("--dtypes", type=several(program.choice(DTYPES)), default=DTYPES, help="default: all")
    parser.add_argument("--threads", type=several(count), default=[1, 2], metavar="N,N", help="default: 1,2")
    parser.add_argument("--tokens", type=count, default=20, metavar="N", help="of a round; default: 20")
    parser.add_argument("--rounds", type=count, default=10, metavar="N")
    parser.add_argument("--folder", default=None, help="where models are written; default: that of temporary files")
    options = parser.parse_args()
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(COLUMNS)
    isa = f"COLIBRI_ISA={os.environ['COLIBRI_ISA']} " if "COLIBRI_ISA" in os.environ else ""
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for shape in options.shapes:
            for dtype in options.dtypes:
                path = Path(folder, f"{shape}-{dtype}.bin")
                write_model(path, shape, dtype)
                for threads in options.threads:
                    for what, *figures in measure(path, threads, options.tokens, options.rounds):
                        command = f"{isa}python -m bench.whole --shapes {shape} --dtypes {dtype} --threads {threads}"
                        writer.writerow([f"{shape}, {dtype}: {what}", threads, *figures,
                                         f"{command} --tokens {options.tokens} --rounds {options.rounds}"])
                        sys.stdout.flush()
                path.unlink()


if __name__ == "__main__":
    run(main)
