"""Prompts on their way to tokens, beside the network's thread: what waits, in which order, and how it ends."""

import http.client
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from conftest import ROOT, program
from service import TIMEOUT, Service

from colibri.engine import Engine
from colibri.intake import LARGE
from colibri.refused import Refused
from colibri.requests import ESCAPED, OTHER_BYTES, SPACED, Reader, leading_id
from colibri.text import DROPPED_BYTES, Tokenizer

tokenizers = pytest.importorskip("tokenizers")
LONGEST = 400   # bytes of a token
LARGE_TEXT = "w1" + " " * 2 * LARGE  # of one token
# A text with "wait" is encoded when the file that the first argument names is there; one with "fail" is an accident.
PATCHED = """
import pathlib, sys, time
from colibri import run, text
go, encode = pathlib.Path(sys.argv.pop(1)), text.Tokenizer.encode
def patched(self, data, *more):
    if b"fail" in data:
        raise KeyError(data)
    while b"wait" in data and not go.exists():
        go.with_suffix(".begun").touch()
        time.sleep(0.01)
    return encode(self, data, *more)
text.Tokenizer.encode = patched
sys.exit(run.command())
"""


def save(folder, tokenizer):
    """The recorded Mixtral with a tokenizer, converted."""
    folder = shutil.copytree(ROOT / "tests" / "data" / "families" / "mixtral", folder / "model")
    tokenizer.save(str(folder / "tokenizer.json"))
    made = program("converter", folder, folder.parent / "words.bin")
    assert made.returncode == 0, made.stderr
    return folder.parent / "words.bin"


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    """A model whose tokens are words, w0 to w95 and a long one."""
    vocabulary = {**{f"w{number}": number for number in range(96)}, "x" * LONGEST: 96}
    words = tokenizers.models.WordLevel(vocabulary, unk_token="w0")
    tokenizer = tokenizers.Tokenizer(words)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return save(tmp_path_factory.mktemp("words"), tokenizer)


@pytest.fixture
def start(words, tmp_path):
    """A function that starts the patched service; its go is the file that lets texts go on."""
    def start(*options):
        service = Service(words, tmp_path, command=[
            sys.executable, "-c", PATCHED, str(tmp_path / "go"), "--backend", "host", "--model", str(words), "--serve",
            f"unix:{tmp_path}/socket", "--http", ":0", *map(str, options)])
        service.go = tmp_path / "go"
        return service
    return start


def test_the_time_to_read_a_message_counts(words, tmp_path):
    """A deadline and ttft_ms begin when the whole of it has arrived, over lines and HTTP."""
    slow = PATCHED.replace("sys.exit", "from colibri import requests\nparse = requests.parse\ndef late(data, *more):\n"
                           "    time.sleep(0.5)\n    return parse(data, *more)\nrequests.parse = late\nsys.exit")
    with Service(words, tmp_path, command=[
            sys.executable, "-c", slow, str(tmp_path / "go"), "--backend", "host", "--model", str(words), "--serve",
            f"unix:{tmp_path}/socket", "--http", ":0"]) as service, service.client() as client:
        for prompt in ("w1", LARGE_TEXT):
            assert client.ask(**fields(1, prompt))["ttft_ms"] >= 500
            assert client.ask(**fields(2, prompt, deadline_ms=400))["error"]["code"] == "deadline"
            connection = http.client.HTTPConnection("127.0.0.1", service.port, timeout=TIMEOUT)
            connection.request("POST", "/v1/completions", json.dumps(
                {"model": "words.bin", "prompt": prompt, "max_tokens": 1, "deadline_ms": 400}))
            assert connection.getresponse().status == 504
        assert service.stop() == 0


