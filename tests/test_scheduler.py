"""Continuous batching: who is in which step, and that a request's tokens are what they are alone."""

import itertools
import math
import os
import re
import time

import numpy as np
import pytest
from scheduling import CHUNK, alone, finish, make, request, submit, turn
from service import wakes
from synthetic import write_model

from colibri.engine import Engine
from colibri.errors import ColibriError
from colibri.refused import Refused
from colibri.sampling import Sampler
from colibri.scheduler import Scheduler


@pytest.fixture(scope="module")
def small(moe_32):
    """An engine with four slots."""
    with Engine(moe_32, backend="host", num_slots=4) as engine:
        yield engine


@pytest.fixture
def scheduler(small, monkeypatch):
    yield (made := make(small, monkeypatch))
    for each in [*made._prefilling, *made._running]:
        each.session.close()
    assert small.num_free_slots == 4


@pytest.fixture
def clock(monkeypatch):
    """Time of any machine: 0.1 ms pass from one look at the clock to the next, and what is slept."""
    readings, slept, start = itertools.count(), [], time.monotonic()
    monkeypatch.setattr(time, "sleep", slept.append)
    monkeypatch.setattr(time, "monotonic", lambda: start + next(readings) * 1e-4 + sum(slept))


def test_the_same_tokens_alone_and_in_company(small, scheduler):
    generator = np.random.default_rng(0)
    requests = []
    for index in range(24):
        prompt = generator.integers(0, 256, int(generator.integers(1, 300))).tolist()
        sampler = Sampler(1.0, 40, 0.9, index) if index % 2 else Sampler()
        requests.append(request(prompt, int(generator.integers(1, 60)), id=index, sampler=sampler))
    expected = [alone(small, request) for request in requests]
    waiting = requests[::-1]
    while not all(request.finish for request in requests):
        while waiting and scheduler.num_unfinished < 7:
            submit(scheduler, waiting.pop())
        turn(scheduler)
    assert [request.tokens for request in requests] == expected
    assert [request.finish for request in requests] == ["length"] * 24
    assert max(map(len, scheduler.calls)) == 4


def test_requests_join_and_leave_between_steps(scheduler):
    first, second = request(b"abc", 8), request(b"defg", 3)
    submit(scheduler, first)
    turn(scheduler, 3)
    assert scheduler.calls == [[(0, 3)], [(0, 1)], [(0, 1)]]  # its prompt, then a token each turn
    submit(scheduler, second)
    turn(scheduler, 3)
    assert scheduler.calls[3:] == [[(0, 1)], [(1, 4)], [(0, 1), (1, 1)], [(0, 1), (1, 1)]]
    assert second.finish == "length" and len(second.tokens) == 3
    turn(scheduler)
    assert scheduler.calls[7:] == [[(0, 1)]] and len(first.tokens) == 7
    finish(scheduler, first)
    assert scheduler.steps == {"decode": 7, "prefill": 2}


def test_a_long_prompt_in_chunks_between_the_steps_of_others(scheduler):
    running, long = request(b"abc", 20), request(bytes(100), 2)
    submit(scheduler, running)
    turn(scheduler, 2)
    del scheduler.calls[:]
    submit(scheduler, long)
    turn(scheduler, 5)
    assert scheduler.calls == [[(0, 1)], [(1, 32)], [(0, 1)], [(1, 32)], [(0, 1)], [(1, 32)], [(0, 1)], [(1, 4)],
                               [(0, 1), (1, 1)]]
    finish(scheduler, running, long)


def test_prompts_one_after_another_and_short_ones_together(scheduler):
    requests = [request(bytes([65 + index]) * length, 1) for index, length in enumerate((40, 10, 10, 10))]
    for item in requests:
        submit(scheduler, item)
    turn(scheduler, 2)
    # Nobody decodes: the first one leaves room for two of 64 tokens; the last one comes after them.
    assert scheduler.calls == [[(0, 40), (1, 10), (2, 10)], [(3, 10)]]
    assert all(item.finish == "length" for item in requests)


@pytest.mark.parametrize("chunk, sizes", [(2, [64, 64, 64, 8, 1, 1]), (80, [80, 80, 40, 1, 1]),
                                          (3, [64, 64, 64, 8, 1, 1])])
