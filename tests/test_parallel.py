"""Threads share a step's work: the same bits however many there are, and whatever befalls one of them."""

import functools
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import reference
from host_model import HostModel, library
from reference import fields

TASKS = Path("/proc/self/task")
SHAPE = fields(num_layers=2, num_experts=6, k=2, hidden=640, ffn=456, num_heads=6, num_kv_heads=2, head_dim=30,
               vocab_size=1031)


def tasks():
    return {int(task.name) for task in TASKS.iterdir()}


@functools.cache
def model():
    return reference.random_model(np.random.default_rng(3), **SHAPE)


def logits(host):
    return host.forward([5, 77, 9], [0, 1, 2], [0, 0, 0])


def alone():
    return logits(HostModel(model(), num_threads=1))


@pytest.mark.parametrize("num_threads", [2, 3, 4, 5, 8, 16])
def test_any_number_of_threads_gives_the_same_bits(num_threads):
    host, expected = HostModel(model(), num_threads=num_threads), alone()
    for _ in range(20):
        assert np.array_equal(logits(host), expected)


@pytest.mark.parametrize("num_words", [1, 1 << 16, 5 << 16, (37 << 16) + 5])
def test_every_item_is_done_once(num_words):
    data = np.random.default_rng(num_words).integers(0, 2**32, num_words, np.uint32)
    for num_threads in range(1, 18):
        assert library().read_sum(data.ctypes.data, data.nbytes, num_threads) == data.sum(dtype=np.uint64) % 2**32


def in_a_thread(function):
    """Returns what it does in a thread of its own, whose workers are new and end with it."""
    results = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join()
    return results[0]


def test_an_item_of_a_thread_without_a_core_is_done_by_another():
    """A worker loses its core to a process beside it hundreds of times, mostly in the middle of an item."""
    host, expected, before = HostModel(model(), num_threads=2), alone(), tasks()
    core = max(os.sched_getaffinity(0))
    script = (f"import os, time\nos.sched_setaffinity(0, [{core}])\nwhile os.getppid() == {os.getpid()}:\n"
              "    end = time.monotonic() + 0.0005\n    while time.monotonic() < end: pass\n    time.sleep(0.0005)\n")

    def steps():
        logits(host)
        for worker in tasks() - before - {threading.get_native_id()}:
            os.sched_setaffinity(worker, [core])
            os.sched_setscheduler(worker, os.SCHED_IDLE, os.sched_param(0))
        with subprocess.Popen([sys.executable, "-c", script]) as beside:
            results = [logits(host) for _ in range(500)]
            beside.kill()
        return results

    assert all(np.array_equal(result, expected) for result in in_a_thread(steps))


def test_threads_end_with_the_one_that_they_work_for():
    host, before = HostModel(model(), num_threads=4), tasks()
    during = in_a_thread(lambda: logits(host) is not None and tasks() - before)
    assert len(during) == 4
    end = time.monotonic() + 20
    while tasks() & during:  # Python's join does not wait for the very end
        assert time.monotonic() < end
        time.sleep(0.001)


def test_signals_are_for_the_program_and_not_for_its_workers():
    host, expected, calls = HostModel(model(), num_threads=3), alone(), []
    before = signal.signal(signal.SIGALRM, lambda *_: calls.append(0))
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
        while len(calls) < 50:
            assert np.array_equal(logits(host), expected)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_workers_block_signals_but_for_faults():
    """A thread begins with all signals blocked, until it has run for the first time."""
    host, before = HostModel(model(), num_threads=3), tasks()
    expected = fields(SIGINT=1, SIGTERM=1, SIGALRM=1, SIGBUS=0, SIGSEGV=0)

    def blocked():
        logits(host)
        workers = tasks() - before - {threading.get_native_id()}
        masks = [int((TASKS / str(worker) / "status").read_text().split("SigBlk:")[1].split()[0], 16)
                 for worker in workers]
        return [{name: mask >> getattr(signal, name) - 1 & 1 for name in expected} for mask in masks]

    def settled():
        end = time.monotonic() + 10
        while (masks := blocked()) != [expected] * 2 and time.monotonic() < end:
            time.sleep(0.01)
        return masks

    assert in_a_thread(settled) == [expected] * 2


def test_a_fork_works_with_threads_of_its_own():
    data = np.arange(9 << 16, dtype=np.uint32)
    built, expected = library(), int(data.sum(dtype=np.uint64) % 2**32)
    assert built.read_sum(data.ctypes.data, data.nbytes, 4) == expected
    child = os.fork()
    if not child:
        signal.alarm(20)
        before = len(tasks())
        same = built.read_sum(data.ctypes.data, data.nbytes, 4) == expected
        os._exit(same and before == 1 and len(tasks()) == 4)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    assert built.read_sum(data.ctypes.data, data.nbytes, 4) == expected
