"""Measures the host backend's MoE block against the machine's ceilings, as CSV on stdout: python -m bench.host

The model is a bare stack of layers of 32 experts, k=2, hidden 1024, ffn 1792, gated, in f16, int8 or int4 (groups of
64): 2.9 GiB of weights, 9 layers in f16, many times a large cache. Its activation is the clamped SwiGLU, with which
numbers stay near 1 from layer to layer: with SwiGLU they become 0, and all tokens have the same experts then.

Decode is one token a step, a new random one each time, so that its experts come from memory. It is compared with the
rate at which a plain sum reads the same memory. Prefill is 512 tokens a step. It is compared with the rate of
independent fused multiply-adds, and in int8 and int4 with the same in f16, too. A ceiling is probed before and after
every measurement, because a shared machine's ceilings move. The columns are medians over the half of the rounds in
which other processes used the processors least. The last rows of f16 are decode beside a process that takes one core;
it counts among the others. COLIBRI_ISA=avx2 and so on in the environment chooses the instruction set.
"""

import csv
import ctypes
import hashlib
import mmap
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from bench.program import count, make_parser, run, several
from colibri import program
from colibri.headers import NATIVE, Form, default, is_few, panel_values
from colibri.native import Library

EXPERTS, K, HIDDEN, FFN = 32, 2, 1024, 1792
CONFIG = {"num_experts": EXPERTS, "k": K, "hidden": HIDDEN, "ffn": FFN, "num_heads": 0, "num_kv_heads": 0,
          "head_dim": 0, "vocab_size": 0, "activation": default().constants["ACTIVATION_CLAMPED_SWIGLU"]}
DTYPES = "f16", "int8", "int4"
GROUP = 64  # columns, of weights of few bits
LEAST_BYTES = 23 << 27  # of weights, filled with whole layers
READ_BYTES = 2 << 30
COLUMNS = ["what", "threads", "unit", "value", "ceiling", "ratio", "cores_used_by_others", "command"]


def build(form):
    shape = CONFIG
    if is_few(form.dtype):
        shape = {**CONFIG, "expert_dtype": form.dtype + 1, "expert_group": form.group, "compute_dtype": 2}
    config = " ".join(f"-D{default().macros[name]}={value}" for name, value in shape.items())
    subprocess.run(["make", "-s", f"CONFIG={config}"], cwd=NATIVE.parent, check=True)
    key = hashlib.sha256(config.encode()).hexdigest()[:12]
    return Library(NATIVE.parent / "build" / f"host-{key}" / "libcolibri.so")


