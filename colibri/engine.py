"""Engine: a loaded model. Session: one KV-cache timeline in it, with prefill, decode and generate."""

import functools
import os
import threading
import time
import weakref
from collections import namedtuple
from numbers import Integral, Real

import numpy as np

from colibri import build, native
from colibri.checkpoint import Checkpoint
from colibri.errors import ColibriError
from colibri.rope import RopeLengths
from colibri.weights import HostMemory, needs_gpu, pointers, usable_processors

BACKENDS = ("auto", "host", "cuda")
DISPATCH = ("device", "combo", "dynamic")  # colibri.launch knows what they are
MAX_THREADS = 256
THREADS_PER_PROCESSOR = 4  # at most
MAX_SLOTS = 1 << 16
DRAWS = 64  # of a seed that are made at a time
GPU_NODES = ("/dev/nvidiactl", "/dev/dxg")  # without one of them, not even asking the driver can succeed

Sampler = namedtuple("Sampler", "temperature top_k top_p seed", defaults=(0.0, 0, 1.0, 0))


def alone(method):
    """An Engine's method that holds the engine, open, while it runs.

    A context manager written in Python would not do: Ctrl-C between taking the lock and the block leaves it taken.
    """
    @functools.wraps(method)
    def run(self, *arguments, **options):
        self._check_open()  # already here: in a forked process nobody may be left to release the lock
        with self._lock:
            self._check_open()
            return method(self, *arguments, **options)
    return run


