"""Holds the benchmarks, each python -m bench.NAME. They share bench.program."""

import sys

from colibri.program import guard_imports

if sys.argv[0] == "-m":  # python -m bench.NAME, whose imports come next
    guard_imports("python -m bench")
