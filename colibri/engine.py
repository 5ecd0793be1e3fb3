"""Engine: a loaded model, and the memory in which its steps run."""

import numpy as np

from colibri.draws import Draws
from colibri.errors import ColibriError
from colibri.opened import Opened, alone
from colibri.sampling import check_samplers
from colibri.session import Session, check_work
from colibri.stepper import Stepper


class Engine(Opened):
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

    def _open(self, memory, context):
        super()._open(memory, context)
        self._free_slots = list(range(self.num_slots))[::-1]
        self._stepper = Stepper(self._model, Draws(self.library, self.checkpoint.header["vocab_size"]))

    @alone
    def session(self):
        """Opens a new, empty timeline. Close it (or use `with`, or drop it) to give its slot to another."""
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
        return self._stepper.run(work, check_samplers(samplers, len(work)), every)

    @alone
    def advance(self, work, samplers):
        """step() for a caller whose sessions, tokens and samplers are checked already: what step() need not find
        out."""
        return self._stepper.run(work, samplers, False)

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
        return self._stepper.stack(x)

    def room(self, num_tokens):
        """Returns how many tokens can be generated after num_tokens: the last takes no position."""
        if num_tokens > self.context:
            raise ColibriError("tokens", f"{num_tokens} in one session",
                               f"at most {self.context_rule(num_tokens)}, or begin another session")
        return self.context - num_tokens + 1

    def context_rule(self, wanted):
        """For an error about too many tokens: how many fit, which limit that is, and what to do to have `wanted`."""
        return self.capacity.rule(wanted, self.checkpoint.path)
