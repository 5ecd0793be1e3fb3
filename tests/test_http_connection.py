"""HTTP on a connection: many requests on one, clients that leave, bytes that are no HTTP, and a server that ends."""

import http.client
import json
import re
import signal
import socket
import threading
import time

import pytest
from asking import MODEL, PROMPT, ask, message, raw
from service import TIMEOUT, Service, greedy, slow_service


@pytest.fixture(scope="module")
def service(moe_32, tmp_path_factory):
    with Service(moe_32, tmp_path_factory.mktemp("http"), "--batch-size", 4, "--queue-size", 2) as service:
        yield service
        assert service.metric("kv_slots_free") == 4 and service.stop() == 0
        assert "fault" not in service.log


def test_two_requests_on_a_connection_that_stays(service):
    body = json.dumps({"model": MODEL, "prompt": "x", "max_tokens": 2}).encode()
    post = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
    got = raw(service, post + post + b"GET /ready HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n").decode()
    assert got.count("HTTP/1.1 200") == 3 and got.count('"object": "text_completion"') == 2
    assert got.endswith('{"status": "ready"}\n')


def test_a_thousand_requests_at_once_on_a_connection(service):
    """They are answered in order, in turn with other clients, and no faster than they are read."""
    get = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with socket.create_connection(("127.0.0.1", service.port), TIMEOUT) as connection:
        sender = threading.Thread(target=connection.sendall, args=[get * 5000])
        sender.start()
        received = b""
        while received.count(b"HTTP/1.1 200") < 5000 or not received.endswith(b"}\n"):
            received += (data := connection.recv(1 << 20))
            assert data
        sender.join()
    assert received.count(b'{"status": "ok"}\n') == 5000


def test_more_requests_than_are_kept_while_one_runs(service, engine):
    """They wait with the client, and none is lost."""
    count, expected = 3000, greedy(engine, "ab", 1)
    body = json.dumps({"model": MODEL, "prompt": "ab", "max_tokens": 1}).encode()
    post = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
    last = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    answers = raw(service, post * count + last).split(b"HTTP/1.1 200")[1:]
    assert len(answers) == count + 1 and answers[-1].endswith(b'{"status": "ok"}\n')
    assert {json.loads(answer.partition(b"\r\n\r\n")[2])["choices"][0]["text"] for answer in answers[:-1]} == {expected}
    get = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n"
    received = bytearray()
    with socket.create_connection(("127.0.0.1", service.port), TIMEOUT) as connection:
        sender = threading.Thread(target=connection.sendall, args=[get * 2500 + last])
        sender.start()
        while data := connection.recv(1 << 20):
            received += data
        sender.join()
    assert received.count(b"HTTP/1.1 200") == 2501 and received.endswith(b'{"status": "ok"}\n')


def test_what_a_client_sends_while_its_request_runs_is_bounded(moe_32, tmp_path):
    with slow_service(moe_32, tmp_path, "--http", ":0") as service:
        body = json.dumps({"model": MODEL, "prompt": PROMPT, "max_tokens": 490}).encode()
        with socket.create_connection(("127.0.0.1", service.port), TIMEOUT) as connection:
            connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%b"
                               % (len(body), body))
            service.wait_for("running_requests", 1)
            before = service.metric("resident_bytes")
            connection.settimeout(1)
            with pytest.raises(TimeoutError):
                connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n" * 2_000_000)
            assert service.metric("resident_bytes") - before < 8 << 20
            assert service.metric("connections_dropped_total") == 0