def test_without_the_package(words, tmp_path):
    """--doctor names it as needed for this model, and a service does not start."""
    (tmp_path / "tokenizers.py").write_text("raise ImportError")
    environment = {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    ended = program("colibri.run", "--backend", "host", "--model", words, "--serve", "-", environment=environment)
    assert (ended.returncode, ended.stdout, ended.stderr.decode().splitlines()[-1]) == (2, b"", (
        "tokenizers: not installed, expected it for the text of this model; run pip install tokenizers (the extra "
        "`text`); a text run with --prompt-ids does without"))
    script = ("import sys\nfrom colibri import doctor, run\nversion = doctor.importlib.metadata.version\n"
              "def fail(name):\n    if name == 'tokenizers':\n"
              "        raise doctor.importlib.metadata.PackageNotFoundError\n"
              "    return version(name)\ndoctor.importlib.metadata.version = fail\nsys.exit(run.command())")
    for options, status, word in ((("--model", words), 2, "needed"), ((), 0, "optional")):
        ended = subprocess.run([sys.executable, "-c", script, "--doctor", *options], cwd=tmp_path, capture_output=True,
                               check=False, env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=TIMEOUT)
        assert ended.returncode == status and (f" tokenizers {word}: not installed; pip install tokenizers, for text"
                                               in " ".join(ended.stdout.decode().split())), ended


def fields(identity, prompt, count=1, **more):
    return {"id": identity, "prompt": prompt, "max_new_tokens": count, **more}


def test_others_go_on_while_a_prompt_is_encoded(start):
    """Those that are large or small do; what came after it on its connection waits for it."""
    with start() as service, service.client() as first, service.client() as second:
        first.send(fields(1, "wait" + LARGE_TEXT), fields(2, "w1 w2"))
        service.wait_for("queue_depth", 2)
        assert second.ask(**fields(3, "w1 w2 w3", 40, stream=True))["completion_tokens"] == 40
        connection = http.client.HTTPConnection("127.0.0.1", service.port, timeout=TIMEOUT)
        connection.request("POST", "/v1/completions", json.dumps({"model": "words.bin", "prompt": "w5",
                                                                  "max_tokens": 3}))
        assert json.loads(connection.getresponse().read())["usage"]["completion_tokens"] == 3
        service.go.touch()
        assert [first.receive()["id"] for _ in range(2)] == [1, 2]
        assert service.stop() == 0 and "fault" not in service.log


def test_requests_of_a_connection_keep_their_order(start):
    with start("--batch-size", 1) as service, service.client() as client:
        generator = random.Random(0)
        for number in range(40):
            client.send(fields(number, generator.choice(["w1", "w1 w2 w3", LARGE_TEXT])))
        assert [client.receive()["id"] for _ in range(40)] == list(range(40))
        assert service.stop() == 0


def test_cancelled_while_it_is_encoded(start):
    """It ends at once, and the next of its connection runs when the thread is free."""
    with start() as service, service.client() as client:
        client.send(fields(1, "wait"), fields(2, "w1"), fields(3, "w2"))
        while not service.go.with_suffix(".begun").exists():
            time.sleep(0.01)
        client.send({"cancel": 3}, {"cancel": 1})
        got = [client.receive() for _ in range(2)]
        assert {line["id"]: (line["finish_reason"], line["text"], line["prompt_tokens"]) for line in got} == {
            1: ("cancelled", "", 0), 3: ("cancelled", "", 0)}
        service.wait_for("queue_depth", 1)
        client.send(fields(1, "w4"))  # the name is free
        service.go.touch()
        assert [client.receive()["id"] for _ in range(2)] == [2, 1]
        assert service.metric('requests_total{finish="cancelled"}') == 2 and service.stop() == 0


def test_a_client_that_leaves_while_its_prompts_are_encoded(start):
    with start() as service, service.client() as other:
        with service.client() as client:
            client.send(fields(1, "wait"), fields(2, "w1"))
            service.wait_for("queue_depth", 2)
        service.wait_for('requests_total{finish="cancelled"}', 2)
        service.go.touch()
        assert other.ask(**fields(1, "w1"))["finish_reason"] == "length"
        assert service.metric("queue_depth") == 0 and service.stop() == 0


def test_a_deadline_while_it_is_encoded(start):
    with start() as service, service.client() as client:
        client.send(fields(1, "wait", deadline_ms=50))
        error = client.receive()["error"]
        assert error["code"] == "deadline"
        assert re.match(r"deadline_ms: passed after \d+ ms while waiting, ", error["message"])
        service.go.touch()
        assert service.stop() == 0


def test_what_is_encoded_counts_as_accepted(start):
    with start("--batch-size", 1, "--queue-size", 1) as service, service.client() as client, service.client() as other:
        client.send(fields(1, "wait"), fields(2, "wait"))
        service.wait_for("queue_depth", 2)
        assert other.ask(**fields(3, "w1"))["error"]["code"] == "queue_full"
        service.process.send_signal(signal.SIGTERM)  # what was accepted is finished
        time.sleep(0.2)
        service.go.touch()
        assert [client.receive()["finish_reason"] for _ in range(2)] == ["length"] * 2 and client.receive() is None
        assert service.process.wait(TIMEOUT) == 0
        assert "stopping: 2 requests to finish\n" in service.log


def test_the_end_while_prompts_are_encoded(start):
    """They hear of it, before their encoding ends."""
    with start("--drain", 0) as service, service.client() as client:
        client.send(fields(1, "wait"), fields(2, "w1"))
        service.wait_for("queue_depth", 2)
        service.process.send_signal(signal.SIGTERM)
        assert {client.receive()["error"]["code"] for _ in range(2)} == {"shutdown"} and client.receive() is None
        service.go.touch()
        assert service.process.wait(TIMEOUT) == 0 and "Traceback" not in service.log


def test_a_large_line_that_arrived_before_the_end_is_answered(start):
    with start() as service, service.client() as client:
        client.send(fields(1, "wait"))
        service.wait_for("queue_depth", 1)
        service.process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
        client.send(fields(2, LARGE_TEXT))
        assert client.receive()["error"]["code"] == "shutdown"
        service.go.touch()
        assert client.receive()["finish_reason"] == "length" and service.process.wait(TIMEOUT) == 0


@pytest.mark.parametrize("prompt", ["fail", "fail" + LARGE_TEXT])
def test_an_accident_on_another_thread(start, prompt):
    """It is answered, over lines and HTTP, and others do not notice; the prompt is not logged."""
    with start() as service, service.client() as client:
        client.send(fields(1, prompt), fields(2, "w1"))
        got = {line["id"]: line for line in (client.receive(), client.receive())}
        error = {"message": "server: KeyError while it read the request, expected none; the log has more",
                 "code": "internal"}
        assert got[1]["error"] == error and got[2]["finish_reason"] == "length"
        connection = http.client.HTTPConnection("127.0.0.1", service.port, timeout=TIMEOUT)
        for text, status in ((prompt, 500), ("w1", 200)):
            connection.request("POST", "/v1/completions", json.dumps(
                {"model": "words.bin", "prompt": text, "max_tokens": 1}))
            answer = connection.getresponse()
            assert (answer.status, "error" in json.loads(answer.read())) == (status, status == 500)
        assert service.metric('errors_total{code="internal"}') == 2 and service.metric("queue_depth") == 0
        assert service.stop() == 0
        assert 2 == len(re.findall(r"Z fault error=KeyError at=.*:\d+\"\n", service.log))
        assert "fail" not in service.log


# How long a line and a text may be

@pytest.fixture(scope="module")
def reader(words):
    with Engine(words, backend="host") as engine:
        yield Reader(engine)


def refused(call, *arguments):
    with pytest.raises(Refused) as error:
        call(*arguments)
    assert error.value.code == "too_long"
    return str(error.value), error.value.id


def test_a_text_that_cannot_fit_is_not_encoded(reader, monkeypatch):
    context = reader._engine.context
    most = context * LONGEST
    assert reader.max_text_bytes == most and reader.max_bytes == OTHER_BYTES + ESCAPED * most
    encoded = []
    monkeypatch.setattr(reader.codec(), "encode", lambda data, *rest: encoded.append(len(data)) or [1])
    for text, good in (("x" * most, True), ("x" * (most + 1), False), ("\u20ac" * (most // 3), True),
                       ("\u20ac" * (most // 3 + 1), False), ("x" * 1_800_000, False)):
        request = reader.request({"id": 4, "prompt": text})
        if good:
            assert request.encode()[0] == [1] and encoded.pop() == len(text.encode())
            del encoded[:]
        else:
            message, identity = refused(request.encode)
            assert identity == 4 and message.startswith(f"prompt: {len(text.encode())} bytes, expected at most {most}, "
                                                        f"{LONGEST} for each token of a context of {context}, ")
    assert not encoded


def test_a_text_of_far_too_many_tokens_is_not_encoded_whole(reader, monkeypatch):
    context, encode, sizes = reader._engine.context, reader.codec().encode, []
    monkeypatch.setattr(reader.codec(), "encode", lambda data, *rest: sizes.append(len(data)) or encode(data, *rest))
    for text, got, lengths in (("w1 " * context, context, [3 * context]),
                               ("w1" + 30 * " " * context, 1, [16 * context, 30 * context + 2]),
                               ("w1 " * (context + 1), f"{context + 1} tokens", [3 * context + 3]),
                               ("w1      " * 2 * context, f"{2 * context} tokens", [16 * context]),
                               ("w1 " * 8 * context, f"more than {2 * context} tokens", [16 * context])):
        del sizes[:]
        request = reader.request({"id": 4, "prompt": text})
        if isinstance(got, int):
            assert len(request.encode()[0]) == got
        else:
            assert refused(request.encode)[0].startswith(f"prompt: {got}, expected at most {context}, ")
        assert sizes == lengths


def test_the_longest_token_of_a_vocabulary():
    assert Tokenizer(tokenizers.Tokenizer(tokenizers.models.BPE()).to_str().encode(), "x").longest == DROPPED_BYTES
    vocabulary = {"a": 0, "\u2581\u2581\u2581\u2581\u2581\u2581\u2581": 1, "bc": 2}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="a"))
    assert Tokenizer(made.to_str().encode(), "x").longest == 21
    made.add_tokens(["<" + "x" * 60 + ">"])
    assert Tokenizer(made.to_str().encode(), "x").longest == 62


def test_more_tokens_than_are_wanted_are_only_counted(words):
    data = (words.parent / "model" / "tokenizer.json").read_bytes()
    codec = Tokenizer(data, "x")
    assert codec.encode(b"w1 w2 w3") == [1, 2, 3]
    codec.most = 2
    assert codec.encode(b"w1 w2") == [1, 2] and codec.encode(b"w1 w2 w3") == range(3)


def test_token_numbers_that_cannot_fit_are_not_read(reader):
    context = reader._engine.context
    assert reader.max_bare_bytes == OTHER_BYTES + context * (2 + SPACED)
    good = json.dumps({"id": "a", "prompt_ids": [11] * context}, indent=4).encode()
    assert len(reader.parse(good)["prompt_ids"]) == context
    bad = b'{"id": "a", "prompt_ids": [' + b"11, " * (reader.max_bare_bytes // 4) + b"11]}"
    message, identity = refused(reader.parse, bad)
    assert identity == "a" and message == (
        f"line: more than {reader.max_bare_bytes} bytes outside of strings, expected fewer; no list of token numbers "
        f"that "
        "fits the context is as long")


def test_a_text_that_cannot_fit_is_not_read(reader, monkeypatch):
    """Each byte of it is one of text, or of an escape with five others at most."""
    most = reader.max_text_bytes + reader.max_bare_bytes
    line = b'{"id": 3, "prompt": "%b"}'
    for piece, per_text in ((b"x", 1), (b"\\u0041", 6)):
        text = piece * (reader.max_text_bytes + 1 if per_text > 1 else most - 100)
        assert len(reader.parse(line % text)["prompt"]) == len(text) // per_text
    monkeypatch.setattr("colibri.requests.parse", None)
    assert refused(reader.parse, line % (b"x" * most)) == (
        f"line: more than {most} bytes, expected fewer; no prompt that fits the context is as long", 3)
    assert refused(reader.parse, line % (b"\\u0041" * most))[1] == 3


@pytest.mark.parametrize("text", ["x", '"', "\\", '\\"', '"\\\\', "\\\\\\\"", "\u20ac\n\0", "[1,2,"])
@pytest.mark.parametrize("ascii", [False, True])
def test_what_stands_in_strings_is_not_counted(reader, text, ascii):
    text *= reader.max_bare_bytes // len(text)
    data = json.dumps({"id": 1, "prompt": text, "stream": True}, ensure_ascii=ascii).encode()
    assert len(data) > reader.max_bare_bytes and reader.parse(data)["prompt"] == text


@pytest.mark.parametrize("data, identity", [
    (b'{"id": 12, "prompt": "', 12), (b' {\n"id":"a\\"b" ,', 'a"b'), (b'{"id": -5, "x', -5), ((b'{"prompt": "x", '
                                                                                              b'"id": 1'), None),
    (b'{"id": 1.5, ', None), (b'{"id": "\\q", ', None), (b'{"id": 1', None), (b"x" * 100, None), (b"", None)])
def test_the_id_of_a_line_that_is_not_read(data, identity):
    assert leading_id(data) == identity


def test_lines_that_cannot_fit_have_their_id(start):
    with start() as service, service.client() as client:
        client.send(b'{"id": 7, "prompt": "' + b"x" * 9_000_000 + b'"}\n', b'{"id": 8, "prompt_ids": [1'
                    + b",1" * 100_000 + b"]}\n", fields(9, "x" * 500_000), fields(10, "w1 " * 3000), fields(11, "w1"))
        got = [client.receive() for _ in range(5)]
        assert [(line["id"], line.get("error", {}).get("code")) for line in sorted(got,
                                                                                   key=lambda line: line["id"])] == [
            (7, "too_long"), (8, "too_long"), (9, "too_long"), (10, "too_long"), (11, None)]
        assert service.stop() == 0


def test_a_scheduler_that_has_failed():
    """What is still to be encoded hears why, too."""
    from colibri.server import Server
    server, entered = Server.__new__(Server), []
    request = SimpleNamespace(is_over=True)
    server.scheduler = SimpleNamespace(failure="GPU: lost", enter=entered.append, take=list)
    server._intake = SimpleNamespace(clear=lambda: [request])
    server.stop = lambda: entered.append("stopped")
    server._news()
    assert entered == [request, "stopped"]
