"""The server as a process: lines over stdin and sockets, clients that misbehave or leave, and how it ends."""

import asyncio
import json
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
from conftest import ROOT
from service import LONG, TIMEOUT, greedy, run_lines
from synthetic import STACK, write_model

from colibri.engine import Engine
from colibri.stdio import Pipes

# Lines on stdin

def test_stdin_until_its_end(moe_32, engine):
    lines = (b'{"id": "a", "prompt": "It was ", "max_new_tokens": 30}\n\n'
             b'{"id": 2, "prompt": "It was ", "max_new_tokens": 20, "temperature": 1, "seed": 3, "stream": true}\n'
             b'nonsense\n'
             b'{"id": 3, "prompt_ids": [73, 116], "max_new_tokens": 4, "stream": true}')  # the last line has no end
    got, log = run_lines(moe_32, lines)
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
    got, _ = run_lines(moe_32, lines, "--queue-size", 300, "--batch-size", 4)
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
    got, _ = run_lines(moe_32, b'GET / HTTP/1.1\r\n{"id": 1, "prompt": "It was ", "max_new_tokens": 3}\n')
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


# Bare stacks

def test_a_bare_stack(tmp_path):
    stack = write_model(tmp_path / "stack.bin", STACK)
    x = np.random.default_rng(0).standard_normal((1200, 64), dtype=np.float32)
    np.save(tmp_path / "x.npy", x)
    request = {"id": 1, "input": str(tmp_path / "x.npy"), "output": str(tmp_path / "y.npy")}
    got, log = run_lines(stack, json.dumps(request).encode() + b'\n{"id": 2, "prompt": "x"}\n')
    assert got[0]["error"]["message"].endswith("expected tokens for prompt; this is a bare stack of MoE layers, give "
                                               "it an input over --serve")
    assert got[1] == {**got[1], "id": 1, "output": request["output"], "finish_reason": "stop", "prompt_tokens": 1200,
                      "completion_tokens": 0, "itl_p50_ms": None}
    with Engine(stack, backend="host") as engine:
        np.testing.assert_array_equal(np.load(tmp_path / "y.npy"), engine.stack(x))
    assert "request id=1 prompt_tokens=1200 tokens=0 finish=stop ttft_ms=" in log
