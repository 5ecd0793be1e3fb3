"""The one exception that users see: a single sentence `where: name=got, expected rule; fix`."""

import os
import signal
import sys


class ColibriError(Exception):
    """A mistake in the input, the options or the machine; the command line prints its text alone and exits with 2."""


def guard_imports(program, interrupted="interrupted"):
    """For a program's other imports, until it takes over: one line for Ctrl-C, status 130, and for what fails, 2."""
    def give_up(kind, error, _):
        cause = str(error).strip().rpartition("\n")[2] or kind.__name__
        expected = "memory for them; raise the limit"
        if issubclass(kind, ModuleNotFoundError):
            expected = ("the packages of setup.cfg; activate their environment (. .venv/bin/activate), or install them "
                        "(pip install -e .)")
        os.write(2, f"{program}: imports: {cause}, expected {expected}\n".encode())
        os._exit(2)
    signal.signal(signal.SIGINT, lambda *_: (os.write(2, f"{interrupted}\n".encode()), os._exit(130)))
    sys.excepthook = give_up


def imports_done():
    """The program takes over: Ctrl-C and what fails are exceptions again."""
    sys.excepthook = sys.__excepthook__
    signal.signal(signal.SIGINT, signal.default_int_handler)
