"""What fails around a run, and how it ends then: memory, devices, weights, clocks, disks, and clients of every kind."""

import contextlib
import os
import re
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT, program
from made_up_gpu import Driver, Status, memory_of
from service import Client, Service
from synthetic import write_model

from colibri import build
from colibri.checkpoint import Checkpoint
from colibri.errors import ColibriError


def limited(mebibytes, *command):
    """A program under a limit of its memory."""
    def limit():
        resource.setrlimit(resource.RLIMIT_AS, (mebibytes << 20, mebibytes << 20))
    return subprocess.run([sys.executable, *map(str, command)], cwd=ROOT, capture_output=True, text=True, check=False,
                          preexec_fn=limit)


def test_a_memory_limit_at_the_start(moe_32, engine):
    """From nothing to enough: each run works, or says in one line what there was no room for."""
    wheres = set()
    for mebibytes in range(20, 400, 4):
        run = limited(mebibytes, "-m", "colibri.run", "--model", moe_32, "--prompt", "hello", "--max-new-tokens", "3")
        if run.returncode == 0:
            break
        if "OpenBLAS" in run.stderr:  # numpy's library ends the process by itself
            continue
        assert run.returncode == 2 and run.stderr.count("\n") == 1 and run.stdout == "", (mebibytes, run.stderr)
        wheres.add(os.path.basename(run.stderr.split(": ")[0]))
    expected = {"python -m colibri.run", moe_32.name, "libcolibri.so", "memory", "threads"}
    assert run.returncode == 0 and wheres <= expected and len(wheres) > 2


def test_a_memory_limit_in_a_step(moe_32, engine):
    """The step fails; the session is as it was before it, and goes on when there is memory again."""
    script = """
import gc, resource, sys
from colibri.engine import Engine
def limit(size):
    resource.setrlimit(resource.RLIMIT_AS, (size, resource.RLIM_INFINITY))
with Engine(sys.argv[1], "host", num_slots=1) as engine, engine.session() as session:
    first = session.prefill(b"It was the custom of ")
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    limit(used)
    kept = []
    try:
        while True:
            kept.append(engine.step([(session, b"x" * 60)], every=True))
            session.length -= 60
    except MemoryError:
        limit(resource.RLIM_INFINITY)
    print(session.length)
    print(bytes(session.generate(b"the old captain", 12)).decode())
"""
    run = subprocess.run([sys.executable, "-c", script, str(moe_32)], cwd=ROOT, capture_output=True, text=True,
                         check=False)
    assert run.returncode == 0, run.stderr
    length, text = run.stdout.splitlines()
    with engine.session() as session:
        session.prefill(b"It was the custom of ")
        assert (int(length), text) == (21, bytes(session.generate(b"the old captain", 12)).decode())


def test_a_device_that_has_no_memory_left(use):
    memory = memory_of(Driver(cuMemAlloc=lambda _: (Status.CUDA_ERROR_OUT_OF_MEMORY, 0)), use)
    memory._device_blocks = []
    with pytest.raises(ColibriError) as error:
        memory.state(1 << 30)
    assert str(error.value) == ("GPU: cuMemAlloc=CUDA_ERROR_OUT_OF_MEMORY, expected CUDA_SUCCESS; see python -m "
                                "colibri.run --doctor")
    assert memory._device_blocks == []


REQUEST = {"prompt": "It was the custom of ", "max_new_tokens": 40}


@pytest.fixture
def model(moe_32, engine, tmp_path):
    """A copy of its own."""
    return shutil.copy(moe_32, tmp_path / "model.bin")


@pytest.fixture(scope="module")
def expected(engine):
    with engine.session() as session:
        return bytes(session.generate(REQUEST["prompt"].encode(), REQUEST["max_new_tokens"])).decode()


def good(service, expected):
    """That the service answers as ever."""
    with service.client() as client:
        assert client.ask(**REQUEST)["text"] == expected


def drained(client):
    """What a client still receives before its connection is closed."""
    lines = []
    with contextlib.suppress(ConnectionResetError):
        while line := client.file.readline():
            lines.append(line)
    return lines


def test_killed_in_the_middle_of_streams(model, tmp_path, expected):
    """Clients get a closed connection, and the port serves again at once."""
    with Service(model, tmp_path, "--serve", "127.0.0.1:0", "--http", ":0") as service:
        place = service.places[0]
        address = "127.0.0.1", int(place.split(":")[1])
        clients = [Client(address) for _ in range(3)]
        for client in clients:
            client.send({"id": 1, "prompt": "a", "max_new_tokens": 500, "stream": True})
            assert "token" in client.receive()
        service.process.kill()
        assert service.process.wait() == -9
        for client in clients:
            assert not any(b"finish_reason" in line or b'"error"' in line for line in drained(client))
    with Service(model, tmp_path, "--serve", place, "--http", ":0") as again:
        assert again.places[0] == place
        with Client(address) as client:
            assert client.ask(**REQUEST)["text"] == expected
        assert again.stop() == 0
    for client in clients:
        client.close()


