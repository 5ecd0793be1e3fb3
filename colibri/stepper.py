"""Stepper: runs sessions' tokens, or a bare stack's states, in as few steps of a model as they fit in."""

import numpy as np

from colibri.errors import ColibriError
from colibri.sampling import History


class Stepper:
    """Runs the steps of a model.

    model: a colibri.model.Model
    draws: what draws the tokens of a History, a colibri.draws.Draws
    """

    def __init__(self, model, draws):
        self._model, self._library, self._memory, self._batch = model, model.library, model.memory, model.batch
        self._draws, self._vocab_size = draws, model.checkpoint.header["vocab_size"]

    def run(self, work, samplers, every):
        """Engine.step, of work that is checked."""
        before = [session.length for session, _ in work]
        try:
            return self._run_all(work, samplers, every)
        except BaseException:
            for (session, tokens), length in zip(work, before):
                # A ring has lost what is before a longer piece.
                if len(tokens) <= self._model.max_piece or not self._model.is_limited:
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
                   np.empty((num_rows, self._vocab_size), np.float32))
        while pending:
            pending, taken = self._run_some(pending, is_sampled, every, results)
            for session, count in taken:
                session.length += count
        return results

    def _run_some(self, pending, is_sampled, every, results):
        """Runs as many tokens as fit in one step, see Batch.fill. Returns what is left and [(session, count)]."""
        left, num_tokens, taken, wanted = self._batch.fill(pending, is_sampled, every)
        for start in range(0, max(len(wanted), 1), self._batch.max_logits):
            logits = wanted[start:start + self._batch.max_logits]
            self._batch.want(logits, is_sampled)
            self._model.run(self._library.forward_logits if start else self._library.forward, num_tokens, len(logits))
            rows = [row for row, *_ in logits]
            if is_sampled:
                self._take(logits, results)
            elif rows:
                results[rows] = self._model.state("logits", len(rows))
                _check_finite("step: the logits", results[rows], rows)
        return left, taken

    def _take(self, wanted, results):
        """Puts the tokens of a call's logits into the results; those of a History are drawn now. wanted: fill()'s"""
        tokens = self._batch.fields["sampled"][:len(wanted)].tolist()
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

    def stack(self, x):
        """Engine.stack, of float states (num_tokens, hidden)."""
        y = np.empty(x.shape, np.float32)
        with np.errstate(over="ignore"):  # what float32 cannot hold shows in the result
            for start in range(0, len(x), self._batch.max_tokens):
                rows = np.ascontiguousarray(x[start:start + self._batch.max_tokens], np.float32)
                self._batch.fields["input"][0] = self._memory.visible(rows)
                self._batch.fields["num_tokens"][0] = len(rows)
                self._batch.fields["num_logits"][0] = 0
                self._model.run(self._library.forward_stack, len(rows))
                y[start:start + len(rows)] = self._model.state("x", len(rows))
                _check_finite("stack: the result", y[start:start + len(rows)], range(start, start + len(rows)))
        return y


def _check_finite(what, rows, numbers):
    """Checks that rows, which have these numbers in the result, hold neither NaN nor inf."""
    finite = np.isfinite(rows)
    if not finite.all():
        row = numbers[np.argmin(finite.all(axis=1))]
        raise ColibriError(what, f"row {row} holds NaN or inf", "finite numbers",
                           "the weights or the input hold NaN, inf or numbers too large")
