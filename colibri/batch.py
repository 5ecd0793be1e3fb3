"""Batch: one step's input and output, as many tokens of the sessions as fit in."""

import numpy as np

from colibri.sampling import draw


class Batch:
    """struct Batch of model.h in memory that the kernels read, and what fills it.

    fields:  {name: array}
    address: of the struct
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
        self._max_tokens = headers.constants["MAX_TOKENS"]

    def fill(self, pending, is_sampled, every):
        """Fills the batch with as many tokens as fit, of no session more than its cache bears.

        pending: [(session, tokens, sampler or None, row of the result for its first logits)]
        Returns what is left of it, the number of tokens, the rows of the result that the logits are, and what it took.
        """
        left, taken, tokens, rows, logit_rows, drawn = [], [], [], [], [], []
        num_tokens = 0
        for session, rest, sampler, row in pending:
            count = min(len(rest), self._max_piece, self._max_tokens - num_tokens)
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
        fields = self.fields
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
        self.fields["uniform"][:len(drawn)] = [draw(sampler.seed, position) if sampler.temperature > 0 else 0
                                               for sampler, position in drawn]