def test_a_model_that_is_cut_off_while_it_serves(model, tmp_path):
    size = os.path.getsize(model)
    with Service(model, tmp_path) as service, service.client() as client:
        client.send({"id": 1, "prompt": "a", "max_new_tokens": 500, "stream": True})
        assert "token" in client.receive()
        os.truncate(model, 8192)
        assert not any(b"finish_reason" in line for line in drained(client))
        assert service.process.wait(10) == 2
        assert service.log.partition("\n")[2] == (
            f"{model}: a part of it can no longer be read, expected its {size} bytes to stay while it is in use; it "
            "was cut off, or its disk fails: write a new file beside it and rename that over it\n")


def test_a_model_that_is_replaced_while_it_serves(model, tmp_path, expected):
    """What runs goes on with the old file; the next start takes the new one."""
    with Service(model, tmp_path) as service:
        (tmp_path / "new.bin").write_bytes(b"COLI")
        os.replace(tmp_path / "new.bin", model)
        good(service, expected)
        assert service.stop() == 0
    run = program("colibri.run", "--model", model, "--serve", ":0")
    assert run.returncode == 2 and run.stderr.decode() == (
        f"{model}: size=4, expected at least 512 bytes; the file is cut off, convert again\n")


def resident(service, field="VmRSS"):
    """MiB"""
    return int(re.search(rf"{field}:\s*(\d+)", Path(f"/proc/{service.process.pid}/status").read_text())[1]) / 1024


def test_a_clock_that_jumps(model, tmp_path, expected):
    """Deadlines and latencies do not look at it."""
    script = ("import itertools, sys, time\nreal, jumps = time.time, itertools.cycle((0, 1e8, -1e8))\n"
              "time.time = lambda: real() + next(jumps)\nfrom colibri import run\nsys.exit(run.command())")
    command = [sys.executable, "-c", script, "--model", str(model), "--serve", f"unix:{tmp_path / 'socket'}", "--http",
               ":0"]
    with Service(model, tmp_path, command=command) as service, service.client() as client:
        for _ in range(5):
            answer = client.ask(**REQUEST, deadline_ms=20_000)
            assert answer["text"] == expected and 0 < answer["ttft_ms"] < 20_000 and 0 < answer["itl_p99_ms"] < 20_000
        answer = client.ask(prompt="x", max_new_tokens=500, deadline_ms=20)
        assert answer.get("finish_reason") == "deadline" or answer["error"]["code"] == "deadline"
        assert service.stop() == 0


def test_a_memory_limit_while_serving(model, tmp_path, expected):
    """No more memory, not even for the stack of a thread: requests are answered, or fail with a line or their
    connection; when there is memory again all is as before."""
    with Service(model, tmp_path, "--batch-size", 4) as service, service.client() as client:
        limit = int(resident(service, "VmRSS") * (1 << 20))
        resource.prlimit(service.process.pid, resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
        answers = []
        with contextlib.suppress(ConnectionError):
            client.send(*[{"id": number, "prompt": "a" * 400, "max_new_tokens": 50} for number in range(20)])
            while len(answers) < 20 and (answer := client.receive()):
                answers.append(answer)
        assert len({answer["id"] for answer in answers}) == len(answers)
        assert {answer["error"]["code"] for answer in answers if "error" in answer} <= {"internal"}
        resource.prlimit(service.process.pid, resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        good(service, expected)
        service.wait_for("kv_slots_free", 4)
        assert service.stop() == 0


def test_weights_that_hold_nan(tmp_path):
    """Every request fails with its line, and the service stays."""
    model = write_model(tmp_path / "model.bin")
    checkpoint = Checkpoint(model)
    start = checkpoint.tensors["layers.1.router"].ctypes.data - checkpoint.data.ctypes.data
    build.library_path(checkpoint)
    with open(model, "r+b") as file:
        file.seek(start)
        file.write(np.float32(np.nan).tobytes())
    with Service(model, tmp_path) as service, service.client() as client:
        for _ in range(3):
            answer = client.ask(prompt="abc", max_new_tokens=3)
            assert answer == {"id": 0, "error": {"code": "internal", "message": (
                "layers.1.router: logits of token 0 are NaN, +inf or fewer than k=2 finite, expected finite; the "
                "weights or the input hold NaN or inf")}}
        assert service.metric("kv_slots_free") == service.metric("kv_slots") and service.stop() == 0


@pytest.mark.parametrize("number", range(9))
def test_no_thread_for_the_service(moe_32, number):
    """One line, wherever the process's limit is met; eight threads are enough to serve stdin and to end."""
    script = ("import sys, threading\nfrom colibri import run\nstart, left = threading.Thread.start, "
              "[int(sys.argv.pop(1))]\ndef limited(thread):\n    left[0] -= 1\n    if left[0] < 0:\n"
              "        raise RuntimeError(\"can't start new thread\")\n    start(thread)\n"
              "threading.Thread.start = limited\nsys.exit(run.command())\n")
    run = subprocess.run([sys.executable, "-c", script, str(number), "--model", str(moe_32), "--backend", "host",
                          "--serve",
                          "-"], input=b'{"id": 1, "prompt": "It was", "max_new_tokens": 4}\n', cwd=ROOT, check=False,
                         capture_output=True, timeout=60)
    if number == 8:
        assert run.returncode == 0 and b'"finish_reason": "length"' in run.stdout
        return
    assert run.returncode == 2 and run.stdout == b""
    assert run.stderr == (b"service: no thread to start, expected a few; raise the limits of processes and memory "
                          b"(ulimit -u and -v)\n")
