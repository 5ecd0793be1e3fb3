"""Grammars: which tokens may come next in an answer of a form that a request asks for, by the package llguidance."""

import contextlib
import json
import os
import queue
import re
import threading

import numpy as np

from colibri.errors import ColibriError, printable
from colibri.processes import NotStarted, Processes, why_ended

CHECK_SECONDS = 1     # of computing, that a grammar may take to be compiled
MASK_THREADS = 4      # at most; the masks of several answers are computed at once
WORDS = 300           # characters of what the package says of an error
PLACE = re.compile(r"^(at )?\d+\(\d+\): |^failed to compile JSON schema: ")  # in a text that the client has not seen
OPTIONS = '%llguidance {"no_forcing": true}\n'  # as many tokens may spell a text as do in any answer
ALL = 0xffffffff
END = b"<end of the answer>"


def package():
    import llguidance
    return llguidance


def limits(used):
    """Returns what bounds the time and memory of a mask."""
    return used.LLParserLimits(max_lexer_states=50_000, max_grammar_size=200_000, verbose_errors=False)


class _Vocabulary:
    """What the package wants to know of tokens. It asks for those of a text where it forces some, which it does not."""

    bos_token_id = None

    def __init__(self, tokens, special):
        self.tokens, self.special_token_ids, self.eos_token_id = [*tokens, END], [*special, len(tokens)], len(tokens)

    def __call__(self, text):
        return []


def tokenizer(used, tokens, special):
    """Returns the package's tokenizer of tokens, each as bytes, with one more that stands for all that end a text."""
    wrapped = used.TokenizerWrapper(_Vocabulary(tokens, special))
    return used.LLTokenizer(wrapped, n_vocab=len(tokens) + 1, eos_token=len(tokens))


class Grammars:
    """Compiles grammars for a model. Any thread may ask.

    codec: of the model's text
    """

    def __init__(self, codec, vocab_size, eos):
        self._codec, self._vocab_size, self._eos = codec, vocab_size, eos
        self._lock, self._check, self._tokenizer = threading.Lock(), None, None
        self._masks, self._threads = queue.SimpleQueue(), []  # of Guides; None: a thread's end

    def prepare(self):
        """Makes what grammars need and would hold other threads up for: a second for 150,000 tokens."""
        with contextlib.suppress(ImportError):
            self._package = package()
            if self._codec is not None and self._codec.is_uniform:
                self._set_tokenizer()

    def compile(self, constraint):
        """Returns the Grammar of a Constraint."""
        where = constraint.where
        with self._lock:
            self._start(where)
        rules = [self._rule(number, mark) for number, mark in enumerate(constraint.marks)]
        text = "\n".join((constraint.text, *rules, OPTIONS))
        try:
            found, status = self._check.ask(json.dumps(text).encode() + b"\n")
        except NotStarted as error:
            raise ColibriError(where, *error.parts[1:]) from None
        error = f"compiling it: {why_ended(status, CHECK_SECONDS)}" if found is None else _words(found["error"])
        if not error:
            matcher = self._package.LLMatcher(self._tokenizer, text, log_level=0, limits=limits(self._package))
            error = _words(matcher.get_error())
        if error:
            raise ColibriError(where, f'"{error}"', "what llguidance takes",
                               "make it simpler" if found is None else None)
        return Grammar(matcher, self._masks, self._vocab_size, where)

    def _rule(self, number, mark):
        """Returns the rules of a Constraint's mark."""
        if mark in self._special:
            token = f"<[{self._special[mark]}]>"
            return f"mark_{number}: {token}\nuntil_{number}: /(?s:.*)/ {token}"
        text = json.dumps(mark, ensure_ascii=False)
        return f"mark_{number}: {text}\nuntil_{number}[suffix={text}]: /(?s:.*)/"

    def _start(self, where):
        """Makes what the first grammar needs."""
        try:
            self._package = package()
        except ImportError:
            raise ColibriError(where, "llguidance is not installed", "it for answers of a form",
                               "run pip install llguidance (the extra `grammar`) for the server") from None
        if not self._codec.is_uniform:
            raise ColibriError(where, "given", "a model whose tokens have the same text wherever they stand",
                               "this model's tokenizer.json has a decoder that changes it")
        if self._tokenizer is None:
            self._set_tokenizer()
        if self._check is None:
            first = json.dumps([CHECK_SECONDS, self._vocab_size, list(self._special.items())]).encode() + b"\n"
            self._check = Processes("grammar_check", first, where)
        while len(self._threads) < min(MASK_THREADS, os.cpu_count() or 1):
            self._threads.append(threading.Thread(target=_compute, args=(self._masks,), name="masks", daemon=True))
            self._threads[-1].start()

    def _set_tokenizer(self):
        numbers = range(self._vocab_size)
        special = {*self._eos, *(number for number in numbers if self._codec.data(number) is None)}
        tokens = [self._codec.name(number)[1] for number in numbers]
        special = sorted(token for token in special if tokens[token])
        self._special = {tokens[token].decode(errors="replace"): token for token in special}
        self._tokenizer = tokenizer(self._package, tokens, special)

    def close(self):
        with self._lock:
            if self._check is not None:
                self._check.close()
            for _ in self._threads:
                self._masks.put(None)


