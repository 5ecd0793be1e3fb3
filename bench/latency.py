"""Latency percentiles over a grid of batch sizes and sequence lengths, as CSV on stdout.

    python -m bench.latency                                   # models/moe-32.pt's .bin, made where it is missing
    python -m bench.latency model.bin --batch-sizes 1,8 --seq-lens 128 --repeat 100

Each cell is a process of its own; the last column is the command that repeats it.
"""

import argparse
import csv
import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COLUMNS = ["batch_size", "seq_len", "ttft_p50_ms", "ttft_p90_ms", "ttft_p99_ms", "ttft_max_ms", "itl_p50_ms",
           "itl_p90_ms", "itl_p99_ms", "itl_max_ms", "decode_tokens_per_s", "prefill_tokens_per_s",
           "fraction_of_read_bandwidth", "resident_mib", "backend", "threads", "command"]


def numbers(text):
    return [int(number) for number in text.split(",")]


def parse():
    parser = argparse.ArgumentParser(prog="python -m bench.latency", description=__doc__.split("\n")[0])
    parser.add_argument("model", nargs="?", default="moe-32.bin", help="default: moe-32.bin")
    parser.add_argument("--batch-sizes", type=numbers, default=[1, 4, 16, 32], metavar="N,N,...")
    parser.add_argument("--seq-lens", type=numbers, default=[128, 512], metavar="N,N,...")
    parser.add_argument("--repeat", type=int, default=20, metavar="N")
    return parser.parse_args()


def measure(model, batch_size, seq_len, repeat):
    """One cell of the grid as a row of COLUMNS."""
    command = ["python", "-m", "colibri.run", "--model", model, "--batch-size", str(batch_size), "--seq-len",
               str(seq_len), "--repeat", str(repeat), "--json"]
    figures = json.loads(subprocess.run([sys.executable, *command[1:]], stdout=subprocess.PIPE, check=True).stdout)
    row = {name: figures.get(name) for name in COLUMNS}
    for kind in ("ttft", "itl"):
        row.update({f"{kind}_{name}_ms": value for name, value in (figures[f"{kind}_ms"] or {}).items()})
    row = {name: row[name] for name in COLUMNS}
    row["command"] = " ".join(command)
    return {name: plain(value) if isinstance(value, float) else value for name, value in row.items()}


def plain(value):
    """Four digits, without an exponent."""
    return f"{float(f'{value:.4g}'):.10f}".rstrip("0").rstrip(".")


def main():
    options = parse()
    if options.model == "moe-32.bin" and not Path(options.model).exists():
        subprocess.run([sys.executable, "-m", "converter", ROOT / "models" / "moe-32.pt", options.model], check=True,
                       stdout=sys.stderr)
    writer = csv.DictWriter(sys.stdout, COLUMNS, lineterminator="\n")
    writer.writeheader()
    for batch_size in options.batch_sizes:
        for seq_len in options.seq_lens:
            writer.writerow(measure(options.model, batch_size, seq_len, options.repeat))
            sys.stdout.flush()


if __name__ == "__main__":
    try:
        main()
    except subprocess.CalledProcessError as error:  # the command has said why
        sys.exit(error.returncode)
