"""Sampler: how a next token is drawn, and the draws themselves. History: what of a sequence its sampler looks at."""

import functools
import math
from collections import namedtuple
from numbers import Integral, Real

import numpy as np

from colibri.errors import ColibriError
from colibri.headers import default

DRAWS = 64            # of a seed that are made at a time
MAX_CHOICES = 128     # of one request
MAX_BIASES = 1024     # tokens in logit_bias
MAX_STOP_TOKENS = 128

# logit_bias: ((token, bias), ...), stop_token_ids: (token, ...). choice: of several by one seed. logprobs: how many of
# the likeliest tokens are told beside the drawn one's log-probability; None: nothing is. prompt_logprobs: the same of
# a prompt's tokens. grammar: a colibri.grammars.Grammar that the text follows.
Fields = namedtuple("Fields", "temperature top_k top_p seed min_p presence_penalty frequency_penalty "
                    "repetition_penalty logit_bias min_tokens stop_token_ids ignore_eos choice logprobs "
                    "prompt_logprobs grammar",
                    defaults=(0.0, 0, 1.0, 0, 0.0, 0.0, 0.0, 1.0, (), 0, (), False, 0, None, None, None))


class Sampler(Fields):
    """Says how a sequence's tokens are drawn, which of them end it, and what is told of them."""

    __slots__ = ()

    def ends(self, token, eos):
        """Returns whether a token that was drawn ends the text. eos: the model's own such tokens"""
        return token in self.stop_token_ids or token in eos and not self.ignore_eos

    def ending(self, eos):
        """Returns all tokens that end the text."""
        return {*self.stop_token_ids, *(() if self.ignore_eos else eos)}


PLAIN = Sampler()
# A step's own sampling does with these: their requests' rows need nothing else.
OF_STEP = ("temperature", "top_k", "top_p", "seed", "choice", "stop_token_ids", "ignore_eos")
Score = namedtuple("Score", "token logprob rank top top_logprobs")  # top: the likeliest tokens, with top_logprobs


def _is_integer(low, high):
    return lambda value: isinstance(value, Integral) and low <= value <= high


def _is_number(low, high):
    return lambda value: isinstance(value, Real) and low <= value <= high


def _is_count(value):
    return value is None or _is_integer(0, default().constants["MAX_TOP"])(value)


def _is_positive(high):
    return lambda value: isinstance(value, Real) and 0 < value <= high and np.float32(value) > 0


def _is_bias(value):
    return isinstance(value, tuple) and len(value) <= MAX_BIASES and all(
        isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], Integral) and _is_number(-100, 100)(pair[1])
        for pair in value) and len({token for token, _ in value}) == len(value)


def _is_tokens(value):
    return isinstance(value, tuple) and len(value) <= MAX_STOP_TOKENS and all(map(_is_integer(0, math.inf), value))


RULES = {  # of each field: whether a value is good, and what is expected; upper limits are those of C's float, int32_t
    "temperature": (_is_number(0, 1e30), "0 (greedy) to 1e30"),
    "top_k": (_is_integer(-1, (1 << 31) - 1), "0 or -1 (all) to 2^31 - 1"),
    "top_p": (_is_positive(1), "more than 0 and at most 1"),
    "seed": (_is_integer(0, (1 << 64) - 1), "0 to 2^64 - 1"),
    "min_p": (_is_number(0, 1), "0 (all) to 1"),
    "presence_penalty": (_is_number(-2, 2), "-2 to 2"),
    "frequency_penalty": (_is_number(-2, 2), "-2 to 2"),
    "repetition_penalty": (_is_positive(1e30), "more than 0 (1: none) and at most 1e30"),
    "logit_bias": (_is_bias, f"at most {MAX_BIASES} different tokens, each with -100 to 100"),
    "min_tokens": (_is_integer(0, (1 << 31) - 1), "0 to 2^31 - 1"),
    "stop_token_ids": (_is_tokens, f"at most {MAX_STOP_TOKENS} tokens"),
    "ignore_eos": (lambda value: isinstance(value, bool), "true or false"),
    "choice": (_is_integer(0, MAX_CHOICES - 1), f"0 to {MAX_CHOICES - 1}"),
    "logprobs": (_is_count, f"0 to {default().constants['MAX_TOP']}"),
    "prompt_logprobs": (_is_count, f"0 to {default().constants['MAX_TOP']}"),
    "grammar": (lambda value: value is None or hasattr(value, "guide"), "a Grammar")}


def check_sampler(sampler, prefix=""):
    """Returns the sampler if its values make sense. prefix: "--" where they are options of the command line."""
    if not isinstance(sampler, Sampler):
        raise ColibriError("samplers", sampler, "a Sampler for each session")
    for name, (is_good, expected) in RULES.items():
        if not is_good(getattr(sampler, name)):
            label = prefix + (name.replace("_", "-") if prefix else name)
            raise ColibriError(label, str(getattr(sampler, name)), expected)
    return sampler


