"""The GPU: calls of the driver, what the first GPU is, its context, its stream, and memory there and page-locked here.

The only importer of cuda.bindings, when a GPU is wanted. Uses what is the same in cuda-python 12 and 13. Everything
runs in the primary context, which the library's own CUDA runtime shares, on one stream that does not wait for the
legacy one.
"""

import contextlib
import ctypes
import functools
import mmap
import os
import threading
import time
from collections import namedtuple

import numpy as np

from colibri.errors import ColibriError
from colibri.headers import default, form_of, is_few
from colibri.weights import usable_processors

ARCHITECTURES = (80, 86, 89, 90, 100, 120)  # what the Makefile builds for
COPY_THREADS = 8                             # that read the model's file for the device, at most ...
CHUNK_BYTES = 2 << 20                        # ... each through two chunks of this size

Properties = namedtuple("Properties", "handle name capability driver_version num_bytes seconds")


@functools.cache
def driver():
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise ColibriError("cuda-python", error, "cuda.bindings", "run pip install cuda-python") from None
    return driver


def call(name, *arguments):
    """One driver call: what it returns beside the status, alone or as a tuple."""
    status, *values = try_call(name, *arguments)
    if status != driver().CUresult.CUDA_SUCCESS:
        raise ColibriError("GPU", f"{name}={status.name}", "CUDA_SUCCESS", "see python -m colibri.run --doctor")
    return values[0] if len(values) == 1 else tuple(values)


def try_call(name, *arguments):
    """One driver call: (status, ...) as it returns them."""
    try:
        return getattr(driver(), name)(*arguments)
    except ValueError as error:
        raise new_status(name, error) from None


def new_status(name, error):
    """Returns the error of a status that is newer than cuda-python."""
    return ColibriError("GPU", f"{name}: {error}", "CUDA_SUCCESS", "pip install -U cuda-python names it")


