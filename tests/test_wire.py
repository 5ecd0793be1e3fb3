"""HTTP as clients speak it: paths, heads, CORS, compressed bodies, old clients, and streams that wait."""

import email.utils
import gzip
import http.client
import json
import random
import socket
import sys
import time
import zlib

import pytest
from asking import MODEL, PROMPT, ask, complete, message
from service import SLOW, TIMEOUT, Service, fails, greedy

from colibri.http import COMMENT, PATHS

ORIGINS = ("http://localhost:3000", "chrome-extension://abc")
NOT_PACKED = "body: no {}, expected what Content-Encoding says; compress it, or leave that out"
# With --batch-size 1 a second stream waits; a comment comes after 0.2 s, and is looked for as often.
WAITING = ("from colibri import http, server\nhttp.COMMENT_SECONDS = server.CHECK_SECONDS = 0.2\n") + SLOW


@pytest.fixture(scope="module")
def open_service(moe_32, tmp_path_factory):
    """One that pages of ORIGINS may use."""
    options = [word for origin in ORIGINS for word in ("--cors", origin)]
    with Service(moe_32, tmp_path_factory.mktemp("cors"), *options) as service:
        yield service
        assert service.stop() == 0 and "fault" not in service.log


def answer(connection, method, path, body=None, headers=()):
    """(response, its body) on a connection that stays, if it does."""
    connection.request(method, path, body, dict(headers))
    response = connection.getresponse()
    return response, response.read()


# Paths and heads

@pytest.mark.parametrize("path", ["moe-32.bin", "moe%2D32%2Ebin", "moe-32.bin/", "moe-32.bin?x=/v1"])
def test_a_model_by_its_id(service, path):
    status, _, text = ask(service, "GET", f"/v1/models/{path}")
    assert status == 200 and [json.loads(text)] == json.loads(ask(service, "GET", "/v1/models")[2])["data"]
    assert json.loads(text) == {"id": MODEL, "object": "model", "created": 0, "owned_by": "colibri"}


@pytest.mark.parametrize("path, shown", [("else", "else"), ("org/moe-32.bin", "org/moe-32.bin"),
                                         ("org%2Fmoe-32.bin", "org/moe-32.bin"), ("moe-32.bin%2F", "moe-32.bin/")])
def test_no_model_of_that_id(service, path, shown):
    status, _, text = ask(service, "GET", f"/v1/models/{path}")
    assert (status, message(text)) == (404, f'model: "{shown}", expected moe-32.bin')


def test_a_model_whose_name_looks_like_an_escape(moe_32, tmp_path):
    path = tmp_path / "a%2Fb.bin"
    path.symlink_to(moe_32)
    with Service(path, tmp_path) as service:
        assert json.loads(ask(service, "GET", "/v1/models/a%252Fb.bin")[2])["id"] == path.name
        assert ask(service, "GET", "/v1/models/a%2Fb.bin")[0] == 404
        assert service.stop() == 0


@pytest.mark.parametrize("path", [path.replace("ID", MODEL) for path in PATHS])
def test_a_slash_at_the_end_and_head(service, path):
    methods = PATHS[path.replace(MODEL, "ID")]
    for method in methods:
        plain, slashed = ask(service, method, path), ask(service, method, path + "/")
        assert plain[0] == slashed[0] == (400 if method == "POST" else 200)
        assert method == "HEAD" or path == "/metrics" or plain[2] == slashed[2]
    if "HEAD" in methods:
        (status, head, text), (_, get, _) = ask(service, "HEAD", path), ask(service, "GET", path)
        assert (status, text, set(head)) == (200, "", set(get)) and head["content-type"] == get["content-type"]
        assert path == "/metrics" or head["content-length"] == get["content-length"]


@pytest.mark.parametrize("method", ["GET", "POST", "DELETE"])
@pytest.mark.parametrize("path", ["/v1/responses", "/v1/responses/r_1", "/v1/messages/", "/v1/messages/count_tokens"])
def test_the_paths_of_other_interfaces_name_this_one(service, method, path):
    status, _, text = ask(service, method, path, None if method == "GET" else {"input": "x"})
    assert (status, message(text)) == (404, (f"path: {path.rstrip('/')}, expected /v1/chat/completions; send a "
                                             "conversation there, in OpenAI's form"))


