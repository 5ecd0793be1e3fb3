"""The server as a process: lines over stdin and sockets, clients that misbehave or leave, and how it ends."""

import asyncio
import fcntl
import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import ROOT, program
from service import TIMEOUT, Client, Service, wakes
from synthetic import STACK, write_model

from colibri.engine import Engine
from colibri.requests import Request
from colibri.server import Server
from colibri.stdio import Pipes

LONG = {"prompt": "It was the custom of ", "max_new_tokens": 490}


def greedy(engine, prompt, count, **sampling):
    with engine.session() as session:
        return bytes(session.generate(prompt.encode(), count, **sampling)).decode(errors="replace")


@pytest.fixture(scope="module")
def service(moe_32, tmp_path_factory):
    """One server for what leaves it as it was."""
    with Service(moe_32, tmp_path_factory.mktemp("service"), "--batch-size", 8, "--queue-size", 4) as service:
        yield service
        assert service.metric("kv_slots_free") == 8 and service.metric("queue_depth") == 0
        assert service.stop() == 0 and "fault" not in service.log


def run(model, lines, *options):
    """The lines that a server on stdin answers, and its log."""
    ended = program("colibri.run", "--backend", "host", "--model", model, "--serve", "-", *options, input=lines)
    assert ended.returncode == 0, ended.stderr.decode()
    return [json.loads(line) for line in ended.stdout.splitlines()], ended.stderr.decode()


# Lines on stdin

def test_stdin_until_its_end(moe_32, engine):
    lines = (b'{"id": "a", "prompt": "It was ", "max_new_tokens": 30}\n\n'
             b'{"id": 2, "prompt": "It was ", "max_new_tokens": 20, "temperature": 1, "seed": 3, "stream": true}\n'
             b'nonsense\n'
             b'{"id": 3, "prompt_ids": [73, 116], "max_new_tokens": 4, "stream": true}')  # the last line has no end
    got, log = run(moe_32, lines)
    by_id = {key: [line for line in got if line["id"] == key] for key in ("a", 2, None, 3)}
    final, = by_id["a"]
    assert final["text"] == greedy(engine, "It was ", 30)
    assert final == {**final, "finish_reason": "length", "prompt_tokens": 7, "completion_tokens": 30,
                     "path": engine.path}
    assert final["ttft_ms"] > 0 and 0 < final["itl_p50_ms"] <= final["itl_p99_ms"]
    *tokens, final = by_id[2]
    assert final["text"] == greedy(engine, "It was ", 20, temperature=1.0, seed=3)
    assert "".join(token["text"] for token in tokens) == final["text"]
    assert bytes(token["token"] for token in tokens).decode() == final["text"]
    assert by_id[None] == [{"id": None, "error": {
        "message": "line: not JSON from character 0 on, expected one JSON object", "code": "bad_request"}}]
    *tokens, final = by_id[3]
    assert [token["token"] for token in tokens] == final["ids"] == list(greedy(engine, "It", 4).encode())
    assert all(token.keys() == {"id", "token"} for token in tokens) and "text" not in final
    assert re.fullmatch(r"serving moe-32.bin on stdin\n(\S+Z request id=\S+ .*\n){4}", log)


def test_a_batch_of_lines_with_room_for_it(moe_32, engine):
    """More requests than slots, from a file; each is answered once."""
    lines = b"".join(b'{"id": %d, "prompt": "%c", "max_new_tokens": 5}\n' % (number, 65 + number % 26)
                     for number in range(300))
    got, _ = run(moe_32, lines, "--queue-size", 300, "--batch-size", 4)
    assert sorted(line["id"] for line in got) == list(range(300))
    expected = {letter: greedy(engine, letter, 5) for letter in map(chr, range(65, 91))}
    assert all(line["text"] == expected[chr(65 + line["id"] % 26)] for line in got)


def test_a_thousand_bad_lines_while_nobody_reads(moe_32):
    """More answers than a pipe holds: the server waits for its reader, and loses none."""
    process = subprocess.Popen([sys.executable, "-m", "colibri.run", "--backend", "host", "--model", str(moe_32),
                                "--serve", "-"], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                               stderr=subprocess.DEVNULL)
    threading.Thread(target=lambda: (process.stdin.write(b"bad\n" * 20_000), process.stdin.close())).start()
    time.sleep(1)
    assert len(process.stdout.read().splitlines()) == 20_000 and process.wait(TIMEOUT) == 0
    process.stdout.close()


def test_a_reader_that_takes_its_time(moe_32):
    """It gets what waits for it, however long after the last request has ended."""
    process = subprocess.Popen([sys.executable, "-m", "colibri.run", "--backend", "host", "--model", str(moe_32),
                                "--serve", "-"], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE)
    process.stdin.write(b"bad\n" * 800)
    process.stdin.close()
    for _ in range(801):
        process.stderr.readline()  # all are answered
    time.sleep(2)
    assert len(process.stdout.read().splitlines()) == 800 and process.wait(TIMEOUT) == 0
    process.stdout.close()
    process.stderr.close()


def test_nobody_reads_stdout_any_more(moe_32):
    process = subprocess.Popen([sys.executable, "-m", "colibri.run", "--backend", "host", "--model", str(moe_32),
                                "--serve", "-"], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE)
    process.stdin.write(json.dumps({"id": 1, **LONG, "stream": True}).encode() + b"\n")
    process.stdin.flush()
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(TIMEOUT) == 0
    log = process.stderr.read().decode()
    assert re.search(r"request id=1 prompt_tokens=21 tokens=\d+ finish=(cancelled|length) ", log) and "Error" not in log
    process.stdin.close()
    process.stderr.close()