def _compute(guides):
    """Computes masks, until there is None to do."""
    while (guide := guides.get()) is not None:
        guide.compute()


class Grammar:
    """A grammar, compiled for a model."""

    def __init__(self, matcher, masks, vocab_size, where):
        self._matcher, self._masks, self._vocab_size, self._where = matcher, masks, vocab_size, where

    def guide(self, ends):
        """Returns a Guide of an answer. ends: the tokens that end it"""
        return Guide(self._matcher.deep_copy(), self._masks, self._vocab_size, ends, self._where)


class Guide:
    """Follows one answer through a grammar, for the thread that steps the model.

    The mask of the tokens that may come next is computed on another thread as soon as a token is added, beside the step
    that needs it at its end.

    is_complete: the answer has all of its text: nothing may follow. error: why no mask can be computed, or None
    """

    def __init__(self, matcher, masks, vocab_size, ends, where):
        self._matcher, self._masks, self._vocab_size, self._where = matcher, masks, vocab_size, where
        self._ends, self._found = sorted(ends), None
        self._busy = threading.Lock()  # is held while a mask is computed
        self.is_complete, self.error = False, None
        self._ask()

    def _ask(self):
        self._busy.acquire()
        self._masks.put(self)

    def compute(self):
        """Computes the mask, on whichever thread."""
        try:
            self._found = self._compute()
        except BaseException as error:  # noqa: BLE001 - a package's panic, too
            self._found = self._everything(), False, self._failed(_words(str(error)))
        finally:
            self._busy.release()

    def _compute(self):
        """Returns (the mask, is_complete, error)."""
        mask = np.frombuffer(self._matcher.compute_bitmask(), np.uint32).copy()
        is_end = _change(mask, self._vocab_size, False)
        for token in self._ends if is_end else ():
            _change(mask, token, True)
        is_complete, error = self._state()
        if error is None and mask.any():
            return mask, is_complete, None
        return self._everything(), is_end and error is None, error

    def _everything(self):
        return np.full(self._vocab_size // 32 + 1, ALL, np.uint32)

    def add(self, token):
        """Takes in a token that was drawn."""
        with self._busy:
            self._matcher.consume_token(token)
            self.is_complete, self.error = self._state()
        if self.error is None and not self.is_complete:
            self._ask()

    def allowed(self, barred=()):
        """Returns a bit for each token that may come next, uint32, without those barred unless no others are left.

        Where there are none, is_complete or error says why, and all may.
        """
        with self._busy:
            mask, is_complete, error = self._found
        self.is_complete, self.error = self.is_complete or is_complete, self.error or error
        if not len(barred):
            return mask
        rest = mask.copy()
        for token in map(int, barred):
            _change(rest, token, False)
        return rest if rest.any() else mask

    def _state(self):
        """Returns is_complete and error, as the package has them."""
        if self._matcher.is_error():
            return False, self._failed(_words(self._matcher.get_error()))
        return self._matcher.is_stopped(), None

    def _failed(self, words):
        return ColibriError(self._where, f'"{words}" in the answer', "a grammar that it can go on by",
                            "make it simpler, or allow other text there")


def _change(mask, token, value):
    """Allows a token or not; returns whether it was allowed."""
    before, bit = int(mask[token // 32]), 1 << token % 32
    mask[token // 32] = before | bit if value else before & ~bit
    return bool(before & bit)


def _words(error):
    """Returns the first line of what the package says, which is about its own form of a schema."""
    line, *more = (error or "").strip().split("\n")
    if line.endswith("regex parse error:"):
        line += next((f" {other}" for other in more if other.startswith("error: ")), "")
    while (found := PLACE.match(line)):
        line = line[found.end():]
    return printable("no token of the model continues it" if line == "NoExtensionBias" else line)[:WORDS]