def test_chunks_alone_and_in_company(small, scheduler, chunk, sizes):
    """Alone 64 tokens; beside others the chunk, or as many as decode; above 64 always the chunk."""
    scheduler.prefill_chunk = chunk
    submit(scheduler, item := request(bytes(200), 3))
    finish(scheduler, item)
    assert [count for call in scheduler.calls for _, count in call] == sizes
    del scheduler.calls[:]
    others = [request(bytes([65 + index]), 100) for index in range(3)]
    for other in others:
        submit(scheduler, other)
    turn(scheduler, 4)
    submit(scheduler, again := request(bytes(200), 3))
    finish(scheduler, again)
    in_company = [call[0][1] for call in scheduler.calls if len(call) == 1 and call[0][1] > 1]
    assert in_company == ([80, 80, 40] if chunk == 80 else [3] * 66 + [2])
    assert again.tokens == item.tokens == alone(small, item)
    finish(scheduler, *others)


def test_streaming_leaves_a_processor_free_and_takes_smaller_chunks(moe_32, monkeypatch):
    """Whoever passes tokens on needs a processor, and sees how long a step takes."""
    with Engine(moe_32, backend="host", num_slots=8, threads=2) as engine:
        scheduler = make(engine, monkeypatch, queue_size=8)
        scheduler.prefill_chunk = 1
        plain = [request(bytes([65 + index]), 200) for index in range(4)]
        streamed, first, second = request(b"It was", 30, stream=True), request(b"x" * 20, 1), request(b"y" * 20, 1)

        def after_a_turn():
            turn(scheduler)
            return int(engine._model.struct["num_threads"][0]), scheduler.calls[-1][0][1]
        for item in plain:
            submit(scheduler, item)
        turn(scheduler, 4)
        submit(scheduler, first)
        assert after_a_turn() == (2, 4)
        finish(scheduler, first)
        submit(scheduler, streamed)
        turn(scheduler, 3)
        submit(scheduler, second)
        assert after_a_turn() == (1, 2)
        finish(scheduler, second, streamed)
        turn(scheduler)
        assert after_a_turn() == (2, 1)
        finish(scheduler, *plain)
        assert streamed.tokens == alone(engine, streamed)


def test_first_come_first_served(scheduler):
    requests = [request(bytes([65 + index]) * 3, 5 + index % 2) for index in range(7)]
    for item in requests:
        submit(scheduler, item)
    finish(scheduler, *requests)
    begun = [item.times[0] for item in requests]
    assert begun == sorted(begun)


def test_a_full_queue(scheduler):
    requests = [request(bytes([65 + index]), 2, id=index) for index in range(7)]  # four slots, three that wait
    for item in requests:
        submit(scheduler, item)
    with pytest.raises(Refused) as refused:
        submit(scheduler, request(b"z", 1, id=9))
    assert (str(refused.value), refused.value.code, refused.value.id) == (
        "queue: 3 waiting, expected fewer; send it again later, or raise --queue-size", "queue_full", 9)
    turn(scheduler)
    assert scheduler.num_waiting == 3 and scheduler.num_running == 4
    turn(scheduler)
    submit(scheduler, last := request(b"z", 1))
    finish(scheduler, *requests, last)
    assert scheduler.num_unfinished == scheduler.num_waiting == scheduler.num_running == 0


@pytest.mark.parametrize("turns, tokens, prefilled", [(0, 0, 0), (3, 0, 64), (10, 6, 100)])
def test_cancelled_while_waiting_prefilling_and_decoding(small, scheduler, turns, tokens, prefilled):
    other, cancelled = request(b"abc", 30), request(bytes(100), 50)
    expected = alone(small, other)
    submit(scheduler, other)
    submit(scheduler, cancelled)
    turn(scheduler, turns)
    scheduler.cancel(cancelled)
    turn(scheduler)
    assert (cancelled.finish, len(cancelled.tokens), cancelled.prefilled) == ("cancelled", tokens, prefilled)
    assert small.num_free_slots == 3
    finish(scheduler, other)
    assert other.tokens == expected
    scheduler.cancel(cancelled)  # too late: nothing happens
    scheduler.cancel(other)
    turn(scheduler)
    assert (cancelled.finish, other.finish, scheduler.num_unfinished) == ("cancelled", "length", 0)


