"""A server's log: one line a request on stderr, each written at once, by a thread: a slow log holds nothing up."""

import json
import os
import queue
import re
import threading
import time

LINES = 1000       # that may wait; what comes beyond is lost, and counted
LINE_BYTES = 4096  # of a line at most: what a pipe takes in one piece
WORD = re.compile("[A-Za-z0-9_.:/+-]+")
PROMPT = 300       # characters of a prompt that --log-prompts shows
MESSAGE = 300      # characters of an error's message


def in_json(event, **values):
    """Returns an event as JSON, all ASCII."""
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    return json.dumps({"time": now, "event": event, **values})


class Log:
    """form: "text" or "json"."""

    def __init__(self, form, descriptor=2):
        self._is_json, self._descriptor = form == "json", descriptor
        self._lost_here = self._lost_there = 0  # each is written by one thread
        self._lines = queue.Queue(LINES)
        self._thread = threading.Thread(target=self._main, name="log", daemon=True)
        self._thread.start()

    @property
    def lost(self):
        return self._lost_here + self._lost_there

    def line(self, event, text=None, **values):
        """Returns the bytes of an event's line: named values, or in their place, where lines are text, `text`."""
        if self._is_json:
            line = in_json(event, **values)
        else:
            now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
            line = text or f"{now} {event}" + "".join(f" {name}={_plain(value)}" for name, value in values.items())
        return line.encode("ascii", "backslashreplace") + b"\n"

    def event(self, event, text=None, **values):
        """Writes line() of the same."""
        data = self.line(event, text, **values)
        if len(data) > LINE_BYTES:
            self._lost_here += 1
            return
        try:
            self._lines.put_nowait(data)
        except queue.Full:
            self._lost_here += 1

    def close(self, seconds=1.0):
        """Writes what waits, unless that takes too long."""
        try:
            self._lines.put(None, timeout=seconds)
            self._thread.join(seconds)
        except queue.Full:
            pass

    def _main(self):
        while (line := self._lines.get()) is not None:
            try:
                if os.write(self._descriptor, line) < len(line):
                    self._lost_there += 1
            except OSError:
                self._lost_there += 1


def _plain(value):
    """Numbers and words as they are, other text in quotes, so that a line stays one line and its fields apart."""
    if value is None:
        return "-"
    return value if isinstance(value, str) and WORD.fullmatch(value) else json.dumps(value)
