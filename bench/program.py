"""What the benchmarks' command lines share beside colibri.program."""

import functools
import subprocess
import sys
import time
from pathlib import Path

from tqdm import tqdm

from colibri import program

ROOT = Path(__file__).resolve().parent.parent

count = program.integer(1)
amount = program.number(0)


def make_parser(name, about):
    """Returns the Parser of python -m bench.NAME, whose --help begins with the first line of `about`."""
    return program.Parser(f"bench.{name}", description=about.split("\n")[0])


def several(kind):
    """Returns the type of an option that is a list of such values, with commas."""
    def check(text):
        return [kind(part) for part in text.split(",")]
    return check


def example_model(model):
    """Returns the model's name. The example is made where it is missing."""
    if model == "moe-32.bin" and not Path(model).exists():
        subprocess.run([sys.executable, "-m", "converter", ROOT / "models" / "moe-32.pt", model], check=True,
                       stdout=sys.stderr)
    return model


class Seconds:
    """Shows a progress bar over so many seconds, on a terminal. left() returns whether some are left."""

    def __init__(self, seconds, what):
        self._end, self._seconds = time.monotonic() + seconds, seconds
        self._bar = tqdm(total=round(seconds), desc=what, unit="s", leave=False, disable=None)

    def left(self):
        rest = self._end - time.monotonic()
        self._bar.update(min(self._bar.total, round(self._seconds - rest)) - self._bar.n)
        if rest <= 0:
            self._bar.close()
        return rest > 0


def run(main):
    """Runs a benchmark and ends. Processes that it started are ended by the blocks that it leaves."""
    sys.exit(program.run(functools.partial(_status, main)))


def _status(main):
    try:
        return main()
    except subprocess.CalledProcessError as error:  # it has said why
        return error.returncode
