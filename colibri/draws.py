"""Draws: tokens of requests that ask for more than a step's own sampling, drawn on the host from rows of logits."""

import numpy as np

from colibri.sampling import Score, draw

ARRAYS = ("biased", "biases", "seen", "counts", "barred")
VALUES = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty")


class Draws:
    """struct Draw of model.h, as many as a step has logits, and the rows that C works in."""

    def __init__(self, library, vocab_size):
        self._library, self._struct, self._vocab_size = library, library.headers.structs["Draw"], vocab_size
        self._changed = np.empty((0, vocab_size), np.float32)

    def run(self, logits, wanted, num_threads):
        """Returns the token of each of `wanted`, and puts what is to be told of it into its History's scores.

        logits: float32 (rows, vocab_size), in C's order
        wanted: [(its row, History, position of the token)]; a token of the prompt is scored, another is drawn
        """
        draws, kept = np.zeros(len(wanted), self._struct), []
        if len(self._changed) < len(wanted):
            self._changed = np.empty((len(wanted), self._vocab_size), np.float32)
        row_bytes = 4 * self._vocab_size
        for i, (row, history, position) in enumerate(wanted):
            draws["logits"][i] = logits.ctypes.data + row * row_bytes
            draws["changed"][i] = self._changed.ctypes.data + i * row_bytes
            self._set(draws[i], history, position, kept)
        self._library.draw(draws.ctypes.data, len(draws), num_threads)
        for found, (_, history, position) in zip(draws, wanted):
            if found["num_top"] >= 0 and found["token"] >= 0:
                history.scores[position] = _score(found)
        return draws["token"].tolist()

    def _set(self, values, history, position, kept):
        """Sets a struct's fields. kept: what holds the arrays that it points to"""
        sampler, token = history.sampler, history.given(position)
        told = sampler.logprobs if token < 0 else sampler.prompt_logprobs
        values["token"], values["num_top"] = token, -1 if told is None else told
        if token >= 0:
            return
        for name in ARRAYS:
            array = np.ascontiguousarray(getattr(history, name))
            kept.append(array)
            values[name] = array.ctypes.data
        for name in ("biased", "seen", "barred"):
            values[f"num_{name}"] = len(getattr(history, name))
        allowed = history.allowed
        if allowed is not None:
            kept.append(allowed)
            values["allowed"] = allowed.ctypes.data
            values["num_barred"] = 0  # they are not among those allowed, but where nothing else is
        for name in VALUES:
            values[name] = getattr(sampler, name)
        values["uniform"] = draw(sampler.seed, position, sampler.choice) if sampler.temperature > 0 else 0


def _score(found):
    count = found["num_top"]
    return Score(int(found["token"]), float(found["logprob"]), int(found["rank"]), found["top"][:count].copy(),
                 found["top_logprobs"][:count].copy())
