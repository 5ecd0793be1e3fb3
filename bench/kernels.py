"""Times the MoE block on the GPU, whole and by op, beside this GPU's ceilings measured in the same run.

    python3 -m bench.kernels [--shape NAME] [--tokens 1,4,16,32] [--extra -DNAME=VALUE] [--csv FILE]

Weights are random and cold: a graph runs the block over several layers, and each layer's weights outgrow the L2 cache.
Times are medians over launches of a graph, divided by its layers. Bytes are the routed experts' weights.
"""

import argparse
import csv
import ctypes
import datetime
import hashlib
import statistics
import subprocess
import sys
from pathlib import Path

import numpy as np
from cuda.bindings import nvrtc

from colibri.device import arch, call, driver, gpu
from colibri.native import Library

ROOT = Path(__file__).resolve().parent.parent
COLUMNS = ("date", "machine", "bench", "case", "metric", "value", "unit", "command")
# What a library needs besides a shape: bf16 weights, SiLU; the smallest attention, so that the block's input stays as it is.
CONFIG = {"weight_dtype": 2, "activation": 0, "gated": 1, "router_kind": 0, "router_bias": 0, "renormalize": 1,
          "num_groups": 1, "topk_groups": 1, "num_heads": 1, "num_kv_heads": 1, "head_dim": 64, "vocab_size": 64}
SHAPES = {
    "32x2-4096-14336": {"num_experts": 32, "k": 2, "hidden": 4096, "ffn": 14336, "num_layers": 2},
    "128x8-2048-768": {"num_experts": 128, "k": 8, "hidden": 2048, "ffn": 768, "num_layers": 8},
    "32x2-1024-1792": {"num_experts": 32, "k": 2, "hidden": 1024, "ffn": 1792, "num_layers": 8},
}
PROBES = r"""
extern "C" __global__ void read(const uint4 *from, unsigned *to, long count) {
    unsigned sum = 0;
    long stride = (long)gridDim.x * blockDim.x, i = (long)blockIdx.x * blockDim.x + threadIdx.x;
    for (; i + 7 * stride < count; i += 8 * stride) {
        uint4 v[8];
        #pragma unroll
        for (int j = 0; j < 8; j++) v[j] = __ldcs(from + i + j * stride);
        #pragma unroll
        for (int j = 0; j < 8; j++) sum += v[j].x ^ v[j].y ^ v[j].z ^ v[j].w;
    }
    if (sum == 12345) *to = sum;
}
"""


def library(config, extra=""):
    """The CUDA library for this GPU with this configuration baked in, built if it is not yet."""
    text = " ".join([f"-D{name.upper()}={value}" for name, value in config.items() if name != "num_layers"] + extra.split())
    subprocess.run(["make", "-s", f"ARCH={arch()}", f"CONFIG={text}"], cwd=ROOT, check=True)
    return Library(ROOT / "build" / f"{arch()}-{hashlib.sha256(text.encode()).hexdigest()[:12]}" / "libcolibri.so")


