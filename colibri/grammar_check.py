"""Compiles grammars to see whether they can be, in a process of its own, which grammars.py starts: a JSON line each.

A grammar is a client's: to compile one may take minutes or end the process. Here that has seconds of CPU time, bounded
memory and less stack than the threads that compile it again.
"""

import threading

from colibri.grammars import limits, package, tokenizer
from colibri.processes import answer

STACK_BYTES = 1 << 20


def main():
    answer(Check)


class Check:
    """Says what is wrong with grammars.

    special: [(text, number)] of the model's special tokens, which a grammar may name; of others, it has the bytes alone
    """

    def __init__(self, vocab_size, special):
        self._package, numbers = package(), {number for _, number in special}
        tokens = [b""] * (vocab_size + 256)
        for text, number in special:
            tokens[number] = text.encode()
        free = (number for number in range(len(tokens)) if number not in numbers)
        for byte, number in zip(range(256), free):
            tokens[number] = bytes((byte,))
        self._tokenizer = tokenizer(self._package, tokens, sorted(numbers))
        threading.stack_size(STACK_BYTES)

    def __call__(self, text):
        """Returns {"error": what the package says, "" if nothing}."""
        found = []
        thread = threading.Thread(target=lambda: found.append(self._error(text)))
        thread.start()
        thread.join()
        return {"error": found[0]}

    def _error(self, text):
        matcher = self._package.LLMatcher(self._tokenizer, text, log_level=0, limits=limits(self._package))
        if not matcher.is_error():
            matcher.compute_bitmask()
        return matcher.get_error()
