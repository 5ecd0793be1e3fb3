"""Processes that answer lines for this one, where what a line asks for may never end, or end the process."""

import collections
import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

from colibri.errors import ColibriError

ROOT = Path(__file__).resolve().parent.parent
START = "import sys; sys.path[:0] = [sys.argv[1]]; from colibri.{} import main; main()"
MEMORY_BYTES = 1 << 30  # addresses of a process that answers


class NotStarted(ColibriError):
    """There is no process. reason: what the system says"""

    def __init__(self, where, reason):
        super().__init__(where, f"no process for it: {reason}", "one",
                         "raise the limits of processes and memory (ulimit -u and -v)")


class Processes:
    """Processes of one kind. Whichever threads ask, each has one of its own while it does.

    module: of colibri; its main() calls answer(). first: the line that a process reads first. where: for errors
    """

    def __init__(self, module, first, where):
        self._module, self._first, self._where = module, first, where
        self._idle, self._busy = collections.deque([self._process()]), set()

    def ask(self, line):
        """Returns (the answer, None), or (None, the status with which the process has ended)."""
        try:
            process = self._idle.pop()
        except IndexError:
            process = self._process()
        self._busy.add(process)
        try:
            answer = _ask(process, line)
        except BaseException:  # of Ctrl-C: the answer is still to come
            _stop(process)
            raise
        finally:
            self._busy.discard(process)
        if answer is None:
            return None, _stop(process)
        self._idle.append(process)
        return answer, None

    def _process(self):
        try:
            process = subprocess.Popen([sys.executable, "-c", START.format(self._module), ROOT],
                                       stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        except OSError as error:
            raise NotStarted(self._where, error.strerror) from None
        with contextlib.suppress(BrokenPipeError):  # who asks it finds that it has ended
            process.stdin.write(self._first)
            process.stdin.flush()
        return process

    def close(self):
        """Ends the processes, also those at work, of which other threads then hear."""
        for process in list(self._busy):
            process.kill()
        while self._idle:
            _stop(self._idle.pop())


def _ask(process, line):
    """Returns a process's answer; None where it has ended, or ends."""
    try:
        process.stdin.write(line)
        process.stdin.flush()
        data = process.stdout.readline()
    except BrokenPipeError:
        return None
    return json.loads(data) if data.endswith(b"\n") else None


def _stop(process):
    """Ends a process, unless it has ended, and returns its status."""
    for pipe in (process.stdin, process.stdout):
        with contextlib.suppress(BrokenPipeError):  # of what it has not read
            pipe.close()
    process.kill()
    return process.wait()


def why_ended(status, seconds):
    """Returns why a process ended. seconds: of computing that an answer may take"""
    if status == -signal.SIGPROF:
        return f"more than {seconds:g} s of computing"
    return f"its process ended with {signal.Signals(-status).name if status < 0 else status}"


def answer(make):
    """Answers the lines on stdin until it ends, in the process that was started.

    make: called with the first line's values after its first, which is the seconds of CPU time that an answer may take;
    returns what answers a line's values. A signal for the terminal's whole group is not for this process.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    limit = MEMORY_BYTES if most == resource.RLIM_INFINITY else min(MEMORY_BYTES, most)
    resource.setrlimit(resource.RLIMIT_AS, (limit, most))
    seconds, *rest = json.loads(sys.stdin.buffer.readline())
    made = make(*rest)
    for line in sys.stdin.buffer:
        signal.setitimer(signal.ITIMER_PROF, seconds)
        try:
            found = made(json.loads(line))
        except (RecursionError, MemoryError) as error:
            found = {"kind": "raised", "error": type(error).__name__}
        data = json.dumps(found).encode() + b"\n"
        signal.setitimer(signal.ITIMER_PROF, 0)
        while data:
            data = data[os.write(1, data):]
