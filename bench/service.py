"""Starts the service for a benchmark, and speaks with it in lines of JSON."""

import json
import re
import socket
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path

from bench.program import ROOT

READY = re.compile(r"^serving .* on ([\d.]+):(\d+), http ([\d.]+):(\d+)(?:, .*)?$")
STOP_SECONDS = 60


class Service:
    """Runs python -m colibri.run --serve on free ports of 127.0.0.1, until the block ends.

    pid, address, http: of the process and its two sockets. log: its lines on stderr after the one that says it is
    ready.
    """

    def __init__(self, model, *options):
        command = [sys.executable, "-m", "colibri.run", "--model", str(Path(model).resolve()), "--serve", "127.0.0.1:0",
                   "--http", "127.0.0.1:0", *map(str, options)]
        self.process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        self.pid, self.log = self.process.pid, []
        try:
            ready = self._wait(command)
        except BaseException:
            self.__exit__()
            raise
        self.address, self.http = (ready[1], int(ready[2])), (ready[3], int(ready[4]))
        self._reader = threading.Thread(target=self._read_log, daemon=True)
        self._reader.start()

    def _wait(self, command):
        for line in self.process.stderr:
            if ready := READY.match(line.strip()):
                return ready
            sys.stderr.write(line)
        raise subprocess.CalledProcessError(self.process.wait() or 1, command)

    def _read_log(self):
        self.log += self.process.stderr

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()

    def stop(self):
        """Sends SIGTERM. Returns the exit status and all lines of the log."""
        self.process.terminate()
        status = self.process.wait(STOP_SECONDS)
        self._reader.join()
        return status, self.log

    def metrics(self):
        """Returns {"name" or 'name{label="value"}': number} of GET /metrics."""
        with urllib.request.urlopen("http://{}:{}/metrics".format(*self.http), timeout=30) as answer:
            lines = answer.read().decode().splitlines()
        pairs = (line.rpartition(" ") for line in lines if line and not line.startswith("#"))
        return {name: float(value) for name, _, value in pairs}

    def status(self, name):
        """Returns a field of /proc/PID/status, in MiB."""
        text = Path(f"/proc/{self.pid}/status").read_text()
        return int(re.search(rf"^{name}:\s*(\d+) kB", text, re.MULTILINE)[1]) / 1024


class Lines:
    """Sends and receives JSON objects over a connection. receive() returns None where the service closed it."""

    def __init__(self, address, timeout=60):
        self.socket = socket.create_connection(address, timeout)
        self._file = self.socket.makefile("rb")

    def send(self, *objects):
        self.send_bytes(b"".join(json.dumps(item).encode() + b"\n" for item in objects))

    def send_bytes(self, data):
        self.socket.sendall(data)

    def receive(self):
        line = self._file.readline()
        return json.loads(line) if line else None

    def ask(self, request):
        """Sends a request and returns its last line."""
        self.send(request)
        while True:
            answer = self.receive()
            if answer is None or "finish_reason" in answer or "error" in answer:
                return answer

    def close(self):
        self._file.close()
        self.socket.close()

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.close()
