"""Measures the host backend's MoE block against the machine's ceilings, as CSV on stdout: python -m bench.host

The model is a bare stack of 7 layers of 32 experts, k=2, hidden 1024, ffn 1792, gated, f16: 2.3 GiB of weights, 64
times a large cache. Decode is one token a step, a new random one each time, so that its experts come from memory. It is
compared with the rate at which a plain sum reads the same memory. Prefill is 512 tokens a step. It is compared with the
rate of independent fused multiply-adds. A ceiling is probed before and after every measurement, because a shared
machine's ceilings move. The columns are medians over the half of the rounds in which other processes used the
processors least. The last rows are decode beside a process that takes one core; it counts among the others.
"""

import csv
import hashlib
import mmap
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from bench.program import count, make_parser, run
from colibri.headers import NATIVE, default
from colibri.native import Library

LAYERS, EXPERTS, K, HIDDEN, FFN = 7, 32, 2, 1024, 1792
CONFIG = {"num_experts": EXPERTS, "k": K, "hidden": HIDDEN, "ffn": FFN, "num_heads": 0, "num_kv_heads": 0,
          "head_dim": 0, "vocab_size": 0}
EXPERT_BYTES = 3 * HIDDEN * FFN * 2
UP_BYTES, DOWN_BYTES = EXPERTS * EXPERT_BYTES * 2 // 3, EXPERTS * EXPERT_BYTES // 3
READ_BYTES = 2 << 30
COLUMNS = ["what", "threads", "unit", "value", "ceiling", "ratio", "cores_used_by_others", "command"]


def build():
    config = " ".join(f"-D{default().macros[name]}={value}" for name, value in CONFIG.items())
    subprocess.run(["make", "-s", f"CONFIG={config}"], cwd=NATIVE.parent, check=True)
    key = hashlib.sha256(config.encode()).hexdigest()[:12]
    return Library(NATIVE.parent / "build" / f"host-{key}" / "libcolibri.so")


class Stack:
    """Holds the benchmark's model: one block of weights, and a bound model for each number of threads asked for."""

    def __init__(self):
        self.library = build()
        self.rng = np.random.default_rng(0)
        self.weights = np.frombuffer(mmap.mmap(-1, LAYERS * (UP_BYTES + DOWN_BYTES)), np.uint16)
        piece = (self.rng.standard_normal(1 << 22) / 32).astype(np.float16).view(np.uint16)
        for start in range(0, len(self.weights), len(piece)):
            self.weights[start:start + len(piece)] = piece[:len(self.weights) - start]
        self.routers = self.rng.standard_normal((LAYERS, 1, HIDDEN, 64)).astype(np.float32)
        self.models = {}

    def bind(self, threads):
        """Returns (model, batch, x), which a step needs. x (512, HIDDEN) is its input."""
        if threads not in self.models:
            structs = self.library.headers.structs
            header, batch = np.zeros(1, structs["BinHeader"]), np.zeros(1, structs["Batch"])
            header["num_layers"] = LAYERS
            header["routed_scaling"] = header["residual_multiplier"] = 1
            layers, weights = np.zeros(LAYERS, structs["Layer"]), np.zeros(1, structs["Weights"])
            for index, layer in enumerate(layers):
                layer["router"] = self.routers[index].ctypes.data
                layer["experts_up"] = self.weights.ctypes.data + index * (UP_BYTES + DOWN_BYTES)
                layer["experts_down"] = layer["experts_up"] + UP_BYTES
            state = np.frombuffer(mmap.mmap(-1, self.library.state_bytes(0, header.ctypes.data, 1, 1)), np.uint8)
            model = np.zeros(self.library.model_bytes(), np.uint8)
            self.library.bind(model.ctypes.data, 0, header.ctypes.data, weights.ctypes.data, layers.ctypes.data,
                              state.ctypes.data, batch.ctypes.data, 1, 1, threads, None)
            start = int(model.view(structs["Model"])["state"]["place"][0]) - state.ctypes.data
            state[start:start + 4 * LAYERS * EXPERTS].view(np.int32).reshape(LAYERS, EXPERTS)[:] = np.arange(EXPERTS)
            x = np.zeros((512, HIDDEN), np.float32)
            batch["input"] = x.ctypes.data
            self.models[threads] = model, batch, x, (header, layers, weights, state)
        return self.models[threads][:3]

    def step(self, threads, num_tokens):
        """Returns the seconds of one step of all layers, from a fresh random input."""
        model, batch, x = self.bind(threads)
        x[:num_tokens] = self.rng.standard_normal((num_tokens, HIDDEN), np.float32)
        batch["num_tokens"] = num_tokens
        start = time.perf_counter()
        self.library.forward_stack(model.ctypes.data, num_tokens)
        return time.perf_counter() - start

    def read_rate(self, threads):
        start = time.perf_counter()
        self.library.read_sum(self.weights.ctypes.data, READ_BYTES, threads)
        return READ_BYTES / (time.perf_counter() - start)

    def decode_rate(self, threads, seconds):
        """Returns the bytes of routed experts a second, in steps of one token."""
        spent, steps = 0.0, 0
        while spent < seconds:
            spent += self.step(threads, 1)
            steps += 1
        return steps * LAYERS * (K * EXPERT_BYTES + EXPERTS * HIDDEN * 4) / spent

    def prefill_rate(self, threads):
        return 512 * K * LAYERS * 3 * HIDDEN * FFN / self.step(threads, 512)


