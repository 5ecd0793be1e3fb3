"""Models on the GPU beside the host: a file in two engines, and a reference model in device memory, its ops run one by
one."""

import concurrent.futures
import ctypes
import fcntl
import hashlib
import os
import subprocess

import numpy as np
import pytest
import reference
from reference import fields

from colibri import build, headers
from colibri.checkpoint import Checkpoint
from colibri.engine import Engine
from colibri.gpu import arch, call, driver, properties
from colibri.headers import NATIVE
from colibri.native import Library

ROOT = NATIVE.parent
BAKED = ("num_experts", "k", "hidden", "ffn", "num_heads", "num_kv_heads", "head_dim", "vocab_size", "weight_dtype",
         "activation", "gated", "router_kind", "router_bias", "renormalize", "num_groups", "topk_groups",
         "expert_bias")
LOGITS = "-DMAX_STEP_LOGITS=512"  # so that steps of many logits run the prompt's kernels
CONTEXT = 512  # of a GpuModel
BARE = fields(num_heads=0, num_kv_heads=0, head_dim=0, vocab_size=0)


def library_file(extra="", **config):
    """The CUDA library for this GPU with this configuration baked in, built if it is not yet."""
    defines = [f"-D{headers.default().macros[name]}={config[name]}" for name in BAKED if name in config]
    text = " ".join([*defines, LOGITS, *extra.split()])
    folder = ROOT / "build" / f"{arch()}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # tests that run in parallel build it once
        made = subprocess.run(["make", "-s", f"ARCH={arch()}", f"CONFIG={text}"], cwd=ROOT, text=True,
                              capture_output=True, check=False)
    assert made.returncode == 0, made.stderr
    return folder / "libcolibri.so"


def build_all(paths):
    """The CUDA libraries of so many files, all at once."""
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(library_of, paths))


def library_of(path):
    """A file's library for this GPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DEFINES", LOGITS)
        return build.library_path(Checkpoint(path), arch())


def engines(path, **options):
    """(host, GPU): a file's Engines over one library, which has both backends."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLIBRI_LIBRARY", library_of(path))
        return tuple(Engine(path, backend=backend, **options) for backend in ("host", "cuda"))


def baked(model):
    """What of a model's configuration is baked into its library."""
    return {name: model[name] for name in BAKED} | ({} if model["num_heads"] else BARE)


class GpuModel:
    """The model on the GPU, and on the host in the same library. Buffers are read and written as NumPy arrays."""

    def __init__(self, model, extra=""):
        self.context = call("cuDevicePrimaryCtxRetain", properties().handle)
        call("cuCtxSetCurrent", self.context)
        self.stream = call("cuStreamCreate", driver().CUstream_flags.CU_STREAM_NON_BLOCKING)
        self.library = Library(library_file(extra, **baked(model)))
        structs = self.library.headers.structs
        self.blocks = []
        header = np.zeros(1, structs["BinHeader"])
        for name in header.dtype.names:
            if name in model:
                header[name] = model[name]
        layers, weights = np.zeros(model["num_layers"], structs["Layer"]), np.zeros(1, structs["Weights"])
        for name, array in reference.stored_tensors(model).items():
            owner, field = (layers[int(name.split(".")[1])], name.split(".")[2]) if "." in name else (weights, name)
            owner[field] = self.allocate(array.nbytes, array)
        size = structs["Batch"].itemsize
        self.pinned = call("cuMemHostAlloc", size, driver().CU_MEMHOSTALLOC_DEVICEMAP)
        self.batch = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(self.pinned))
        self.batch = self.batch.view(structs["Batch"])[0]
        self.batch.fill(0)
        state = self.allocate(self.library.state_bytes(1, header.ctypes.data, 2, CONTEXT))
        self.buffers, offset = {}, 0
        for buffer in self.library.headers.state_buffers(header[0], 2, CONTEXT):
            self.buffers[buffer.name] = buffer, state + offset
            offset += -(-buffer.rows * buffer.columns * buffer.dtype.itemsize // 4096) * 4096
        self.model = np.zeros(self.library.model_bytes(), np.uint8)
        self.keep = header, layers, weights
        self.library.bind(self.model.ctypes.data, 1, header.ctypes.data, weights.ctypes.data, layers.ctypes.data, state,
                          self.pinned, 2, CONTEXT, 1, int(self.stream))
        self.write("place", np.tile(np.arange(model["num_experts"]), (model["num_layers"], 1)))

    def allocate(self, size, array=None):
        pointer = call("cuMemAlloc", max(size, 1))
        self.blocks.append(pointer)
        if array is None:
            call("cuMemsetD8Async", pointer, 0, size, self.stream)
        elif size:
            self.upload(pointer, np.ascontiguousarray(array))
        return int(pointer)

    def upload(self, pointer, array):
        """Before what comes next in the stream, which a copy outside of it need not be."""
        call("cuMemcpyHtoDAsync", pointer, array.ctypes.data, array.nbytes, self.stream)
        self.synchronize()

    def close(self):
        for pointer in self.blocks:
            call("cuMemFree", pointer)
        call("cuMemFreeHost", self.pinned)
        call("cuStreamDestroy", self.stream)

    def read(self, name, rows=None):
        buffer, pointer = self.buffers[name]
        array = np.empty((rows or buffer.rows, buffer.columns), buffer.dtype)
        self.synchronize()
        call("cuMemcpyDtoH", array.ctypes.data, pointer, array.nbytes)
        return array

    def write(self, name, array):
        buffer, pointer = self.buffers[name]
        self.upload(pointer, np.ascontiguousarray(array, buffer.dtype))

    def poison(self, *names):
        """Every byte 0xff: NaN."""
        for name in names:
            buffer, pointer = self.buffers[name]
            call("cuMemsetD8Async", pointer, 0xff, buffer.rows * buffer.columns * buffer.dtype.itemsize, self.stream)

    def synchronize(self):
        call("cuStreamSynchronize", self.stream)

    def run(self, *ops, rows, layer=0):
        for op in ops:
            self.library.run_op(self.model.ctypes.data, op.encode(), rows, layer)

    def moe(self, x, rows=None):
        """x (tokens, hidden) through layer 0 of a bare stack, launched for `rows` tokens."""
        self.write("x", x)
        self.batch["num_tokens"], self.batch["fault"] = len(x), 0
        self.run("begin", "router", "experts_up", "experts_down", "combine", rows=rows or len(x))
        return self.read("x", len(x))

    def capture(self, *ops, rows):
        """The ops as a graph that can be launched."""
        mode = driver().CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        call("cuStreamBeginCapture", self.stream, mode)
        try:
            self.run(*ops, rows=rows)
        finally:
            graph = call("cuStreamEndCapture", self.stream)
        return call("cuGraphInstantiate", graph, 0)

    def launch(self, graph):
        call("cuGraphLaunch", graph, self.stream)
