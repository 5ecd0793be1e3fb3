"""The GPU: its context, its memory, and steps as graphs. The only importer of cuda.bindings, when a GPU is wanted.

Uses only what is the same in cuda-python 12 and 13. Everything runs in the primary context, which the library's own
CUDA runtime shares, on one stream that does not wait for the legacy one.
"""

import contextlib
import ctypes
import functools
import itertools
import math
import mmap
import os
import re
import sys
import threading
import time
from collections import namedtuple

import numpy as np

from colibri.errors import ColibriError
from colibri.graphs import MAX_NODES, GraphCache
from colibri.headers import default, format_of, in_mask
from colibri.weights import usable_processors

ARCHITECTURES = (80, 86, 89, 90, 100, 120)  # what the Makefile builds for
COPY_THREADS = 8                             # that read the model's file for the device, at most ...
CHUNK_BYTES = 2 << 20                        # ... each through two chunks of this size ...
PART_BYTES = 1 << 30                         # ... so much at a time
GRAPH_BYTES = 64 << 20                       # what graphs may take of the device's memory, an estimate
MAX_COMBINATIONS = MAX_NODES // 16           # graphs to make ahead: each has some ten nodes, and all are to stay
PROBE_BYTES = 256 << 20                      # more than the caches hold

Gpu = namedtuple("Gpu", "handle name capability driver_version num_bytes seconds")


@functools.cache
def driver():
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise ColibriError(f"cuda-python: {error}, expected cuda.bindings; run pip install cuda-python") from None
    return driver


def call(name, *arguments):
    """One driver call: what it returns beside the status, alone or as a tuple."""
    status, *values = _status(name, *arguments)
    if status != driver().CUresult.CUDA_SUCCESS:
        raise ColibriError(f"GPU: {name}={status.name}, expected CUDA_SUCCESS; see python -m colibri.run --doctor")
    return values[0] if len(values) == 1 else tuple(values)


def _status(name, *arguments):
    try:
        return getattr(driver(), name)(*arguments)
    except ValueError as error:
        raise new_status(name, error) from None


def new_status(name, error):
    """Of a driver that is newer than cuda-python."""
    return ColibriError(f"GPU: {name}: {error}, expected CUDA_SUCCESS; pip install -U cuda-python names it")