class Engine:
    """A model file, its library, and the memory in which steps run.

    path:       the model's file, or a Checkpoint of it
    backend:    "host", "cuda", or "auto": cuda where it can be had, else host, with the reason in `why_host`
    threads:    host threads; None: the processors that this process may use; at most 4 for each of them
    num_slots:  sessions that can be open at once; None: the library's max_batch
    build:      False makes a library that is not built yet an error
    num_layers: run only the first so many layers, to look at what happens inside
    dispatch:   on a GPU, "device" (None: this), "combo" or "dynamic": see colibri.launch.Launcher

    An engine may be used from several threads: it runs one step at a time. Everything wrong raises ColibriError.
    """

    def __init__(self, path, backend="auto", threads=None, num_slots=None, build=True, num_layers=None,
                 dispatch=None):
        self._lock = threading.Lock()
        start = time.perf_counter()
        self.checkpoint = path if isinstance(path, Checkpoint) else Checkpoint(path)
        header = self.checkpoint.header
        self.threads = check_threads(threads)
        self.num_slots = _between("num_slots", num_slots, None, 1, MAX_SLOTS)
        self.num_layers = _between("num_layers", num_layers, header["num_layers"], 1, header["num_layers"])
        if dispatch not in (None, *DISPATCH):
            raise ColibriError(f"dispatch: {dispatch}, expected one of {', '.join(DISPATCH)}")
        opened = time.perf_counter()
        self.library, memory, self.why_host = load_library(self.checkpoint, backend, build, dispatch)
        loaded = time.perf_counter()
        baked = self.library.baked
        self.num_slots = self.num_slots or min(baked["max_batch"], MAX_SLOTS)
        self.max_tokens = self.library.headers.constants["MAX_TOKENS"]
        self.context = min(baked["max_seq_len"], header["max_positions"] or baked["max_seq_len"])
        try:
            self._place(memory)
        except ColibriError as error:
            if backend != "auto" or dispatch or memory is HostMemory:
                raise
            self.why_host = str(error)
            self.library = open_library(self.checkpoint, "host", build)
            self._place(HostMemory)
        self._free_slots = list(range(self.num_slots))[::-1]
        self.path = self.library.path(self.memory.code).decode()
        whole, parts = time.perf_counter() - start, self.memory.seconds  # a GPU's driver comes before its library
        before = sum(parts.get(name, 0) for name in ("cuda import", "cuInit")) + self.memory.overlap
        library = max(0.0, loaded - opened - before)
        self.seconds = {"library": library, "map": whole - library - sum(parts.values()), **parts}

    def _place(self, memory):
        """Opens a backend's memory and puts the model there."""
        self.memory, self._unwatch = memory(self.library), lambda: None
        try:
            self._unwatch = self.library.watch(self.checkpoint.path, self.checkpoint.data)
            self._bind()
        except BaseException:
            self._unwatch()
            self.memory.close()
            raise

    def _bind(self):
        """Gives the library the memory that it works in; what it points to is kept in attributes."""
        library, memory, structs = self.library, self.memory, self.library.headers.structs
        header = np.frombuffer(self.checkpoint.header_bytes, structs["BinHeader"]).copy()
        header["num_layers"] = self.num_layers
        self._buffers = {buffer.name: buffer for buffer in library.headers.state_buffers(header[0], self.num_slots)}
        sizes = library.headers.cache_values(header[0])
        self.max_piece, self._is_limited = sizes["max_piece"], sizes["is_limited"]
        state_bytes = library.state_bytes(memory.code, header.ctypes.data, self.num_slots)
        cache_bytes = sum(buffer.rows * buffer.columns * buffer.dtype.itemsize for name, buffer in self._buffers.items()
                          if name.endswith("_cache"))
        memory.reserve({"weights": sum(view.nbytes for view in self.checkpoint.tensors.values()),
                        "KV cache": cache_bytes, "workspaces": state_bytes - cache_bytes})
        self._weights = pointers(self.checkpoint, memory.weights(self.checkpoint), structs)
        state = memory.state(state_bytes)
        self.batch = memory.batch(structs["Batch"].itemsize).view(structs["Batch"])
        self._model = np.zeros(1, structs["Model"])
        if self._model.nbytes != library.model_bytes():
            raise ColibriError(f"{library.file}: struct Model={library.model_bytes()} bytes, expected "
                               f"{self._model.nbytes} from native/model.h; build the library again with make")
        self._address = self._model.ctypes.data
        library.bind(self._address, memory.code, header.ctypes.data, self._weights[0].ctypes.data,
                     self._weights[1].ctypes.data, state, self.batch.ctypes.data, self.num_slots, self.threads,
                     memory.stream)
        self._place_experts()
        self._fields = {name: self.batch[name] if self.batch[name].ndim == 1 else self.batch[name][0]
                        for name in self.batch.dtype.names}
        self._positions = np.arange(library.baked["max_seq_len"], dtype=np.int32)
        is_long, is_dynamic = (header[0]["rope_kind"] == library.headers.constants[f"ROPE_{kind}"]
                               for kind in ("LONG", "DYNAMIC"))
        original = int(header[0]["rope_original_positions"])
        self._has_rope_lengths = bool(is_long or is_dynamic) and original < self.context
        self._rope_original = original if is_long else 0

    def _place_experts(self):
        """Tells the kernels where each expert stands: as in the file, expert e at place e."""
        stored, num_experts = self.library.baked["stored_experts"], self.checkpoint.header["num_experts"]
        if stored != num_experts:
            raise ColibriError(f"{self.library.file}: stored_experts={stored}, expected num_experts={num_experts}, "
                               "since a model's experts are all in memory; leave STORED_EXPERTS out of DEFINES")
        self._places = np.tile(np.arange(num_experts, dtype=np.int32), (self.num_layers, 1))  # kept while it is copied
        self.memory.write(int(self._model["state"]["place"][0]), self._places)

    @alone
    def session(self):
        """A new, empty timeline. Close it (or use `with`, or drop it) to give its slot to another."""
        if self.checkpoint.header["vocab_size"] == 0:
            raise ColibriError(f"{self.checkpoint.path}: vocab_size=0, expected tokens; this is a bare stack of MoE "
                               "layers, run hidden states through it with Engine.stack or --input")
        if not self._free_slots:
            raise ColibriError(f"num_slots: {self.num_slots} sessions are open, expected fewer to open another; "
                               "close one, or load the engine with more slots")
        return Session(self, self._free_slots.pop())

    @property
    def num_free_slots(self):
        return len(self._free_slots)

    @alone
    def step(self, work, samplers=None, every=False):
        """Appends tokens to sessions, all of them in as few library calls as the tokens fit in.

        work:     [(session, tokens)], each session once, tokens at least one int of the vocabulary
        samplers: None, or for each session a Sampler, or None where its next token is not wanted
        every:    logits after every token, not only after each session's last
        Returns float32 logits (len(work) or the number of all tokens, vocab_size); with samplers, the next tokens.
        A session that a step fails for is as it was; of a model with windows, if its tokens were at most max_piece.
        """
        work = self._check_work(work)
        return self._step(work, _check_samplers(samplers, len(work)), every)

    @alone
    def advance(self, work, samplers):
        """step() for a caller whose sessions, tokens and samplers are checked already: what step() need not find
        out."""
        return self._step(work, samplers, False)

    @alone
    def spare(self, processors):
        """From the next step on, the host's threads leave so many processors to others. Results do not depend on it."""
        self._model["num_threads"] = max(1, self.threads - processors)

    def _step(self, work, samplers, every):
        before = [session.length for session, _ in work]
        try:
            return self._run_all(work, samplers, every)
        except BaseException:
            for (session, tokens), length in zip(work, before):
                if len(tokens) <= self.max_piece or not self._is_limited:  # else a ring has lost what is before them
                    session.length = length
            raise

    def _run_all(self, work, samplers, every):
        pending, num_rows = [], 0
        for session, tokens in work if self._has_rope_lengths else ():
            self._compute_again(session, session.rope.begin(session.length, tokens, self._rope_original))
        for (session, tokens), sampler in zip(work, samplers or [None] * len(work)):
            pending.append((session, tokens, sampler, num_rows))
            num_rows += len(tokens) if every else 1
        is_sampled = samplers is not None
        results = ([None] * num_rows if is_sampled else
                   np.empty((num_rows, self.checkpoint.header["vocab_size"]), np.float32))
        while pending:
            pending, num_tokens, rows, taken = self._fill(pending, is_sampled, every)
            self._run(self.library.forward, num_tokens, len(rows))
            if is_sampled:
                for row, token in zip(rows, self._fields["sampled"][:len(rows)].tolist()):
                    results[row] = token
            elif rows:
                results[rows] = self.state("logits", len(rows))
                _check_finite("step: the logits", results[rows], rows)
            for session, count in taken:
                session.length += count
        return results

    def _compute_again(self, session, tokens):
        """Computes the keys and values of a session's earlier tokens, [] or all, for its new length of rope."""
        pending, length = [(session, tokens, None, 0)] if tokens else [], session.length
        try:
            session.length -= len(tokens)
            while pending:
                pending, num_tokens, _, _ = self._fill(pending, True, False)
                self._run(self.library.forward, num_tokens, 0)
                session.length += num_tokens
        except BaseException:
            session.rope.spoil()
            raise
        finally:
            session.length = length

    @alone
    def stack(self, x):
        """Runs states x (num_tokens, hidden) through a bare stack of MoE layers; returns float32 of its shape."""
        hidden, vocab_size = (self.checkpoint.header[name] for name in ("hidden", "vocab_size"))
        if vocab_size:
            raise ColibriError(f"{self.checkpoint.path}: vocab_size={vocab_size}, expected 0, a bare stack of MoE "
                               "layers; run this model on tokens, with Engine.session or --prompt")
        try:
            x = np.asarray(x)
        except (TypeError, ValueError):
            raise ColibriError(f"x: of another form, expected floats of shape (num_tokens, {hidden})") from None
        if x.ndim != 2 or x.shape[1] != hidden or x.dtype.kind != "f":
            raise ColibriError(f"x: {x.dtype} of shape {x.shape}, expected floats of shape (num_tokens, {hidden})")
        y = np.empty(x.shape, np.float32)
        with np.errstate(over="ignore"):  # what float32 cannot hold shows in the result
            for start in range(0, len(x), self.max_tokens):
                rows = np.ascontiguousarray(x[start:start + self.max_tokens], np.float32)
                self._fields["input"][0] = self.memory.visible(rows)
                self._fields["num_tokens"][0] = len(rows)
                self._fields["num_logits"][0] = 0
                self._run(self.library.forward_stack, len(rows))
                y[start:start + len(rows)] = self.state("x", len(rows))
                _check_finite("stack: the result", y[start:start + len(rows)], range(start, start + len(rows)))
        return y

    def room(self, num_tokens):
        """How many tokens can be generated after num_tokens: the last is not fed back, and takes no position."""
        if num_tokens > self.context:
            raise ColibriError(f"tokens: {num_tokens} in one session, expected at most "
                               f"{self.context_rule(num_tokens)}, or begin another session")
        return self.context - num_tokens + 1

    def context_rule(self, wanted):
        """For an error about too many tokens: how many fit, which limit that is, and what to do to have `wanted`."""
        positions, built = self.checkpoint.header["max_positions"], self.library.baked["max_seq_len"]
        if 0 < positions <= built:
            return f"{positions}, the model's own positions (max_positions of {self.checkpoint.path}); use fewer"
        note = f" (the model has {positions} positions)" if positions else ""
        return f"{built}, {build.raise_limit('MAX_SEQ_LEN', min(wanted, positions or wanted), note)}"

    def state(self, name, rows=None):
        """The first rows (None: all) of a buffer of model.h's STATE_BUFFERS, as the last step left it; copy to keep."""
        self._check_open()
        buffer = self._buffer(name)
        rows = _between("rows", rows, buffer.rows, 0, buffer.rows)
        return self.memory.read(int(self._model["state"][name][0]), (rows, buffer.columns), buffer.dtype)

    def write(self, name, array):
        """Puts rows of a buffer there, before a step or an op that reads them."""
        self._check_open()
        buffer = self._buffer(name)
        array = np.ascontiguousarray(array, buffer.dtype)
        if array.size > buffer.rows * buffer.columns:
            raise ColibriError(f"{name}: shape={array.shape}, expected at most {(buffer.rows, buffer.columns)}")
        self.memory.write(int(self._model["state"][name][0]), array)

    @alone
    def run_op(self, op, num_rows, layer=0):
        """One op of native/ops.h on the state as it is, for tests and benchmarks."""
        _between("num_rows", num_rows, 1, 1, self.max_tokens)
        _between("layer", layer, 0, 0, self.num_layers - 1)
        self._fields["num_tokens"][0] = num_rows
        self._run(lambda model, rows: self.library.run_op(model, op.encode(), rows, layer), num_rows)

    @alone
    def pin(self, array):
        """Page-locks a C-contiguous array, until close(): a GPU's steps then read a float32 input where it lies.

        The caller keeps the array until then. Returns it.
        """
        if not isinstance(array, np.ndarray):
            raise ColibriError(f"array: {type(array).__name__}, expected a numpy array")
        if not array.flags.c_contiguous or array.nbytes == 0:
            raise ColibriError(f"array: shape={array.shape}, strides={array.strides}, expected C-contiguous and not "
                               "empty; use numpy.ascontiguousarray")
        return self.memory.pin(array)

    @alone
    def precapture(self):
        """Makes the graphs of decoding now rather than at the first steps that need them."""
        self.memory.precapture(self._address)

    def close(self):
        """Gives the memory back; the engine and its sessions cannot be used afterwards."""
        if native.is_forked():  # the memory is the parent's, and nobody may be left to release the lock
            return
        with self._lock:
            if self._model is not None:
                self._model = None
                self._unwatch()
                self.memory.close()

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.close()

    def _check_open(self):
        native.check_process()
        if self._model is None:
            raise ColibriError("engine: closed, expected open; load the model again")

    def _buffer(self, name):
        if name not in self._buffers:
            raise ColibriError(f"buffer: {name}, expected one of {', '.join(self._buffers)}")
        return self._buffers[name]

    def _check_work(self, work):
        """[(session, its tokens as an array)]"""
        try:
            work = [(session, tokens) for session, tokens in work]
        except (TypeError, ValueError):
            raise ColibriError("step: work of another form, expected [(session, tokens), ...]") from None
        if not work:
            raise ColibriError("step: 0 sessions, expected at least one [(session, tokens)]")
        pending = [(session, self._check_tokens(session, tokens)) for session, tokens in work]
        if len({session.slot for session, _ in work}) < len(work):
            raise ColibriError("step: one session twice, expected each once")
        return pending

    def _check_tokens(self, session, tokens):
        if not isinstance(session, Session) or session.engine is not self:
            raise ColibriError("session: not of this engine, expected one that its session() returned")
        if session.slot is None:
            raise ColibriError("session: closed, expected open; begin another with engine.session()")
        _check_not_text(tokens)
        vocab_size = self.checkpoint.header["vocab_size"]
        try:
            tokens = np.asarray(list(tokens) if isinstance(tokens, (bytes, bytearray)) else tokens)
        except (TypeError, ValueError):
            raise ColibriError("tokens: of another form, expected ints in a row") from None
        if tokens.size == 0:
            raise ColibriError("tokens: none, expected at least one int; give the session something to continue")
        if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
            raise ColibriError(f"tokens: {tokens.dtype} of shape {tokens.shape}, expected ints in a row")
        if tokens.min() < 0 or tokens.max() >= vocab_size:
            wrong = tokens[(tokens < 0) | (tokens >= vocab_size)][0]
            raise ColibriError(f"tokens: {wrong}, expected 0 to {vocab_size - 1}")
        self.room(session.length + len(tokens))
        return tokens

    def _fill(self, pending, is_sampled, every):
        """Fills the batch with as many tokens as fit, of no session more than its cache bears.

        pending: [(session, tokens, sampler or None, row of the result for its first logits)]
        Returns what is left of it, the number of tokens, the rows of the result that the logits are, and what it took.
        """
        left, taken, tokens, rows, logit_rows, drawn = [], [], [], [], [], []
        num_tokens = 0
        for session, rest, sampler, row in pending:
            count = min(len(rest), self.max_piece, self.max_tokens - num_tokens)
            wanted = 0 if is_sampled and sampler is None else count if every else int(count == len(rest))
            if count < len(rest):
                left.append((session, rest[count:], sampler, row + wanted))
            if count == 0:
                continue
            tokens.append(rest[:count])
            num_tokens += count
            taken.append((session, count))
            for i in range(wanted):
                logit_rows.append(num_tokens - wanted + i)
                drawn.append((sampler, session.length + count - wanted + i + 1))
                rows.append(row + i)
        self._set_tokens(taken, tokens, num_tokens)
        fields = self._fields
        fields["logit_rows"][:len(rows)] = logit_rows
        fields["num_tokens"][0], fields["num_logits"][0], fields["sample"][0] = num_tokens, len(rows), is_sampled
        if is_sampled:
            self._set_samplers(drawn)
        return left, num_tokens, rows, taken

    def _set_tokens(self, taken, tokens, num_tokens):
        """taken: [(session, how many tokens)], tokens: [those]"""
        slots, lengths = [session.slot for session, _ in taken], [session.length for session, _ in taken]
        if num_tokens > len(taken):  # else it is decoding, for which lists are faster
            counts = [count for _, count in taken]
            tokens, slots = np.concatenate(tokens), np.repeat(slots, counts)
            lengths = np.concatenate([self._positions[start:start + count] for start, count in zip(lengths, counts)])
        else:
            tokens = [token for token, in tokens]
        for name, values in (("tokens", tokens), ("positions", lengths), ("slots", slots)):
            self._fields[name][:num_tokens] = values
        if self._has_rope_lengths:
            self._fields["rope_lengths"][:num_tokens] = np.repeat([session.rope.length for session, _ in taken],
                                                                  [count for _, count in taken])

    def _set_samplers(self, drawn):
        """drawn: [(sampler, the position that its token will have)]"""
        for name in ("temperature", "top_k", "top_p"):
            self._fields[name][:len(drawn)] = [getattr(sampler, name) for sampler, _ in drawn]
        self._fields["uniform"][:len(drawn)] = [draw(sampler.seed, position) if sampler.temperature > 0 else 0
                                                for sampler, position in drawn]

    def _run(self, function, *sizes):
        self._fields["fault"][0] = 0
        self.memory.launch(function, self._address, *sizes)
        self.memory.sync()
        self.library.check(self._address)