def test_reasons_and_dates(service):
    connection = http.client.HTTPConnection("127.0.0.1", service.port, timeout=TIMEOUT)
    for method, path, body, status, reason in (
            ("GET", "/health", None, 200, "OK"), ("GET", "/nothing", None, 404, "Not Found"),
            ("DELETE", "/metrics", None, 405, "Method Not Allowed"), ("OPTIONS", "/health", None, 204, "No Content"),
            ("POST", "/v1/completions", "x", 400, "Bad Request")):
        response, _ = answer(connection, method, path, body)
        assert (response.status, response.reason) == (status, reason)
        date = response.getheader("date")
        assert abs(email.utils.parsedate_to_datetime(date).timestamp() - time.time()) < 60 and date.endswith(" GMT")


def test_the_head_of_a_stream(service):
    _, headers, text = ask(service, "POST", "/v1/completions",
                           {"model": MODEL, "prompt": "x", "max_tokens": 2, "stream": True})
    assert headers["x-accel-buffering"] == "no" and headers["content-type"] == "text/event-stream; charset=utf-8"
    assert headers["cache-control"] == "no-cache" and "date" in headers and text.endswith("data: [DONE]\n\n")


# CORS

@pytest.mark.parametrize("origin, allowed", [(ORIGINS[0], True), (ORIGINS[1], True), ("HTTP://LOCALHOST:3000", True),
                                             ("http://localhost:3001", False), ("http://localhost", False),
                                             ("http://localhost:3000.evil.example", False), ("null", False)])
def test_pages_of_an_origin(open_service, origin, allowed):
    body = {"model": MODEL, "prompt": "x", "max_tokens": 1}
    for method, path, sent in (("GET", "/v1/models", None), ("GET", "/nothing", None), ("DELETE", "/health", None),
                               ("POST", "/v1/completions", body), ("POST", "/v1/completions", {**body, "stream": True}),
                               ("POST", "/v1/completions", b"nonsense")):
        _, headers, _ = ask(open_service, method, path, sent, {"Origin": origin})
        assert headers.get("access-control-allow-origin") == (origin if allowed else None)
        assert headers["vary"] == "Origin"
    status, headers, text = ask(open_service, "OPTIONS", "/v1/chat/completions", None, {
        "Origin": origin, "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type,x-stainless-os"})
    asked = {name: value for name, value in headers.items() if name.startswith("access-control-")}
    assert (status, text, headers["allow"]) == (204, "", "POST, OPTIONS")
    assert asked == ({"access-control-allow-origin": origin, "access-control-allow-methods": "POST",
                      "access-control-allow-headers": "authorization,content-type,x-stainless-os",
                      "access-control-max-age": "600"} if allowed else {})


def test_pages_of_any_origin(moe_32, tmp_path):
    with Service(moe_32, tmp_path, "--cors", "*") as service:
        for origin in ("http://a.example", "null"):
            _, headers, _ = ask(service, "GET", "/v1/models", None, {"Origin": origin})
            assert headers["access-control-allow-origin"] == "*" and "vary" not in headers
        assert "access-control-allow-origin" not in ask(service, "GET", "/v1/models")[1]
        assert service.stop() == 0


def test_no_pages_unless_they_are_named(service):
    head = {"Origin": ORIGINS[0], "Access-Control-Request-Method": "POST"}
    for method, path in (("GET", "/health"), ("OPTIONS", "/v1/completions")):
        _, headers, _ = ask(service, method, path, None, head)
        assert not [name for name in headers if name.startswith("access-control")]
    status, headers, _ = ask(service, "OPTIONS", "*")
    assert (status, headers["allow"]) == (204, "GET, HEAD, POST, OPTIONS")
    assert ask(service, "OPTIONS", "/nothing")[0] == 404


@pytest.mark.parametrize("origin", ["", "localhost:3000", "http://localhost:3000/", "http://a b", "http://u@a",
                                    "https://", "http://a,http://b/"])
def test_origins_that_are_none(moe_32, origin):
    assert fails(moe_32, "--http", ":0", "--cors", origin) == (
        f"--cors: {origin}, expected * or an origin such as http://localhost:3000, without a path; correct it\n")


# Bodies

def packed(coding, data):
    """The data compressed: gzip in pieces of random length."""
    if coding == "deflate":
        return zlib.compress(data)
    cut = random.randrange(len(data) + 1)
    return gzip.compress(data[:cut]) + gzip.compress(data[cut:])


