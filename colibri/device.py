"""A model on a GPU: its weights, its state and what its steps read and write there."""

import functools
import sys

from colibri.errors import ColibriError
from colibri.gpu import CHUNK_BYTES, Gpu, call, properties
from colibri.launch import Launcher

PART_BYTES = 1 << 30    # of the weights, that go to the device at a time
GRAPH_BYTES = 64 << 20  # what graphs may take of the device's memory, an estimate
PROBE_BYTES = 256 << 20  # more than the caches hold


class DeviceMemory:
    """Holds a model on a GPU and runs its steps. The members are described in colibri.weights.HostMemory.

    opening:  of the GPU's context
    dispatch: how steps are launched, see colibri.launch.Launcher; None: "device"
    """

    def __init__(self, library, opening, dispatch=None):
        self.code = library.headers.constants["COLIBRI_CUDA"]
        self.gpu = Gpu(opening)
        self.launcher = Launcher(self.gpu, library, dispatch or "device")
        self.seconds, self.overlap = self.gpu.seconds, self.gpu.overlap
        self.launch, self.sync, self.precapture = self.launcher.launch, self.launcher.sync, self.launcher.precapture
        self.read, self.write, self.pin = self.gpu.read, self.gpu.write, self.gpu.pin
        self._library, self._bytes, self._staging = library, {}, None

    @property
    def stream(self):
        return self.gpu.stream

    def available(self):
        """Opens the GPU. Returns what is free there but for graphs and a margin."""
        self.gpu.open()
        free, _ = call("cuMemGetInfo")
        return free - GRAPH_BYTES - free // 64

    def reserve(self, parts):
        """Checks that what will be allocated fits. parts: {"weights": bytes, ...}; graphs come on top."""
        free, _ = call("cuMemGetInfo")
        self._bytes = {**parts, "graphs": GRAPH_BYTES}
        needed = sum(self._bytes.values())
        if needed > free:
            listed = ", ".join(f"{name} {size / 2**30:.2f}" for name, size in self._bytes.items())
            raise ColibriError("GPU memory",
                               f"{needed / 2**30:.2f} GiB needed ({listed}), {free / 2**30:.2f} GiB free",
                               fix="lower --batch-size or --context, end other processes on the GPU, or run with "
                                   "--backend host")

    def weights(self, checkpoint):
        """All tensors in one block, laid out as in the file."""
        addresses = {name: view.ctypes.data for name, view in checkpoint.tensors.items()}
        first = min(addresses.values())
        size = max(view.ctypes.data + view.nbytes for view in checkpoint.tensors.values()) - first
        block, chunks = self.gpu.allocate(size), self.gpu.chunks
        upload = functools.partial(self._upload, chunks)
        with self.gpu.timed("kernels"):
            upload(0, 0, 0)  # the CUDA runtime loads them at its first call
        with self.gpu.timed("weights"):
            for offset, count in parts(size):
                upload(block + offset, first + offset, count)
        self.gpu.unpin(chunks)
        self.gpu.chunks, self._copied = None, size
        return {name: block + address - first for name, address in addresses.items()}

    def _upload(self, chunks, target, source, num_bytes):
        self._library.upload(target, source, num_bytes, chunks.ctypes.data, CHUNK_BYTES, len(chunks), self.stream)

    def state(self, num_bytes):
        return self.gpu.allocate_zeros(num_bytes)

    def batch(self, num_bytes):
        """Page-locked and mapped, so that kernels read it where the host writes it."""
        array = self.gpu.allocate_pinned(num_bytes)
        array[:] = 0
        return array

    def visible(self, array):
        """Returns the array's own address if it is pinned, else that of a page-locked copy, always the same."""
        self.gpu.enter()
        start = array.ctypes.data
        if not self.gpu.is_pinned(array):
            if self._staging is None or self._staging.nbytes < array.nbytes:
                self._staging = self.gpu.allocate_pinned(1 << (array.nbytes - 1).bit_length())
            self._staging[:array.nbytes] = array.view("u1").reshape(-1)
            start = self._staging.ctypes.data
        return int(call("cuMemHostGetDevicePointer", start, 0))

    def close(self):
        """Frees everything."""
        self.gpu.close(self.launcher.close)

    def read_bandwidth(self, checkpoint, threads):
        """Returns the rate of a copy within the device's memory, bytes read and bytes written counted alike."""
        return self.gpu.copy_rate(PROBE_BYTES)

    def usage(self):
        self.gpu.enter()
        free, total = call("cuMemGetInfo")
        return {"bytes": {**{name.replace(" ", "_"): size for name, size in self._bytes.items()},
                          "used": total - free, "total": total}, "graphs": self.launcher.graphs.statistics()}

    def figures(self):
        usage = self.usage()
        mib = {name: size / 2**20 for name, size in usage["bytes"].items()}
        return {"device": {
            "name": properties().name, "dispatch": self.launcher.dispatch, "graphs": usage["graphs"],
            "used_mib": mib.pop("used"), "total_mib": mib.pop("total"), "memory_mib": mib,
            "weights_gb_per_s": self._copied / self.seconds["weights"] / 1e9,
            "pinned_gb_per_s": self.gpu.pinned_rate(PROBE_BYTES // 8) / 1e9}}


def parts(num_bytes):
    """(offset, bytes) of each PART_BYTES, with a progress bar on a terminal when they take longer than a second."""
    parts = [(offset, min(PART_BYTES, num_bytes - offset)) for offset in range(0, num_bytes, PART_BYTES)]
    if len(parts) < 2 or not sys.stderr.isatty():
        return parts
    from tqdm import tqdm
    return tqdm(parts, delay=1, leave=False, desc="weights", unit="GiB")