def test_a_cancelled_one_gives_its_slot_to_the_next(small, scheduler):
    requests = [request(bytes([65 + index]) * 3, 30) for index in range(6)]
    for item in requests:
        submit(scheduler, item)
    turn(scheduler, 2)
    scheduler.cancel(requests[4])  # waits
    scheduler.cancel(requests[1])  # runs
    turn(scheduler)
    assert [bool(item.tokens) for item in requests] == [True, True, True, True, False, True]
    assert scheduler.calls[-1] == [(4, 3)] and small.num_free_slots == 0
    finish(scheduler, *requests)
    assert requests[0].tokens == alone(small, requests[0])


@pytest.mark.usefixtures("clock")
def test_deadlines(scheduler):
    begun = time.monotonic()
    requests = [request(bytes([65 + index]) * 3, 200) for index in range(4)]
    waits = request(b"w", 5, deadline=begun + 0.02, arrived=begun)
    for item in (*requests, waits):
        submit(scheduler, item)
    turn(scheduler, 3)
    assert waits.finish is None
    time.sleep(0.03)
    turn(scheduler)
    assert (waits.finish, waits.error.code, waits.error.id) == ("error", "deadline", b"w")
    assert str(waits.error).startswith("deadline_ms: passed after ")
    assert str(waits.error).endswith(" ms while waiting, expected time for a first token; allow more, or send it when "
                                     "fewer requests run")
    for item in requests:
        scheduler.cancel(item)
    turn(scheduler)
    late = request(b"abc", 500, deadline=time.monotonic() + 0.01)
    submit(scheduler, late)
    finish(scheduler, late)
    assert late.finish == "deadline" and 1 <= len(late.tokens) < 500 and late.error is None
    assert late.times[-1] < late.deadline + 0.05


@pytest.mark.usefixtures("clock")
def test_a_first_token_after_the_deadline(small, scheduler, monkeypatch):
    step = small.advance
    monkeypatch.setattr(small, "advance", lambda *arguments: (time.sleep(0.03), step(*arguments))[1])
    submit(scheduler, late := request(b"abc", 5, deadline=time.monotonic() + 0.02))
    turn(scheduler)
    assert late.tokens == [] and late.error.code == "deadline"
    assert re.fullmatch(r"deadline_ms: passed after [3-9]\d ms while prefilling, expected time for a first token; .*",
                        str(late.error))


def test_deadlines_of_what_has_ended_are_forgotten(scheduler):
    """Also while one with an earlier deadline runs on."""
    now = time.monotonic()
    submit(scheduler, first := request(b"abc", 400, deadline=now + 1000))
    for number in range(200):
        submit(scheduler, item := request(b"x", 1, deadline=now + 2000 + number))
        finish(scheduler, item)
    assert len(scheduler._deadlines) < 100 and first in [entry[2] for entry in scheduler._deadlines]
    scheduler.cancel(first)
    turn(scheduler)
    assert first.finish == "cancelled"


@pytest.mark.usefixtures("clock")
def test_a_deadline_within_prefill(scheduler):
    slow = request(bytes(500), 5, deadline=time.monotonic() + 0.05)
    submit(scheduler, slow)
    turn(scheduler)
    time.sleep(0.06)
    turn(scheduler)
    assert slow.error.code == "deadline" and " ms while prefilling, expected" in str(slow.error)


@pytest.mark.usefixtures("clock")
def test_a_deadline_that_cannot_be_met_is_refused_before_it_runs(scheduler):
    scheduler._token_seconds = 0.001
    hopeless = request(bytes(100), 5, deadline=time.monotonic() + 0.09)
    submit(scheduler, hopeless)
    turn(scheduler)
    assert scheduler.calls == [] and hopeless.error.code == "deadline"
    assert str(hopeless.error) in [f"deadline_ms: {left} ms left, expected at least 100 for a first token; allow more"
                                   for left in (88, 89, 90)]


def test_an_end_token_stops(small, scheduler, monkeypatch):
    item = request(b"It was the custom of ", 30)
    expected = alone(small, item)
    monkeypatch.setattr(small.checkpoint, "eos", (expected[7],))
    count = expected.index(expected[7])
    submit(scheduler, item)
    finish(scheduler, item)
    assert (item.finish, item.tokens) == ("stop", expected[:count])


