"""Measures a step of the example model on a GPU by kind of dispatch; cold start; memory over many steps.

    python -m bench.dispatch [--steps N] [--large FILE] [--csv FILE]

Times are medians over --steps steps of one token. `host` is the time until the step is under way, `call` the time until
its token can be read, `device` the time from the step's start to its end on the GPU. The kernels' sum adds up the time
of every op repeated in a graph by itself. --large names a .bin whose cold start is measured, in processes of their own.
Where it is missing, a model of 1 GiB of random weights is written there.
"""

import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

from bench.kernels import save
from bench.program import ROOT, count, example_model, make_parser, run
from colibri import gpu
from colibri.engine import Engine
from colibri.library import DISPATCH
from colibri.sampling import Sampler

LAYER_OPS = ("attention_norm", "qkv", "rope", "attention", "attention_out", "ffn_norm", "router",
             "experts_up", "experts_down", "combine")
STEP_OPS = ("begin", "embed", "gather_norm", "lm_head", "sample")
REPEAT = 20


def decode(engine, session, steps, token=65):
    """Returns the seconds of each of some greedy steps."""
    seconds = []
    for _ in range(steps):
        start = time.perf_counter()
        token, = engine.step([(session, [token])], [Sampler()])
        seconds.append(time.perf_counter() - start)
    return seconds


def launches(engine, steps):
    """Runs the step that the batch holds again and again. Returns its (host, call, device) seconds."""
    memory, function, model = engine.memory, engine.library.forward, engine._model.address
    start, end = (gpu.call("cuEventCreate", 0) for _ in range(2))
    times = []
    for _ in range(steps):
        begin = time.perf_counter()
        memory.launch(function, model, 1, 1)
        launched = time.perf_counter()
        memory.sync()
        called = time.perf_counter()
        gpu.call("cuEventRecord", start, memory.stream)
        memory.launch(function, model, 1, 1)
        gpu.call("cuEventRecord", end, memory.stream)
        memory.sync()
        times.append((launched - begin, called - begin, gpu.call("cuEventElapsedTime", start, end) / 1e3))
    return [statistics.median(column) for column in zip(*times)]


def op_seconds(engine, op, layer, steps):
    """Returns the time of one op among repetitions of itself."""
    def enqueue():
        for _ in range(REPEAT):
            engine.library.run_op(engine._model.address, op.encode(), 1, layer)
    graph = engine.memory.launcher.capture(enqueue)
    try:
        return gpu.elapsed(graph.launch, engine.memory.stream, steps) / REPEAT
    finally:
        graph.destroy()


def measure_dispatch(model, steps):
    """Returns rows (case, metric, value, unit) for the three kinds of dispatch."""
    for dispatch in DISPATCH:
        with Engine(model, backend="cuda", num_slots=1, dispatch=dispatch) as engine, engine.session() as session:
            session.prefill(b"It was the custom of ")
            decode(engine, session, 20)
            itl = decode(engine, session, min(steps, engine.context - 60))
            host, call, on_device = launches(engine, steps)
            for metric, value in (("host", host), ("call", call), ("device", on_device),
                                  ("itl", statistics.median(itl))):
                yield dispatch, metric, value * 1e6, "us"
            if dispatch == "device":
                layers = sum(op_seconds(engine, op, 1, 20) for op in LAYER_OPS) * engine.num_layers
                rest = {op: op_seconds(engine, op, 0, 20) for op in STEP_OPS}
                for op in sorted(set(LAYER_OPS)):
                    yield op, "kernel", op_seconds(engine, op, 1, 20) * 1e6, "us"
                for op, value in rest.items():
                    yield op, "kernel", value * 1e6, "us"
                total = layers + sum(rest.values())
                yield dispatch, "kernels' sum", total * 1e6, "us"
                yield dispatch, "itl over kernels' sum", statistics.median(itl) / total, "1"


def measure_memory(model, steps):
    """Returns how the GPU's used memory changes over many steps of random batch size and length."""
    import numpy as np
    rng = np.random.default_rng(0)
    with Engine(model, backend="cuda") as engine:
        used = []
        for index in range(max(1, steps // 10)):
            sessions = [engine.session() for _ in range(rng.integers(1, 33) if index > 32 else min(index + 1, 32))]
            engine.step([(session, rng.integers(0, 256, rng.integers(1, 400))) for session in sessions])
            for _ in range(9):
                engine.step([(session, [1]) for session in sessions])
            for session in sessions:
                session.close()
            free, total = gpu.call("cuMemGetInfo")
            used.append((total - free) / 2**20)
        yield f"{steps} steps", "growth after a tenth", used[-1] - used[len(used) // 10], "MiB"
        yield f"{steps} steps", "graphs", engine.memory.launcher.graphs.statistics()["graphs"], "1"


def measure_cold_start(model, repeat=3):
    """Returns the parts of the time from a process's start to its first token, each the median of some processes."""
    command = [sys.executable, "-m", "colibri.run", "--model", Path(model).resolve(), "--backend", "cuda",
               "--seq-len", "9",
               "--max-new-tokens", "8", "--warmup", "0", "--repeat", "1", "--json"]
    runs = [json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True, cwd=ROOT).stdout)
            for _ in range(repeat + 1)][1:]
    name = f"cold start, {Path(model).stat().st_size / 2**30:.2f} GiB"
    for part in runs[0]["cold_start_ms"]:
        yield name, part, statistics.median(run["cold_start_ms"][part] for run in runs), "ms"
    yield name, "total", statistics.median(sum(run["cold_start_ms"].values()) for run in runs), "ms"
    for rate in ("weights_gb_per_s", "pinned_gb_per_s"):
        yield name, rate, statistics.median(run["device"][rate] for run in runs), "GB/s"


def write_large(path):
    sys.path.insert(0, str(ROOT / "tests"))
    import synthetic
    synthetic.write_model(path, num_experts=32, hidden=1024, ffn=1792, num_layers=3, num_heads=16, num_kv_heads=4,
                          head_dim=64, max_positions=0)


def main():
    parser = make_parser("dispatch", __doc__)
    parser.add_argument("--model", default="moe-32.bin", help="default: moe-32.bin, made where it is missing")
    parser.add_argument("--steps", type=count, default=300, metavar="N")
    parser.add_argument("--memory-steps", type=count, metavar="N")
    parser.add_argument("--large", metavar="FILE")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="append the rows there")
    options = parser.parse_args()
    example_model(options.model)
    if options.large and not Path(options.large).exists():
        write_large(options.large)
    rows = list(measure_dispatch(options.model, options.steps))
    rows += measure_memory(options.model, options.memory_steps) if options.memory_steps else []
    rows += measure_cold_start(options.large) if options.large else []
    for case, metric, value, unit in rows:
        print(f"{case:28} {metric:24} {value:12.3f} {unit}")
    if options.csv:
        save(options.csv, "dispatch", [(case, metric, f"{value:.4g}", unit) for case, metric, value, unit in rows])


if __name__ == "__main__":
    run(main)