class Session:
    """One timeline of tokens in an engine's KV cache.

    length: tokens in it so far; at most engine.context
    """

    def __init__(self, engine, slot):
        self.engine, self.slot, self.length = engine, slot, 0
        self.rope = RopeLengths()
        # Appending to a list needs no lock, which a thread that drops the session might be holding.
        self._release = weakref.finalize(self, engine._free_slots.append, slot)
        self._release.atexit = False

    def expect(self, num_tokens):
        """Says that the next num_tokens tokens are one prompt, which may come in several steps.

        Longrope and dynamic NTK choose the frequencies of a prompt by its whole length; other models need not know.
        """
        left = self.engine.context - self.length
        self.rope.expected = self.length + _between("num_tokens", num_tokens, 0, 1, left)

    def prefill(self, tokens):
        """Appends tokens (ints or bytes). Returns the logits after the last one, float32 (vocab_size,)."""
        return self.engine.step([(self, tokens)])[0]

    def decode(self, token):
        """Appends one token. Returns the logits after it, float32 (vocab_size,)."""
        return self.engine.step([(self, [token])])[0]

    def pin(self, array):
        """Engine.pin: page-locks an array that prompts are read from."""
        return self.engine.pin(array)

    def generate(self, prompt_tokens, max_new_tokens=64, temperature=0.0, top_k=0, top_p=1.0, seed=0):
        """Yields up to max_new_tokens tokens that continue the session after prompt_tokens (ints or bytes).

        One of the checkpoint's end tokens (checkpoint.eos) ends the text, and is not yielded.
        temperature 0 is greedy; top_k 0 and top_p 1 leave all tokens in. The same seed draws the same tokens.
        """
        sampler = check_sampler(Sampler(temperature, top_k, top_p, seed))
        _check_not_text(prompt_tokens)
        try:
            tokens = list(prompt_tokens)
        except TypeError:
            raise ColibriError(f"tokens: {prompt_tokens}, expected ints or bytes") from None
        room = self.engine.room(self.length + len(tokens))
        if isinstance(max_new_tokens, Integral) and max_new_tokens > room:
            count = self.length + len(tokens)
            raise ColibriError(f"max_new_tokens: {max_new_tokens}, expected 1 to {room} after {count} tokens in a "
                               f"context of {self.engine.context_rule(count + int(max_new_tokens) - 1)}")
        if not isinstance(max_new_tokens, Integral) or max_new_tokens < 1:
            raise ColibriError(f"max_new_tokens: {max_new_tokens}, expected 1 to {room}")
        return self._generate(tokens, max_new_tokens, sampler)

    def _generate(self, tokens, max_new_tokens, sampler):
        for _ in range(max_new_tokens):
            tokens = self.engine.step([(self, tokens)], [sampler])
            if tokens[0] in self.engine.checkpoint.eos:
                return
            yield tokens[0]

    def close(self):
        """Gives the slot back."""
        if native.is_forked():
            return
        with self.engine._lock:
            self._release()  # once, however often it is called
            self.slot = None

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.close()