def busy_seconds():
    """Returns the seconds that (all processors, this process) have worked since their start."""
    user, nice, system, _, _, irq, softirq, steal = map(int, Path("/proc/stat").read_text().split()[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK"), time.process_time()


def medians(rounds, measure):
    """Returns medians of what measure() returns, and of the cores that others used, over the quieter half of the
    rounds.
    """
    rows = []
    for _ in range(rounds):
        start, (busy, own) = time.perf_counter(), busy_seconds()
        values = measure()
        busy, own = (after - before for after, before in zip(busy_seconds(), (busy, own)))
        rows.append((max(0, busy - own) / (time.perf_counter() - start), *values))
    quiet = sorted(rows)[:(rounds + 1) // 2]
    others, *values = [statistics.median(column) for column in zip(*quiet)]
    return *values, others


def against(measure, ceiling):
    """Returns (value, ceiling, ratio). The ceiling is probed before and after the measurement."""
    before, value, after = ceiling(), measure(), ceiling()
    return value / 1e9, (before + after) / 2e9, value / ((before + after) / 2)


def beside_a_busy_process(stack, threads):
    """Returns (decode beside a process that takes a core, decode of one thread without it, their ratio)."""
    alone = stack.decode_rate(1, 0.5)
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as busy:
        time.sleep(0.1)
        value = stack.decode_rate(threads, 1.5)
        busy.kill()
    return value / 1e9, alone / 1e9, value / alone


def measurements(stack, rounds):
    """Returns rows of COLUMNS without the command."""
    for threads in (1, 2):
        yield "decode, 1 token", threads, "GB/s", *medians(rounds, lambda t=threads: against(
            lambda: stack.decode_rate(t, 0.1), lambda: stack.read_rate(t)))
        yield "prefill, 512 tokens", threads, "GFMA/s", *medians(rounds, lambda t=threads: against(
            lambda: stack.prefill_rate(t), lambda: stack.library.fma_rate(0.1, t)))
    for threads in (1, 2):
        yield "decode beside a busy process, to 1 thread alone", threads, "GB/s", *medians(
            (rounds + 1) // 2, lambda t=threads: beside_a_busy_process(stack, t))


def main():
    parser = make_parser("host", __doc__)
    parser.add_argument("--rounds", type=count, default=20, metavar="N")
    rounds = parser.parse_args().rounds
    stack = Stack()
    stack.step(2, 512)
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(COLUMNS)
    for what, threads, unit, value, ceiling, ratio, others in measurements(stack, rounds):
        writer.writerow([what, threads, unit, f"{value:.1f}", f"{ceiling:.1f}", f"{ratio:.3f}", f"{others:.2f}",
                         f"python -m bench.host --rounds {rounds}"])
        sys.stdout.flush()


if __name__ == "__main__":
    run(main)
