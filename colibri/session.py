"""Session: one KV-cache timeline in an engine, with prefill, decode and generate."""

import weakref
from numbers import Integral

import numpy as np

from colibri import native
from colibri.errors import ColibriError, between
from colibri.rope import RopeLengths
from colibri.sampling import History, Sampler, check_sampler, check_tokens, is_plain


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
        self.rope.expected = self.length + between("num_tokens", num_tokens, 0, 1, left)

    def prefill(self, tokens):
        """Appends tokens (ints or bytes). Returns the logits after the last one, float32 (vocab_size,)."""
        return self.engine.step([(self, tokens)])[0]

    def decode(self, token):
        """Appends one token. Returns the logits after it, float32 (vocab_size,)."""
        return self.engine.step([(self, [token])])[0]

    def pin(self, array):
        """Engine.pin: page-locks an array that prompts are read from."""
        return self.engine.pin(array)

    def generate(self, prompt_tokens, max_new_tokens=64, temperature=0.0, top_k=0, top_p=1.0, seed=0, **more):
        """Yields up to max_new_tokens tokens that continue the session after prompt_tokens (ints or bytes).

        One of the checkpoint's end tokens (checkpoint.eos) ends the text, and is not yielded; so does the end of a
        grammar.
        temperature 0 is greedy; top_k 0 and top_p 1 leave all tokens in. The same seed draws the same tokens.
        more: fields of colibri.sampling.Sampler, such as min_p=0.1. Penalties count the tokens from prompt_tokens on.
        """
        sampler = check_sampler(Sampler(temperature, top_k, top_p, seed, **more))
        check_tokens(sampler, self.engine.checkpoint.header["vocab_size"], self.engine.checkpoint.eos)
        _check_not_text(prompt_tokens)
        try:
            tokens = list(prompt_tokens)
        except TypeError:
            raise ColibriError("tokens", str(prompt_tokens), "ints or bytes") from None
        room = self.engine.room(self.length + len(tokens))
        if isinstance(max_new_tokens, Integral) and max_new_tokens > room:
            count = self.length + len(tokens)
            raise ColibriError("max_new_tokens", max_new_tokens,
                               f"1 to {room} after {count} tokens in a context of "
                               f"{self.engine.context_rule(count + int(max_new_tokens) - 1)}")
        if not isinstance(max_new_tokens, Integral) or max_new_tokens < 1:
            raise ColibriError("max_new_tokens", str(max_new_tokens), f"1 to {room}")
        return self._generate(tokens, max_new_tokens, sampler)

    def _generate(self, tokens, max_new_tokens, sampler):
        history = None if is_plain(sampler) else History(sampler, tokens, self.engine.checkpoint.eos, self.length)
        for _ in range(max_new_tokens):
            tokens = self.engine.step([(self, tokens)], [history or sampler])
            if sampler.ends(tokens[0], self.engine.checkpoint.eos) or history and history.is_over():
                return
            if history:
                history.add(tokens[0])
            yield tokens[0]
            if history and history.is_over():
                return

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
        raise ColibriError("tokens", "a str", "ints or bytes", "encode it: text.encode()")


def check_work(engine, work):
    """[(session, its tokens as an array)]"""
    try:
        work = [(session, tokens) for session, tokens in work]
    except (TypeError, ValueError):
        raise ColibriError("step", "work of another form", "[(session, tokens), ...]") from None
    if not work:
        raise ColibriError("step", "0 sessions", "at least one [(session, tokens)]")
    pending = [(session, _check_tokens(engine, session, tokens)) for session, tokens in work]
    if len({session.slot for session, _ in work}) < len(work):
        raise ColibriError("step", "one session twice", "each once")
    return pending


def _check_tokens(engine, session, tokens):
    if not isinstance(session, Session) or session.engine is not engine:
        raise ColibriError("session", "not of this engine", "one that its session() returned")
    if session.slot is None:
        raise ColibriError("session", "closed", "open", "begin another with engine.session()")
    _check_not_text(tokens)
    vocab_size = engine.checkpoint.header["vocab_size"]
    try:
        tokens = np.asarray(list(tokens) if isinstance(tokens, (bytes, bytearray)) else tokens)
    except (TypeError, ValueError):
        raise ColibriError("tokens", "of another form", "ints in a row") from None
    if tokens.size == 0:
        raise ColibriError("tokens", "none", "at least one int", "give the session something to continue")
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise ColibriError("tokens", f"{tokens.dtype} of shape {tokens.shape}", "ints in a row")
    if tokens.min() < 0 or tokens.max() >= vocab_size:
        wrong = tokens[(tokens < 0) | (tokens >= vocab_size)][0]
        raise ColibriError("tokens", wrong, f"0 to {vocab_size - 1}")
    engine.room(session.length + len(tokens))
    return tokens
