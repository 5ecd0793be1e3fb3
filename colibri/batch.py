"""Batch: one step's input and output, as many tokens of the sessions as fit in."""

import numpy as np

from colibri.sampling import PLAIN, History, draw


class Batch:
    """struct Batch of model.h in memory that the kernels read, and what fills it.

    fields:  {name: array}
    address: of the struct
    max_tokens, max_logits: of one call of the library
    """

    def __init__(self, memory, headers, max_piece, has_rope_lengths):
        """memory: a backend's, see colibri.weights.HostMemory. headers: the library's. max_piece: see cache.h.

        has_rope_lengths: whether frequencies depend on a session's length
        """
        struct = headers.structs["Batch"]
        self._struct = memory.batch(struct.itemsize).view(struct)
        self.fields = {name: self._struct[name] if self._struct[name].ndim == 1 else self._struct[name][0]
                       for name in struct.names}
        self.address = self._struct.ctypes.data
        self._max_piece, self._has_rope_lengths = max_piece, has_rope_lengths
        self.max_tokens, self.max_logits = (headers.constants[f"MAX_STEP_{name}"] for name in ("TOKENS", "LOGITS"))

    def fill(self, pending, is_sampled, every):
        """Fills the batch with as many tokens as fit, of no session more than its cache bears.

        pending: [(session, tokens, Sampler, History or None, row of the result for its first logits)]
        Returns what is left of it, the number of tokens, what it took, and which logits are wanted: [(row of the
        result, the token in the batch, its sampler, the position of the token that is drawn or scored)]. The row is
        None for a prompt's token that is scored.
        """
        left, taken, tokens, wanted = [], [], [], []
        num_tokens = 0
        for session, rest, sampler, row in pending:
            count = min(len(rest), self._max_piece, self.max_tokens - num_tokens)
            rows = 0 if is_sampled and sampler is None else count if every else int(count == len(rest))
            scored = _num_scored(sampler, session.length, count)
            rows = min(rows, count - scored)
            if count < len(rest):
                left.append((session, rest[count:], sampler, row + rows))
            if count == 0:
                continue
            tokens.append(rest[:count])
            num_tokens += count
            taken.append((session, count))
            for i in range(scored):
                wanted.append((None, num_tokens - count + i, sampler, session.length + i + 1))
            for i in range(rows):
                wanted.append((row + i, num_tokens - rows + i, sampler, session.length + count - rows + i + 1))
        self._set_tokens(taken, tokens, num_tokens)
        self.fields["num_tokens"][0] = num_tokens
        return left, num_tokens, taken, wanted

    def want(self, logits, is_sampled):
        """Sets which logits the next call computes, at most max_logits of fill()'s."""
        self.fields["logit_rows"][:len(logits)] = [token for _, token, _, _ in logits]
        self.fields["num_logits"][0], self.fields["sample"][0] = len(logits), is_sampled
        if is_sampled:
            # rows of a History are drawn later: see colibri.draws
            self._set_samplers([(PLAIN if isinstance(sampler, History) else sampler, position)
                                for _, _, sampler, position in logits])

    def _set_tokens(self, taken, tokens, num_tokens):
        """taken: [(session, how many tokens)], tokens: [those]"""
        slots, lengths = [session.slot for session, _ in taken], [session.length for session, _ in taken]
        if num_tokens > len(taken):  # else it is decoding, for which lists are faster
            counts = [count for _, count in taken]
            tokens, slots = np.concatenate(tokens), np.repeat(slots, counts)
            lengths = np.concatenate([np.arange(start, start + count) for start, count in zip(lengths, counts)])
        else:
            tokens = [token for token, in tokens]
        for name, values in (("tokens", tokens), ("positions", lengths), ("slots", slots)):
            self.fields[name][:num_tokens] = values
        if self._has_rope_lengths:
            self.fields["rope_lengths"][:num_tokens] = np.repeat([session.rope.length for session, _ in taken],
                                                                 [count for _, count in taken])

    def _set_samplers(self, drawn):
        """drawn: [(sampler, the position that its token will have)]"""
        for name in ("temperature", "top_k", "top_p"):
            self.fields[name][:len(drawn)] = [getattr(sampler, name) for sampler, _ in drawn]
        self.fields["uniform"][:len(drawn)] = [
            draw(sampler.seed, position, sampler.choice) if sampler.temperature > 0 else 0
            for sampler, position in drawn]


def _num_scored(sampler, length, count):
    """Returns after how many of a session's next `count` tokens the one that follows is scored, as a prompt's."""
    if not isinstance(sampler, History) or not sampler.has_prompt_scores:
        return 0
    return min(max(sampler.end - 1 - length, 0), count)