def test_http_on_stdin_closes_nothing(moe_32, engine):
    """The browser's danger is not there; and what comes after, above all the end, is seen."""
    got, _ = run(moe_32, b'GET / HTTP/1.1\r\n{"id": 1, "prompt": "It was ", "max_new_tokens": 3}\n')
    assert got[0] == {"id": None, "error": {"code": "bad_request", "message": (
        "line: HTTP, expected a JSON object a line; HTTP is spoken at --http")}}
    assert [line["text"] for line in got[1:]] == [greedy(engine, "It was ", 3)]


def test_the_end_of_stdin_after_its_connection():
    """Which was dropped while it was not read."""
    async def main():
        stopped = asyncio.Event()
        connection = SimpleNamespace(connection_made=lambda transport: None, connection_lost=lambda error: None,
                                     server=SimpleNamespace(stop=stopped.set))
        source, end = os.pipe()
        pipes = Pipes(asyncio.get_running_loop(), connection, source, end)
        os.write(end, b"not read any more\n")
        pipes.pause_reading()
        pipes.abort()
        os.close(end)
        await asyncio.wait_for(stopped.wait(), TIMEOUT)
        os.close(source)
    asyncio.run(main())


def test_a_full_disk_under_the_answers(moe_32):
    with open("/dev/full", "wb") as full:
        ended = subprocess.run([sys.executable, "-m", "colibri.run", "--backend", "host", "--model", str(moe_32),
                                "--serve", "-"], cwd=ROOT, input=b'{"id": 1, "prompt": "a", "max_new_tokens": 2}\n',
                               stdout=full, stderr=subprocess.PIPE, timeout=TIMEOUT, check=False)
    assert ended.returncode == 2 and re.fullmatch(
        r"serving moe-32.bin on stdin\n\S+Z request id=1 .*\n"
        r"stdout: No space left on device, expected to write the answers there; free some space\n",
        ended.stderr.decode())


def test_a_signal_while_stdin_is_open(moe_32, engine):
    process = subprocess.Popen([sys.executable, "-m", "colibri.run", "--backend", "host", "--model", str(moe_32),
                                "--serve", "-"], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                               stderr=subprocess.DEVNULL)
    process.stdin.write(json.dumps({"id": 1, **LONG, "stream": True}).encode() + b"\n")
    process.stdin.flush()
    process.stdout.readline()
    process.send_signal(signal.SIGTERM)
    *_, final = process.stdout.read().splitlines()
    assert json.loads(final)["text"] == greedy(engine, LONG["prompt"], 490) and process.wait(TIMEOUT) == 0
    process.stdin.close()
    process.stdout.close()


# Requests over a socket

