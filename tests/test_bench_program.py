"""The benchmarks' command lines: mistakes, and Ctrl-C."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import ROOT, program

MISTAKES = {
    "--batch-sizes: x, expected an integer, 1 or more": "latency --batch-sizes 1,x",
    "--clients: 0, expected 1 or more": "serve --clients 4,0",
    "--rates: 0, expected a number above 0": "load --rates 0",
    "--seconds: inf, expected a number above 0": "load --seconds inf",
    "--soak: -1, expected a number above 0": "soak --soak -1",
    "--rounds: 0, expected 1 or more": "host --rounds 0",
    "--gib: nan, expected a number above 0": "convert --gib nan",
    "--shapes: llama, expected one of mixtral, olmoe, qwen3-30b": "whole --shapes llama",
    "foo: unknown, expected one of bin, step, request": "fuzz foo",
}


@pytest.mark.parametrize(("message", "command"), MISTAKES.items())
def test_mistake_is_one_line(message, command):
    name, *arguments = command.split()
    run = program(f"bench.{name}", *arguments)
    assert (run.returncode, run.stdout, run.stderr.decode()) == (2, b"", message + "\n")


@pytest.mark.parametrize("command", [["latency"], ["serve"], ["load"], ["soak", "--model"]])
def test_model_that_is_not_there(command):
    run = program(f"bench.{command[0]}", *command[1:], "nope.bin")
    assert (run.returncode, run.stdout, run.stderr.decode().count("\n")) == (2, b"", 1)
    assert b"nope.bin: not found, expected a model file; " in run.stderr


def children(pid):
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


@pytest.mark.parametrize(("number", "status", "message"), [(signal.SIGINT, 130, "interrupted\n"),
                                                           (signal.SIGTERM, 143, "terminated\n")])
@pytest.mark.parametrize("command", [["load", "--rates", "5"], ["soak", "--clients", "3", "--model"]])
def test_stopped(moe_32, command, number, status, message):
    """By Ctrl-C, which reaches the whole group, or kill: its service and clients end with it."""
    with subprocess.Popen([sys.executable, "-m", f"bench.{command[0]}", *command[1:], moe_32], cwd=ROOT, text=True,
                          stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True) as run:
        while not children(run.pid):
            assert run.poll() is None
        started = children(run.pid)
        os.killpg(run.pid, number)
        assert run.stderr.read() == message
    assert run.returncode == status
    end = time.monotonic() + 10
    while any(Path(f"/proc/{child}/exe").exists() for child in started):
        assert time.monotonic() < end
        time.sleep(0.01)
