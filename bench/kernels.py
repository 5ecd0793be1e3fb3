"""Times the MoE block and the dense ops on the GPU, whole and by op, beside ceilings measured in the same run.

    python -m bench.kernels [--shape NAME] [--tokens 1,4,16,32] [--ops NAME,...] [--positions N]
                            [--extra -DNAME=VALUE] [--csv FILE]

Weights are random, from one seed, and cold: a graph runs the ops over several layers, several times, and what lies
between two readings of the same weights outgrows the L2 cache. Only the "example" shape is as small as that cache.
Times are medians over launches of a graph, divided by the layers it runs. Where experts are read, they are means of
those over several draws of the input, since chance decides how many experts are read. Bytes are the weights that are
read: the routed experts', or the whole matrix. Attention's bytes are the keys and values of --positions, 512, a token.
`select` is routing from the logits on, where that is a kernel of its own. More than 64 tokens are one prompt, whose
operations are counted too; their ceiling is torch's product, where torch is installed.
"""

import csv
import ctypes
import datetime
import functools
import hashlib
import itertools
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
from cuda.bindings import nvrtc

from bench.program import ROOT, count, make_parser, run, several
from colibri.gpu import arch, call, driver, properties
from colibri.headers import default, stored_bytes
from colibri.native import Library
from colibri.program import choice

COLUMNS = ("date", "machine", "bench", "case", "metric", "value", "unit", "command")
# What a library needs besides a shape: bf16 weights, SiLU; the smallest attention, so that the block's input stays.
CONFIG = {"weight_dtype": 2, "activation": 0, "gated": 1, "router_kind": 0, "router_bias": 0, "renormalize": 1,
          "num_groups": 1, "topk_groups": 1, "num_heads": 1, "num_kv_heads": 1, "head_dim": 64, "vocab_size": 64}
SHAPES = {
    "32x2-4096-14336": {"num_experts": 32, "k": 2, "hidden": 4096, "ffn": 14336, "num_layers": 2},
    "128x8-2048-768": {"num_experts": 128, "k": 8, "hidden": 2048, "ffn": 768, "num_layers": 8},
    "32x2-1024-1792": {"num_experts": 32, "k": 2, "hidden": 1024, "ffn": 1792, "num_layers": 8},
    "dense-4096": {"num_experts": 32, "k": 2, "hidden": 4096, "ffn": 64, "num_layers": 4, "num_heads": 32,
                   "num_kv_heads": 8, "head_dim": 128, "vocab_size": 32000},
    "mlp-4096-14336": {"num_experts": 32, "k": 2, "hidden": 4096, "ffn": 64, "shared_ffn": 14336, "num_layers": 4},
    "example": {"num_experts": 32, "k": 2, "hidden": 128, "ffn": 96, "num_layers": 6, "num_heads": 8, "num_kv_heads": 4,
                "head_dim": 16, "vocab_size": 256},
}
MIN_LAYERS = 8  # of a graph, so that its own start hardly counts
DRAWS = 16  # of the input, where it decides how many experts are read
NUM_SLOTS = 32  # the most tokens that are each of a sequence of its own; more are one prompt
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
    """Returns the CUDA library for this GPU with this configuration baked in. Builds it if need be."""
    defines = [f"-D{default().macros[name]}={value}" for name, value in config.items() if name != "num_layers"]
    text = " ".join([*defines, "-DMAX_STEP_LOGITS=MAX_STEP_TOKENS", *extra.split()])
    subprocess.run(["make", "-s", f"ARCH={arch()}", f"CONFIG={text}"], cwd=ROOT, check=True)
    return Library(ROOT / "build" / f"{arch()}-{hashlib.sha256(text.encode()).hexdigest()[:12]}" / "libcolibri.so")


