"""Opened: a model that is loaded into a backend's memory, for one caller at a time."""

import functools
import threading
import time

import numpy as np

from colibri import library as libraries
from colibri import native
from colibri.checkpoint import Checkpoint
from colibri.errors import ColibriError, between
from colibri.library import DISPATCH
from colibri.model import Model
from colibri.weights import HostMemory, check_threads

MAX_SLOTS = 1 << 16


def alone(method):
    """Makes an Engine's method hold the engine, open, while it runs.

    A context manager written in Python would not do: Ctrl-C between taking the lock and the block leaves it taken.
    """
    @functools.wraps(method)
    def run(self, *arguments, **options):
        self._check_open()  # already here: in a forked process nobody may be left to release the lock
        with self._lock:
            self._check_open()
            return method(self, *arguments, **options)
    return run


class Opened:
    """A loaded model. Its parameters are colibri.engine.Engine's."""

    def __init__(self, path, backend="auto", threads=None, num_slots=None, build=True, num_layers=None,
                 dispatch=None, context=None):
        self._lock = threading.Lock()
        start = time.perf_counter()
        self.checkpoint = path if isinstance(path, Checkpoint) else Checkpoint(path)
        header = self.checkpoint.header
        self.threads = check_threads(threads)
        self.num_slots = between("num_slots", num_slots, None, 1, MAX_SLOTS)
        self.num_layers = between("num_layers", num_layers, header["num_layers"], 1, header["num_layers"])
        if dispatch not in (None, *DISPATCH):
            raise ColibriError("dispatch", dispatch, f"one of {', '.join(DISPATCH)}")
        opened = time.perf_counter()
        self.library, memory, self.why_host = libraries.load_library(self.checkpoint, backend, build, dispatch)
        loaded = time.perf_counter()
        baked = self.library.baked
        self.num_slots = self.num_slots or min(baked["max_batch"], MAX_SLOTS)
        self.max_tokens = self.library.headers.constants["MAX_STEP_TOKENS"]
        try:
            self._open(memory, context)
        except ColibriError as error:
            if backend != "auto" or dispatch or memory is HostMemory:
                raise
            self.why_host = str(error)
            self.library = libraries.open_library(self.checkpoint, "host", build)
            self._open(HostMemory, context)
        self.path = self.library.path(self.memory.code).decode()
        whole, parts = time.perf_counter() - start, self.memory.seconds  # a GPU's driver comes before its library
        before = sum(parts.get(name, 0) for name in ("cuda import", "cuInit")) + self.memory.overlap
        library = max(0.0, loaded - opened - before)
        self.seconds = {"library": library, "map": whole - library - sum(parts.values()), **parts}

    def _open(self, memory, context):
        """Puts the model into a backend's memory."""
        self._model = Model(self.checkpoint, self.library, memory, self.num_slots, self.num_layers, self.threads,
                            context)
        self.memory, self.batch, self.context = self._model.memory, self._model.batch, self._model.context
        self.capacity, self.max_piece = self._model.capacity, self._model.max_piece

    @alone
    def spare(self, processors):
        """From the next step on, the host's threads leave so many processors to others. Results do not depend on it."""
        self._model.struct["num_threads"] = max(1, self.threads - processors)

    def state(self, name, rows=None):
        """Returns the first rows (None: all) of a buffer of STATE_BUFFERS, as the last step left it; copy to keep."""
        self._check_open()
        return self._model.state(name, rows)

    def write(self, name, array):
        """Puts rows of a buffer there, before a step or an op that reads them."""
        self._check_open()
        self._model.write(name, array)

    @alone
    def run_op(self, op, num_rows, layer=0):
        """One op of native/ops.h on the state as it is, for tests and benchmarks."""
        between("num_rows", num_rows, 1, 1, self.max_tokens)
        between("layer", layer, 0, 0, self.num_layers - 1)
        self.batch.fields["num_tokens"][0] = num_rows
        self._model.run(lambda model, rows: self.library.run_op(model, op.encode(), rows, layer), num_rows)

    @alone
    def pin(self, array):
        """Page-locks a C-contiguous array, until close(): a GPU's steps then read a float32 input where it lies.

        The caller keeps the array until then. Returns it.
        """
        if not isinstance(array, np.ndarray):
            raise ColibriError("array", type(array).__name__, "a numpy array")
        if not array.flags.c_contiguous or array.nbytes == 0:
            raise ColibriError("array", f"shape={array.shape}, strides={array.strides}", "C-contiguous and not empty",
                               "use numpy.ascontiguousarray")
        return self.memory.pin(array)

    @alone
    def precapture(self):
        """Makes the graphs of decoding now rather than at the first steps that need them."""
        self.memory.precapture(self._model.address)

    def close(self):
        """Gives the memory back; the engine and its sessions cannot be used afterwards."""
        if native.is_forked():  # the memory is the parent's, and nobody may be left to release the lock
            return
        with self._lock:
            if self._model is not None:
                self._model.close()
                self._model = None

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.close()

    def _check_open(self):
        native.check_process()
        if self._model is None:
            raise ColibriError("engine", "closed", "open", "load the model again")
