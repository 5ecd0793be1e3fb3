"""A short soak and a short load, and that the soak notices what it is there for."""

import csv
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT, program

from bench import load, soak


def test_some_seconds(moe_32):
    """Too short for what memory is promised; the rest holds."""
    run = subprocess.run([ROOT / "bench" / "stress.sh", "--soak", "0.1", "--clients", "4", "--model", moe_32, "--json"],
                         env={"PYTHON": sys.executable, "PATH": "/usr/bin:/bin"}, capture_output=True, text=True,
                         check=False)
    figures = json.loads(run.stdout)
    assert [failure for failure in figures["failures"] if not failure.startswith("memory: ")] == []
    assert figures["length"] > 20
    assert all(figures[name] for name in ("HTTP requests", "bad lines", "leaves", "stopped clients"))
    assert figures["free slots"] == "16 of 16"


def test_load(moe_32, tmp_path):
    plot = ["--png", tmp_path / "load.png"] if importlib.util.find_spec("matplotlib") else []
    run = program("bench.load", moe_32, "--rates", "5,10", "--seconds", "1", *plot)
    assert run.returncode == 0, run.stderr
    rows = list(csv.DictReader(run.stdout.decode().splitlines()))
    assert [row["offered_rps"] for row in rows] == ["5", "10"]
    for row in rows:
        assert row["refused"] == "0" and 0 < float(row["ttft_p50_ms"]) <= float(row["ttft_p99_ms"])
        assert 0 < float(row["itl_p50_ms"]) <= float(row["itl_p99_ms"])
    assert not plot or (tmp_path / "load.png").read_bytes()[:4] == b"\x89PNG"


def test_the_time_between_tokens_that_arrive_together():
    """Is each one's share of the time since those before; the first ones have none."""
    record = object.__new__(load.Record)
    for times, expected in (([1.0, 1.0, 1.25, 2.0, 2.0, 2.0], [250] * 4), ([1.0, 1.5, 1.75], [500, 250]), ([1.0], []),
                            ([], [])):
        record.times = times
        np.testing.assert_allclose(record.itl(), expected)


@pytest.fixture
def client(monkeypatch):
    """A client that waits for request 1, and raises what it would report."""
    def fail(self, reason):
        raise AssertionError(reason)
    monkeypatch.setattr(soak.Client, "fail", fail)
    client = soak.Client(None, None, "model.bin", [{"request": {}, "output": [5, 6, 7]}], 0)
    client.pending[1] = {"case": 0, "stream": True, "seen": [], "deadline": False, "cancelled": False,
                         "cancel_after": None}
    client.connection = Answers()
    return client


class Answers(list):
    def receive(self):
        return self.pop(0) if self else None


def final(**changes):
    return {"id": 1, "ids": [5, 6, 7], "finish_reason": "length", "prompt_tokens": 1, "completion_tokens": 3,
            "ttft_ms": 1.0, "itl_p50_ms": 1.0, "itl_p99_ms": 1.0, **changes}


TOKENS = [{"id": 1, "token": token} for token in (5, 6, 7)]


@pytest.mark.parametrize("answers, failure", [
    ([*TOKENS, final()], None),
    ([*TOKENS, final(), final()], "duplicated"),
    ([*TOKENS, final(ids=[5, 6, 8])], "wrong: case 0 gives '[5, 6, 8]', expected '[5, 6, 7]'"),
    ([*TOKENS[:2], final()], "events: '[5, 6]' add up to another text"),
    ([*TOKENS[:2], final(ids=[5, 6], finish_reason="cancelled")], "ended as cancelled without a cause"),
    ([final(id=2)], "duplicated, or of another"),
    ([{"id": None, "error": {"code": "bad_request", "message": ""}}], "error that nothing asked for"),
    ([{"id": 1, "error": {"code": "internal", "message": ""}}], "error: "),
    (TOKENS, "connection: closed by the service"),
])
def test_what_a_client_notices(client, answers, failure):
    client.connection += answers
    if failure is None:
        while client.pending:
            client.read_line()
        assert client.counts == Counter(length=1, tokens=3)
        return
    with pytest.raises(AssertionError) as noticed:
        while client.pending or client.connection:
            client.read_line()
    assert failure in str(noticed.value)


def test_what_the_end_notices():
    flat = {"resident": {"warm_mib": 100.0, "end_mib": 101.0, "growth": 0.01}}
    grown = {"resident": {"warm_mib": 100.0, "end_mib": 103.0, "growth": 0.03}}
    log = ["2026-01-01T00:00:00Z request id=1 finish=length\n"]
    assert soak.check([{}], flat, (4, 4), 0, log) == []
    assert soak.check([{"failure": "x"}], flat, (4, 4), 0, log) == ["x"]
    assert soak.check([{}], grown, (4, 4), 0, log) == [
        "memory: resident grew from 100.0 to 103.0 MiB, expected at most 2%"]
    assert soak.check([{}], flat, (3, 4), 0, log) == ["slots: 3 free at the end, expected all 4"]
    assert soak.check([{}], flat, (4, 4), 1, log) == ["service: ended with 1, expected 0"]
    assert "is no line of one request" in soak.check([{}], flat, (4, 4), 0, [log[0][:-1] + log[0][5:]])[0]


def test_soak_tells_that_its_service_was_killed(moe_32):
    """Every client that saw it says so, and the exit status is the service's end."""
    command = [sys.executable, "-m", "bench.soak", "--soak", "2", "--clients", "2", "--json", "--model", moe_32]
    with subprocess.Popen(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as run:
        children = Path(f"/proc/{run.pid}/task/{run.pid}/children")
        while len(pids := children.read_text().split()) < 3:  # the service, then its clients
            assert run.poll() is None
            time.sleep(0.01)
        time.sleep(1)
        os.kill(int(pids[0]), signal.SIGKILL)
        figures, errors = run.communicate(timeout=60)
    failures = json.loads(figures)["failures"]
    assert run.returncode == 1 and errors.splitlines() == failures
    assert "service: ended with -9, expected 0" in failures
    assert any(failure.startswith("client 100") for failure in failures)
