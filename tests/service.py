"""A server as a process, and clients that speak lines with it."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time

from conftest import ROOT, program

START_SECONDS = 30
TIMEOUT = 30
LONG = {"prompt": "It was the custom of ", "max_new_tokens": 490}
SLOW = ("import sys, time\nfrom colibri import run\nfrom colibri.engine import Engine\n"
        "def slow(step):\n    return lambda *arguments: time.sleep(0.05) or step(*arguments)\n"
        "Engine.advance, Engine.stack = slow(Engine.advance), slow(Engine.stack)\nsys.exit(run.command())")


def greedy(engine, prompt, count, **sampling):
    with engine.session() as session:
        return bytes(session.generate(prompt.encode(), count, **sampling)).decode(errors="replace")


def run_lines(model, lines, *options):
    """The lines that a server on stdin answers, and its log."""
    ended = program("colibri.run", "--backend", "host", "--model", model, "--serve", "-", *options, input=lines)
    assert ended.returncode == 0, ended.stderr.decode()
    return [json.loads(line) for line in ended.stdout.splitlines()], ended.stderr.decode()


def fails(model, *options, **rest):
    """The one line with which a server does not start."""
    ended = program("colibri.run", "--backend", "host", "--model", model, *options, **rest)
    assert ended.returncode == 2 and ended.stdout == b""
    return ended.stderr.decode()


def wakes(pid, thread):
    """How often a thread has gone to sleep: as often as it woke."""
    with open(f"/proc/{pid}/task/{thread}/status") as file:
        return int(re.search(r"^voluntary_ctxt_switches:\s*(\d+)", file.read(), re.MULTILINE)[1])


class Service:
    """python -m colibri.run with --serve unix:PATH --http :0, or what else the options say; use it with `with`."""

    def __init__(self, model, folder, *options, command=None, environment=(), pass_fds=()):
        self.path, self.log_path = folder / "socket", folder / "log"
        if not any(str(option) in ("--serve", "--http") for option in options):
            options = ("--serve", f"unix:{self.path}", "--http", ":0", *options)
        self.command = command or [sys.executable, "-m", "colibri.run", "--backend", "host", "--model", str(model),
                                   *map(str, options)]
        self.pass_fds = pass_fds
        self.environment = {**os.environ, "PYTHONPATH": str(ROOT), **dict(environment)}

    def __enter__(self):
        with open(self.log_path, "wb") as log:
            self.process = subprocess.Popen(self.command, cwd=ROOT, env=self.environment, stderr=log,
                                            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                                            pass_fds=self.pass_fds)
        end = time.monotonic() + START_SECONDS
        while not (found := re.search(r"^serving \S+ on (.*)\n", self.log, re.MULTILINE)):
            assert self.process.poll() is None and time.monotonic() < end, self.log
            time.sleep(0.01)
        self.places = [place for place in found[1].split(", ") if ":" in place]  # without what the model's file says
        self.port = next((int(place.rpartition(":")[2]) for place in self.places if place.startswith("http ")), None)
        return self

    def __exit__(self, *exception):
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    @property
    def log(self):
        return self.log_path.read_text()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"

    def client(self):
        return Client(str(self.path))

    def stop(self, number=signal.SIGTERM):
        """The status that the process ends with after a signal."""
        self.process.send_signal(number)
        return self.process.wait(TIMEOUT)

    def metric(self, name):
        """The value of a sample, `name` or `name{label="value"}`, in /metrics."""
        import urllib.request
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=TIMEOUT) as response:
            text = response.read().decode()
        return float(next(line for line in text.splitlines() if line.startswith(f"colibri_{name} ")).rpartition(" ")[2])

    def wait_for(self, name, value):
        """Waits until a metric has a value."""
        end = time.monotonic() + TIMEOUT
        while (got := self.metric(name)) != value:
            assert time.monotonic() < end, f"{name}={got}, expected {value}"
            time.sleep(0.01)

    def wait_for_log(self, text):
        """Waits until the log has a text: a request's line comes after its answer."""
        end = time.monotonic() + TIMEOUT
        while text not in self.log:
            assert time.monotonic() < end, self.log
            time.sleep(0.01)


def slow_service(model, folder, *options):
    """A server whose steps take 50 ms more."""
    return Service(model, folder, command=[sys.executable, "-c", SLOW, "--backend", "host", "--model", str(model),
                                           "--serve", f"unix:{folder}/socket", *map(str, options)])


class Client:
    def __init__(self, address):
        """address: a path, or (host, port)"""
        self.socket = socket.socket(socket.AF_INET if isinstance(address, tuple) else socket.AF_UNIX)
        self.socket.settimeout(TIMEOUT)
        self.socket.connect(address)
        self.file = self.socket.makefile("rb")

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.close()

    def close(self):
        self.file.close()
        self.socket.close()

    def send(self, *messages):
        """Dicts as lines, bytes as they are."""
        self.socket.sendall(b"".join(message if isinstance(message, bytes) else json.dumps(message).encode() + b"\n"
                                     for message in messages))

    def receive(self):
        """The next line, or None at the end."""
        line = self.file.readline()
        return json.loads(line) if line else None

    def ask(self, **fields):
        """A request's last line."""
        self.send({"id": 0, **fields})
        while "token" in (line := self.receive()):
            pass
        return line
