"""How a server ends: signals, the time to drain, and being killed."""

import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import ROOT
from service import LONG, SLOW, TIMEOUT, Service, greedy, slow_service
from synthetic import STACK, write_model

from colibri.requests import Request
from colibri.server import Server


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_what_runs_finish(moe_32, tmp_path, engine, number):
    with Service(moe_32, tmp_path, "--batch-size", 1) as service:
        with service.client() as client, service.client() as idle:
            client.send({"id": 1, **LONG}, {"id": 2, "prompt": "abc", "max_new_tokens": 5})
            service.wait_for("running_requests", 1)
            service.process.send_signal(number)
            assert client.receive()["text"] == greedy(engine, LONG["prompt"], 490)
            assert client.receive()["text"] == greedy(engine, "abc", 5)
            assert client.receive() is None and idle.receive() is None
        assert service.process.wait(TIMEOUT) == 0 and not service.path.exists()
        assert re.search(r"^serving .*\nstopping: 2 requests to finish\n\S+Z request id=1 ", service.log)


def test_what_the_time_to_drain_cuts(moe_32, tmp_path):
    with Service(moe_32, tmp_path, "--drain", 0, "--batch-size", 1) as service, service.client() as client:
        client.send({"id": 1, **LONG, "stream": True}, {"id": 2, **LONG})
        client.receive()
        service.process.send_signal(signal.SIGTERM)
        got = {}
        while len(got) < 2:
            line = client.receive()
            if "token" not in line:
                got[line["id"]] = line
        assert got[1]["finish_reason"] == "shutdown" and got[1]["completion_tokens"] > 0
        assert got[2]["error"]["code"] == "shutdown"
        assert re.fullmatch(r"server: ended after \d+ ms while waiting, expected a running one; send it to another, or "
                            "again later", got[2]["error"]["message"])
        assert client.receive() is None and service.process.wait(TIMEOUT) == 0


def test_requests_while_it_drains(moe_32, tmp_path):
    with slow_service(moe_32, tmp_path) as service, service.client() as client:
        client.send({"id": 1, "prompt": "abc", "max_new_tokens": 12, "stream": True})
        client.receive()
        service.process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
        with pytest.raises(OSError):
            service.client()
        client.send({"id": 2, "prompt": "abc"})
        lines = []
        while line := client.receive():
            lines.append(line)
        refused, = [line for line in lines if line["id"] == 2]
        assert refused["error"] == {"code": "shutdown", "message": "server: shutting down, expected a running one; "
                                                                   "send it to another, or again later"}
        assert lines[-1]["id"] == 1 and lines[-1]["completion_tokens"] == 12
        assert service.process.wait(TIMEOUT) == 0


@pytest.mark.parametrize("number, status, word", [(signal.SIGTERM, 143, "terminated"),
                                                  (signal.SIGINT, 130, "interrupted")])
def test_a_second_signal_ends_it_at_once(moe_32, tmp_path, number, status, word):
    with slow_service(moe_32, tmp_path) as service, service.client() as client:
        client.send({"id": 1, **LONG, "stream": True})
        client.receive()
        service.process.send_signal(number)
        time.sleep(0.2)
        assert service.process.poll() is None
        assert service.stop(number) == status
        assert service.log.endswith(f"{word}\n") and not service.path.exists()


@pytest.mark.parametrize("log", ["its reader has ended", "nobody reads it", "a full disk"])
def test_a_second_signal_needs_no_log(moe_32, tmp_path, log):
    reading, writing = os.pipe()
    if log == "nobody reads it":
        os.write(writing, bytes(fcntl.fcntl(writing, fcntl.F_GETPIPE_SZ)))
    elif log == "a full disk":
        os.dup2(os.open("/dev/full", os.O_WRONLY), writing)
    else:
        os.close(reading)
    with subprocess.Popen([sys.executable, "-c", SLOW, "--backend", "host", "--model", str(moe_32), "--serve", "-"],
                          cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=writing) as process:
        process.stdin.write(json.dumps({"id": 1, **LONG, "stream": True}).encode() + b"\n")
        process.stdin.flush()
        process.stdout.readline()
        for _ in range(2):
            assert process.poll() is None
            process.send_signal(signal.SIGTERM)
            time.sleep(0.2)
        try:
            assert process.wait(5) == 143
        finally:
            process.kill()
    os.close(writing)
    if log != "its reader has ended":
        os.close(reading)


def test_a_second_signal_leaves_nothing_half_written(tmp_path):
    model, folder = write_model(tmp_path / "stack.bin", STACK), tmp_path / "out"
    folder.mkdir()
    np.save(tmp_path / "x.npy", np.zeros((100_000, 64), np.float32))
    with slow_service(model, tmp_path) as service, service.client() as client:
        client.send({"id": 1, "input": str(tmp_path / "x.npy"), "output": str(folder / "y.npy")})
        while not os.listdir(folder):
            time.sleep(0.01)
        service.process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
        assert len(os.listdir(folder)) == 1 and service.stop() == 143 and not os.listdir(folder)


def test_killed_and_started_again(moe_32, tmp_path):
    """The socket is left behind, clients get the end of their connection, and the next server takes the place."""
    with Service(moe_32, tmp_path) as service, service.client() as client:
        client.send({"id": 1, **LONG})
        service.process.kill()
        try:
            assert client.receive() is None
        except ConnectionResetError:
            pass
        service.process.wait()
        assert service.path.is_socket()
    with Service(moe_32, tmp_path) as service, service.client() as client:
        assert client.ask(prompt="x", max_new_tokens=1)["finish_reason"] == "length"
        assert service.stop() == 0 and not service.path.exists()


def test_an_end_that_comes_while_a_token_is_told_of():
    """The scheduler's thread goes on meanwhile: the end is seen early, its own news come after, and it is told once."""
    told, ended = [], []

    class Owner:
        is_closing = False

        def progress(self, request):
            told.append((len(request.news()), request.is_over))

        def flush(self):
            pass
    request = Request(1, Owner(), [1], stream=True)
    server = Server.__new__(Server)
    server.is_draining, server._ended, server._num_unanswered = False, ended.append, 1
    server.scheduler = SimpleNamespace(take=lambda: [request], failure=None)
    request.tokens.append(5)
    server._news()
    request.tokens.append(6)
    request.finish = "length"
    server._news()
    server._news()
    assert told == [(1, False), (1, True)] and ended == [request] and server._num_unanswered == 0
