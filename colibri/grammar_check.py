"""Compiles grammars to see whether they can be, in a process of its own, which grammars.py starts: a JSON line each.

A grammar is a client's: to compile one may take minutes or end the process. Here that has seconds of CPU time, bounded
memory and less stack than the threads that compile it again.
"""

import threading

from colibri.grammars import LIMITS, package, tokenizer
from colibri.processes import answer

STACK_BYTES = 1 << 20
BYTES = [bytes((byte,)) for byte in range(256)]


def main():
    answer(Check)


class Check:
    """Says what is wrong with grammars."""

    def __init__(self):
        self._package = package()
        self._tokenizer = tokenizer(self._package, BYTES, ())
        threading.stack_size(STACK_BYTES)

    def __call__(self, text):
        """Returns {"error": what the package says, "" if nothing}."""
        found = []
        thread = threading.Thread(target=lambda: found.append(self._error(text)))
        thread.start()
        thread.join()
        return {"error": found[0]}

    def _error(self, text):
        matcher = self._package.LLMatcher(self._tokenizer, text, log_level=0, limits=LIMITS(self._package))
        if not matcher.is_error():
            matcher.compute_bitmask()
        return matcher.get_error()