def check_tokens(sampler, vocab_size, eos):
    """Checks that a sampler's tokens are a model's, and that it can draw one of them."""
    for name, tokens in (("logit_bias", [token for token, _ in sampler.logit_bias]),
                         ("stop_token_ids", sampler.stop_token_ids)):
        for token in tokens:
            if not 0 <= token < vocab_size:
                raise ColibriError(name, f"token {token}", f"0 to {vocab_size - 1}")
    if sampler.min_tokens and len({*sampler.stop_token_ids, *eos}) >= vocab_size:
        raise ColibriError("min_tokens", sampler.min_tokens, "a token that does not end the text",
                           "leave some of stop_token_ids out")


def check_samplers(samplers, count):
    """Returns the samplers as a list, or None for None."""
    if samplers is None:
        return None
    if not isinstance(samplers, (list, tuple)):
        raise ColibriError("samplers", samplers, "a list, a Sampler for each session")
    samplers = [sampler if sampler is None or isinstance(sampler, History) else _check_plain(check_sampler(sampler))
                for sampler in samplers]
    if len(samplers) != count:
        raise ColibriError("samplers", len(samplers), f"one for each of {count} sessions")
    return samplers


def _check_plain(sampler):
    if not is_plain(sampler):
        name = next(name for name in RULES if name not in OF_STEP and getattr(sampler, name) != getattr(PLAIN, name))
        raise ColibriError("samplers", f"{name} in a Sampler alone", "a History, which knows the sequence's tokens")
    return sampler


def is_plain(sampler):
    """Returns whether a step's own sampling does for all tokens of a sequence: it needs no History."""
    return all(getattr(sampler, name) == value for name, value in PLAIN._asdict().items() if name not in OF_STEP)


class History:
    """A sequence's Sampler, and what it looks at: the tokens of the prompt, and those that were drawn.

    Whoever steps the session calls add() for each token that becomes a part of it. All of it follows from the tokens.

    end:    the position of the first token after the prompt
    scores: {position: Score} of what was asked for; a step that is repeated writes the same again
    """

    def __init__(self, sampler, prompt, eos, start=0):
        """prompt: its tokens, ints or bytes. eos: those that end a text. start: the position of the prompt's first"""
        self.sampler, self.prompt, self.start, self.end = sampler, list(prompt), start, start + len(prompt)
        self.scores, self._drawn = {}, 0
        self.guide = sampler.grammar.guide(sampler.ending(eos)) if sampler.grammar is not None else None
        self.biased = np.array([token for token, _ in sampler.logit_bias], np.int32)
        self.biases = np.array([bias for _, bias in sampler.logit_bias], np.float32)
        self._barred = np.array(sorted({*eos, *sampler.stop_token_ids}), np.int32)
        penalties = sampler.presence_penalty, sampler.frequency_penalty, sampler.repetition_penalty
        self._has_penalties = penalties != (0, 0, 1)
        first = np.unique(np.array(self.prompt, np.int32)) if self._has_penalties else np.empty(0, np.int32)
        self._places = dict(zip(first.tolist(), range(len(first))))
        self._seen, self._counts = first, np.zeros(len(first), np.int32)

    def add(self, token):
        """Takes in a token that was drawn."""
        self._drawn += 1
        if self.guide is not None:
            self.guide.add(token)
        if not self._has_penalties:
            return
        place = self._places.setdefault(token, len(self._places))
        if place == len(self._seen):
            more = np.zeros(max(64, place), np.int32)
            self._seen, self._counts = np.append(self._seen, more), np.append(self._counts, more)
        self._seen[place] = token
        self._counts[place] += 1

    @property
    def seen(self):
        """Returns the tokens so far, each once."""
        return self._seen[:len(self._places)]

    @property
    def counts(self):
        """Returns how often each of them was drawn."""
        return self._counts[:len(self._places)]

    @property
    def barred(self):
        """Returns the tokens that may not be drawn next."""
        return self._barred[:len(self._barred) if self._drawn < self.sampler.min_tokens else 0]

    @property
    def allowed(self):
        """Returns a bit for each token that the grammar allows next, or None without a grammar.

        What min_tokens bars may be drawn all the same where the grammar has nothing else.
        """
        return None if self.guide is None else self.guide.allowed(self.barred)

    @property
    def is_complete(self):
        """Returns whether a grammar has the text end here."""
        return self.guide is not None and self.guide.is_complete

    def is_over(self):
        """Returns is_complete; raises what is wrong with the grammar."""
        if self.guide is not None and self.guide.error:
            raise self.guide.error
        return self.is_complete

    @property
    def has_prompt_scores(self):
        return self.sampler.prompt_logprobs is not None

    def given(self, position):
        """Returns the prompt's token at a position, or -1 where one is drawn."""
        return self.prompt[position - self.start] if position < self.end else -1


def draw(seed, position, choice=0):
    """Returns the draw in [0, 1) for the token at a position, which depends on seed, choice and position alone.

    24 random bits, so that the float32 that C reads is exact and below 1.
    """
    return _draws(seed, choice, position // DRAWS)[position % DRAWS]


@functools.lru_cache(1024)
def _draws(seed, choice, block):
    """Returns the draws of DRAWS positions: the first of the four words that the generator gives for each counter."""
    words = np.random.Philox(key=seed, counter=block * DRAWS + (choice << 64)).random_raw(4 * DRAWS)[::4]
    return ((words >> np.uint64(40)) / (1 << 24)).tolist()