def _check_not_text(tokens):
    if isinstance(tokens, str):
        raise ColibriError("tokens: a str, expected ints or bytes; encode it: text.encode()")


def load_library(checkpoint, backend, build_missing, dispatch):
    """(Library, what makes its memory of it, why auto chose the host or "") for a model; nothing is allocated yet."""
    if backend not in BACKENDS:
        raise ColibriError(f"backend: {backend}, expected one of {', '.join(BACKENDS)}")
    why_host = ""
    if backend == "auto" and not any(map(os.path.exists, GPU_NODES)):
        backend, why_host = "host", "no NVIDIA GPU on this machine"
    if backend != "host":
        from colibri import device, gpu  # imports cuda.bindings: not on the host's way
        try:
            gpu.check_weights(checkpoint)
            arch = gpu.arch()
            return *_load_with_context(device, gpu, checkpoint, arch, build_missing, dispatch), ""
        except ColibriError as error:
            if backend == "cuda":
                raise
            why_host = str(error)
    if dispatch:
        needs_gpu(f"--dispatch: {dispatch}", why_host or "--backend host")
    return open_library(checkpoint, "host", build_missing), HostMemory, why_host


def _load_with_context(device, gpu, checkpoint, arch, build_missing, dispatch):
    """The library, loaded while the GPU's context opens, and how its DeviceMemory is made."""
    opening = gpu.Opening()
    try:
        library = open_library(checkpoint, arch, build_missing)
        gpu.check_library(library)
    except BaseException:
        opening.close()
        raise
    return library, functools.partial(device.DeviceMemory, opening=opening, dispatch=dispatch)


