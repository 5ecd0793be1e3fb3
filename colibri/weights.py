"""Checkpoint views -> host or device memory, and the pointer structs that C reads."""

import contextlib
import glob
import math
import mmap
import os
import re
import time
import weakref
from pathlib import Path

import numpy as np

from colibri.errors import ColibriError, between

PROBE_BYTES = 64 << 20, 512 << 20  # least and most: four times what the largest cache holds, between these
PROBE_SECONDS = 0.2
MAX_THREADS = 256
THREADS_PER_PROCESSOR = 4  # at most
CGROUPS = "/sys/fs/cgroup"


class HostMemory:
    """Holds a model and runs its steps, on the host: the one seam between backends.

    colibri.device.DeviceMemory has the same members, and the engine uses no others:
      code      COLIBRI_HOST or COLIBRI_CUDA, as colibri_bind takes it
      stream    what colibri_bind takes: None, or the CUstream as an int
      available()           -> bytes of memory for weights, caches and workspaces; asked once, before reserve()
      reserve(parts)        checks, before anything is allocated, that {"weights": bytes, "KV cache": ...} fit
      weights(checkpoint)   -> {tensor name: address} for every tensor of checkpoint.tensors
      state(num_bytes)      -> address of a zeroed block, aligned to 4096 bytes
      batch(num_bytes)      -> writable uint8 array; its address must serve the backend's kernels too
      launch(function, model, *sizes)  starts function(model, *sizes), a step of the library; the sizes are
                            (num_tokens, num_logits) or (num_tokens,), true numbers that a backend may round up
      sync()                waits until the step is done, so that batch and state can be read
      read(address, shape, dtype)  -> array with what lies there, valid until the next step
      write(address, array) puts a C-contiguous array there
      visible(array)        -> address at which a step reads a C-contiguous array; the array stays as it is until sync()
      pin(array)            page-locks a caller's array, until close(), for visible() to name it as it lies; returns it
      precapture(model)     makes a GPU's graphs for decoding ahead; an error on the host
      close()               gives everything back; nothing is used afterwards
      read_bandwidth(checkpoint, threads)  -> bytes a second that this memory can be read with, measured now
      figures()             -> what a run's figures say about this memory, {} or {"device": {...}}
      usage()               -> what a server watches, {} or {"bytes": {use: bytes}, "graphs": GraphCache.statistics()}
      seconds               what opening took, {part of a cold start: seconds}
      overlap               seconds of those that passed while the library was loaded
    """

    stream, overlap = None, 0.0

    def __init__(self, library):
        self._library = library
        self.code = library.headers.constants["COLIBRI_HOST"]
        self._state, self.seconds = None, {}

    def available(self):
        return available_bytes() * 15 // 16

    def reserve(self, parts):
        pass

    def weights(self, checkpoint):
        return {name: view.ctypes.data for name, view in checkpoint.tensors.items()}

    def state(self, num_bytes):
        self._state = _block(num_bytes)
        weakref.finalize(self._state, self._library.rest)
        self._start = self._state.ctypes.data
        return self._start

    def batch(self, num_bytes):
        return _block(num_bytes)

    def launch(self, function, model, *sizes):
        function(model, *sizes)

    def sync(self):
        pass

    def read(self, address, shape, dtype):
        """Returns a writable array that keeps the state block alive, also after close()."""
        dtype, start = np.dtype(dtype), address - self._start
        return self._state[start:start + math.prod(shape) * dtype.itemsize].view(dtype).reshape(shape)

    def write(self, address, array):
        self.read(address, array.shape, array.dtype)[...] = array

    def visible(self, array):
        return array.ctypes.data

    def pin(self, array):
        return array

    def precapture(self, model):
        needs_gpu("--precapture", "given")

    def close(self):
        self._state = None

    def read_bandwidth(self, checkpoint, threads):
        """Best of five passes, or of those that fit the time, over the mapped model, or a buffer if that is smaller."""
        size = min(max(4 * largest_cache_bytes(), PROBE_BYTES[0]), PROBE_BYTES[1])
        data = checkpoint.data[:size] if len(checkpoint.data) >= size else np.ones(size, np.uint8)
        seconds = []
        while len(seconds) < 6 and (len(seconds) < 2 or sum(seconds) < PROBE_SECONDS):
            start = time.perf_counter()
            self._library.read_sum(data.ctypes.data, size, threads)
            seconds.append(time.perf_counter() - start)
        return size / min(seconds[1:])  # the first one faults the pages in

    def figures(self):
        return {}

    def usage(self):
        return {}