def test_two_lengths_of_a_body(service):
    """They are refused, and what follows is not read: a proxy may have taken it for a part of the body."""
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n"
    got = raw(service, head + b"Content-Length: 5\r\n\r\n")  # at once
    assert got.startswith(b"HTTP/1.1 400 ") and message(got.partition(b"\r\n\r\n")[2]) == (
        "HTTP: Content-Length and Transfer-Encoding, expected one of them; leave one out")
    got = raw(service, b"POST /health HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\n"
                       b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert got.count(b"HTTP/1.1 ") == 1 and got.startswith(b"HTTP/1.1 400 ") and b"connection: close\r\n" in got.lower()


@pytest.mark.parametrize("target, status", [("http://localhost/health", 200), ("HTTPS://a:80/health?x=http://b/c", 200),
                                            ("http://localhost", 404), ("/http://a/health", 404)])
def test_a_target_with_its_origin(service, target, status):
    assert ask(service, "GET", target)[0] == status


def test_garbage_after_a_head(service):
    got = raw(service, b"HEAD /health HTTP/1.1\r\nHost: localhost\r\n\r\nGARBAGE\r\n\r\n")
    first, second = re.split(rb"HTTP/1.1 (?=\d)", got)[1:]
    assert first.startswith(b"200 ") and first.endswith(b"\r\n\r\n") and second.startswith(b"400 ")
    assert message(second.partition(b"\r\n\r\n")[2]) == ("HTTP: illegal request line \"GARBAGE\", expected an "
                                                        "HTTP/1.1 request")


def test_a_body_in_pieces_and_an_old_client(service):
    body = json.dumps({"model": MODEL, "prompt": "x", "max_tokens": 2}).encode()
    head = (b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n")
    chunks = [b"%x\r\n%b\r\n" % (len(piece), piece) for piece in (body[:7], body[7:])]
    assert b"HTTP/1.1 200" in raw(service, head, *chunks, b"0\r\n\r\n", pause=0.02)
    assert b"HTTP/1.1 200" in raw(service, b"GET /health HTTP/1.0\r\n\r\n")
    old = b"POST /v1/completions HTTP/1.0\r\nContent-Length: %d\r\n\r\n%b"
    body = json.dumps({"model": MODEL, "prompt": "x", "max_tokens": 3, "stream": True}).encode()
    assert raw(service, old % (len(body), body)).endswith(b"data: [DONE]\n\n")
    expect = (b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\nContent-Length: %d\r\n"
              b"Connection: close\r\n\r\n")
    assert raw(service, expect % len(body), body, pause=0.05).startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200")
    got = raw(service, expect % 99_999_999_999)  # without the body: its length is enough
    assert got.startswith(b"HTTP/1.1 400 ") and json.loads(got.partition(b"\r\n\r\n")[2])["error"]["code"] == "too_long"


@pytest.mark.parametrize("data", [b"\x16\x03\x01\x02\0\x01\0", b"nonsense\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n",
                                  b"GET /" + b"x" * 20_000 + b" HTTP/1.1\r\n\r\n",
                                  b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: -5\r\n\r\n"])
def test_what_is_no_http(service, data):
    got = raw(service, data)
    assert re.match(rb"HTTP/1.1 4\d\d ", got)
    assert b"expected an HTTP/1.1 request" in got and b"connection: close" in got.lower()


@pytest.mark.parametrize("data, status, expected", [
    (b"GET /" + b"x" * 20_000, 431,
     "more than 16384 bytes of a head or of a chunk's size, expected an HTTP/1.1 request"),
    (b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", 400,
     'illegal chunk header "zz", expected an HTTP/1.1 request'),
    (b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nabc\r\n", 400,
     'malformed chunk footer "bc", expected an HTTP/1.1 request'),
    (b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: gzip\r\n\r\n", 501,
     "Only Transfer-Encoding: chunked is supported, expected an HTTP/1.1 request"),
    (b"GET /\"\xff' HTTP/1.1\r\nHost\r\n\r\n", 400, None),
    (b'{"id": 1, "prompt": "x"}\n', 400, "a JSON object, expected an HTTP/1.1 request; lines are spoken at --serve"),
    (b'GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n{"id": 1', 400,
     "a JSON object, expected an HTTP/1.1 request; lines are spoken at --serve")])
def test_what_is_no_http_is_told_so_plainly(service, data, status, expected):
    head, _, body = raw(service, data).rpartition(b"\r\n\r\n")
    assert b"HTTP/1.1 %d " % status in head
    if expected:
        assert message(body) == f"HTTP: {expected}"
    assert not re.search(r"bytearray|b'", message(body))


def test_a_body_of_100_mb(service):
    before = service.metric("resident_bytes")
    status, _, text = ask(service, "POST", "/v1/completions", b"x" * 100_000_000)
    assert (status, message(text)) == (400, ("body: more than 75264 bytes, expected fewer; no prompt that fits the "
                                            "context is as long"))
    assert service.metric("resident_bytes") - before < 8 << 20


def test_a_client_that_leaves_without_a_stream(service):
    cancelled = service.metric('requests_total{finish="cancelled"}')
    body = json.dumps({"model": MODEL, "prompt": PROMPT, "max_tokens": 490}).encode()
    with socket.create_connection(("127.0.0.1", service.port)) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%b"
                           % (len(body), body))
        service.wait_for("running_requests", 1)
    service.wait_for('requests_total{finish="cancelled"}', cancelled + 1)


def test_a_client_that_leaves_while_it_is_not_read(moe_32, tmp_path):
    """With more behind its request than is read ahead."""
    body = json.dumps({"model": MODEL, "prompt": PROMPT, "max_tokens": 490}).encode()
    with slow_service(moe_32, tmp_path, "--http", ":0") as service:
        with socket.create_connection(("127.0.0.1", service.port)) as connection:
            connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%b"
                               % (len(body), body))
            service.wait_for("running_requests", 1)
            connection.sendall(b"x" * 70_000)
            time.sleep(1.5)
            assert service.metric("running_requests") == 1  # as long as it is there
        service.wait_for("running_requests", 0)
        assert service.metric('requests_total{finish="cancelled"}') == 1


def test_draining(moe_32, tmp_path):
    service = slow_service(moe_32, tmp_path, "--http", ":0")
    with service:
        body = json.dumps({"model": MODEL, "prompt": PROMPT, "max_tokens": 12, "stream": True}).encode()
        idle = http.client.HTTPConnection("127.0.0.1", service.port, timeout=TIMEOUT)
        idle.request("GET", "/ready")
        assert idle.getresponse().read() == b'{"status": "ready"}\n'
        with socket.create_connection(("127.0.0.1", service.port), TIMEOUT) as connection:
            connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%b"
                               % (len(body), body))
            received = connection.recv(65536)
            service.process.send_signal(signal.SIGTERM)
            time.sleep(0.1)
            assert idle.sock.recv(1) == b""  # closed at once: nothing ran on it
            while data := connection.recv(65536):
                received += data
        assert received.startswith(b"HTTP/1.1 200") and b"data: [DONE]\n\n" in received
        assert service.process.wait(TIMEOUT) == 0


def test_what_waits_when_the_time_to_drain_is_over(moe_32, tmp_path):
    with slow_service(moe_32, tmp_path, "--http", ":0", "--drain", 0, "--batch-size", 1) as service:
        running, waiting = (http.client.HTTPConnection("127.0.0.1", service.port, timeout=TIMEOUT) for _ in range(2))
        for connection, stream in ((running, True), (waiting, False)):
            connection.request("POST", "/v1/completions", json.dumps(
                {"model": MODEL, "prompt": PROMPT, "max_tokens": 400, "stream": stream}))
            if stream:
                begun = connection.getresponse()
        service.wait_for("queue_depth", 1)
        service.process.send_signal(signal.SIGTERM)
        answer = waiting.getresponse()
        error = json.loads(answer.read())["error"]
        assert answer.status == 503 and error["code"] == "shutdown"
        assert error["message"].startswith("server: ended after ") and begun.read().endswith(b"data: [DONE]\n\n")
        assert service.process.wait(TIMEOUT) == 0