@pytest.mark.parametrize("coding", ["gzip", "x-gzip", "deflate", "GZIP"])
def test_compressed_bodies(service, engine, coding):
    random.seed(coding)
    for size in (1, 20, 300):
        prompt = "".join(random.choice("ab c\n") for _ in range(size))
        body = json.dumps({"model": MODEL, "prompt": prompt, "max_tokens": 7}).encode()
        status, _, text = ask(service, "POST", "/v1/completions", packed(coding, body), {"Content-Encoding": coding})
        assert status == 200 and json.loads(text)["choices"][0]["text"] == greedy(engine, prompt, 7)
    body = json.dumps({"model": MODEL, "prompt": "x", "max_tokens": 3}).encode() + b" " * 40_000
    assert ask(service, "POST", "/v1/completions", packed(coding, body), {"Content-Encoding": coding})[0] == 200
    assert ask(service, "POST", "/v1/completions", body, {"Content-Encoding": "identity"})[0] == 200


@pytest.mark.parametrize("coding, data, expected", [
    ("gzip", b"{}", NOT_PACKED.format("gzip")),
    ("gzip", b"", "body: gzip without its end, expected all of it"),
    ("gzip", gzip.compress(b"{}" * 500)[:-9], "body: gzip without its end, expected all of it"),
    ("gzip", gzip.compress(b"{}") + b"rest", NOT_PACKED.format("gzip")),
    ("gzip", zlib.compress(b"{}"), NOT_PACKED.format("gzip")),
    ("deflate", gzip.compress(b"{}"), NOT_PACKED.format("deflate")),
    ("deflate", zlib.compress(b"{}") + b"rest", "body: 4 bytes after deflate's end, expected none"),
    ("gzip", gzip.compress(b"nonsense"), "body: not JSON from character 0 on, expected one JSON object")])
def test_compressed_bodies_that_are_damaged(service, coding, data, expected):
    status, _, text = ask(service, "POST", "/v1/completions", data, {"Content-Encoding": coding})
    assert (status, message(text)) == (400, expected)


@pytest.mark.parametrize("coding", ["br", "zstd", "gzip, gzip", "compress"])
def test_codings_that_are_not_there(service, coding):
    status, headers, text = ask(service, "POST", "/v1/completions", b"{}", {"Content-Encoding": coding})
    assert (status, headers["accept-encoding"]) == (415, "identity, gzip, x-gzip, deflate")
    assert message(text) == (f"Content-Encoding: {coding}, expected one of identity, gzip, x-gzip, deflate; send it "
                             "without")


def test_a_body_that_would_fill_the_memory(service):
    """60 KB that stand for 60 MB, also as many small files one after another."""
    before = service.metric("resident_bytes")
    for data in (gzip.compress(b"x" * 60_000_000), gzip.compress(b"x" * 60_000) * 500):
        status, _, text = ask(service, "POST", "/v1/completions", data, {"Content-Encoding": "gzip"})
        assert (status, json.loads(text)["error"]["code"]) == (400, "too_long")
        assert message(text).startswith("body: more than 75264 bytes, expected fewer; ")
    assert service.metric("resident_bytes") - before < 8 << 20


# HTTP/1.0

def test_old_clients_that_ask_to_stay(service, engine):
    body = json.dumps({"model": MODEL, "prompt": PROMPT, "max_tokens": 5}).encode()
    keep = b"Connection: Keep-Alive\r\n"
    requests = [b"GET /health HTTP/1.0\r\n%b\r\n" % keep, b"HEAD /health HTTP/1.0\r\n%b\r\n" % keep,
                b"POST /v1/completions HTTP/1.0\r\n%bContent-Length: %d\r\n\r\n%b" % (keep, len(body), body),
                b"GET /nothing HTTP/1.0\r\n%b\r\n" % keep, b"POST /v1/completions HTTP/1.0\r\n%b\r\n" % keep,
                b"OPTIONS /health HTTP/1.0\r\n%b\r\n" % keep, b"GET /ready HTTP/1.0\r\n\r\n"]
    heads = ["200 OK", "200 OK", "200 OK", "404 Not Found", "400 Bad Request", "204 No Content", "200 OK"]
    for at_once in (True, False):
        with socket.create_connection(("127.0.0.1", service.port), TIMEOUT) as connection:
            file = connection.makefile("rb")
            if at_once:
                connection.sendall(b"".join(requests))
            for number, (request, head) in enumerate(zip(requests, heads)):
                if not at_once:
                    connection.sendall(request)
                status, length, is_last = file.readline().decode(), 0, number == len(requests) - 1
                assert status == f"HTTP/1.1 {head}\r\n"
                headers = dict(line.decode().strip().lower().split(": ", 1) for line in iter(file.readline, b"\r\n"))
                assert headers["connection"] == ("close" if is_last else "keep-alive") and "date" in headers
                length = 0 if request[:4] == b"HEAD" else int(headers.get("content-length", 0))
                text = file.read(length)
                if request[:4] == b"POST" and head == "200 OK":
                    assert json.loads(text)["choices"][0]["text"] == greedy(engine, PROMPT, 5)
            assert text == b'{"status": "ready"}\n' and file.read() == b""