def _block(num_bytes):
    """Zero pages of a private anonymous mapping: what is never touched, as most of a KV cache, costs nothing."""
    try:
        return np.frombuffer(mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)
    except OSError as error:
        raise ColibriError("memory", f"{num_bytes / 2**30:.2f} GiB of state: {error.strerror}",
                           fix="use fewer sessions at once (num_slots, --batch-size) or a shorter --context") from None


def largest_cache_bytes():
    """Returns the size of the first processor's largest cache; 0 where the kernel does not tell."""
    sizes = [0]
    for path in glob.glob("/sys/devices/system/cpu/cpu0/cache/index*/size"):
        with open(path) as file:
            sizes.append(int(file.read().strip().removesuffix("K")) << 10)
    return max(sizes)


def needs_gpu(option, given, why=""):
    because = f" ({why})" if why else ""
    raise ColibriError(option, given, f"only on a GPU, and this runs on the host{because}",
                       "leave it out, or see python -m colibri.run --doctor")


def pointers(checkpoint, addresses, structs):
    """struct Weights and struct Layer[num_layers] as structured arrays of addresses and scales; NULL if absent.

    structs: numpy dtypes by name (Headers.structs). Keep both arrays for as long as the model is in use.
    """
    values = {**addresses, **{f"{name}_scale": scale for name, scale in checkpoint.scales.items()}}
    layers = np.zeros(checkpoint.header["num_layers"], structs["Layer"])
    for index, layer in enumerate(layers):
        for name in layer.dtype.names:
            layer[name] = values.get(f"layers.{index}.{name}", 0)
    weights = np.zeros(1, structs["Weights"])
    for name in weights.dtype.names:
        weights[name] = values.get(name, 0)
    if checkpoint.header["tied_embeddings"]:
        weights["lm_head"], weights["lm_head_scale"] = weights["embed"], weights["embed_scale"]
    weights["layers"] = layers.ctypes.data
    return weights, layers


def usable_processors():
    """Processors that this process may use: its affinity, and a container's quota where there is one."""
    count = len(os.sched_getaffinity(0))
    try:
        with open("/sys/fs/cgroup/cpu.max") as file:
            quota, period = file.read().split()
        return count if quota == "max" else max(1, min(count, -(-int(quota) // int(period))))
    except (OSError, ValueError):
        return count


def available_bytes():
    """Returns what memory this process may still take: what the kernel calls available, or its cgroups leave."""
    with open("/proc/meminfo") as file:
        left = [int(line.split()[1]) << 10 for line in file if line.startswith("MemAvailable:")]
    try:
        with open("/proc/self/cgroup") as file:
            path = next(line.strip()[3:] for line in file if line.startswith("0::"))
    except (OSError, StopIteration):
        return min(left)
    own, root = Path(CGROUPS, path.strip("/")), Path(CGROUPS)
    for group in (own, *own.parents):
        if group == root or root in group.parents:
            with contextlib.suppress(OSError, ValueError, TypeError):  # the root has no limit, a limit may be "max"
                limit = int((group / "memory.max").read_text())
                used = re.search(r"^anon (\d+)$", (group / "memory.stat").read_text(), re.MULTILINE)
                left.append(max(0, limit - int(used[1])))
    return min(left)


def check_threads(threads):
    """Returns the number of threads, or the default for None."""
    return between("threads", threads, min(usable_processors(), MAX_THREADS), 1, most_threads())


def most_threads():
    """More would be slower, and could leave no room for another's stack."""
    return min(MAX_THREADS, THREADS_PER_PROCESSOR * usable_processors())