def test_each_client_gets_its_own(service, engine):
    """16 clients at once on 8 slots, sampled and greedy, streaming or not; each answer is what it is alone."""
    results = {}

    def talk(number):
        with service.client() as client:
            for turn in range(4):
                fields = {"prompt": f"Chapter {number}. ", "max_new_tokens": 20 + number, "stream": bool(turn % 2)}
                sampling = {"temperature": 0.9, "top_k": 30, "seed": number} if number % 2 else {}
                while "error" in (got := client.ask(**fields, **sampling)):
                    assert got["error"]["code"] == "queue_full"
                    time.sleep(0.01)
                results[number, turn] = got["text"], greedy(engine, fields["prompt"], fields["max_new_tokens"],
                                                            **sampling)
    threads = [threading.Thread(target=talk, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 64 and all(got == expected for got, expected in results.values())


def test_a_full_queue(service):
    with service.client() as client:
        client.send(*({"id": number, **LONG} for number in range(14)))
        got = [client.receive() for _ in range(2)]
        assert [(line["id"], line["error"]["code"], line["error"]["message"]) for line in got] == [
            (number, "queue_full", "queue: 4 waiting, expected fewer; send it again later, or raise --queue-size")
            for number in (12, 13)]
        assert sorted(client.receive()["id"] for _ in range(12)) == list(range(12))
        assert client.ask(prompt="x", max_new_tokens=1)["finish_reason"] == "length"


def test_deadlines(service):
    with service.client() as client:
        deadline_ms = 15
        while "error" in (final := client.ask(**LONG, deadline_ms=deadline_ms)):  # a busy machine has no token yet
            assert final["error"]["code"] == "deadline"
            deadline_ms *= 2
        assert final["finish_reason"] == "deadline" and 0 < final["completion_tokens"] < 490
        client.send(*({"id": number, **LONG} for number in range(8)), {"id": "late", **LONG, "deadline_ms": 1})
        line = client.receive()
        assert line["id"] == "late" and line["error"]["code"] == "deadline"
        assert re.match(r"deadline_ms: (passed after \d+ ms while|-?\d+ ms left, expected)", line["error"]["message"])
        for _ in range(8):
            assert client.receive()["finish_reason"] == "length"


def test_cancel(service):
    with service.client() as client:
        client.send({"id": "x", **LONG}, {"id": "y", "prompt": "abc", "max_new_tokens": 2}, {"cancel": "x"},
                    {"cancel": "unknown"})
        got = {line["id"]: line for line in (client.receive(), client.receive())}
        assert got["x"]["finish_reason"] == "cancelled" and got["y"]["finish_reason"] == "length"


def test_another_client_cannot_cancel(service):
    with service.client() as client, service.client() as other:
        client.send({"id": 5, "prompt": "abc", "max_new_tokens": 100})
        other.send({"cancel": 5})
        assert client.receive()["finish_reason"] == "length"


def test_an_id_twice(service):
    with service.client() as client:
        client.send({"id": 7, **LONG}, {"id": 7, "prompt": "x"})
        assert client.receive() == {"id": 7,
                                    "error": {"message": "id: 7 is running, expected another; wait for its end",
                                                       "code": "bad_request"}}
        assert client.receive()["completion_tokens"] == 490
        assert client.ask(id=7, prompt="x", max_new_tokens=1)["finish_reason"] == "length"  # free again


def test_bad_lines_and_a_good_one_after(service):
    with service.client() as client:
        client.send(b"\xff\n", b"{}\n", b"\n", b'{"id": "q", "prompt": "x", "max_new_tokens": 1e9}\n')
        got = [client.receive() for _ in range(3)]
        assert [(line["id"], line["error"]["message"].split(",")[0]) for line in got] == [
            (None, "line: byte 0xff at 0"), (None, "id: missing"), ("q", "max_new_tokens: 1000000000.0")]
        assert client.ask(prompt="x", max_new_tokens=1)["finish_reason"] == "length"


def test_a_line_in_small_pieces(service, engine):
    with service.client() as client:
        line = json.dumps({"id": 1, "prompt": "h\xe9", "max_new_tokens": 3}, ensure_ascii=False)
        for byte in line.encode() + b"\r\n":
            client.send(bytes([byte]))
        assert client.receive()["text"] == greedy(engine, "h\xe9", 3)


def test_a_line_of_100_mb(service):
    """Is thrown away as it comes; what follows is served."""
    with service.client() as client:
        before = service.metric("resident_bytes")
        sender = threading.Thread(target=client.send, args=[b"x" * 100_000_000 + b'\n{"id": 1, "prompt": "x"}\n'])
        sender.start()
        assert client.receive() == {"id": None, "error": {
            "message": "line: more than 75264 bytes, expected fewer; no prompt that fits the context is as long",
            "code": "too_long"}}
        assert client.receive()["completion_tokens"] == 64
        sender.join()
        assert service.metric("resident_bytes") - before < 8 << 20


def test_half_a_character_at_the_end(service):
    with service.client() as client:
        client.send(b'{"id": 1, "prompt": "\xe2\x82')
        client.socket.shutdown(socket.SHUT_WR)
        assert client.receive() is None


def test_garbage_of_ten_thousand_connections(service):
    """Some close at once, some send bytes, some wait for the answer."""
    garbage = np.random.default_rng(0).integers(0, 256, 4096, dtype=np.uint8).tobytes()
    for number in range(10_000):
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(service.path))
            if number % 4:
                client.send(garbage[number % 1000:number % 1000 + number % 300])
    service.wait_for("open_connections", 1)  # the one that asks
    with service.client() as client:
        assert client.ask(prompt="x", max_new_tokens=1)["finish_reason"] == "length"


@pytest.mark.parametrize("when", ["waiting", "prefilling", "decoding"])
def test_a_client_that_leaves(service, when):
    service.wait_for("running_requests", 0)
    cancelled = service.metric('requests_total{finish="cancelled"}')
    with service.client() as other:
        if when == "waiting":
            other.send(*({"id": number, **LONG} for number in range(8)))
        client = service.client()
        client.send(*({"id": number, "prompt": "x" * 500, "max_new_tokens": 12} if when == "prefilling" else
                      {"id": number, **LONG, "stream": True} for number in range(4)))
        if when == "decoding":
            client.receive()
        client.close()
        service.wait_for('requests_total{finish="cancelled"}', cancelled + 4)
        if when == "waiting":
            assert [other.receive()["finish_reason"] for _ in range(8)] == ["length"] * 8
    service.wait_for("kv_slots_free", 8)


def test_http_spoken_to_lines(service):
    with service.client() as client:
        client.send(b'POST / HTTP/1.1\r\ncontent-length: 22\r\n\r\n{"id": 1, "prompt": "x"}\n')
        assert client.receive()["error"]["message"] == (
            "line: HTTP, expected a JSON object a line; HTTP is spoken at --http")
        assert client.receive() is None


def test_a_client_that_does_not_read(moe_32, tmp_path):
    """Its answers wait within limits, then it is dropped; others do not notice."""
    with Service(moe_32, tmp_path, command=[
            sys.executable, "-c", ("import sys\nfrom colibri import connection, run\n"
            "connection.MAX_STALL_SECONDS = 1\nsys.exit(run.command())"), "--backend", "host", "--model", str(moe_32),
            "--serve", f"unix:{tmp_path}/socket", "--http", ":0", "--queue-size", "100000"]) as service:
        client = service.client()
        client.socket.settimeout(0.5)
        sent = 0
        with pytest.raises((TimeoutError, BrokenPipeError, ConnectionResetError)):
            while True:
                client.send(b"bad\n" * 1000)
                sent += 1000
        assert sent < 500_000  # the server stops reading when its answers are not read
        before = service.metric("resident_bytes")
        service.wait_for("connections_dropped_total", 1)
        assert service.metric("resident_bytes") - before < 1 << 20
        assert re.search(r"Z connection dropped=\"took nothing for 1 s\"\n", service.log)
        with service.client() as other:
            assert other.ask(prompt="x", max_new_tokens=1)["finish_reason"] == "length"
        client.close()
        half = service.client()
        half.send(b'{"id": 1')
        service.wait_for("connections_dropped_total", 2)
        assert half.receive() is None
        assert re.search(r"Z connection dropped=\"sent half a message, then nothing for 1 s\"\n", service.log)
        assert service.stop() == 0


def test_a_stopped_client_goes_on(service, engine):
    """SIGSTOP in the middle of a stream, then SIGCONT: nothing is missing."""
    script = ("import json, socket, sys\nclient = socket.socket(socket.AF_UNIX)\nclient.connect(sys.argv[1])\n"
              "request = {'id': 1, 'prompt': 'It was ', 'max_new_tokens': 300, 'stream': True}\n"
              "client.sendall(json.dumps(request).encode() + b'\\n')\n"
              "for line in client.makefile():\n    print(line, end='', flush=True)\n"
              "    if 'finish_reason' in line:\n        break\n")
    process = subprocess.Popen([sys.executable, "-c", script, str(service.path)], stdout=subprocess.PIPE, text=True)
    first = process.stdout.readline()
    process.send_signal(signal.SIGSTOP)
    time.sleep(0.3)
    process.send_signal(signal.SIGCONT)
    *tokens, final = map(json.loads, [first, *process.stdout.read().splitlines()])
    assert "".join(token["text"] for token in tokens) == final["text"] == greedy(engine, "It was ", 300)


def with_few_files(model, folder):
    """A server that may have 220 files open: room for ten connections of each kind."""
    return Service(model, folder, command=[
        "bash", "-c", 'ulimit -n 220; exec "$@"', "bash", sys.executable, "-m", "colibri.run", "--backend", "host",
        "--model", str(model), "--serve", f"unix:{folder}/socket", "--http", ":0"])


def test_too_many_connections(moe_32, tmp_path):
    with with_few_files(moe_32, tmp_path) as service:
        clients = [service.client() for _ in range(10)]
        for client in clients:
            client.send(b'{"id": 0, ')  # it has begun: nobody takes its place
        service.wait_for("open_connections", 11)
        refused = service.client()
        assert refused.receive() == {"id": None, "error": {
            "message": "connections: 10 are open and none is idle, expected fewer; close one first",
            "code": "too_many_connections"}}
        assert refused.receive() is None
        assert service.metric("connections_dropped_total") == 1
        for client in clients:
            client.send(b'"prompt": "x", "max_new_tokens": 1}\n')
            assert client.receive()["finish_reason"] == "length"
        clients[0].send({"id": 0, **LONG, "stream": True})  # it runs: the second one has been idle for longest
        clients[0].receive()
        assert service.client().receive()["error"]["code"] == "too_many_connections"  # they may be about to send one
        time.sleep(1.2)
        with service.client() as client:
            assert client.ask(prompt="x", max_new_tokens=1)["finish_reason"] == "length"
            assert clients[1].receive() is None
        assert clients[0].ask(id=1, prompt="x", max_new_tokens=1)["finish_reason"] == "length"
        assert re.search(r'Z connection dropped="idle for \d+ s, and its place was needed"\n', service.log)
        assert service.stop() == 0


# How it ends

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


SLOW = ("import sys, time\nfrom colibri import run\nfrom colibri.engine import Engine\n"
        "def slow(step):\n    return lambda *arguments: time.sleep(0.05) or step(*arguments)\n"
        "Engine.advance, Engine.stack = slow(Engine.advance), slow(Engine.stack)\nsys.exit(run.command())")


def slow_service(model, folder, *options):
    """A server whose steps take 50 ms more."""
    return Service(model, folder, command=[sys.executable, "-c", SLOW, "--backend", "host", "--model", str(model),
                                           "--serve", f"unix:{folder}/socket", *map(str, options)])


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


# Where it listens

def fails(model, *options, **rest):
    ended = program("colibri.run", "--backend", "host", "--model", model, *options, **rest)
    assert ended.returncode == 2 and ended.stdout == b""
    return ended.stderr.decode()


def test_places_that_are_taken(moe_32, service, tmp_path):
    assert fails(moe_32, "--serve", f"unix:{service.path}") == (
        f"--serve: unix:{service.path}, in use by another server, expected a free name; choose another, or end that "
        "server\n")
    with service.client() as client:  # which goes on
        assert client.ask(prompt="x", max_new_tokens=1)["finish_reason"] == "length"
    assert fails(moe_32, "--serve", f":{service.port}") == (
        f"--serve: :{service.port}: Address already in use, expected a free address of this machine; choose another\n")
    (tmp_path / "file").write_text("precious")
    assert fails(moe_32, "--serve", f"unix:{tmp_path}/file") == (
        f"--serve: unix:{tmp_path}/file, a file that is no socket, expected none there; choose another name, or remove "
        "it\n")
    assert (tmp_path / "file").read_text() == "precious"
    assert fails(moe_32, "--serve", f"unix:{tmp_path}/none/socket").startswith(
        f"--serve: unix:{tmp_path}/none/socket: No such file or directory, expected a free address")
    assert fails(moe_32, "--serve", "unix:" + "x" * 108) == (
        f"--serve: unix:{'x' * 108}, expected a name of 1 to 107 bytes; choose another\n")
    assert "203.0.113.1:5: Cannot assign requested address, expected" in fails(moe_32, "--serve", "203.0.113.1:5")


@pytest.mark.parametrize("host, shown", [("..", ".."), ("a..b", "a..b"), ("x" * 64, "x" * 64), (b"\xff", "\\udcff")])
def test_hosts_that_are_no_names(moe_32, host, shown):
    ended = subprocess.run([sys.executable, "-m", "colibri.run", "--backend", "host", "--model", str(moe_32), "--http",
                            (host if isinstance(host, bytes) else host.encode()) + b":8099"], cwd=ROOT,
                           capture_output=True, timeout=TIMEOUT, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr.decode()) == (2, b"", (
        f"--http: {shown}:8099, expected a host's name with 1 to 63 characters between two dots; correct it\n"))


@pytest.mark.parametrize("options, message", [
    (("--serve", "localhost"), "--serve: localhost, expected - or HOST:PORT or unix:PATH, with a port of 0 to 65535"),
    (("--serve", ":70000"), "--serve: :70000, expected - or HOST:PORT or unix:PATH, with a port of 0 to 65535"),
    (("--http", "unix:x"), "--http: unix:x, expected HOST:PORT, with a port of 0 to 65535"),
    (("--http", "::1:80"), "--http: ::1:80, expected HOST:PORT, with a port of 0 to 65535"),
    (("--serve", "-", "--prompt", "x"), "--prompt: given, expected only without --serve and --http; leave it out"),
    (("--serve", "-", "--seed", "1"), "--seed: given, expected only without --serve and --http; leave it out"),
    (("--http", ":0", "--json"), "--json: given, expected only without --serve and --http; leave it out"),
    (("--prompt", "x", "--drain", "1"), "--drain: given, expected only with --serve or --http; leave it out"),
    (("--log-prompts",), "--log-prompts: given, expected only with --serve or --http; leave it out"),
    (("--serve", "-", "--queue-size", "-1"), "--queue-size: -1, expected 0 to 1048576"),
    (("--serve", "-", "--log-format", "xml"), "--log-format: xml, expected one of text, json"),
    (("--serve", "-", "--prefill-chunk", "513"), ("--prefill-chunk: 513, expected at most 512, MAX_STEP_TOKENS of the "
     "library; use fewer, or raise it with DEFINES=-DMAX_STEP_TOKENS=513 in the environment")),
    (("--serve", "-", "--batch-size", "33"), ("--batch-size: 33, expected at most 32, MAX_BATCH of the library; use "
     "fewer, or raise it with DEFINES=-DMAX_BATCH=33 in the environment"))])
def test_options(moe_32, options, message):
    assert fails(moe_32, *options) == message + "\n"


def test_http_without_its_library(moe_32, tmp_path):
    (tmp_path / "h11.py").write_text("raise ImportError")
    assert fails(moe_32, "--http", ":0", environment={"PYTHONPATH": f"{tmp_path}:{ROOT}"}) == (
        "h11: not installed, expected it for --http; run pip install h11 (the extra `serve`)\n")


def test_host_and_port(moe_32, tmp_path):
    with Service(moe_32, tmp_path, "--serve", ":0", "--http", "localhost:0") as service:
        host, port = service.places[0].split(":")
        assert host == "127.0.0.1" and int(port) > 0
        with Client((host, int(port))) as client:
            assert client.ask(prompt="x", max_new_tokens=1)["finish_reason"] == "length"
        assert service.stop() == 0


def test_sockets_of_systemd(moe_32, tmp_path):
    """Passed as descriptors 3 and 4, named; the options' own addresses are not opened."""
    with socket.socket() as lines, socket.socket() as http:
        for listening in (lines, http):
            listening.bind(("127.0.0.1", 0))
            listening.listen()
        script = ("import os, sys\nos.dup2(int(sys.argv[1]), 103)\nos.dup2(int(sys.argv[2]), 3)\nos.dup2(103, 4)\n"
                  "os.environ.update(LISTEN_PID=str(os.getpid()), LISTEN_FDS='2', LISTEN_FDNAMES='lines:http')\n"
                  "os.execv(sys.executable, [sys.executable, '-m', 'colibri.run', *sys.argv[3:]])")
        command = [sys.executable, "-c", script, str(http.fileno()), str(lines.fileno()), "--backend", "host",
                   "--model", str(moe_32), "--serve", "unix:/nonexistent/socket", "--http", ":1"]
        with Service(moe_32, tmp_path, command=command, pass_fds=(lines.fileno(), http.fileno())) as service:
            assert service.places == [f"127.0.0.1:{lines.getsockname()[1]}", f"http 127.0.0.1:{http.getsockname()[1]}"]
            with Client(lines.getsockname()) as client:
                assert client.ask(prompt="x", max_new_tokens=1)["finish_reason"] == "length"
            assert service.metric("connections_total") == 2
            assert service.stop() == 0


@pytest.mark.parametrize("count, kind, message", [
    ("x", "stream", "LISTEN_FDS: x, expected the number of sockets passed, 0 to 9999; unset it"),
    ("9" * 5000, "stream", f"LISTEN_FDS: {'9' * 80}, expected the number of sockets passed, 0 to 9999; unset it"),
    ("99", "stream", ("--serve: descriptor 101 of LISTEN_FDS: Bad file descriptor, expected a listening socket there; "
     "correct the .socket unit, or unset LISTEN_FDS")),
    *(("1", kind, (f"--serve: descriptor 3 of LISTEN_FDS: {wrong}, expected a listening socket there; correct the "
       ".socket unit, or unset LISTEN_FDS")) for kind, wrong in (
          ("datagram", "not a listening stream socket of IP or Unix"),
          ("stream", "not a listening stream socket of IP or Unix"),
          ("file", "Socket operation on non-socket")))])
def test_what_systemd_did_not_pass(moe_32, count, kind, message):
    script = ("import os, socket, sys\ncount, kind, *command = sys.argv[1:]\n"
              "type = socket.SOCK_DGRAM if kind == 'datagram' else socket.SOCK_STREAM\n"
              "one = open('/dev/null') if kind == 'file' else socket.socket(type=type)\n"
              "os.dup2(one.fileno(), 3)\nos.set_inheritable(3, True)\n"
              "os.environ.update(LISTEN_PID=str(os.getpid()), LISTEN_FDS=count)\n"
              "os.execv(sys.executable, [sys.executable, '-m', 'colibri.run', *command])")
    ended = subprocess.run([sys.executable, "-c", script, count, kind, "--backend", "host", "--model", str(moe_32),
                            "--serve", ":0"], cwd=ROOT, capture_output=True, timeout=TIMEOUT, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr.decode()) == (2, b"", message + "\n")


# Bare stacks, logs, time

def test_a_bare_stack(tmp_path):
    stack = write_model(tmp_path / "stack.bin", STACK)
    x = np.random.default_rng(0).standard_normal((1200, 64), dtype=np.float32)
    np.save(tmp_path / "x.npy", x)
    request = {"id": 1, "input": str(tmp_path / "x.npy"), "output": str(tmp_path / "y.npy")}
    got, log = run(stack, json.dumps(request).encode() + b'\n{"id": 2, "prompt": "x"}\n')
    assert got[0]["error"]["message"].endswith("expected tokens for prompt; this is a bare stack of MoE layers, give "
                                               "it an input over --serve")
    assert got[1] == {**got[1], "id": 1, "output": request["output"], "finish_reason": "stop", "prompt_tokens": 1200,
                      "completion_tokens": 0, "itl_p50_ms": None}
    with Engine(stack, backend="host") as engine:
        np.testing.assert_array_equal(np.load(tmp_path / "y.npy"), engine.stack(x))
    assert "request id=1 prompt_tokens=1200 tokens=0 finish=stop ttft_ms=" in log


def test_logs(moe_32):
    secret = b'{"id": "a b\\n\\u00e9", "prompt": "my secret\\n", "max_new_tokens": 2}\n'
    _, text = run(moe_32, secret)
    assert "secret" not in text
    assert re.fullmatch(r'serving moe-32.bin on stdin\n\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ request id="a b\\n\\u00e9" '
                        r"prompt_tokens=10 tokens=2 finish=length ttft_ms=[\d.]+ itl_p99_ms=[\d.]+\n", text)
    _, text = run(moe_32, secret, "--log-format", "json", "--log-prompts")
    serving, line = map(json.loads, text.splitlines())
    assert serving == {"time": serving["time"], "event": "serving", "model": "moe-32.bin", "serve": "stdin"}
    assert line == {**line, "event": "request", "id": "a b\n\xe9", "tokens": 2, "finish": "length",
                    "prompt": "my secret\n"}


@pytest.mark.parametrize("fields, message", [
    ({"prompt": "my secret", "seed": -1}, "seed: ..., expected 0 to 2^64 - 1"),
    ({"prompt": ["my secret"]}, "prompt: ..., expected a string"),
    ({"prompt_ids": "my secret"}, "prompt_ids: ..., expected a list of integers"),
    ({"prompt_ids": [7, 4711]}, "prompt_ids[1]: ..., expected 0 to 255"),
    ({"prompt": "my secret", "max_new_tokens": "my secret"}, "max_new_tokens: ..., expected an integer, 1 or more"),
    ({"prompt": "x", "my secret": 1}, (
        "...: unknown field, expected one of id, prompt, prompt_ids, input, output, max_new_tokens, temperature, "
        "top_k, top_p, seed, stream, deadline_ms, add_special_tokens")),
    ({"prompt": "x", "top_p": "e"}, "top_p: ..., expected a number"),
    ({"prompt": "x", "temperature": 1, "top_p": 4711}, "top_p: ..., expected more than 0 and at most 1"),
    ({"prompt": "x", "top_k": -1}, "top_k: ..., expected 0 (all) to 2^31 - 1"),
    ({"prompt": "x", "max_new_tokens": 4711}, ("max_new_tokens: ..., expected at most 512 after a prompt of 1 token in "
                                               "a context of 512, the model's own positions (max_positions of PATH); "
                                               "use fewer")),
    ({"prompt": "my secret" * 100}, ("prompt: 900 bytes, expected at most 512, the model's own positions "
                                     "(max_positions of PATH); use fewer"))])
def test_the_message_of_a_refused_request_in_the_log(moe_32, fields, message):
    """In one line, without what may be of a prompt, unless prompts are to be shown."""
    line = json.dumps({"id": 1, **fields}).encode() + b"\n"
    got, text = run(moe_32, line)
    message = message.replace("PATH", str(moe_32))
    logged = re.search(r"Z request id=1 (?:prompt_tokens=0 tokens=0 )?finish=error code=\w+ message=(\"[^\"]*\")", text)
    assert logged[1] == json.dumps(message)
    assert "secret" not in text and "4711" not in text
    _, text = run(moe_32, line, "--log-format", "json", "--log-prompts")
    logged = json.loads(text.splitlines()[-1])
    assert logged["message"] == got[0]["error"]["message"] and logged["code"] == got[0]["error"]["code"]


@pytest.mark.parametrize("line, said, message", [
    (b'"my secret"', "my secret", "line: ..., expected a JSON object"),
    (b'{"id": 1, "my secret": 1, "my secret": 1}', "my secret",
     "line: ... twice, expected each field once; leave one out"),
    (b'{"id": 1, "prompt": "\xfe"}', "byte 0xfe at 21", "line: byte ... at 21, expected UTF-8; encode it so")])
def test_a_line_that_holds_a_prompt_is_not_logged(moe_32, line, said, message):
    got, text = run(moe_32, line + b"\n")
    assert said in got[0]["error"]["message"] and f'message="{message}"\n' in text and "secret" not in text


def test_what_a_file_of_a_client_is_called_is_not_logged(tmp_path):
    stack = write_model(tmp_path / "stack.bin", STACK)
    np.save(tmp_path / "secret.npy", np.full((3, 64), np.nan, np.float32))
    name = str(tmp_path / "secret.npy")
    got, text = run(stack, b"".join(json.dumps({"id": number, "input": source, "output": output}).encode() + b"\n"
                                    for number, (source, output) in enumerate((
                                        (name, name), (f"{name}x", "y.npy"), (name, str(tmp_path)),
                                        (name, f"{name}/y"), (name, f"{name}y")))))
    assert len(got) == 5 and all(name in line["error"]["message"] or str(tmp_path) in line["error"]["message"]
                                 for line in got)
    assert sorted(re.findall(r'message="([^"]*)"', text)) == sorted([
        "output: ..., expected another file than input; choose another name",
        "...: No such file or directory, expected an .npy file of numbers; write it with numpy.save",
        "output: ...: a directory, expected a file or a new name",
        "output: ..., Not a directory, expected a file's name",
        "...: row 0 holds NaN or inf, expected finite numbers; look at what made it"])


def test_every_line_of_a_log_in_json(moe_32):
    process = subprocess.Popen([sys.executable, "-c", SLOW, "--backend", "host", "--model", str(moe_32), "--serve", "-",
                                "--http", ":0", "--log-format", "json"], cwd=ROOT, stdin=subprocess.PIPE,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdin.write(json.dumps({"id": 1, **LONG, "stream": True}).encode() + b"\n")
    process.stdin.flush()
    process.stdout.readline()
    lines = [process.stderr.readline()]
    for _ in range(2):
        process.send_signal(signal.SIGTERM)
        lines.append(process.stderr.readline())
    _, rest = process.communicate(timeout=TIMEOUT)
    serving, stopping, terminated = ({**json.loads(line), "time": ""} for line in lines)
    assert process.returncode == 143 and rest == b""
    assert serving == {"time": "", "event": "serving", "model": "moe-32.bin", "serve": "stdin", "http": serving["http"]}
    assert re.fullmatch(r"127.0.0.1:\d+", serving["http"])
    assert stopping == {"time": "", "event": "stopping", "requests": 1}
    assert terminated == {"time": "", "event": "terminated"}


@pytest.mark.parametrize("address, message", [
    ("unix:none/socket", ("--serve: unix:none/socket: No such file or directory, expected a free address of this "
                          "machine; choose another")),
    ("-", "stdout: No space left on device, expected to write the answers there; free some space")])
def test_an_error_in_a_log_in_json(moe_32, address, message):
    with open("/dev/full", "wb") as full:
        ended = subprocess.run([sys.executable, "-m", "colibri.run", "--model", str(moe_32), "--serve", address,
                                "--log-format", "json"], cwd=ROOT, input=b"{}\n", stdout=full,
                               stderr=subprocess.PIPE, check=False, timeout=TIMEOUT)
    last = [json.loads(line) for line in ended.stderr.splitlines()][-1]
    assert ended.returncode == 2 and last == {"time": last["time"], "event": "fault", "error": message}


def test_a_full_disk_under_the_log(moe_32, tmp_path):
    with Service(moe_32, tmp_path, command=[
            "bash", "-c", 'exec "$@" 2> >(head -n 1 >&2)', "bash", sys.executable, "-m", "colibri.run", "--backend",
            "host", "--model", str(moe_32), "--serve", f"unix:{tmp_path}/socket", "--http", "127.0.0.1:0"]) as service:
        with service.client() as client:  # the log's reader has ended: every further line is lost
            for _ in range(5):
                assert client.ask(prompt="x", max_new_tokens=1)["finish_reason"] == "length"
        service.wait_for("log_lines_lost_total", 5)
        assert service.stop() == 0


def test_an_idle_server_takes_no_time(service):
    """Its threads sleep, but for one look at the clock a second."""
    def all_wakes():
        pid = service.process.pid
        return sum(wakes(pid, thread) for thread in os.listdir(f"/proc/{pid}/task"))
    service.wait_for("running_requests", 0)
    time.sleep(0.5)  # for the end of the connection that asked
    begun, before = time.monotonic(), all_wakes()
    time.sleep(1)
    assert all_wakes() - before <= math.ceil(time.monotonic() - begun) + 1


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


# Connections without a request

PLACES = """
import sys
from colibri import connection, run, server
server.MAX_CONNECTIONS, connection.IDLE_SECONDS = int(sys.argv.pop(1)), {"lines": float(sys.argv.pop(1)), "http": 1}
sys.exit(run.command())
"""


def with_places(model, folder, count, seconds):
    """A server with so many places of each kind, whose lines may be idle for so long, and HTTP for a second."""
    return Service(model, folder, command=[sys.executable, "-c", PLACES, str(count), str(seconds), "--backend", "host",
                                           "--model", str(model), "--serve", f"unix:{folder}/socket", "--http", ":0"])


def http_client(service):
    return Client(("127.0.0.1", service.port))


GET = b"GET /%b HTTP/1.1\r\nhost: x\r\n\r\n"


def test_idle_connections_end(moe_32, tmp_path):
    """HTTP's and, later, those of lines; one that has a request or is within one does not."""
    with with_places(moe_32, tmp_path, 100, 3) as service, service.client() as lines, service.client() as within, \
            http_client(service) as new, http_client(service) as answered:
        answered.send(GET % b"ready")
        within.send(b'{"id"')
        began = time.monotonic()
        assert new.socket.recv(1) == b"" and time.monotonic() - began > 0.9
        assert b"200" in answered.socket.recv(1 << 16) and answered.socket.recv(1) == b""
        assert lines.ask(prompt="x", max_new_tokens=1)["finish_reason"] == "length"  # it is idle from now on
        began = time.monotonic()
        assert lines.receive() is None and time.monotonic() - began > 2.9
        within.send(b': 1, "prompt": "x", "max_new_tokens": 1}\n')
        assert within.receive()["finish_reason"] == "length"
        assert service.stop() == 0 and "Z connection " not in service.log


def test_stdin_is_never_idle(moe_32):
    process = subprocess.Popen([sys.executable, "-c", PLACES, "1", "0.1", "--backend", "host", "--model", str(moe_32),
                                "--serve", "-"], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                               stderr=subprocess.DEVNULL)
    for _ in range(2):
        time.sleep(1.5)
        process.stdin.write(b'{"id": 1, "prompt": "x", "max_new_tokens": 1}\n')
        process.stdin.flush()
        assert json.loads(process.stdout.readline())["finish_reason"] == "length"
    process.stdin.close()
    assert process.wait(TIMEOUT) == 0
    process.stdout.close()


def test_health_while_all_places_are_idle(moe_32, tmp_path):
    """The one that is idle for longest makes room; a thousand may come."""
    with Service(moe_32, tmp_path) as service:
        idle = [http_client(service) for _ in range(1000)]
        service.wait_for("open_connections", 1001)  # the one that asks has a spare place, or the others have just come
        time.sleep(1.2)
        for path in (b"health", b"ready", b"metrics", b"v1/models"):
            with http_client(service) as client:
                client.send(GET % path)
                assert b"HTTP/1.1 200" in client.socket.recv(1 << 16)
        assert idle[0].socket.recv(1) == b""
        idle[-1].send(GET % b"health")
        assert b"HTTP/1.1 200" in idle[-1].socket.recv(1 << 16)
        for client in idle:
            client.close()
        assert service.stop() == 0


def test_completions_while_all_places_are_idle(moe_32, tmp_path):
    """Also those in the spare places make room, and one that has a spare place gets another's for a completion."""
    body = json.dumps({"model": "moe-32.bin", "prompt": "x", "max_tokens": 1}).encode()
    post = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
    with with_few_files(moe_32, tmp_path) as service:
        idle = [http_client(service) for _ in range(18)]
        time.sleep(1.5)
        for client in (idle[17], *(http_client(service) for _ in range(4))):
            client.send(post)
            assert b"HTTP/1.1 200" in client.socket.recv(1 << 16)
            client.close()
        assert service.log.count("and its place was needed") >= 8
        for client in idle:
            client.close()
        assert service.stop() == 0


def test_health_while_all_places_are_taken(moe_32, tmp_path):
    """Spare places are for what needs no request: a completion is refused there, and more connections are."""
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n"
    with with_places(moe_32, tmp_path, 3, 60) as service:
        taken = [http_client(service) for _ in range(3)]
        for client in taken:
            client.send(head)
        service.wait_for("open_connections", 4)
        spare = [http_client(service) for _ in range(8)]
        for client in spare[1:]:  # none of them is idle
            client.send(head)
        service_full = http_client(service).socket.recv(1 << 16)
        assert b"HTTP/1.1 503" in service_full and b"connections: 3 are open and none is idle" in service_full
        spare[0].send(GET % b"health")
        got = spare[0].socket.recv(1 << 16)
        assert b"HTTP/1.1 200" in got and b"connection: close" in got.lower() and spare[0].socket.recv(1) == b""
        spare[1].send(b"{\"x\": 1}\n")
        got = spare[1].socket.recv(1 << 16)
        assert b"HTTP/1.1 503" in got and b'"code": "too_many_connections"' in got
        for client in (*taken, *spare):
            client.close()
        service.wait_for("open_connections", 1)
        assert service.stop() == 0


def test_stdin_that_cannot_be_read(moe_32, tmp_path):
    """A file that is open for writing alone."""
    with open(tmp_path / "requests", "wb") as file:
        ended = subprocess.run([sys.executable, "-m", "colibri.run", "--backend", "host", "--model", str(moe_32),
                                "--serve", "-"], cwd=ROOT, stdin=file, capture_output=True, timeout=TIMEOUT, check=False)
    assert (ended.returncode, ended.stdout) == (2, b"") and ended.stderr.decode().splitlines()[1:] == [
        "stdin: Bad file descriptor, expected requests there; give it a file or a pipe"]
