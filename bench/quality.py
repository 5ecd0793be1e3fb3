"""Measures what a model loses in each format of its weights, as CSV on stdout: python -m bench.quality

The checkpoint is converted with each --as, and reads a text in windows. Each row compares its logits with those of the
first format: how often the most likely token is the same, and the Kullback-Leibler divergence of the next token's
distribution, in nats a token, on average and at the 99th percentile. Bits a byte are those of all tokens of the windows
but each one's first, over their bytes.
"""

import csv
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from tqdm import tqdm

from bench.latency import plain
from bench.program import ROOT, count, make_parser, run
from colibri import text
from colibri.engine import Engine
from colibri.errors import ColibriError

FORMATS = ("f16", "int8", "int4", "int4 --group 32", "int4 --group 128", "int4 --dense-dtype int4", "fp8")
COLUMNS = ["format", "bytes", "bits_a_byte", "top1_agreement", "mean_kl", "p99_kl", "tokens", "command"]


def log_softmax(logits):
    """Returns the log-probabilities of logits (tokens, vocab_size), in float64."""
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))


class Comparison:
    """Sums what the windows of a text say of a model beside the reference."""

    def __init__(self):
        self.nats, self.same, self.divergences = 0.0, 0, []

    def add(self, tokens, logits, reference):
        """Adds a window. tokens: (n), logits and reference: (n, vocab_size), after each token."""
        found, expected = log_softmax(logits[:-1]), log_softmax(reference[:-1])
        self.nats -= found[np.arange(len(found)), tokens[1:]].sum()
        self.same += int((found.argmax(axis=1) == expected.argmax(axis=1)).sum())
        self.divergences.append((np.exp(expected) * (expected - found)).sum(axis=1))

    def row(self, num_bytes):
        """Returns bits a byte, agreement, mean and 99th percentile of the divergence, and the number of tokens."""
        divergences = np.concatenate(self.divergences)
        count = len(divergences)
        return (self.nats / np.log(2) / num_bytes, self.same / count, divergences.mean(),
                np.percentile(divergences, 99), count)


def windows_of(path, checkpoint, length, most):
    """Returns the text's windows of `length` tokens, [(tokens, bytes of all but the first)]."""
    used = text.codec(checkpoint, False)
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise ColibriError("--text", f"{path}: {error.strerror}", "a file of text") from None
    tokens = np.asarray(list(used.encode(data, "--text", False)))
    found = [tokens[start:start + length] for start in range(0, len(tokens) - length + 1, length)][:most]
    if not found:
        raise ColibriError("--text", f"{len(tokens)} tokens", f"at least {length}, a window",
                           "lower --window, or take a longer text")
    return [(window, len(data) / len(tokens) * (length - 1)) for window in found]


def convert(checkpoint, options, path):
    """Writes the checkpoint with --dtype `options` to a path."""
    command = [sys.executable, "-m", "converter", checkpoint, path, "--force", "--dtype", *shlex.split(options)]
    if subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, check=False).returncode:
        raise ColibriError("--as", repr(options), "what --dtype takes, and more options of python -m converter")


def logits_of(engine, tokens):
    with engine.session() as session:
        return engine.step([(session, tokens)], every=True)


def compare(reference, model, windows, name):
    """Returns the Comparison of two models' logits over the windows."""
    found = Comparison()
    with Engine(reference, num_slots=1) as first, Engine(model, num_slots=1) as second:
        for tokens, _ in tqdm(windows, desc=name, leave=False, disable=None):
            found.add(tokens, logits_of(second, tokens), logits_of(first, tokens))
    return found


def main():
    parser = make_parser("quality", __doc__)
    parser.add_argument("checkpoint", nargs="?", default=str(ROOT / "models" / "moe-32.pt"),
                        help="what python -m converter reads (default: the example model)")
    parser.add_argument("--as", dest="formats", action="append", metavar="FORMAT",
                        help='a --dtype, and more options of the converter: --as "int4 --group 32"; the first one is '
                             f"compared with (default: {', '.join(FORMATS)})")
    parser.add_argument("--text", default=str(ROOT / "tests" / "data" / "heldout.txt"), metavar="FILE",
                        help="the text (default: the example model's held-out text)")
    parser.add_argument("--window", type=count, default=512, metavar="N", help="tokens of a window (default 512)")
    parser.add_argument("--windows", type=count, default=128, metavar="N", help="windows at most (default 128)")
    options = parser.parse_args()
    command = " ".join(["python -m bench.quality", *map(shlex.quote, sys.argv[1:])])
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(COLUMNS)
    with tempfile.TemporaryDirectory() as folder:
        reference, model = Path(folder, "reference.bin"), Path(folder, "model.bin")
        windows = None
        for index, name in enumerate(options.formats or FORMATS):
            path = reference if index == 0 else model
            convert(options.checkpoint, name, path)
            if windows is None:
                with Engine(path, num_slots=1) as engine:
                    windows = windows_of(options.text, engine.checkpoint, min(options.window, engine.context),
                                         options.windows)
            found = compare(reference, path, windows, name).row(sum(size for _, size in windows))
            writer.writerow([name, os.path.getsize(path), f"{found[0]:.4f}", *map(plain, found[1:]), command])
            sys.stdout.flush()


if __name__ == "__main__":
    run(main)
