"""How a GPU's steps are launched: as CUDA graphs by size, by combination of experts, or kernel by kernel."""

import contextlib
import ctypes
import functools
import itertools
import math

import numpy as np

from colibri.errors import ColibriError
from colibri.gpu import call, driver, new_status, try_call
from colibri.graphs import MAX_NODES, GraphCache
from colibri.headers import in_mask

MAX_COMBINATIONS = MAX_NODES // 16  # graphs to make ahead: each has some ten nodes, and all are to stay


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
            raise ColibriError("GPU", f"cuGraphLaunch={status.name}", "CUDA_SUCCESS",
                               "see python -m colibri.run --doctor")

    def destroy(self):
        call("cuStreamSynchronize", self._stream)  # it may still be running
        call("cuGraphExecDestroy", self._executable)


class Launcher:
    """Starts a library's steps on an open GPU.

    gpu:      a colibri.gpu.Gpu
    dispatch: "device": one graph a size, whose kernels read the routing where they are
              "combo": for a single token, one graph a layer and combination of experts, chosen on the host
              "dynamic": no graphs, every kernel launched by itself
    num_steps: started so far
    """

    def __init__(self, gpu, library, dispatch):
        self.dispatch, self.num_steps, self.graphs = dispatch, 0, GraphCache(self.capture)
        self._gpu, self._library, self._routing = gpu, library, {}
        self._graphed = {id(library.forward), id(library.forward_stack)}  # ctypes functions have no hash
        self._buckets = [buckets(library.headers.constants[name]) for name in ("MAX_STEP_TOKENS", "MAX_STEP_LOGITS")]

    def launch(self, function, model, *sizes):
        """Starts function(model, *sizes), sizes rounded up to those that graphs are made for."""
        self._gpu.enter()
        self.num_steps += 1
        if id(function) not in self._graphed:
            function(model, *sizes)
            return
        sizes = self._launched(sizes)
        if self.dispatch == "dynamic":
            function(model, *sizes)
        elif self.dispatch == "combo" and sizes[0] == 1:
            self._launch_combinations(model, *sizes)
        else:
            self.graphs.get_or_create((id(function), model, *sizes), functools.partial(function, model, *sizes))

    def _launched(self, sizes):
        """(num_tokens, num_logits) or (num_tokens,) as graphs are made for."""
        return tuple(bucket[size] for bucket, size in zip(self._buckets, sizes))

    def _launch_combinations(self, model, num_tokens, num_logits=0):
        """Starts a step in parts, cut at each layer's router: the experts that it chose name the next part's graph."""
        if model not in self._routing:
            self._routing[model] = self._find_routing(model)
        ids, address, has_router = self._routing[model]
        for part in range(len(has_router)):
            chosen = ()
            if has_router[part]:
                self._gpu.read_later(ids, address)
                self.sync()
                chosen = tuple(sorted(ids.tolist()))
            enqueue = functools.partial(self._library.forward_part, model, num_tokens, num_logits, part)
            self.graphs.get_or_create((model, num_logits, part, chosen), enqueue)

    def _find_routing(self, model):
        """Returns a page-locked copy of the first row of ids, its address on the device, and whether a part begins with
        the experts that the part before it chose: the first does not, nor does one after a layer without a router."""
        ids = self._gpu.allocate_pinned(4 * self._library.baked["k"]).view(np.int32)
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
        self._gpu.enter()
        forward, baked = self._library.forward, self._library.baked
        if baked["vocab_size"] == 0 or self.dispatch == "dynamic":
            return
        if self.dispatch == "device":
            most = len(self._buckets[1]) - 1
            for sizes in sorted({self._launched((size, min(size, most))) for size in range(1, baked["max_batch"] + 1)}):
                self.graphs.create((id(forward), model, *sizes), functools.partial(forward, model, *sizes))
            return
        has_router = self._has_router(model)
        count = math.comb(baked["num_experts"], baked["k"]) * sum(has_router)
        if count > MAX_COMBINATIONS:
            raise ColibriError("--precapture", f"{count} graphs of combinations of experts",
                               f"at most {MAX_COMBINATIONS}", "leave it out, and each is made at its first sight")
        for part, has in enumerate(has_router):
            enqueue = functools.partial(self._library.forward_part, model, 1, 1, part)
            for chosen in itertools.combinations(range(baked["num_experts"]), baked["k"]) if has else [()]:
                self.graphs.create((model, 1, part, chosen), enqueue)

    def capture(self, enqueue):
        """Returns the Graph of what enqueue() starts, without running it."""
        mode = driver().CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        call("cuStreamBeginCapture", self._gpu.stream, mode)
        try:
            enqueue()
        except BaseException:
            with contextlib.suppress(ColibriError):
                call("cuGraphDestroy", call("cuStreamEndCapture", self._gpu.stream))
            raise
        status, graph = try_call("cuStreamEndCapture", self._gpu.stream)
        if status != driver().CUresult.CUDA_SUCCESS:
            raise ColibriError("GPU", f"cuStreamEndCapture={status.name}", "CUDA_SUCCESS",
                               "run with --dispatch dynamic")
        return Graph(graph, self._gpu.stream)

    def sync(self):
        self._gpu.sync(f"step {self.num_steps}")

    def close(self):
        self.graphs.close()


def buckets(max_tokens):
    """Returns what a step of n tokens is launched for, as a list by n: the next power of two, at most max_tokens."""
    return [0] + [min(1 << math.ceil(math.log2(size)), max_tokens) for size in range(1, max_tokens + 1)]