def test_news_come_once_a_turn(small):
    told = []
    scheduler = Scheduler(small, 3, CHUNK, lambda: told.append(1))
    streams, quiet = request(b"abc", 3, stream=True), request(b"def", 3)
    for item in (streams, quiet):
        submit(scheduler, item)
    turn(scheduler, 2)
    assert told == [1]  # the second turn's are fetched with the first one's
    assert scheduler.take() == [streams] and len(streams.tokens) == 2
    turn(scheduler)
    assert told == [1, 1] and scheduler.take() == [streams, quiet] and scheduler.take() == []


def test_one_request_that_spoils_a_step(tmp_path, monkeypatch):
    """A token whose embedding is NaN: the request that has it fails, the others of its step do not notice."""
    model = write_model(tmp_path / "model.bin")
    with Engine(model, backend="host", num_slots=4) as engine:
        items = [request(bytes(prompt), 6, id=index) for index, prompt in enumerate(([1, 2], [3, 7], [4, 5], [6]))]
        expected = [alone(engine, item) for item in items]
        start = engine.checkpoint.tensors["embed"].ctypes.data - engine.checkpoint.data.ctypes.data
    with open(model, "r+b") as file:
        data = np.fromfile(model, np.float16, 64 * 256, offset=start).reshape(-1, 64, 64)  # panels of 64 tokens
        data[0, :, 7] = np.nan
        file.seek(start)
        file.write(data.tobytes())
    assert not any(7 in tokens for index, tokens in enumerate(expected) if index != 1)
    with Engine(model, backend="host", num_slots=4) as engine:
        scheduler = make(engine, monkeypatch)
        for item in items:
            submit(scheduler, item)
        finish(scheduler, *items)
        assert [item.tokens for item in items] == [expected[0], [], expected[2], expected[3]]
        assert items[1].error.code == "internal" and "layers.0.router: logits of token" in str(items[1].error)
        assert engine.num_free_slots == 4


def test_no_memory_for_a_step(small, scheduler, monkeypatch):
    def step(work, samplers):
        raise MemoryError
    monkeypatch.setattr(small, "advance", step)
    submit(scheduler, item := request(b"abc", 3))
    turn(scheduler)
    assert str(item.error) == ("memory: not enough for a step, expected more; lower --batch-size, or raise the "
                               "service's limit")


def test_a_device_that_is_lost(small, monkeypatch):
    """As colibri.device says it: every request hears why, and the thread ends."""
    scheduler = Scheduler(small, 3, CHUNK, lambda: None)

    def lost(*_):
        raise ColibriError("GPU: step 2: CUDA_ERROR_ILLEGAL_ADDRESS, expected CUDA_SUCCESS")
    items = [request(bytes([65 + index]), 400) for index in range(6)]
    for item in items[:5]:
        submit(scheduler, item)
    turn(scheduler, 2)
    submit(scheduler, items[5])
    monkeypatch.setattr(small, "advance", lost)
    monkeypatch.setattr(small.memory, "sync", lost)
    scheduler.start()
    scheduler._thread.join(10)
    assert scheduler.failure == "GPU: step 2: CUDA_ERROR_ILLEGAL_ADDRESS, expected CUDA_SUCCESS"
    assert not scheduler.is_alive
    assert {(item.finish, str(item.error), item.error.code) for item in items} == {
        ("error", scheduler.failure, "internal")}
    assert scheduler.num_unfinished == 0
    late = request(b"late", 4)
    submit(scheduler, late)  # by a server that has not heard of it yet
    assert late in scheduler.take() and str(late.error) == scheduler.failure and scheduler.num_unfinished == 0


def test_an_idle_scheduler_takes_no_time(small):
    scheduler = Scheduler(small, 3, CHUNK, lambda: None)
    scheduler.start()
    time.sleep(0.1)
    before = wakes(os.getpid(), scheduler._thread.native_id)
    time.sleep(0.5)
    assert wakes(os.getpid(), scheduler._thread.native_id) == before
    assert scheduler.stop(10)


def test_on_its_own_thread(small):
    scheduler = Scheduler(small, 10, CHUNK, lambda: None)
    scheduler.start()
    items = [request(bytes([65 + index]) * 50, 30) for index in range(8)]
    for item in items:
        submit(scheduler, item)
    end = time.monotonic() + 20
    while not all(item.finish for item in items) and time.monotonic() < end:
        time.sleep(0.01)
    assert scheduler.stop(10)
    assert [item.tokens for item in items] == [alone(small, item) for item in items]
    assert items[0].figures()["prompt_tokens"] == 50 and items[0].deadline == math.inf
