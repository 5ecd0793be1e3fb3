"""Connections: how many there may be, and what becomes of idle ones and of clients that do not read."""

import json
import re
import signal
import subprocess
import sys
import time

import pytest
from conftest import ROOT
from service import LONG, TIMEOUT, Client, Service, greedy


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


GET = b"GET /%b HTTP/1.1\r\nhost: localhost\r\n\r\n"


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
    post = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
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
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9\r\n\r\n"
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
                                "--serve", "-"], cwd=ROOT, stdin=file, capture_output=True, timeout=TIMEOUT,
                                check=False)
    assert (ended.returncode, ended.stdout) == (2, b"") and ended.stderr.decode().splitlines()[1:] == [
        "stdin: Bad file descriptor, expected requests there; give it a file or a pipe"]
