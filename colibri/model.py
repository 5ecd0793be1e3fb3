"""Model: a checkpoint in a backend's memory, bound to its library, so that steps can run."""

import numpy as np

from colibri import capacity
from colibri.batch import Batch
from colibri.errors import ColibriError, between
from colibri.weights import pointers


class Model:
    """A checkpoint in a backend's memory, bound to its library.

    checkpoint, library: the file and the library for it
    memory:     HostMemory or DeviceMemory, opened here
    num_slots:  sessions that have a place in the KV cache
    num_layers: of the checkpoint's, the first so many
    threads:    of the host
    context:    the most tokens of a session; None: the model's own positions, or as many as memory holds
    """

    def __init__(self, checkpoint, library, memory, num_slots, num_layers, threads, context):
        self.checkpoint, self.library, self.num_slots = checkpoint, library, num_slots
        self.memory, self._unwatch = memory(library), lambda: None
        try:
            self._unwatch = library.watch(checkpoint.path, checkpoint.data)
            self._bind(num_layers, threads, context)
        except BaseException:
            self.close()
            raise

    def _bind(self, num_layers, threads, context):
        """Gives the library the memory that it works in; what it points to is kept in attributes."""
        library, memory, structs = self.library, self.memory, self.library.headers.structs
        header = np.frombuffer(self.checkpoint.header_bytes, structs["BinHeader"]).copy()
        header["num_layers"] = num_layers
        self._choose_context(header, context)
        self.buffers = {buffer.name: buffer for buffer in library.headers.state_buffers(header[0], self.num_slots,
                                                                                         self.context)}
        sizes = library.headers.cache_values(header[0], self.context)
        self.max_piece, self.is_limited = sizes["max_piece"], sizes["is_limited"]
        self._set_rope(header[0])
        state_bytes = library.state_bytes(memory.code, header.ctypes.data, self.num_slots, self.context)
        cache_bytes, _ = library.headers.state_bytes(header[0], self.num_slots, self.context)
        memory.reserve({"weights": self.checkpoint.weight_bytes, "KV cache": cache_bytes,
                        "workspaces": state_bytes - cache_bytes})
        self.weights = pointers(self.checkpoint, memory.weights(self.checkpoint), structs)
        state = memory.state(state_bytes)
        self.batch = Batch(memory, library.headers, self.max_piece, self.has_rope_lengths)
        self.struct = np.zeros(1, structs["Model"])
        if self.struct.nbytes != library.model_bytes():
            raise ColibriError(library.file, f"struct Model={library.model_bytes()} bytes",
                               f"{self.struct.nbytes} from native/model.h", "build the library again with make")
        self.address = self.struct.ctypes.data
        library.bind(self.address, memory.code, header.ctypes.data, self.weights[0].ctypes.data,
                     self.weights[1].ctypes.data, state, self.batch.address, self.num_slots, self.context,
                     threads, memory.stream)
        self._place_experts(num_layers)

    def _choose_context(self, header, asked):
        """Sets the positions of a session: how many memory holds is known once the backend's is open."""
        sizes, num_slots = self.library.headers, self.num_slots
        rest = (self.library.state_bytes(self.memory.code, header.ctypes.data, num_slots, capacity.STEP)
                - sizes.state_bytes(header[0], num_slots, capacity.STEP)[0] + self.checkpoint.weight_bytes)
        self.capacity = capacity.choose(self.checkpoint, asked, num_slots, lambda positions: (
            rest + sizes.state_bytes(header[0], num_slots, positions)[0]), self.memory.available())
        self.context = self.capacity.positions

    def _set_rope(self, header):
        """Finds out whether frequencies depend on a session's length, and from which on."""
        is_long, is_dynamic = (header["rope_kind"] == self.library.headers.constants[f"ROPE_{kind}"]
                               for kind in ("LONG", "DYNAMIC"))
        original = int(header["rope_original_positions"])
        self.has_rope_lengths = bool(is_long or is_dynamic) and original < self.context
        self.rope_original = original if is_long else 0

    def _place_experts(self, num_layers):
        """Tells the kernels where each expert stands: as in the file, expert e at place e."""
        stored, num_experts = self.library.baked["stored_experts"], self.checkpoint.header["num_experts"]
        if stored != num_experts:
            raise ColibriError(self.library.file, f"stored_experts={stored}",
                               f"num_experts={num_experts}, since a model's experts are all in memory",
                               "leave STORED_EXPERTS out of DEFINES")
        self._places = np.tile(np.arange(num_experts, dtype=np.int32), (num_layers, 1))  # kept while it is copied
        self.memory.write(int(self.struct["state"]["place"][0]), self._places)

    def state(self, name, rows=None):
        """Returns the first rows (None: all) of a buffer of model.h's STATE_BUFFERS, as the last step left it."""
        buffer = self._buffer(name)
        rows = between("rows", rows, buffer.rows, 0, buffer.rows)
        return self.memory.read(int(self.struct["state"][name][0]), (rows, buffer.columns), buffer.dtype)

    def write(self, name, array):
        """Puts rows of a buffer there, before a step or an op that reads them."""
        buffer = self._buffer(name)
        array = np.ascontiguousarray(array, buffer.dtype)
        if array.size > buffer.rows * buffer.columns:
            raise ColibriError(name, f"shape={array.shape}", f"at most {(buffer.rows, buffer.columns)}")
        self.memory.write(int(self.struct["state"][name][0]), array)

    def run(self, function, *sizes):
        """Calls a function of the library on the model, and waits for its end."""
        self.batch.fields["fault"][0] = 0
        self.memory.launch(function, self.address, *sizes)
        self.memory.sync()
        self.library.check(self.address)

    def close(self):
        """Gives the memory back."""
        self._unwatch()
        self.memory.close()

    def _buffer(self, name):
        if name not in self.buffers:
            raise ColibriError("buffer", str(name), f"one of {', '.join(self.buffers)}")
        return self.buffers[name]
