"""The one exception that users see: a single sentence `where: name=got, expected rule; fix`."""

import contextlib
import os
import signal
import sys
import traceback
from numbers import Integral

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


class ColibriError(Exception):
    """A mistake in the input, the options or the machine; the command line prints its text alone and exits with 2."""


def between(name, value, default, low, high):
    """The value, or the default for None."""
    if value is None:
        return default
    if not isinstance(value, Integral):
        raise ColibriError(f"{name}: {value!r}, expected an integer, {low} to {high}")
    if not low <= value <= high:
        raise ColibriError(f"{name}: {value}, expected {low} to {high}")
    return value


def of_system(error):
    """Returns the sentence of an OSError that nothing nearer has explained."""
    where = error.filename
    if where is None:
        ours = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)
                if frame.f_code.co_filename.startswith(ROOT)]
        where = "{}:{}".format(*ours[-1])[len(ROOT):]
    return (f"{os.fsdecode(where)}: {error.strerror or error}, expected the system to allow it; check permissions, space "
            "and limits (ulimit -a)")


@contextlib.contextmanager
def writing_stdout(what):
    """For what writes to stdout: what fails there is an error of stdout, and nothing else is."""
    try:
        yield
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the exit would try to write again
        raise ColibriError(f"stdout: {error.strerror}, expected to write the {what} there; free some space") from None


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
