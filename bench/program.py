"""Holds what the benchmarks' command lines share: a mistake is one line and status 2, Ctrl-C is one word and status
130.
"""

import argparse
import signal
import subprocess
import sys
import time
from pathlib import Path

from tqdm import tqdm

from colibri.errors import ColibriError, imports_done

ROOT = Path(__file__).resolve().parent.parent


class Parser(argparse.ArgumentParser):
    """Parses the options of python -m bench.NAME. Its --help begins with the first line of `about`."""

    def __init__(self, name, about):
        super().__init__(prog=f"python -m bench.{name}", description=about.split("\n")[0], allow_abbrev=False)

    def error(self, message):
        raise ColibriError(f"{message.removeprefix('argument ')}; see {self.prog} --help")


def count(text):
    """Reads an option that is a whole number, 1 or more."""
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}, expected 1 or more")
    return int(text)


def amount(text):
    """Reads an option that is a finite number above 0."""
    try:
        number = float(text)
    except ValueError:
        number = 0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text}, expected a number above 0")
    return number


def several(kind):
    """Returns the type of an option that is a list of such values, with commas."""
    def check(text):
        return [kind(part) for part in text.split(",")]
    return check


def names(known):
    """Returns the type of an option that is a list of some of these names, with commas."""
    def check(text):
        for name in text.split(","):
            if name not in known:
                raise argparse.ArgumentTypeError(f"{name}, expected some of {', '.join(known)}")
        return text.split(",")
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
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        imports_done()
        sys.exit(main())
    except ColibriError as error:
        message, status = str(error), 2
    except subprocess.CalledProcessError as error:  # it has said why
        sys.exit(error.returncode)
    except KeyboardInterrupt:
        message, status = "interrupted", 130
    print(message, file=sys.stderr)
    sys.exit(status)