class Bench:
    """Holds one shape's library and random weights on the GPU."""

    def __init__(self, shape, extra="", positions=512, num_slots=NUM_SLOTS):
        self.config, self.positions = {**CONFIG, **SHAPES[shape]}, positions
        call("cuCtxSetCurrent", call("cuDevicePrimaryCtxRetain", properties().handle))
        self.stream = call("cuStreamCreate", driver().CUstream_flags.CU_STREAM_NON_BLOCKING)
        self.library = library(self.config, extra)
        context = max(positions, self.library.baked["max_step_tokens"])  # a prompt's tokens are of one sequence
        self.rng, self.block, self.blocks = np.random.default_rng(1), None, []
        headers, num_layers = self.library.headers, self.config["num_layers"]
        header, weights = np.zeros(1, headers.structs["BinHeader"]), np.zeros(1, headers.structs["Weights"])
        for name, value in self.config.items():
            header[name] = value
        for name in ("routed_scaling", "residual_multiplier", "embedding_multiplier", "logits_multiplier",
                     "rope_attention_factor"):
            header[name] = 1
        header["v_head_dim"] = header["rotary_dim"] = self.config["head_dim"]
        header["attention_scale"], header["norm_eps"] = self.config["head_dim"] ** -0.5, 1e-5
        self.layers = np.zeros(num_layers, headers.structs["Layer"])
        for tensor in headers.tensors(header[0]):
            _, layer, name = tensor.name.split(".") if "." in tensor.name else ("", "", tensor.name)
            (self.layers[int(layer)] if layer else weights)[name] = self.random_tensor(tensor, header[0])
        self.batch = call("cuMemHostAlloc", headers.structs["Batch"].itemsize, driver().CU_MEMHOSTALLOC_DEVICEMAP)
        memory = (ctypes.c_uint8 * headers.structs["Batch"].itemsize).from_address(self.batch)
        self.fields = np.frombuffer(memory, headers.structs["Batch"])
        self.fields.view(np.uint8)[:] = 0
        size = self.library.state_bytes(1, header.ctypes.data, num_slots, context)
        self.state = self.allocate(size)
        call("cuMemsetD8", self.state, 0, size)
        self.offsets, offset = {}, 0
        for buffer in headers.state_buffers(header[0], num_slots, context):
            self.offsets[buffer.name] = self.state + offset
            offset += -(-buffer.rows * buffer.columns * buffer.dtype.itemsize // 4096) * 4096
        self.model = np.zeros(self.library.model_bytes(), np.uint8)
        self.library.bind(self.model.ctypes.data, 1, header.ctypes.data, weights.ctypes.data, self.layers.ctypes.data,
                          self.state, self.batch, num_slots, context, 1,
                          int(self.stream))
        experts = np.tile(np.arange(self.config["num_experts"], dtype=np.int32), (num_layers, 1))
        call("cuMemcpyHtoD", self.offsets["place"], experts.ctypes.data, experts.nbytes)
        self.keep = header, weights

    def allocate(self, size):
        self.blocks.append(int(call("cuMemAlloc", size)))
        return self.blocks[-1]

    def close(self):
        for block in self.blocks:
            call("cuMemFree", block)

    def upload(self, array):
        pointer = self.allocate(array.nbytes)
        call("cuMemcpyHtoD", pointer, array.ctypes.data, array.nbytes)
        return pointer

    def random_tensor(self, tensor, header):
        """Returns random numbers: float32 of about 1; bf16 of about 0.03, one block repeated, since a copy is quicker.
        """
        num_bytes = stored_bytes(tensor, header)
        if tensor.type == "float":
            return self.upload(self.rng.standard_normal(num_bytes // 4).astype(np.float32))
        if self.block is None:
            block = (self.rng.standard_normal(1 << 24) * 0.03).astype(np.float32).view(np.uint32) >> 16
            self.block = block.astype(np.uint16)
        pointer, done = self.allocate(num_bytes), min(num_bytes, self.block.nbytes)
        call("cuMemcpyHtoD", pointer, self.block.ctypes.data, done)
        while done < num_bytes:
            size = min(done, num_bytes - done)
            call("cuMemcpyDtoD", pointer + done, pointer, size)
            done += size
        return pointer

    def begin(self, tokens):
        """Begins a step of random rows: tokens of as many sequences at their last position, or one sequence from its
        start.
        """
        for name in ("x", "normed", "attention"):
            width = self.config["hidden"] if name != "attention" else self.config["num_heads"] * self.config["head_dim"]
            x = self.rng.standard_normal((tokens, width)).astype(np.float32)
            call("cuMemcpyHtoD", self.offsets[name], x.ctypes.data, x.nbytes)
        self.fields["num_tokens"] = self.fields["num_logits"] = tokens
        is_prompt = tokens > NUM_SLOTS
        self.fields["slots"][0, :tokens] = 0 if is_prompt else np.arange(tokens)
        self.fields["positions"][0, :tokens] = np.arange(tokens) if is_prompt else self.positions - 1
        self.fields["logit_rows"][0, :tokens] = np.arange(tokens)
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

    def capture_selection(self, tokens, count):
        """Captures `count` runs of the router's second kernel as a graph. Returns None where all is one kernel."""
        call("cuStreamBeginCapture", self.stream, driver().CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)
        self.run(["router"], tokens, [0])
        router = call("cuStreamEndCapture", self.stream)
        nodes, num_nodes = call("cuGraphGetNodes", router, 2)
        if num_nodes < 2:
            return None
        node = call("cuGraphKernelNodeGetParams", nodes[1])
        config, attributes = driver().CUlaunchConfig(), [driver().CUlaunchAttribute() for _ in range(2)]
        kinds = driver().CUlaunchAttributeID
        attributes[0].id = kinds.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attributes[0].value.programmaticStreamSerializationAllowed = 1
        attributes[1].id, cluster = kinds.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, attributes[1].value.clusterDim
        cluster.x, cluster.y, cluster.z = node.gridDimX if node.gridDimX <= 8 else 1, 1, 1
        config.gridDimX, config.gridDimY, config.gridDimZ = node.gridDimX, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = node.blockDimX, 1, 1
        config.hStream, config.attrs, config.numAttrs = self.stream, attributes, 2
        call("cuStreamBeginCapture", self.stream, driver().CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)
        for _ in range(count):
            call("cuLaunchKernelEx", config, node.func, int(node.kernelParams), 0)
        return call("cuGraphInstantiate", call("cuStreamEndCapture", self.stream), 0)

    def time(self, ops, tokens, graphs, repeats=40):
        """Returns the median microseconds a layer, and the experts read a layer. graphs: each one's layers."""
        count = sum(map(len, graphs))
        self.run(ops, tokens, range(len(self.layers)))
        graphs = [self.capture(ops, tokens, layers) for layers in graphs]
        before, launches = self.count("experts_read", np.uint64), itertools.count()

        def launch():
            next(launches)
            for graph in graphs:
                call("cuGraphLaunch", graph, self.stream)

        times = time_launches(self.stream, launch, repeats)
        read = (self.count("experts_read", np.uint64) - before) / next(launches) / count
        for graph in graphs:
            call("cuGraphExecDestroy", graph)
        return times / count, read

    def draws(self, ops, tokens, graphs, count=DRAWS, repeats=10):
        """Returns the means of the same over draws of the rows. Without the router among the ops, every layer has layer
        0's choice.
        """
        results = []
        for _ in range(count):
            self.begin(tokens)
            self.run(["router"], tokens, [0])
            experts = self.count("num_active", np.int32)
            microseconds, read = self.time(ops, tokens, graphs, repeats)
            results.append((microseconds, read or experts))
        return map(statistics.mean, zip(*results))


def time_launches(stream, launch, repeats):
    """Returns the median microseconds of one launch, by events.

    Runs 20 ms of launches first, since a GPU that was idle is slow at first.
    """
    begin, end = (call("cuEventCreate", 0) for _ in range(2))
    times, start = [], time.perf_counter()
    while time.perf_counter() - start < 0.02:
        launch()
        call("cuStreamSynchronize", stream)
    for _ in range(repeats):
        call("cuEventRecord", begin, stream)
        launch()
        call("cuEventRecord", end, stream)
        call("cuEventSynchronize", end)
        times.append(call("cuEventElapsedTime", begin, end) * 1e3)
    return statistics.median(times)


def read_ceiling(stream, size=4 << 30):
    """Returns GB/s of reading device memory, and of copying it (read plus written)."""
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


def product_ceiling(size=8192):
    """Returns FLOP/s of torch's bf16 product of random matrices, or None without torch."""
    try:
        import torch
    except ImportError:
        return None
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        return 2 * size**3 / time_launches(stream.cuda_stream, lambda: torch.matmul(a, b), 20) * 1e6


BLOCK = ["router", "experts_up", "experts_down", "combine"]
MOE_OPS = {"block": BLOCK, "single": BLOCK, "router": ["router"], "select": [],
           "experts_up": ["experts_up"], "experts_down": ["experts_down"], "combine": ["combine"]}
DENSE_OPS = {name: [name] for name in ("ffn_norm", "qkv", "rope", "attention", "attention_out", "gather_norm",
                                              "lm_head")}
MLP_OPS = {"mlp": ["mlp"]}
OPS = {**MOE_OPS, **DENSE_OPS, **MLP_OPS}
MATRICES = {"block": 3, "single": 3, "experts_up": 2, "experts_down": 1}


def work(bench, op, tokens, experts):
    """Returns (bytes read, floating-point operations) of an op. experts: how many are read."""
    config = bench.config
    hidden, width = config["hidden"], config["num_heads"] * config["head_dim"]
    kv_width = config["num_kv_heads"] * config["head_dim"]
    if op in MATRICES:
        matrix = MATRICES[op] * hidden * config["ffn"]
        return experts * matrix * 2, 2 * tokens * config["k"] * matrix
    if op == "attention":  # a prompt's token sees itself and those before
        seen = (tokens + 1) / 2 if tokens > NUM_SLOTS else bench.positions
        kept = tokens if tokens > NUM_SLOTS else tokens * bench.positions
        return kept * kv_width * 2 * 4, 4 * tokens * seen * width
    elements = {"qkv": (width + 2 * kv_width) * hidden, "attention_out": hidden * width,
                "lm_head": config["vocab_size"] * hidden, "mlp": 3 * hidden * config.get("shared_ffn", 0)}.get(op, 0)
    return elements * 2, 2 * tokens * elements


def measure(bench, tokens, ops):
    """Returns rows (op, microseconds, bytes read, operations, experts read), each of one layer."""
    config, rows = bench.config, []
    layers = [*range(config["num_layers"])] * -(-MIN_LAYERS // config["num_layers"])
    for op in ops:
        if op == "select":
            bench.begin(tokens)
            graph = bench.capture_selection(tokens, MIN_LAYERS)
            if graph:
                launch = functools.partial(call, "cuGraphLaunch", graph, bench.stream)
                rows.append((op, time_launches(bench.stream, launch, 40) / MIN_LAYERS, 0, 0, 0))
            continue
        graphs = [[layer] for layer in layers] if op == "single" else [layers]
        how_often = {} if op in MATRICES else {"count": 1, "repeats": 40}
        microseconds, experts = bench.draws(OPS[op], tokens, graphs, **how_often)
        rows.append((op, microseconds, *work(bench, op, tokens, experts), experts))
    return rows


def save(path, bench, rows):
    """Adds rows (case, metric, value, unit) to a CSV file of COLUMNS."""
    command = " ".join(["python -m", f"bench.{bench}", *sys.argv[1:]])
    about = datetime.date.today().isoformat(), properties().name, bench
    is_new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerows(([COLUMNS] if is_new else []) + [(*about, *row, command) for row in rows])


def measure_shape(bench, shape, tokens, ops, read, product):
    """Returns rows for the CSV file, and prints them. read, product: the ceilings."""
    rows = []
    for op, times, num_bytes, operations, experts in measure(bench, tokens, ops):
        case, rate, flops = f"{shape} T={tokens} {op}", num_bytes / times / 1e3, operations / times / 1e6
        rows.append((case, "time", f"{times:.2f}", "us"))
        text = f"{case:40} {times:9.2f} us"
        if num_bytes:
            rows += [(case, "read", f"{rate:.0f}", "GB/s"), (case, "read of ceiling", f"{rate / read:.3f}", "")]
            text += f" {rate:6.0f} GB/s {rate / read:6.3f} of read"
        if op in MATRICES:
            rows.append((case, "experts read", f"{experts:.2f}", ""))
            text += f" {experts:7.2f} experts"
        if operations and tokens > 64:
            rows.append((case, "product", f"{flops:.1f}", "TFLOP/s"))
            text += f" {flops:6.1f} TFLOP/s"
            if product:
                rows.append((case, "product of ceiling", f"{flops * 1e12 / product:.3f}", ""))
                text += f" {flops * 1e12 / product:6.3f} of product"
        print(text, flush=True)
    return rows


def main():
    parser = make_parser("kernels", __doc__)
    parser.add_argument("--shape", type=choice(SHAPES), metavar="|".join(SHAPES))
    parser.add_argument("--tokens", type=several(count), default=[1, 4, 16, 32], metavar="N,N,...")
    parser.add_argument("--positions", type=count, default=512, metavar="N", help="that a token sees")
    parser.add_argument("--extra", default="")
    parser.add_argument("--ops", type=several(choice(OPS)), metavar="NAME,...",
                        help=f"of {', '.join(OPS)}; default: those that the shape is for")
    parser.add_argument("--csv", type=Path)
    arguments = parser.parse_args()
    rows = []
    for shape in [arguments.shape] if arguments.shape else SHAPES:
        slots = max([tokens for tokens in arguments.tokens if tokens <= NUM_SLOTS], default=1)
        bench = Bench(shape, arguments.extra, arguments.positions, slots)
        if not rows:
            read, copy = read_ceiling(bench.stream)
            product = product_ceiling() if max(arguments.tokens) > 64 else None
            rows = [("ceiling", "read", f"{read:.0f}", "GB/s"), ("ceiling", "copy", f"{copy:.0f}", "GB/s")]
            if product:
                rows.append(("ceiling", "product", f"{product / 1e12:.0f}", "TFLOP/s"))
            print(*(f"{name} {value} {unit}" for _, name, value, unit in rows), sep=", ")
        own = MLP_OPS if "shared_ffn" in bench.config else DENSE_OPS if bench.config["num_heads"] > 1 else MOE_OPS
        ops = arguments.ops or own
        for tokens in arguments.tokens:
            rows += measure_shape(bench, shape, tokens, ops, read, product)
        bench.close()
    if arguments.csv:
        save(arguments.csv, "kernels", rows)


if __name__ == "__main__":
    run(main)