def attribute(handle, name):
    return call("cuDeviceGetAttribute", getattr(driver().CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}"), handle)


@functools.cache
def properties():
    """Returns the first GPU, ready to be used. seconds: what that took, {"cuda import": ..., "cuInit": ...}."""
    start = time.perf_counter()
    result = driver().CUresult
    imported = time.perf_counter()
    # Kernels are loaded with the library, not at their first launch: that would be a pause in the middle of a run.
    os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")
    try:
        status, = try_call("cuInit", 0)
    except RuntimeError as error:
        found = "not one of a driver" if "cuGetProcAddress" in str(error) else "not found"
        raise ColibriError("NVIDIA driver", f"libcuda.so {found}", "NVIDIA's",
                           "install it, or run with --backend host") from None
    if status == result.CUDA_ERROR_NO_DEVICE:
        raise ColibriError("GPU", "none", "one that the driver shows", "look at nvidia-smi and CUDA_VISIBLE_DEVICES")
    if status != result.CUDA_SUCCESS:
        raise ColibriError("NVIDIA driver", f"cuInit={status.name}", "CUDA_SUCCESS",
                           "look at nvidia-smi and dmesg, and restart after a driver's update")
    handle = call("cuDeviceGet", 0)
    seconds = {"cuda import": imported - start, "cuInit": time.perf_counter() - imported}
    name = call("cuDeviceGetName", 100, handle).split(b"\0")[0].decode(errors="replace")
    capability = tuple(attribute(handle, f"COMPUTE_CAPABILITY_{part}") for part in ("MAJOR", "MINOR"))
    return Properties(handle, name, capability, call("cuDriverGetVersion"), call("cuDeviceTotalMem", handle), seconds)


def arch():
    """Returns what the Makefile's ARCH must be for this GPU, such as "sm_90"."""
    major, minor = properties().capability
    fitting = [arch for arch in ARCHITECTURES if arch // 10 == major and arch % 10 <= minor]
    if not fitting:
        raise ColibriError("GPU", f"{properties().name} of compute capability {major}.{minor}",
                           f"one of {', '.join(f'{arch / 10:.1f}' for arch in ARCHITECTURES)}",
                           "run with --backend host")
    return f"sm_{max(fitting)}"


def memory_info():
    """(free, total) bytes of the GPU's memory."""
    context = call("cuDevicePrimaryCtxRetain", properties().handle)
    try:
        call("cuCtxSetCurrent", context)
        return call("cuMemGetInfo")
    finally:
        call("cuDevicePrimaryCtxRelease", properties().handle)


def check_weights(checkpoint):
    """Checks that the kernels can be built for a model's weights."""
    names = {code: name for name, code in default().codes("DTYPE").items()}
    dtypes = {name: form_of(f"{name}_t", checkpoint.header).dtype for name in ("expert", "dense", "embed")}
    fix = "convert the model with --dtype bf16, or run it with --backend host"
    for name, dtype in dtypes.items():
        if names[dtype] == "f32" or is_few(dtype):
            field = f"{name}_dtype" if checkpoint.header[f"{name}_dtype"] else "weight_dtype"
            raise ColibriError(checkpoint.path, f"{field}={names[dtype]}", "f16 or bf16 on a GPU", fix)
    experts, dense, embedding = (names[dtype] for dtype in dtypes.values())
    for what, dtype in (("experts", experts), ("embedding", embedding)):
        if dtype != dense:
            raise ColibriError(checkpoint.path, f"{what} in {dtype} and dense matrices in {dense}",
                               "one dtype on a GPU", fix)


def check_library(library):
    """Checks that this GPU and its driver can run the library's kernels."""
    library.path(library.headers.constants["COLIBRI_CUDA"])  # fails in a host library, with the reason
    built, (major, minor) = library.baked["cuda_arch"], properties().capability
    if built // 10 != major or built % 10 > minor:
        raise ColibriError(library.file, f"sm_{built}", f"kernels for {properties().name}, which is {arch()}",
                           f"build with make ARCH={arch()}")
    needed, version = library.baked["cuda_version"] // 1000, properties().driver_version
    if version // 1000 < needed:
        raise ColibriError("NVIDIA driver", f"CUDA {version // 1000}.{version // 10 % 100}",
                           f"{needed}.0 or newer for {library.file}", "update the driver, or build with an older nvcc")


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
            raise ColibriError("GPU", "no thread to open its context with", "one more",
                               "raise the limit of processes (ulimit -u)") from None

    def _open(self):
        try:
            self._context = call("cuDevicePrimaryCtxRetain", properties().handle)
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
                call("cuDevicePrimaryCtxRelease", properties().handle)


class Gpu:
    """The first GPU while a model uses it: its context, a stream, and what was allocated through it.

    opening: of its context
    seconds: what opening it took, {part of a cold start: seconds}
    overlap: seconds of those that passed before this object was made, while the library was loaded
    chunks:  the opening's, page-locked once the GPU is open, as far as that is possible
    stream:  the CUstream as an int
    """

    def __init__(self, opening):
        self.seconds, self.overlap = dict(properties().seconds), opening.elapsed()
        properties().seconds.clear()  # of a process they are parts of one start
        self.chunks = opening.chunks
        self._opening, self._blocks, self._pinned, self._registered = opening, [], [], []
        self._context = self._stream = self._thread = None

    def open(self):
        """Waits for the context and makes the stream."""
        self.seconds["context"] = self.overlap
        with self.timed("context"):
            self._context, self._thread = self._opening.context(), threading.current_thread()
            with contextlib.suppress(ColibriError):  # where page-locking is refused, copies are slower, and that is all
                self.pin(self.chunks)
        self._stream = call("cuStreamCreate", driver().CUstream_flags.CU_STREAM_NON_BLOCKING)
        self.stream = int(self._stream)

    @contextlib.contextmanager
    def timed(self, name):
        """Adds the block's time to a part of the cold start."""
        start = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0) + time.perf_counter() - start

    def enter(self):
        """Makes the context this thread's, where another had it."""
        if threading.current_thread() is not self._thread:  # an ended thread's number may be another's now
            self._thread = threading.current_thread()
            call("cuCtxSetCurrent", self._context)

    def sync(self, what):
        """Waits for the stream. what: "step 12", for the error of work that failed there."""
        status = try_call("cuStreamSynchronize", self._stream)[0]
        if status is not driver().CUresult.CUDA_SUCCESS:
            raise ColibriError("GPU", f"{what}: {status.name}", "CUDA_SUCCESS",
                               "run again with --dispatch dynamic and CUDA_LAUNCH_BLOCKING=1 in the environment to "
                               "see its layer and op")

    def allocate(self, num_bytes):
        """Returns the address of a block of device memory."""
        self._blocks.append(int(call("cuMemAlloc", num_bytes)))
        return self._blocks[-1]

    def allocate_zeros(self, num_bytes):
        block = self.allocate(num_bytes)
        call("cuMemsetD8Async", block, 0, num_bytes, self._stream)
        call("cuStreamSynchronize", self._stream)
        return block

    def allocate_pinned(self, num_bytes):
        """Returns a uint8 array in page-locked, mapped host memory."""
        self._pinned.append(int(call("cuMemHostAlloc", num_bytes, driver().CU_MEMHOSTALLOC_DEVICEMAP)))
        return host_array(self._pinned[-1], num_bytes)

    def pin(self, array):
        """Page-locks and maps a C-contiguous array, for kernels to read it there. Its owner keeps it until close()."""
        self.enter()
        flags = 0 if array.flags.writeable else driver().CU_MEMHOSTREGISTER_READ_ONLY
        call("cuMemHostRegister", array.ctypes.data, array.nbytes, flags | driver().CU_MEMHOSTREGISTER_DEVICEMAP)
        self._registered.append(array)
        return array

    def unpin(self, array):
        if any(array is pinned for pinned in self._registered):
            call("cuMemHostUnregister", array.ctypes.data)
            self._registered = [pinned for pinned in self._registered if pinned is not array]

    def is_pinned(self, array):
        """Returns whether an array lies within one that pin() was given."""
        start = array.ctypes.data
        return any(0 <= start - pinned.ctypes.data <= pinned.nbytes - array.nbytes for pinned in self._registered)

    def read(self, address, shape, dtype):
        self.enter()
        array = np.empty(shape, dtype)
        if array.nbytes:
            call("cuMemcpyDtoH", array.ctypes.data, address, array.nbytes)
        return array

    def read_later(self, array, address):
        """Fills a page-locked array when the stream gets there."""
        call("cuMemcpyDtoHAsync", array.ctypes.data, address, array.nbytes, self._stream)

    def write(self, address, array):
        self.enter()
        call("cuMemcpyHtoDAsync", address, array.ctypes.data, array.nbytes, self._stream)

    def close(self, first):
        """Calls first(), then frees everything; after a device error the context is lost, and its memory with it."""
        if self._context is not None:
            free = functools.partial(functools.partial, call)
            for step in (free("cuCtxSetCurrent", self._context), first, *(free(*held) for held in self._held())):
                with contextlib.suppress(ColibriError):
                    step()
        self._opening.close()

    def _held(self):
        """(driver call that frees it, argument) for all that it holds."""
        for array in self._registered:
            yield "cuMemHostUnregister", array.ctypes.data
        for block in self._blocks:
            yield "cuMemFree", block
        for address in self._pinned:
            yield "cuMemFreeHost", address
        if self._stream is not None:
            yield "cuStreamDestroy", self._stream

    def copy_rate(self, num_bytes):
        """Bytes a second of a copy within the device's memory, those read and those written counted alike."""
        self.enter()
        with temporary(num_bytes) as source, temporary(num_bytes) as target:
            call("cuMemsetD8Async", source, 0x5a, num_bytes, self._stream)
            copy = functools.partial(call, "cuMemcpyDtoDAsync", target, source, num_bytes, self._stream)
            return 2 * num_bytes / elapsed(copy, self._stream)

    def pinned_rate(self, num_bytes):
        """Bytes a second from page-locked host memory to the device, measured now."""
        self.enter()
        source = call("cuMemHostAlloc", num_bytes, 0)
        try:
            with temporary(num_bytes) as target:
                copy = functools.partial(call, "cuMemcpyHtoDAsync", target, source, num_bytes, self._stream)
                return num_bytes / elapsed(copy, self._stream)
        finally:
            call("cuMemFreeHost", source)


def host_array(address, num_bytes):
    """Returns the uint8 array of what lies there."""
    return np.frombuffer((ctypes.c_uint8 * num_bytes).from_address(address), np.uint8)


@contextlib.contextmanager
def temporary(num_bytes):
    block = call("cuMemAlloc", num_bytes)
    try:
        yield int(block)
    finally:
        call("cuMemFree", block)


def elapsed(enqueue, stream, repeat=3):
    """Returns the best of some runs of enqueue(), in seconds on the device."""
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