def open_library(checkpoint, arch, build_missing):
    library = native.Library(build.library_path(checkpoint, arch, build_missing))
    build.compare(library, checkpoint)
    return library


def check_sampler(sampler, prefix=""):
    """The sampler, if its values make sense. prefix: "--" where they are options of the command line."""
    if not isinstance(sampler, Sampler):
        raise ColibriError(f"samplers: {sampler}, expected a Sampler for each session")
    temperature, top_k, top_p, seed = sampler  # the upper limits are those of C's float and int32_t
    for name, good, expected in (
            ("temperature", isinstance(temperature, Real) and 0 <= temperature <= 1e30, "0 (greedy) to 1e30"),
            ("top_k", isinstance(top_k, Integral) and 0 <= top_k < 1 << 31, "0 (all) to 2^31 - 1"),
            ("top_p", isinstance(top_p, Real) and 0 < top_p <= 1 and np.float32(top_p) > 0,
             "more than 0 and at most 1"),
            ("seed", isinstance(seed, Integral) and 0 <= seed < 1 << 64, "0 to 2^64 - 1")):
        if not good:
            label = prefix + (name.replace("_", "-") if prefix else name)
            raise ColibriError(f"{label}: {getattr(sampler, name)}, expected {expected}")
    return sampler


def check_threads(threads):
    """The number of threads, or the default for None."""
    return _between("threads", threads, min(usable_processors(), MAX_THREADS), 1, most_threads())


