"""Benchmarks, each python -m bench.NAME; bench.program has what they share."""

import sys

from colibri.program import guard_imports

if sys.argv[0] == "-m":  # python -m bench.NAME, whose imports come next
    guard_imports("python -m bench")
