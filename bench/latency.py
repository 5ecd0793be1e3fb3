"""Measures latency percentiles over a grid of batch sizes and sequence lengths, as CSV on stdout.

    python -m bench.latency                                   # models/moe-32.pt's .bin, made where it is missing
    python -m bench.latency model.bin --batch-sizes 1,8 --seq-lens 128 --repeat 100

Each cell is a process of its own. The last column is the command that repeats it.
"""

import csv
import itertools
import json
import subprocess
import sys

from bench.program import count, example_model, make_parser, run, several

COLUMNS = ["batch_size", "seq_len", "ttft_p50_ms", "ttft_p90_ms", "ttft_p99_ms", "ttft_max_ms", "itl_p50_ms",
           "itl_p90_ms", "itl_p99_ms", "itl_max_ms", "decode_tokens_per_s", "prefill_tokens_per_s",
           "fraction_of_read_bandwidth", "resident_mib", "backend", "threads", "command"]


def parse():
    parser = make_parser("latency", __doc__)
    parser.add_argument("model", nargs="?", default="moe-32.bin", help="default: moe-32.bin")
    parser.add_argument("--batch-sizes", type=several(count), default=[1, 4, 16, 32], metavar="N,N,...")
    parser.add_argument("--seq-lens", type=several(count), default=[128, 512], metavar="N,N,...")
    parser.add_argument("--repeat", type=count, default=20, metavar="N")
    return parser.parse_args()


def measure(model, batch_size, seq_len, repeat):
    """Returns one cell of the grid as a row of COLUMNS."""
    command = ["python", "-m", "colibri.run", "--model", model, "--batch-size", str(batch_size), "--seq-len",
               str(seq_len), "--repeat", str(repeat), "--json"]
    figures = json.loads(subprocess.run([sys.executable, *command[1:]], stdout=subprocess.PIPE, check=True,
                                        start_new_session=True).stdout)  # Ctrl-C is this process's
    row = {name: figures.get(name) for name in COLUMNS}
    for kind in ("ttft", "itl"):
        row.update({f"{kind}_{name}_ms": value for name, value in (figures[f"{kind}_ms"] or {}).items()})
    row = {name: row[name] for name in COLUMNS}
    row["command"] = " ".join(command)
    return {name: plain(value) if isinstance(value, float) else value for name, value in row.items()}


def plain(value):
    """Returns a number in four digits, without an exponent."""
    return f"{float(f'{value:.4g}'):.10f}".rstrip("0").rstrip(".")


def main():
    options = parse()
    example_model(options.model)
    writer = csv.DictWriter(sys.stdout, COLUMNS, lineterminator="\n")
    for number, (batch_size, seq_len) in enumerate(itertools.product(options.batch_sizes, options.seq_lens)):
        row = measure(options.model, batch_size, seq_len, options.repeat)
        if number == 0:
            writer.writeheader()
        writer.writerow(row)
        sys.stdout.flush()


if __name__ == "__main__":
    run(main)
