"""What the command lines share: the parser, the types of options, signals, and every mistake as one line.

Exit status: 0 done, 2 a mistake (one line on stderr), 130 Ctrl-C, 143 SIGTERM.
"""

import argparse
import contextlib
import os
import re
import signal
import sys
import traceback

from colibri.errors import ColibriError, printable

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
DECIMAL = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
INTEGER = re.compile(r"[+-]?[0-9]{1,1000}")  # int() also takes blanks, underscores and other digits


class Parser(argparse.ArgumentParser):
    """Parses the options of `python -m MODULE`. A mistake is a ColibriError."""

    def __init__(self, module, **options):
        super().__init__(prog=f"python -m {module}", allow_abbrev=False,
                         formatter_class=argparse.RawDescriptionHelpFormatter, **options)

    def parse_args(self, args=None, namespace=None):
        """Parses options and positional arguments in any order."""
        options, unknown = self.parse_known_intermixed_args(args, namespace)
        if unknown:
            import difflib
            known = [name for action in self._actions for name in action.option_strings]
            near = difflib.get_close_matches(unknown[0], known, 1) if unknown[0].startswith("-") else []
            raise ColibriError(unknown[0][:80], "unknown option", "one that --help lists",
                               f"did you mean {near[0]}?" if near else None)
        return options

    def error(self, message):
        hint = "" if ", expected " in message else f"; see {self.prog} --help"
        raise ColibriError(message.removeprefix("argument ") + hint)

    def print_help(self, file=None):
        with writing_stdout():  # argparse's own hides a full disk
            print(self.format_help(), end="")


def integer(low=None, high=None):
    """Returns the type of an option: an integer from low to high."""
    limit = "" if low is None else f"{low} or more" if high is None else f"{low} to {high}"

    def check(text):
        if not INTEGER.fullmatch(text):
            raise argparse.ArgumentTypeError(f"{text[:80]}, expected an integer{limit and ', '}{limit}")
        value = int(text)
        if (low is not None and value < low) or (high is not None and value > high):
            raise argparse.ArgumentTypeError(f"{text}, expected {limit}")
        return value
    return check


def number(above=None):
    """Returns the type of an option: a finite number, above a limit where there is one."""
    def check(text):
        value = float(text) if DECIMAL.fullmatch(text) else float("nan")
        if not abs(value) < float("inf") or (above is not None and value <= above):
            raise argparse.ArgumentTypeError(f"{text[:80]}, expected a number"
                                             + (f" above {above}" if above is not None else ""))
        return value
    return check


def choice(values):
    """Returns the type of an option: one of these names."""
    def check(text):
        if text not in values:
            raise argparse.ArgumentTypeError(f"{text}, expected one of {', '.join(values)}")
        return text
    return check


def of_system(error):
    """Returns a ColibriError of an OSError that nothing nearer has explained."""
    where, path = error.filename, "the path, "
    if where is None:
        ours = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)
                if frame.f_code.co_filename.startswith(ROOT)]
        where, path = "{}:{}".format(*ours[-1])[len(ROOT):], ""
    return ColibriError(os.fsdecode(where), str(error.strerror or error), "the system to allow it",
                        f"check {path}permissions, space and limits (ulimit -a)")


@contextlib.contextmanager
def writing_stdout():
    """Wraps what writes to stdout: what fails there is an error of stdout, and nothing else is.

    Where the reader has gone away the process ends as by SIGPIPE, without a word.
    """
    try:
        yield
        if sys.stdout:
            sys.stdout.flush()
    except BrokenPipeError:
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGPIPE)
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the exit would try to write again
        raise ColibriError("stdout", error.strerror, "to write the results there", "free some space") from None


def guard_imports(program, interrupted="interrupted"):
    """Ends a program with one line where its other imports fail, status 2, or Ctrl-C comes, 130. run() takes over."""
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


def _terminate(*_):
    raise KeyboardInterrupt("terminated")


def _take_over(like_ctrl_c):
    """Makes signals exceptions, and puts /dev/null where a standard stream is closed, lest a file take its place."""
    sys.excepthook = sys.__excepthook__
    signal.signal(signal.SIGTERM, _terminate)
    for number in (signal.SIGINT, *like_ctrl_c):
        if number == signal.SIGINT or signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP
            signal.signal(number, signal.default_int_handler)
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    sys.stderr = sys.stderr or os.fdopen(os.dup(descriptor), "w")
    os.close(descriptor)


def run(main, interrupted="interrupted", like_ctrl_c=()):
    """Runs a program's main() and returns its exit status.

    interrupted: the line after Ctrl-C
    like_ctrl_c: other signals that end the program as Ctrl-C does
    """
    try:
        _take_over(like_ctrl_c)
        try:
            status = main()
        except SystemExit as end:  # of --help and --version
            status = end.code
        with writing_stdout():  # what was printed must get there
            return status or 0
    except ColibriError as error:
        message, status = str(error), 2
    except KeyboardInterrupt as stop:
        message, status = ("terminated", 143) if stop.args else (interrupted, 130)
    except MemoryError:
        message, status = "memory: not enough for this run, expected more; use less input or raise the limit", 2
    except OSError as error:
        message, status = str(of_system(error)), 2
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, _: os._exit(128 + number))  # it ends already: without a traceback
    with contextlib.suppress(OSError):  # the status still tells; print would leave it for the exit to try again
        os.write(2, f"{printable(' '.join(message.splitlines()))}\n".encode())
    return status