class Bench:
    """One shape's library and random weights on the GPU."""

    def __init__(self, shape, extra=""):
        self.config = {**CONFIG, **SHAPES[shape]}
        call("cuCtxSetCurrent", call("cuDevicePrimaryCtxRetain", gpu().handle))
        self.stream = call("cuStreamCreate", driver().CUstream_flags.CU_STREAM_NON_BLOCKING)
        self.library = library(self.config, extra)
        self.rng, self.keep, self.block = np.random.default_rng(), [], None
        structs, layers = self.library.headers.structs, self.config["num_layers"]
        header, weights = np.zeros(1, structs["BinHeader"]), np.zeros(1, structs["Weights"])
        for name, value in self.config.items():
            header[name] = value
        for name in ("routed_scaling", "residual_multiplier", "embedding_multiplier", "logits_multiplier",
                     "rope_attention_factor"):
            header[name] = 1
        header["attention_scale"] = self.config["head_dim"] ** -0.5
        self.layers = np.zeros(layers, structs["Layer"])
        experts, hidden, ffn = (self.config[name] for name in ("num_experts", "hidden", "ffn"))
        for layer in self.layers:
            layer["experts_up"] = self.random_weights(experts * -(-2 * ffn // 64) * 64 * hidden)
            layer["experts_down"] = self.random_weights(experts * -(-hidden // 64) * 64 * ffn)
            layer["router"] = self.upload(self.rng.standard_normal(-(-experts // 64) * 64 * hidden).astype(np.float32))
        self.batch = call("cuMemHostAlloc", structs["Batch"].itemsize, driver().CU_MEMHOSTALLOC_DEVICEMAP)
        memory = (ctypes.c_uint8 * structs["Batch"].itemsize).from_address(self.batch)
        self.fields = np.frombuffer(memory, structs["Batch"])
        self.fields.view(np.uint8)[:] = 0
        size = self.library.state_bytes(1, header.ctypes.data, 1)
        self.state = self.allocate(size)
        call("cuMemsetD8", self.state, 0, size)
        self.offsets, offset = {}, 0
        for buffer in self.library.headers.state_buffers(header[0], 1):
            self.offsets[buffer.name] = self.state + offset
            offset += -(-buffer.rows * buffer.columns * buffer.dtype.itemsize // 4096) * 4096
        self.model = np.zeros(self.library.model_bytes(), np.uint8)
        self.library.bind(self.model.ctypes.data, 1, header.ctypes.data, weights.ctypes.data, self.layers.ctypes.data,
                          self.state, self.batch, 1, 1, int(self.stream))
        self.keep += [header, weights]

    def allocate(self, size):
        return int(call("cuMemAlloc", size))

    def upload(self, array):
        pointer = self.allocate(array.nbytes)
        call("cuMemcpyHtoD", pointer, array.ctypes.data, array.nbytes)
        return pointer

    def random_weights(self, count):
        """bf16 values of 0.03 or so: one random block over and over, for a copy costs less than drawing them."""
        if self.block is None:
            block = (self.rng.standard_normal(1 << 24) * 0.03).astype(np.float32).view(np.uint32) >> 16
            self.block = block.astype(np.uint16)
        pointer, done = self.allocate(count * 2), min(count, self.block.size)
        call("cuMemcpyHtoD", pointer, self.block.ctypes.data, done * 2)
        while done < count:
            size = min(done, count - done)
            call("cuMemcpyDtoD", pointer + done * 2, pointer, size * 2)
            done += size
        return pointer

    def begin(self, tokens):
        x = self.rng.standard_normal((tokens, self.config["hidden"])).astype(np.float32)
        call("cuMemcpyHtoD", self.offsets["normed"], x.ctypes.data, x.nbytes)
        self.fields["num_tokens"] = tokens
        self.run(["begin"], tokens, [0])

    def run(self, ops, tokens, layers):
        for layer in layers:
            for op in ops:
                self.library.run_op(self.model.ctypes.data, op.encode(), tokens, layer)

    def count(self, name, dtype):
        value = np.zeros(1, dtype)
        call("cuStreamSynchronize", self.stream)
        call("cuMemcpyDtoH", value.ctypes.data, self.offsets[name], value.nbytes)
        return int(value[0])

    def capture(self, ops, tokens, layers):
        call("cuStreamBeginCapture", self.stream, driver().CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)
        self.run(ops, tokens, layers)
        return call("cuGraphInstantiate", call("cuStreamEndCapture", self.stream), 0)

    def time(self, ops, tokens, graphs, repeats=40):
        """Median microseconds a layer, and the experts read a layer. graphs: each one's layers."""
        count = sum(map(len, graphs))
        self.run(ops, tokens, range(len(self.layers)))
        graphs = [self.capture(ops, tokens, layers) for layers in graphs]
        before = self.count("experts_read", np.uint64)

        def launch():
            for graph in graphs:
                call("cuGraphLaunch", graph, self.stream)

        times = time_launches(self.stream, launch, repeats)
        read = (self.count("experts_read", np.uint64) - before) / (repeats + 3) / count
        for graph in graphs:
            call("cuGraphExecDestroy", graph)
        return times / count, read


def time_launches(stream, launch, repeats):
    """Median microseconds of one launch, by events, after three to warm up."""
    begin, end = (call("cuEventCreate", 0) for _ in range(2))
    times = []
    for i in range(repeats + 3):
        call("cuEventRecord", begin, stream)
        launch()
        call("cuEventRecord", end, stream)
        call("cuEventSynchronize", end)
        times.append(call("cuEventElapsedTime", begin, end) * 1e3)
    return statistics.median(times[3:])


def read_ceiling(stream, size=4 << 30):
    """GB/s of reading device memory, and of copying it (read plus written)."""
    program = check_nvrtc(nvrtc.nvrtcCreateProgram(PROBES.encode(), b"probes", 0, [], []))
    check_nvrtc(nvrtc.nvrtcCompileProgram(program, 1, [f"--gpu-architecture={arch()}".encode()]))
    image = b" " * check_nvrtc(nvrtc.nvrtcGetCUBINSize(program))
    check_nvrtc(nvrtc.nvrtcGetCUBIN(program, image))
    kernel = call("cuModuleGetFunction", call("cuModuleLoadData", image), b"read")
    memory, other = call("cuMemAlloc", size), call("cuMemAlloc", size)
    call("cuMemsetD32", memory, 0x3f123456, size // 4)
    values = np.array([int(memory)], np.uint64), np.array([int(other)], np.uint64), np.array([size // 16], np.int64)
    arguments = np.array([value.ctypes.data for value in values], np.uint64)

    def read():
        call("cuLaunchKernel", kernel, 132 * 4, 1, 1, 512, 1, 1, 0, stream, arguments.ctypes.data, 0)

    reading = time_launches(stream, read, 20)
    copying = time_launches(stream, lambda: call("cuMemcpyDtoDAsync", other, memory, size, stream), 20)
    call("cuMemFree", memory)
    call("cuMemFree", other)
    return size / reading / 1e3, 2 * size / copying / 1e3


def check_nvrtc(result):
    assert result[0] == nvrtc.nvrtcResult.NVRTC_SUCCESS, result[0]
    return result[1] if len(result) == 2 else result[1:]


MATRICES = {"block": 3, "single": 3, "experts_up": 2, "experts_down": 1, "router": 0, "combine": 0}
BLOCK = ["router", "experts_up", "experts_down", "combine"]
OPS = {"block": BLOCK, "single": BLOCK, "router": ["router"],
       "experts_up": ["experts_up"], "experts_down": ["experts_down"], "combine": ["combine"]}


def measure(bench, tokens, ceiling, ops):
    """Rows (op, microseconds, GB/s of weights, fraction of the read ceiling)."""
    config = bench.config
    matrix = config["hidden"] * config["ffn"] * 2
    layers = range(config["num_layers"])
    bench.begin(tokens)
    rows = []
    for op in ops:
        bench.begin(tokens)
        bench.run(["router"], tokens, [0])
        times, read = bench.time(OPS[op], tokens, [[layer] for layer in layers] if op == "single" else [layers])
        experts = read or bench.count("num_active", np.int32)  # without the router, layer 0's experts in every layer
        rate = experts * MATRICES[op] * matrix / times / 1e3
        rows.append((op, times, rate, rate / ceiling, experts))
    return rows


def save(path, bench, rows):
    """Adds rows (case, metric, value, unit) to a CSV file of COLUMNS."""
    command = " ".join(["python -m", f"bench.{bench}", *sys.argv[1:]])
    about = datetime.date.today().isoformat(), gpu().name, bench
    is_new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerows(([COLUMNS] if is_new else []) + [(*about, *row, command) for row in rows])


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shape", choices=SHAPES)
    parser.add_argument("--tokens", default="1,4,16,32")
    parser.add_argument("--extra", default="")
    parser.add_argument("--ops", default=",".join(OPS))
    parser.add_argument("--csv", type=Path)
    arguments = parser.parse_args()
    rows = []
    for shape in [arguments.shape] if arguments.shape else SHAPES:
        bench = Bench(shape, arguments.extra)
        if not rows:
            ceiling, copy = read_ceiling(bench.stream)
            rows = [("ceiling", "read", f"{ceiling:.0f}", "GB/s"), ("ceiling", "copy", f"{copy:.0f}", "GB/s")]
            print(f"read {ceiling:.0f} GB/s, copy {copy:.0f} GB/s")
        for tokens in map(int, arguments.tokens.split(",")):
            for op, times, rate, fraction, experts in measure(bench, tokens, ceiling, arguments.ops.split(",")):
                case = f"{shape} T={tokens} {op}"
                print(f"{case:40} {times:9.2f} us {rate:6.0f} GB/s {fraction:6.3f} of read {experts:7.2f} experts", flush=True)
                rows.append((case, "time", f"{times:.2f}", "us"))
                if rate:
                    rows += [(case, "weights", f"{rate:.0f}", "GB/s"), (case, "experts read", f"{experts:.2f}", "")]
    if arguments.csv:
        save(arguments.csv, "kernels", rows)


if __name__ == "__main__":
    main()
