"""What fails around a run, and how it ends then: memory, devices, weights, clocks, disks, and clients of every kind."""

import resource
import subprocess
import sys

import pytest
from conftest import ROOT
from test_device import Driver, Status, memory_of, use  # noqa: F401

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
        wheres.add(run.stderr.replace(str(moe_32), "model").split(": ")[0])
    assert run.returncode == 0 and wheres <= {"python -m colibri.run", "model", "memory", "threads"} and len(wheres) > 2


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
    run = subprocess.run([sys.executable, "-c", script, str(moe_32)], cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    length, text = run.stdout.splitlines()
    with engine.session() as session:
        session.prefill(b"It was the custom of ")
        assert (int(length), text) == (21, bytes(session.generate(b"the old captain", 12)).decode())


def test_a_device_that_has_no_memory_left(use):  # noqa: F811
    memory = memory_of(Driver(cuMemAlloc=lambda _: (Status.CUDA_ERROR_OUT_OF_MEMORY, 0)), use)
    memory._device_blocks = []
    with pytest.raises(ColibriError) as error:
        memory.state(1 << 30)
    assert str(error.value) == ("GPU: cuMemAlloc=CUDA_ERROR_OUT_OF_MEMORY, expected CUDA_SUCCESS; see python -m colibri.run "
                                "--doctor")
    assert memory._device_blocks == []