class Stack:
    """Holds the benchmark's model: one block of weights, and a bound model for each number of threads asked for."""

    def __init__(self, dtype):
        code = default().codes("DTYPE")[dtype]
        self.form = Form(code, GROUP * is_few(code), 0)
        self.library = build(self.form)
        self.rng = np.random.default_rng(0)
        self.up, self.down = (self.panel(columns) for columns in (HIDDEN, FFN))
        self.up_bytes, self.down_bytes = (EXPERTS * rows // 64 * panel.size for rows, panel in
                                          ((2 * FFN, self.up), (HIDDEN, self.down)))
        self.layer_bytes = self.up_bytes + self.down_bytes
        self.layers = -(-LEAST_BYTES // self.layer_bytes)
        self.weights = np.frombuffer(mmap.mmap(-1, self.layers * self.layer_bytes), np.uint8)
        for layer in self.weights.reshape(self.layers, -1):
            layer[:self.up_bytes].reshape(-1, self.up.size)[:] = self.up
            layer[self.up_bytes:].reshape(-1, self.down.size)[:] = self.down
        self.routers = self.rng.standard_normal((self.layers, 1, HIDDEN, 64)).astype(np.float32)
        self.models = {}

    def panel(self, columns):
        """Returns a panel of random weights as bytes. Of few bits, each scale is the same."""
        sizes = panel_values(self.form, columns)
        if not sizes["is_few"]:
            return (self.rng.standard_normal(64 * columns) / 16).astype(np.float16).view(np.uint8)
        panel = self.rng.integers(0, 256, (sizes["column_groups"], sizes["panel_bytes"] // sizes["column_groups"]))
        panel = panel.astype(np.uint8)
        panel[:, :sizes["table_bytes"]].view(np.float16)[:] = 1 / 16 / (74 if sizes["unit"] == 4 else 4.6)
        return panel.ravel()

    def bind(self, threads):
        """Returns (model, batch, x), which a step needs. x (512, HIDDEN) is its input."""
        if threads not in self.models:
            structs = self.library.headers.structs
            header, batch = np.zeros(1, structs["BinHeader"]), np.zeros(1, structs["Batch"])
            header["num_layers"] = self.layers
            header["routed_scaling"] = header["residual_multiplier"] = header["swiglu_alpha"] = 1
            header["swiglu_limit"] = 7
            layers, weights = np.zeros(self.layers, structs["Layer"]), np.zeros(1, structs["Weights"])
            for index, layer in enumerate(layers):
                layer["router"] = self.routers[index].ctypes.data
                layer["experts_up"] = self.weights.ctypes.data + index * self.layer_bytes
                layer["experts_down"] = layer["experts_up"] + self.up_bytes
                layer["experts_up_scale"] = layer["experts_down_scale"] = is_few(self.form.dtype)
            state = np.frombuffer(mmap.mmap(-1, self.library.state_bytes(0, header.ctypes.data, 1, 1)), np.uint8)
            model = np.zeros(self.library.model_bytes(), np.uint8)
            self.library.bind(model.ctypes.data, 0, header.ctypes.data, weights.ctypes.data, layers.ctypes.data,
                              state.ctypes.data, batch.ctypes.data, 1, 1, threads, None)
            start = int(model.view(structs["Model"])["state"]["place"][0]) - state.ctypes.data
            state[start:start + 4 * self.layers * EXPERTS].view(np.int32).reshape(-1, EXPERTS)[:] = np.arange(EXPERTS)
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

    def states(self, threads):
        """Returns what the last layer left of the latest step."""
        model, batch, _ = self.bind(threads)
        start = int(model.view(self.library.headers.structs["Model"])["state"]["x"][0])
        size = int(batch["num_tokens"][0]) * HIDDEN
        return np.ctypeslib.as_array((ctypes.c_float * size).from_address(start))

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
        return steps * self.layers * (K * self.layer_bytes // EXPERTS + EXPERTS * HIDDEN * 4) / spent

    def prefill_rate(self, threads):
        return 512 * K * self.layers * 3 * HIDDEN * FFN / self.step(threads, 512)


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


def measurements(stack, dtype, rounds, plain):
    """Returns rows of COLUMNS without the command. plain: the stack in f16 where this one is not, or None."""
    for threads in (1, 2):
        yield f"decode, 1 token, {dtype}", threads, "GB/s", *medians(rounds, lambda t=threads: against(
            lambda: stack.decode_rate(t, 0.1), lambda: stack.read_rate(t)))
        yield f"prefill, 512 tokens, {dtype}", threads, "GFMA/s", *medians(rounds, lambda t=threads: against(
            lambda: stack.prefill_rate(t), lambda: stack.library.fma_rate(0.1, t)))
        if plain:
            yield f"prefill, 512 tokens, {dtype} to f16", threads, "GFMA/s", *medians(rounds, lambda t=threads: against(
                lambda: stack.prefill_rate(t), lambda: plain.prefill_rate(t)))
    for threads in () if plain else (1, 2):
        yield "decode beside a busy process, to 1 thread alone", threads, "GB/s", *medians(
            (rounds + 1) // 2, lambda t=threads: beside_a_busy_process(stack, t))


def main():
    parser = make_parser("host", __doc__)
    parser.add_argument("--rounds", type=count, default=20, metavar="N")
    parser.add_argument("--dtypes", type=several(program.choice(DTYPES)), default=DTYPES, help="default: all")
    options = parser.parse_args()
    plain = Stack("f16")
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(COLUMNS)
    command = f"python -m bench.host --rounds {options.rounds} --dtypes {','.join(options.dtypes)}"
    for dtype in options.dtypes:
        stack = plain if dtype == "f16" else Stack(dtype)
        stack.step(2, 512)
        for what, threads, unit, value, ceiling, ratio, others in measurements(
                stack, dtype, options.rounds, None if stack is plain else plain):
            what = f"{what}; {stack.library.path(0).decode()}"
            writer.writerow([what, threads, unit, f"{value:.1f}", f"{ceiling:.1f}", f"{ratio:.3f}", f"{others:.2f}",
                             command])
            sys.stdout.flush()


if __name__ == "__main__":
    run(main)