def most_threads():
    """More would be slower, and could leave no room for another's stack."""
    return min(MAX_THREADS, THREADS_PER_PROCESSOR * usable_processors())


def _check_samplers(samplers, count):
    """The samplers as a list, or None for None."""
    if samplers is None:
        return None
    if not isinstance(samplers, (list, tuple)):
        raise ColibriError(f"samplers: {samplers}, expected a list, a Sampler for each session")
    samplers = [sampler if sampler is None else check_sampler(sampler) for sampler in samplers]
    if len(samplers) != count:
        raise ColibriError(f"samplers: {len(samplers)}, expected one for each of {count} sessions")
    return samplers


def _check_finite(what, rows, numbers):
    """That rows, which are those of these numbers in what is returned, hold neither NaN nor inf."""
    finite = np.isfinite(rows)
    if not finite.all():
        row = numbers[np.argmin(finite.all(axis=1))]
        raise ColibriError(f"{what}: row {row} holds NaN or inf, expected finite numbers; the weights or the input "
                           "hold NaN, inf or numbers too large")


def draw(seed, position):
    """The draw in [0, 1) for the token at a position: it depends on the seed and the position alone.

    24 random bits, so that the float32 that C reads is exact and below 1.
    """
    return _draws(seed, position // DRAWS)[position % DRAWS]


@functools.lru_cache(1024)
def _draws(seed, block):
    """Those of DRAWS positions: the first of the four words that the generator gives for each counter."""
    words = np.random.Philox(key=seed, counter=block * DRAWS).random_raw(4 * DRAWS)[::4]
    return ((words >> np.uint64(40)) / (1 << 24)).tolist()


def _between(name, value, default, low, high):
    """The value, or the default for None."""
    if value is None:
        return default
    if not isinstance(value, Integral):
        raise ColibriError(f"{name}: {value!r}, expected an integer, {low} to {high}")
    if not low <= value <= high:
        raise ColibriError(f"{name}: {value}, expected {low} to {high}")
    return value