def test_a_stream_ends_an_old_client_s_connection(service):
    """Its length is not known before, and HTTP/1.0 has no chunks."""
    body = json.dumps({"model": MODEL, "prompt": "x", "max_tokens": 3, "stream": True}).encode()
    with socket.create_connection(("127.0.0.1", service.port), TIMEOUT) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.0\r\nConnection: keep-alive\r\nContent-Length: %d\r\n\r\n%b"
                           % (len(body), body))
        got = connection.makefile("rb").read().lower()
    assert b"connection: close" in got and b"transfer-encoding" not in got and got.endswith(b"\n\ndata: [done]\n\n")


# Streams that wait

def test_a_stream_that_waits_has_a_head_and_comments(moe_32, tmp_path, engine):
    options = ("--http", ":0", "--batch-size", "1")
    with Service(moe_32, tmp_path, command=[sys.executable, "-c", WAITING, "--backend", "host", "--model", str(moe_32),
                                            "--serve", f"unix:{tmp_path}/socket", *options]) as service:
        with service.client() as other:
            other.send({"id": 1, "prompt": "x", "max_new_tokens": 490})
            service.wait_for("running_requests", 1)
            connection = http.client.HTTPConnection("127.0.0.1", service.port, timeout=TIMEOUT)
            connection.request("POST", "/v1/completions", json.dumps(
                {"model": MODEL, "prompt": PROMPT, "max_tokens": 4, "stream": True}))
            response = connection.getresponse()  # while the other runs
            assert service.metric("queue_depth") == 1 and response.status == 200
            assert [response.readline() for _ in range(6)] == [COMMENT[:2], b"\n"] * 3
            assert service.metric("queue_depth") == 1
            other.send({"cancel": 1})
            lines = [line for line in response.read().decode().split("\n\n") if line != ":"]
        events = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
        assert lines[-2:] == ["data: [DONE]", ""]
        assert "".join(event["choices"][0]["text"] for event in events) == greedy(engine, PROMPT, 4)
        assert service.stop() == 0


def test_what_is_wrong_before_a_stream_is_accepted_is_a_status(service):
    for prompt, status in (("x" * 600, 400), ([1, 2, 999], 400), ("", 400)):
        got = complete(service, prompt=prompt, stream=True)
        assert got[0] == status and got[1]["error"]["type"] == "invalid_request_error"


def test_what_is_wrong_after_a_stream_was_accepted_is_an_event(moe_32, tmp_path):
    with Service(moe_32, tmp_path, command=[
            sys.executable, "-c", WAITING, "--backend", "host", "--model", str(moe_32), "--serve",
            f"unix:{tmp_path}/socket", "--http", ":0", "--batch-size", "1"]) as service, service.client() as other:
        other.send({"id": 1, "prompt": "x", "max_new_tokens": 490})
        service.wait_for("running_requests", 1)
        for path, prompt in (("completions", {"prompt": "x"}),
                             ("chat/completions", {"messages": [{"role": "user", "content": "x"}]})):
            status, _, text = ask(service, "POST", f"/v1/{path}",
                                  {"model": MODEL, "stream": True, "deadline_ms": 300, **prompt})
            *_, last, end = [event for event in text.split("\n\n") if event != ":"]
            assert (status, end) == (200, "")
            assert json.loads(last.removeprefix("data: "))["error"]["code"] == "deadline"
        other.send({"cancel": 1})
        other.receive()
        assert service.stop() == 0
