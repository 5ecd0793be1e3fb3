"""Engine: a loaded model, and the memory in which its steps run."""

import functools
import threading
import time

import numpy as np

from colibri import library as libraries
from colibri import native
from colibri.checkpoint import Checkpoint
from colibri.draws import Draws
from colibri.errors import ColibriError, between
from colibri.library import DISPATCH
from colibri.model import Model
from colibri.sampling import History, check_samplers
from colibri.session import Session, check_work
from colibri.weights import HostMemory, check_threads

MAX_SLOTS = 1 << 16


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
    context:    the most tokens of a session; None: the model's own positions, or as many as memory holds

    An engine may be used from several threads: it runs one step at a time. Everything wrong raises ColibriError.
    """

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
        self._draws = Draws(self.library, header["vocab_size"])
        self._free_slots = list(range(self.num_slots))[::-1]
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
    def session(self):
        """A new, empty timeline. Close it (or use `with`, or drop it) to give its slot to another."""
        if self.checkpoint.header["vocab_size"] == 0:
            raise ColibriError(self.checkpoint.path, "vocab_size=0", "tokens",
                               "this is a bare stack of MoE layers, run hidden states through it with Engine.stack "
                               "or --input")
        if not self._free_slots:
            raise ColibriError("num_slots", f"{self.num_slots} sessions are open", "fewer to open another",
                               "close one, or load the engine with more slots")
        return Session(self, self._free_slots.pop())

    @property
    def num_free_slots(self):
        return len(self._free_slots)

    @alone
    def step(self, work, samplers=None, every=False):
        """Appends tokens to sessions, all of them in as few library calls as the tokens fit in.

        work:     [(session, tokens)], each session once, tokens at least one int of the vocabulary
        samplers: None, or for each session a Sampler, a History, or None where its next token is not wanted
        every:    logits after every token, not only after each session's last
        Returns float32 logits (len(work) or the number of all tokens, vocab_size); with samplers, the next tokens.
        A session that a step fails for is as it was; of a model with windows, if its tokens were at most max_piece.
        """
        work = check_work(self, work)
        return self._step(work, check_samplers(samplers, len(work)), every)

    @alone
    def advance(self, work, samplers):
        """step() for a caller whose sessions, tokens and samplers are checked already: what step() need not find
        out."""
        return self._step(work, samplers, False)

    @alone
    def spare(self, processors):
        """From the next step on, the host's threads leave so many processors to others. Results do not depend on it."""
        self._model.struct["num_threads"] = max(1, self.threads - processors)

    def _step(self, work, samplers, every):
        before = [session.length for session, _ in work]
        try:
            return self._run_all(work, samplers, every)
        except BaseException:
            for (session, tokens), length in zip(work, before):
                # A ring has lost what is before a longer piece.
                if len(tokens) <= self.max_piece or not self._model.is_limited:
                    session.length = length
            raise

    def _run_all(self, work, samplers, every):
        pending, num_rows = [], 0
        for session, tokens in work if self._model.has_rope_lengths else ():
            self._compute_again(session, session.rope.begin(session.length, tokens, self._model.rope_original))
        for (session, tokens), sampler in zip(work, samplers or [None] * len(work)):
            pending.append((session, tokens, sampler, num_rows))
            num_rows += len(tokens) if every else 1
        is_sampled = samplers is not None
        results = ([None] * num_rows if is_sampled else
                   np.empty((num_rows, self.checkpoint.header["vocab_size"]), np.float32))
        while pending:
            pending, taken = self._run_some(pending, is_sampled, every, results)
            for session, count in taken:
                session.length += count
        return results

    def _run_some(self, pending, is_sampled, every, results):
        """Runs as many tokens as fit in one step, see Batch.fill. Returns what is left and [(session, count)]."""
        left, num_tokens, taken, wanted = self.batch.fill(pending, is_sampled, every)
        for start in range(0, max(len(wanted), 1), self.batch.max_logits):
            logits = wanted[start:start + self.batch.max_logits]
            self.batch.want(logits, is_sampled)
            self._model.run(self.library.forward_logits if start else self.library.forward, num_tokens, len(logits))
            rows = [row for row, *_ in logits]
            if is_sampled:
                self._take(logits, results)
            elif rows:
                results[rows] = self._model.state("logits", len(rows))
                _check_finite("step: the logits", results[rows], rows)
        return left, taken

    def _take(self, wanted, results):
        """Puts the tokens of a call's logits into the results; those of a History are drawn now. wanted: fill()'s"""
        tokens = self.batch.fields["sampled"][:len(wanted)].tolist()
        later = [(i, sampler, position) for i, (_, _, sampler, position) in enumerate(wanted)
                 if isinstance(sampler, History)]
        if later:
            logits = self._model.state("logits", later[-1][0] + 1)
            drawn = self._draws.run(logits, later, int(self._model.struct["num_threads"][0]))
            for (i, _, _), token in zip(later, drawn):
                tokens[i] = token
        for (row, *_), token in zip(wanted, tokens):
            if row is not None:
                results[row] = token

    def _compute_again(self, session, tokens):
        """Computes the keys and values of a session's earlier tokens, [] or all, for its new length of rope."""
        pending, length = [(session, tokens, None, 0)] if tokens else [], session.length
        try:
            session.length -= len(tokens)
            while pending:
                pending, [(_, count)] = self._run_some(pending, True, False, [])
                session.length += count
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
            raise ColibriError(self.checkpoint.path, f"vocab_size={vocab_size}", "0, a bare stack of MoE layers",
                               "run this model on tokens, with Engine.session or --prompt")
        try:
            x = np.asarray(x)
        except (TypeError, ValueError):
            raise ColibriError("x", "of another form", f"floats of shape (num_tokens, {hidden})") from None
        if x.ndim != 2 or x.shape[1] != hidden or x.dtype.kind != "f":
            raise ColibriError("x", f"{x.dtype} of shape {x.shape}", f"floats of shape (num_tokens, {hidden})")
        y = np.empty(x.shape, np.float32)
        with np.errstate(over="ignore"):  # what float32 cannot hold shows in the result
            for start in range(0, len(x), self.max_tokens):
                rows = np.ascontiguousarray(x[start:start + self.max_tokens], np.float32)
                self.batch.fields["input"][0] = self.memory.visible(rows)
                self.batch.fields["num_tokens"][0] = len(rows)
                self.batch.fields["num_logits"][0] = 0
                self._model.run(self.library.forward_stack, len(rows))
                y[start:start + len(rows)] = self._model.state("x", len(rows))
                _check_finite("stack: the result", y[start:start + len(rows)], range(start, start + len(rows)))
        return y

    def room(self, num_tokens):
        """How many tokens can be generated after num_tokens: the last is not fed back, and takes no position."""
        if num_tokens > self.context:
            raise ColibriError("tokens", f"{num_tokens} in one session",
                               f"at most {self.context_rule(num_tokens)}, or begin another session")
        return self.context - num_tokens + 1

    def context_rule(self, wanted):
        """For an error about too many tokens: how many fit, which limit that is, and what to do to have `wanted`."""
        return self.capacity.rule(wanted, self.checkpoint.path)

    def state(self, name, rows=None):
        """The first rows (None: all) of a buffer of model.h's STATE_BUFFERS, as the last step left it; copy to keep."""
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



def _check_finite(what, rows, numbers):
    """Checks that rows, which have these numbers in the result, hold neither NaN nor inf."""
    finite = np.isfinite(rows)
    if not finite.all():
        row = numbers[np.argmin(finite.all(axis=1))]
        raise ColibriError(what, f"row {row} holds NaN or inf", "finite numbers",
                           "the weights or the input hold NaN, inf or numbers too large")