def attribute(handle, name):
    return call("cuDeviceGetAttribute", getattr(driver().CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}"), handle)


@functools.cache
def gpu():
    """The first GPU, ready to be used. seconds: what getting there took, {"cuda import": ..., "cuInit": ...}."""
    start = time.perf_counter()
    result = driver().CUresult
    imported = time.perf_counter()
    # Kernels are loaded with the library, not at their first launch: that would be a pause in the middle of a run.
    os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")
    try:
        status, = _status("cuInit", 0)
    except RuntimeError as error:
        found = "not one of a driver" if "cuGetProcAddress" in str(error) else "not found"
        raise ColibriError(f"NVIDIA driver: libcuda.so {found}, expected NVIDIA's; install it, or run with "
                           "--backend host") from None
    if status == result.CUDA_ERROR_NO_DEVICE:
        raise ColibriError("GPU: none, expected one that the driver shows; look at nvidia-smi and CUDA_VISIBLE_DEVICES")
    if status != result.CUDA_SUCCESS:
        raise ColibriError(f"NVIDIA driver: cuInit={status.name}, expected CUDA_SUCCESS; look at nvidia-smi and dmesg, "
                           "and restart after a driver's update")
    handle = call("cuDeviceGet", 0)
    seconds = {"cuda import": imported - start, "cuInit": time.perf_counter() - imported}
    name = call("cuDeviceGetName", 100, handle).split(b"\0")[0].decode(errors="replace")
    capability = tuple(attribute(handle, f"COMPUTE_CAPABILITY_{part}") for part in ("MAJOR", "MINOR"))
    return Gpu(handle, name, capability, call("cuDriverGetVersion"), call("cuDeviceTotalMem", handle), seconds)


def arch():
    """What the Makefile's ARCH must be for this GPU: "sm_90"."""
    major, minor = gpu().capability
    fitting = [arch for arch in ARCHITECTURES if arch // 10 == major and arch % 10 <= minor]
    if not fitting:
        raise ColibriError(f"GPU: {gpu().name} of compute capability {major}.{minor}, expected one of "
                           f"{', '.join(f'{arch / 10:.1f}' for arch in ARCHITECTURES)}; run with --backend host")
    return f"sm_{max(fitting)}"


def memory_info():
    """(free, total) bytes of the GPU's memory."""
    context = call("cuDevicePrimaryCtxRetain", gpu().handle)
    try:
        call("cuCtxSetCurrent", context)
        return call("cuMemGetInfo")
    finally:
        call("cuDevicePrimaryCtxRelease", gpu().handle)


def check_weights(checkpoint):
    """Checks that the kernels can be built for a model's weights."""
    names = {code: name for name, code in default().codes("DTYPE").items()}
    experts, dense = (names[format_of(kind, checkpoint.header)] for kind in ("expert_t", "dense_t"))
    fix = "convert the model with --dtype bf16, or run it with --backend host"
    for field, dtype in (("expert_dtype", experts), ("dense_dtype", dense)):
        if dtype == "f32":
            field = field if checkpoint.header[field] else "weight_dtype"
            raise ColibriError(f"{checkpoint.path}: {field}=f32, expected f16 or bf16 on a GPU; {fix}")
    if experts != dense:
        raise ColibriError(f"{checkpoint.path}: experts in {experts} and dense matrices in {dense}, expected one dtype "
                           f"on a GPU; {fix}")


def check_library(library):
    """That this GPU and its driver can run the library's kernels."""
    path = library.path(library.headers.constants["COLIBRI_CUDA"]).decode()  # fails in a host library, with the reason
    built, (major, minor) = library.baked["cuda_arch"], gpu().capability
    if built // 10 != major or built % 10 > minor:
        raise ColibriError(f"{library.file}: sm_{built}, expected kernels for {gpu().name}, which is {arch()}; build with "
                           f"make ARCH={arch()}")
    needed, version = int(re.search(r"CUDA (\d+)", path)[1]), gpu().driver_version
    if version // 1000 < needed:
        raise ColibriError(f"NVIDIA driver: CUDA {version // 1000}.{version // 10 % 100}, expected {needed}.0 or newer for "
                           f"{library.file}; update the driver, or build with an older nvcc")


class Opening:
    """The GPU's context, which a thread opens: a tenth of a second, in which the library can be loaded.

    chunks: uint8 (threads, 2, CHUNK_BYTES), through which the weights will go to the device
    """

    def __init__(self):
        self._started, self._ended = time.perf_counter(), None
        self._context = self._error = None
        self.chunks = np.empty((min(COPY_THREADS, usable_processors()), 2, CHUNK_BYTES), np.uint8)
        self._thread = threading.Thread(target=self._open)
        try:
            self._thread.start()
        except RuntimeError:
            raise ColibriError("GPU: no thread to open its context with, expected one more; raise the limit of "
                               "processes (ulimit -u)") from None

    def _open(self):
        try:
            self._context = call("cuDevicePrimaryCtxRetain", gpu().handle)
        except BaseException as error:  # noqa: BLE001 - raised again by context()
            self._error = error
        self._ended = time.perf_counter()

    def elapsed(self):
        """Seconds that it has taken until now."""
        return (self._ended or time.perf_counter()) - self._started

    def context(self):
        """Waits for it, and makes it this thread's."""
        self.chunks[:, :, ::mmap.PAGESIZE] = 0  # page-locking is then quick: the pages are there
        self._thread.join()
        if self._error:
            raise self._error
        call("cuCtxSetCurrent", self._context)
        return self._context

    def close(self):
        """Gives it back."""
        self._thread.join()
        if self._context is not None:
            self._context = None
            with contextlib.suppress(ColibriError):
                call("cuDevicePrimaryCtxRelease", gpu().handle)


class Graph:
    """An executable graph on a stream."""

    def __init__(self, graph, stream):
        try:
            self.num_nodes = call("cuGraphGetNodes", graph)[1]
            self._executable = call("cuGraphInstantiate", graph, 0)
        finally:
            call("cuGraphDestroy", graph)
        self._start, self._stream, self._success = driver().cuGraphLaunch, stream, driver().CUresult.CUDA_SUCCESS

    def launch(self):
        try:
            status = self._start(self._executable, self._stream)[0]
        except ValueError as error:
            raise new_status("cuGraphLaunch", error) from None
        if status is not self._success:
            raise ColibriError(f"GPU: cuGraphLaunch={status.name}, expected CUDA_SUCCESS; "
                               "see python -m colibri.run --doctor")

    def destroy(self):
        call("cuStreamSynchronize", self._stream)  # it may still be running
        call("cuGraphExecDestroy", self._executable)


class DeviceMemory:
    """Where a model lives and how its steps run, on a GPU. The members are described in colibri.weights.HostMemory.

    opening:  of its context
    dispatch: "device": one graph a size, whose kernels read the routing where they are
              "combo": for a single token, one graph a layer and combination of experts, chosen on the host
              "dynamic": no graphs, every kernel launched by itself
    """

    def __init__(self, library, opening, dispatch=None):
        self.dispatch = dispatch or "device"
        self.code = library.headers.constants["COLIBRI_CUDA"]
        self.seconds, self.overlap = dict(gpu().seconds), opening.elapsed()
        gpu().seconds.clear()  # of a process they are parts of one start
        self._library, self._device_blocks, self._pinned, self._registered = library, [], [], []
        self._graphed = {id(library.forward), id(library.forward_stack)}  # ctypes functions have no hash
        self._buckets = buckets(library.headers.constants["MAX_TOKENS"])
        self._steps, self._bytes, self._routing, self._staging = 0, {}, {}, None
        self._opening, self._chunks = opening, opening.chunks
        self._context = self._stream = self._thread = None
        self.graphs = GraphCache(self._capture)

    def _open(self):
        self.seconds["context"] = self.overlap
        with self._timed("context"):
            self._context, self._thread = self._opening.context(), threading.current_thread()
            with contextlib.suppress(ColibriError):  # where page-locking is refused, copies are slower, and that is all
                self.pin(self._chunks)
        self._stream = call("cuStreamCreate", driver().CUstream_flags.CU_STREAM_NON_BLOCKING)
        self.stream = int(self._stream)
        self._capture_mode = driver().CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL

    @contextlib.contextmanager
    def _timed(self, name):
        start = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0) + time.perf_counter() - start

    def reserve(self, parts):
        """Opens, and checks that what will be allocated fits. parts: {"weights": bytes, ...}; graphs come on top."""
        self._open()
        free, _ = call("cuMemGetInfo")
        self._bytes = {**parts, "graphs": GRAPH_BYTES}
        needed = sum(self._bytes.values())
        if needed > free:
            listed = ", ".join(f"{name} {size / 2**30:.2f}" for name, size in self._bytes.items())
            raise ColibriError(f"GPU memory: {needed / 2**30:.2f} GiB needed ({listed}), {free / 2**30:.2f} GiB free; lower "
                               "--batch-size or MAX_SEQ_LEN, end other processes on the GPU, or run with --backend host")

    def weights(self, checkpoint):
        """All tensors in one block, laid out as in the file."""
        addresses = {name: view.ctypes.data for name, view in checkpoint.tensors.items()}
        first = min(addresses.values())
        size = max(view.ctypes.data + view.nbytes for view in checkpoint.tensors.values()) - first
        block = self._allocate(size)
        with self._timed("kernels"):
            self._upload(0, 0, 0)  # the CUDA runtime loads them at its first call
        with self._timed("weights"):
            for offset, count in parts(size):
                self._upload(block + offset, first + offset, count)
        self._unpin(self._chunks)
        self._chunks, self._copied = None, size
        return {name: block + address - first for name, address in addresses.items()}

    def _upload(self, target, source, num_bytes):
        self._library.upload(target, source, num_bytes, self._chunks.ctypes.data, CHUNK_BYTES, len(self._chunks),
                             self.stream)

    def state(self, num_bytes):
        block = self._allocate(num_bytes)
        call("cuMemsetD8Async", block, 0, num_bytes, self._stream)
        call("cuStreamSynchronize", self._stream)
        return block

    def batch(self, num_bytes):
        """Page-locked and mapped, so that kernels read it where the host writes it."""
        array = self._allocate_pinned(num_bytes)
        array[:] = 0
        return array

    def visible(self, array):
        """The array's own address if it is pinned, or else that of a page-locked copy, the same one each time."""
        self._enter()
        start = array.ctypes.data
        if not any(0 <= start - pinned.ctypes.data <= pinned.nbytes - array.nbytes for pinned in self._registered):
            if self._staging is None or self._staging.nbytes < array.nbytes:
                self._staging = self._allocate_pinned(1 << (array.nbytes - 1).bit_length())
            self._staging[:array.nbytes] = array.view(np.uint8).reshape(-1)
            start = self._staging.ctypes.data
        return int(call("cuMemHostGetDevicePointer", start, 0))

    def pin(self, array):
        """Page-locks and maps a C-contiguous array that its owner keeps until close(), so that kernels read it there."""
        self._enter()
        flags = 0 if array.flags.writeable else driver().CU_MEMHOSTREGISTER_READ_ONLY
        call("cuMemHostRegister", array.ctypes.data, array.nbytes, flags | driver().CU_MEMHOSTREGISTER_DEVICEMAP)
        self._registered.append(array)
        return array

    def _unpin(self, array):
        if any(array is pinned for pinned in self._registered):
            call("cuMemHostUnregister", array.ctypes.data)
            self._registered = [pinned for pinned in self._registered if pinned is not array]

    def launch(self, function, model, *sizes):
        self._enter()
        self._steps += 1
        if id(function) not in self._graphed:
            function(model, *sizes)
            return
        sizes = [self._buckets[size] for size in sizes]
        if self.dispatch == "dynamic":
            function(model, *sizes)
        elif self.dispatch == "combo" and sizes[0] == 1:
            self._launch_combinations(model, *sizes)
        else:
            self.graphs.get_or_create((id(function), model, *sizes), functools.partial(function, model, *sizes))

    def _enter(self):
        """Makes the context this thread's, where another had it."""
        if threading.current_thread() is not self._thread:  # an ended thread's number may be another's now
            self._thread = threading.current_thread()
            call("cuCtxSetCurrent", self._context)

    def _launch_combinations(self, model, num_tokens, num_logits=0):
        """A step in parts, cut where a layer has its router: the experts that it chose name the graph of the next part."""
        if model not in self._routing:
            self._routing[model] = self._find_routing(model)
        ids, address, has_router = self._routing[model]
        for part in range(len(has_router)):
            chosen = ()
            if has_router[part]:
                call("cuMemcpyDtoHAsync", ids.ctypes.data, address, ids.nbytes, self._stream)
                self.sync()
                chosen = tuple(sorted(ids.tolist()))
            enqueue = functools.partial(self._library.forward_part, model, num_tokens, num_logits, part)
            self.graphs.get_or_create((model, num_logits, part, chosen), enqueue)

    def _find_routing(self, model):
        """A page-locked copy of expert_ids' first row, its address on the device, and whether a part begins with the
        experts that the part before it chose: the first does not, nor does one after a layer without a router."""
        ids = self._allocate_pinned(4 * self._library.baked["k"]).view(np.int32)
        return ids, int(self._fields(model)["state"]["expert_ids"]), self._has_router(model)

    def _has_router(self, model):
        header = self._fields(model)["header"]
        return [False] + [not in_mask(header["dense_layers"], layer) for layer in range(int(header["num_layers"]))]

    def _fields(self, model):
        """struct Model at that address."""
        struct = self._library.headers.structs["Model"]
        return np.frombuffer((ctypes.c_char * struct.itemsize).from_address(model), struct)[0]

    def precapture(self, model):
        """Makes every graph of decoding ahead: of each batch size, or of each layer and combination of experts."""
        self._enter()
        forward, baked = self._library.forward, self._library.baked
        if baked["vocab_size"] == 0 or self.dispatch == "dynamic":
            return
        if self.dispatch == "device":
            for size in sorted({self._buckets[size] for size in range(1, baked["max_batch"] + 1)}):
                self.graphs.create((id(forward), model, size, size), functools.partial(forward, model, size, size))
            return
        has_router = self._has_router(model)
        count = math.comb(baked["num_experts"], baked["k"]) * sum(has_router)
        if count > MAX_COMBINATIONS:
            raise ColibriError(f"--precapture: {count} graphs of combinations of experts, expected at most "
                               f"{MAX_COMBINATIONS}; leave it out, and each is made at its first sight")
        for part, has in enumerate(has_router):
            enqueue = functools.partial(self._library.forward_part, model, 1, 1, part)
            for chosen in itertools.combinations(range(baked["num_experts"]), baked["k"]) if has else [()]:
                self.graphs.create((model, 1, part, chosen), enqueue)

    def _capture(self, enqueue):
        call("cuStreamBeginCapture", self._stream, self._capture_mode)
        try:
            enqueue()
        except BaseException:
            with contextlib.suppress(ColibriError):
                call("cuGraphDestroy", call("cuStreamEndCapture", self._stream))
            raise
        status, graph = _status("cuStreamEndCapture", self._stream)
        if status != driver().CUresult.CUDA_SUCCESS:
            raise ColibriError(f"GPU: cuStreamEndCapture={status.name}, expected CUDA_SUCCESS; "
                               "run with --dispatch dynamic")
        return Graph(graph, self._stream)

    def sync(self):
        status = _status("cuStreamSynchronize", self._stream)[0]
        if status is not driver().CUresult.CUDA_SUCCESS:
            raise ColibriError(f"GPU: step {self._steps}: {status.name}, expected CUDA_SUCCESS; run again with --dispatch "
                               "dynamic and CUDA_LAUNCH_BLOCKING=1 in the environment to see its layer and op")

    def read(self, address, shape, dtype):
        self._enter()
        array = np.empty(shape, dtype)
        if array.nbytes:
            call("cuMemcpyDtoH", array.ctypes.data, address, array.nbytes)
        return array

    def write(self, address, array):
        self._enter()
        call("cuMemcpyHtoDAsync", address, array.ctypes.data, array.nbytes, self._stream)

    def close(self):
        """Frees everything; after a device error the context is lost, and its memory with it."""
        if self._context is not None:
            for free, *arguments in self._held():
                with contextlib.suppress(ColibriError):
                    free(*arguments)
        self._opening.close()

    def _held(self):
        """(function that frees it, arguments) for all that it holds."""
        yield call, "cuCtxSetCurrent", self._context
        yield self.graphs.close,
        for array in self._registered:
            yield call, "cuMemHostUnregister", array.ctypes.data
        for block in self._device_blocks:
            yield call, "cuMemFree", block
        for address in self._pinned:
            yield call, "cuMemFreeHost", address
        if self._stream is not None:
            yield call, "cuStreamDestroy", self._stream

    def read_bandwidth(self, checkpoint, threads):
        """Of a copy within the device's memory, bytes read and bytes written counted alike."""
        self._enter()
        with temporary(PROBE_BYTES) as source, temporary(PROBE_BYTES) as target:
            call("cuMemsetD8Async", source, 0x5a, PROBE_BYTES, self._stream)
            copy = functools.partial(call, "cuMemcpyDtoDAsync", target, source, PROBE_BYTES, self._stream)
            return 2 * PROBE_BYTES / elapsed(copy, self._stream)

    def pinned_rate(self):
        """Bytes a second from page-locked host memory to the device, measured now."""
        size = PROBE_BYTES // 8
        source = call("cuMemHostAlloc", size, 0)
        try:
            with temporary(size) as target:
                return size / elapsed(functools.partial(call, "cuMemcpyHtoDAsync", target, source, size, self._stream),
                                      self._stream)
        finally:
            call("cuMemFreeHost", source)

    def usage(self):
        self._enter()
        free, total = call("cuMemGetInfo")
        return {"bytes": {**{name.replace(" ", "_"): size for name, size in self._bytes.items()},
                          "used": total - free, "total": total}, "graphs": self.graphs.statistics()}

    def figures(self):
        usage = self.usage()
        mib = {name: size / 2**20 for name, size in usage["bytes"].items()}
        return {"device": {
            "name": gpu().name, "dispatch": self.dispatch, "graphs": usage["graphs"],
            "used_mib": mib.pop("used"), "total_mib": mib.pop("total"), "memory_mib": mib,
            "weights_gb_per_s": self._copied / self.seconds["weights"] / 1e9, "pinned_gb_per_s": self.pinned_rate() / 1e9}}

    def _allocate(self, num_bytes):
        self._device_blocks.append(int(call("cuMemAlloc", num_bytes)))
        return self._device_blocks[-1]

    def _allocate_pinned(self, num_bytes):
        self._pinned.append(int(call("cuMemHostAlloc", num_bytes, driver().CU_MEMHOSTALLOC_DEVICEMAP)))
        return host_array(self._pinned[-1], num_bytes)


def buckets(max_tokens):
    """What a step of n tokens is launched for, as a list by n: the next power of two, at most max_tokens."""
    return [0] + [min(1 << math.ceil(math.log2(size)), max_tokens) for size in range(1, max_tokens + 1)]


def host_array(address, num_bytes):
    return np.frombuffer((ctypes.c_uint8 * num_bytes).from_address(address), np.uint8)


@contextlib.contextmanager
def temporary(num_bytes):
    block = call("cuMemAlloc", num_bytes)
    try:
        yield int(block)
    finally:
        call("cuMemFree", block)


def elapsed(enqueue, stream, repeat=3):
    """The best of some runs of enqueue(), in seconds on the device."""
    start, end = call("cuEventCreate", 0), call("cuEventCreate", 0)
    seconds = []
    for _ in range(repeat + 1):
        call("cuEventRecord", start, stream)
        enqueue()
        call("cuEventRecord", end, stream)
        call("cuEventSynchronize", end)
        seconds.append(call("cuEventElapsedTime", start, end) / 1e3)
    for event in (start, end):
        call("cuEventDestroy", event)
    return min(seconds[1:])


def parts(num_bytes):
    """(offset, bytes) of each PART_BYTES, with a progress bar on a terminal when they take longer than a second."""
    parts = [(offset, min(PART_BYTES, num_bytes - offset)) for offset in range(0, num_bytes, PART_BYTES)]
    if len(parts) < 2 or not sys.stderr.isatty():
        return parts
    from tqdm import tqdm
    return tqdm(parts, delay=1, leave=False, desc="weights", unit="GiB")
