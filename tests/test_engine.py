"""Engine and Session: the same bits however tokens are fed, slots, limits, sampling, threads."""

import gc
import os
import subprocess
import sys
import threading

import numpy as np
import pytest
from conftest import ROOT
from synthetic import STACK, write_model

from colibri.checkpoint import Checkpoint
from colibri.engine import Engine
from colibri.errors import ColibriError
from colibri.sampling import Sampler, draw
from colibri.weights import most_threads, usable_processors

MOST_THREADS = most_threads()
TEXT = b"And it came to pass in those days, that there went out a decree"


def feed(session, text, piece):
    """The logits after text, fed so many bytes at a time."""
    for start in range(0, len(text), piece):
        logits = session.prefill(text[start:start + piece])
    return logits


@pytest.mark.parametrize("piece", [1, 2, 7, 62])
def test_prefill_and_decode_give_the_same_bits(engine, piece):
    with engine.session() as whole, engine.session() as pieces:
        np.testing.assert_array_equal(whole.prefill(TEXT), feed(pieces, TEXT, piece))
        assert whole.length == pieces.length == len(TEXT)


def test_a_row_is_the_same_alone_and_in_a_batch_of_32(engine):
    generator = np.random.default_rng(5)
    prompts = [TEXT] + [generator.integers(0, 256, generator.integers(1, 90)) for _ in range(31)]
    with engine.session() as session:
        alone = session.prefill(TEXT), session.decode(10), session.decode(65)
    sessions = [engine.session() for _ in prompts]
    batch = engine.step(list(zip(sessions, prompts)))
    np.testing.assert_array_equal(batch[0], alone[0])
    np.testing.assert_array_equal(engine.step([(session, [10]) for session in reversed(sessions)])[-1], alone[1])
    np.testing.assert_array_equal(engine.step([(session, [65]) for session in sessions])[0], alone[2])
    for session in sessions:
        session.close()


def test_the_same_bits_in_100_runs_with_1_and_2_threads(moe_32):
    results = set()
    for threads in (1, 2):
        with Engine(moe_32, backend="host", threads=threads) as engine:
            for _ in range(100):
                with engine.session() as session:
                    results.add(session.prefill(TEXT).tobytes() + session.decode(7).tobytes())
    assert len(results) == 1


def test_logits_of_every_token(engine):
    with engine.session() as session:
        every = engine.step([(session, TEXT)], every=True)
    with engine.session() as session:
        one_by_one = np.stack([session.decode(token) for token in TEXT])
    np.testing.assert_array_equal(every, one_by_one)


def test_more_tokens_than_one_step_takes(engine):
    """Three sessions of 400 tokens are three library calls; the second splits two sessions."""
    generator = np.random.default_rng(6)
    prompts = generator.integers(0, 256, (3, 400))
    sessions = [engine.session() for _ in prompts]
    logits = engine.step(list(zip(sessions, prompts)))
    for session, prompt, row in zip(sessions, prompts, logits):
        assert session.length == 400
        session.close()
        with engine.session() as alone:
            np.testing.assert_array_equal(feed(alone, prompt, 100), row)


def test_a_slot_used_again_remembers_nothing(engine):
    with engine.session() as session:
        first = session.prefill(TEXT)
        slot = session.slot
    with engine.session() as session:
        session.prefill(os.urandom(200))
    with engine.session() as session:
        assert session.slot == slot
        np.testing.assert_array_equal(session.prefill(TEXT), first)


def test_slots_run_out_and_come_back(moe_32):
    with Engine(moe_32, backend="host", num_slots=2) as engine:
        first, _second = engine.session(), engine.session()
        with pytest.raises(ColibriError, match="num_slots: 2 sessions are open"):
            engine.session()
        first.close()
        first.close()  # closing twice frees the slot once
        second = engine.session()
        with pytest.raises(ColibriError, match="num_slots: 2"):
            engine.session()
        del second  # dropping it gives the slot back too
        for _ in range(3):
            assert engine.session().prefill(TEXT).shape == (256,)
        first.close()  # still closed
        kept = engine.session()
        with pytest.raises(ColibriError, match="num_slots: 2"):
            engine.session()
        kept.close()


def test_the_context_is_a_limit(engine):
    with engine.session() as session:
        session.prefill(bytes([32]) * 512)
        with pytest.raises(ColibriError, match="tokens: 513 in one session, expected at most 512"):
            session.decode(32)
    with engine.session() as session:
        assert len(list(session.generate(bytes([32]) * 510, max_new_tokens=3))) == 3
        with pytest.raises(ColibriError, match="max_new_tokens: 2, expected 1 to 1"):
            session.generate(b"", max_new_tokens=2)


@pytest.mark.parametrize("tokens, message", [
    ([], "tokens: none, expected at least one int"), ("text", r"tokens: a str, expected ints or bytes; encode it"),
    ([256], "tokens: 256, expected 0 to 255"), ([-1], "tokens: -1"),
    ([1.5], "float64"), ([[1]], r"shape \(1, 1\)")])
def test_wrong_tokens(engine, tokens, message):
    with engine.session() as session:
        with pytest.raises(ColibriError, match=message):
            session.prefill(tokens)
        assert session.length == 0


def test_a_step_of_nothing_and_text_to_continue(engine):
    with pytest.raises(ColibriError, match="step: 0 sessions, expected at least one"):
        engine.step([])
    with engine.session() as session, pytest.raises(ColibriError, match="tokens: a str"):
        session.generate("It was")


@pytest.mark.parametrize("tokens", [[1, [2]], [[1], [2, 3]], None, 5, [2**70], [True]])
def test_tokens_of_another_form(engine, tokens):
    with engine.session() as session:
        for call in (session.prefill, lambda tokens: list(session.generate(tokens))):
            with pytest.raises(ColibriError, match="tokens: "):
                call(tokens)
        assert session.length == 0


@pytest.mark.parametrize("work", [5, [5], [(1, [2])], [(None, [2])]])
def test_work_of_another_form(engine, work):
    with pytest.raises(ColibriError, match="step: work of another form|session: not of this engine"):
        engine.step(work)


def test_a_session_of_another_engine(moe_32):
    with Engine(moe_32, backend="host") as one, Engine(moe_32, backend="host") as other:
        session = one.session()
        with pytest.raises(ColibriError, match="session: not of this engine, expected one that its session"):
            other.step([(session, [1])])
        assert session.length == 0


@pytest.mark.parametrize("samplers, message", [
    ([Sampler(float("nan"))], "temperature: nan"), ([Sampler("x")], "temperature: x"),
    ([Sampler(1e300)], r"temperature: 1e\+300"), ([Sampler(1.0, -5)], "top_k: -5"),
    ([Sampler(1.0, 1 << 31)], "top_k: 2147483648"), ([Sampler(1.0, 2.5)], "top_k: 2.5"),
    ([Sampler(1.0, 0, float("nan"))], "top_p: nan"), ([Sampler(seed=None)], "seed: None"), ([(1, 2)], "samplers: "),
    ([0], "samplers: 0"), (5, "samplers: 5"),
    ([], "samplers: 0, expected one for each of 1 sessions"), ([Sampler()] * 2, "samplers: 2, expected one")])
def test_a_step_checks_its_samplers(engine, samplers, message):
    with engine.session() as session:
        with pytest.raises(ColibriError, match=message):
            engine.step([(session, [1])], samplers)
        assert session.length == 0


def test_sizes_of_an_op_and_of_buffers(engine):
    for rows, layer, message in ((0, 0, "num_rows: 0"), (513, 0, "num_rows: 513, expected 1 to 512"),
                                 (1, 6, "layer: 6, expected 0 to 5"), (1, -1, "layer: -1")):
        with pytest.raises(ColibriError, match=message):
            engine.run_op("router", rows, layer)
    with pytest.raises(ColibriError, match="rows: 65, expected 0 to 64"):
        engine.state("logits", 65)
    with pytest.raises(ColibriError, match=r"x: shape=\(513, 128\), expected at most \(512, 128\)"):
        engine.write("x", np.zeros((513, 128), np.float32))
    with pytest.raises(ColibriError, match="buffer: nothing, expected one of key_cache"):
        engine.state("nothing")


def test_a_forked_process_is_told(moe_32):
    """Both an engine of its parent's and one of its own would wait for threads that a fork does not copy."""
    script = ("import os, signal, sys\nfrom colibri.engine import Engine\nfrom colibri.errors import ColibriError\n"
              "engine = Engine(sys.argv[1], backend='host', threads=2)\nsession = engine.session()\n"
              "session.prefill(b'word' * 40)\n"
              "if os.fork():\n    sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))\n"
              "signal.alarm(10)\ncaught = 0\n"
              "def load():\n    Engine(sys.argv[1], backend='host', threads=2)\n"
              "for use in (lambda: session.prefill(b'word' * 40), load):\n    try:\n        use()\n"
              "    except ColibriError as error:\n        caught += 'forked process' in str(error)\n"
              "engine._lock.acquire()\n"  # as a thread that was within a step has left it
              "session.close()\nengine.close()\n"
              "os._exit(40 + caught)\n")
    forked = subprocess.run([sys.executable, "-c", script, str(moe_32)], cwd=ROOT, capture_output=True, check=False)
    assert forked.returncode == 42, forked.stderr


def damage(path, name, value):
    """The model with all elements of a tensor replaced, F32 or F16."""
    checkpoint = Checkpoint(path)
    view = checkpoint.tensors[name]
    with open(path, "r+b") as file:
        file.seek(view.ctypes.data - checkpoint.data.ctypes.data)
        file.write(np.full(view.size, value, view.dtype).tobytes())
    return path


@pytest.mark.parametrize("name, value", [("lm_head", np.nan), ("lm_head", np.inf), ("final_norm", np.nan)])
def test_logits_that_are_not_finite(tmp_path, name, value):
    with Engine(damage(write_model(tmp_path / "model.bin"), name, value), backend="host") as engine:
        session = engine.session()
        with pytest.raises(ColibriError, match="step: the logits: row 0 holds NaN or inf, expected finite numbers"):
            session.prefill(b"hello")
        assert session.length == 0


def test_result_of_a_stack_that_is_not_finite(tmp_path):
    path = damage(write_model(tmp_path / "stack.bin", STACK), "layers.1.experts_down", np.nan)
    message = "stack: the result: row 0 holds NaN or inf"
    with Engine(path, backend="host") as engine, pytest.raises(ColibriError, match=message):
        engine.stack(np.ones((3, 64), np.float32))


@pytest.mark.filterwarnings("error")
def test_too_large_for_float32(tmp_path):
    with Engine(write_model(tmp_path / "stack.bin", STACK), backend="host") as engine, pytest.raises(ColibriError):
        engine.stack(np.full((3, 64), 1e300))


def test_closed_and_doubled_sessions(moe_32):
    engine = Engine(moe_32, backend="host")
    session = engine.session()
    with pytest.raises(ColibriError, match="one session twice"):
        engine.step([(session, [1]), (session, [2])])
    session.close()
    with pytest.raises(ColibriError, match="session: closed"):
        session.decode(1)
    another = engine.session()
    engine.close()
    engine.close()
    with pytest.raises(ColibriError, match="engine: closed"):
        another.decode(1)
    for use in (engine.session, lambda: engine.state("x"), lambda: engine.write("x", np.zeros((1, 128), np.float32)),
                lambda: engine.pin(np.zeros(3))):
        with pytest.raises(ColibriError, match="engine: closed"):
            use()


def test_a_view_of_the_state_outlives_the_engine(moe_32):
    engine = Engine(moe_32, backend="host")
    with engine.session() as session:
        session.prefill(TEXT)
    logits = engine.state("logits", 1)
    kept = logits.copy()
    engine.close()
    del engine, session
    gc.collect()
    np.testing.assert_array_equal(logits, kept)


def test_seeded_sampling(engine):
    def sample(seed, **options):
        with engine.session() as session:
            return bytes(session.generate(TEXT, 40, temperature=1.0, seed=seed, **options))
    assert sample(1) == sample(1) != sample(2)
    with engine.session() as session:
        greedy = bytes(session.generate(TEXT, 40))
    assert sample(3, top_k=1) == greedy and sample(3, top_p=1e-6) == greedy != sample(3)


def test_a_sequence_draws_the_same_in_any_batch(engine):
    sampler = Sampler(temperature=1.0, seed=9)
    with engine.session() as session:
        alone = list(session.generate(TEXT, 10, temperature=1.0, seed=9))
    sessions = [engine.session() for _ in range(3)]
    samplers = [Sampler(temperature=1.0, seed=4), sampler, Sampler()]
    tokens = engine.step([(session, TEXT) for session in sessions], samplers)
    drawn = [tokens[1]]
    for _ in range(9):
        tokens = engine.step([(session, [token]) for session, token in zip(sessions, tokens)], samplers)
        drawn.append(tokens[1])
    for session in sessions:
        session.close()
    assert drawn == alone


def test_draws_are_even():
    draws = np.array([draw(seed, position) for seed in range(20) for position in range(100)])
    assert 0 <= draws.min() and draws.max() < 1 and (draws.astype(np.float32) == draws).all()
    assert abs(draws.mean() - 0.5) < 0.03 and len(np.unique(draws)) > 1990


@pytest.mark.parametrize("options, message", [
    ({"temperature": -1}, "temperature: -1"), ({"temperature": float("nan")}, "temperature: nan"),
    ({"top_p": 0}, "top_p: 0"), ({"top_p": 1e-50}, "top_p: 1e-50"), ({"top_p": 1.5}, "top_p: 1.5"),
    ({"top_k": -2}, "top_k: -2"),
    ({"seed": -1}, "seed: -1"), ({"max_new_tokens": 2.5}, "max_new_tokens: 2.5, expected 1 to"),
    ({"max_new_tokens": 0}, "max_new_tokens: 0, expected 1 to")])
def test_wrong_sampling_options(engine, options, message):
    with engine.session() as session, pytest.raises(ColibriError, match=message):
        session.generate(TEXT, **options)


@pytest.mark.parametrize("options, message", [
    ({"threads": 0}, f"threads: 0, expected 1 to {MOST_THREADS}"),
    ({"threads": "2"}, f"threads: '2', expected an integer, 1 to {MOST_THREADS}"),
    ({"threads": MOST_THREADS + 1}, f"threads: {MOST_THREADS + 1}, expected 1 to {MOST_THREADS}"),
    ({"num_slots": "3"}, "num_slots: '3', expected an integer"), ({"num_slots": 0}, "num_slots: 0"),
    ({"num_layers": 7}, "num_layers: 7, expected 1 to 6"), ({"backend": "tpu"}, "backend: tpu, expected one of auto")])
def test_wrong_engine_options(moe_32, options, message):
    with pytest.raises(ColibriError, match=message):
        Engine(moe_32, **{"backend": "host", **options})


class Patient:
    """A lock that gives up, where a test would never end."""

    def __init__(self):
        self._lock = threading.Lock()

    def __enter__(self):
        assert self._lock.acquire(timeout=5)

    def __exit__(self, *_):
        self._lock.release()


def test_ctrl_c_at_any_place_leaves_the_engine_to_others(engine, monkeypatch):
    """An interrupt at the begin and the end of every function of a step, which is where Python looks for signals: the
    session can be closed on the way out."""
    monkeypatch.setattr(engine, "_lock", Patient())
    left = 0

    def interrupt(frame, event, _):
        nonlocal left
        ours = os.path.basename(frame.f_code.co_filename) in ("engine.py", "opened.py", "stepper.py", "contextlib.py")
        if ours and event in ("call", "return"):
            left -= 1
            if left == 0:
                raise KeyboardInterrupt
        return interrupt
    with engine.session() as session:
        session.prefill(TEXT)
        expected = session.decode(65)
    for count in range(1, 1000):
        left = count
        try:
            with engine.session() as session:
                session.prefill(TEXT)
                sys.settrace(interrupt)  # until it raises
                logits = session.decode(65)
                sys.settrace(None)
                np.testing.assert_array_equal(logits, expected)
                break
        except KeyboardInterrupt:
            assert session.length in (len(TEXT), len(TEXT) + 1)
        finally:
            sys.settrace(None)
    assert 20 < count < 999


def test_two_threads_on_one_engine(engine):
    with engine.session() as session:
        expected = list(session.generate(TEXT, 60))
    results = {}

    def work(name):
        with engine.session() as session:
            results[name] = list(session.generate(TEXT, 60))
    threads = [threading.Thread(target=work, args=(name,)) for name in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert list(results.values()) == [expected] * 6


def test_stack_takes_any_number_of_rows(tmp_path):
    path = write_model(tmp_path / "stack.bin", STACK)
    x = np.random.default_rng(0).standard_normal((1100, 64), dtype=np.float32)
    with Engine(path, backend="host") as engine:
        y = engine.stack(x)
        assert y.shape == x.shape and y.dtype == np.float32
        for rows in (1, 31, 512, 513):
            np.testing.assert_array_equal(engine.stack(x[:rows]), y[:rows])
        half = x.astype(np.float16)
        np.testing.assert_array_equal(engine.stack(half), engine.stack(half.astype(np.float32)))
        np.testing.assert_array_equal(engine.stack(np.asfortranarray(x)), y)
        with pytest.raises(ColibriError, match=r"x: float32 of shape \(1100, 63\), expected"):
            engine.stack(x[:, :63])
        with pytest.raises(ColibriError, match=r"x: of another form, expected floats of shape \(num_tokens, 64\)"):
            engine.stack([[1.0], [1.0, 2.0]])
        with pytest.raises(ColibriError, match="vocab_size=0, expected tokens"):
            engine.session()


def test_nan_names_layer_and_token(tmp_path):
    path = write_model(tmp_path / "stack.bin", STACK)
    x = np.zeros((600, 64), np.float32)
    x[5, 3] = np.nan
    with Engine(path, backend="host") as engine:
        with pytest.raises(ColibriError, match=r"layers.0.router: logits of token 5 are NaN"):
            engine.stack(x)
        assert np.isfinite(engine.stack(np.ones((2, 64), np.float32))).all()  # and the engine goes on


def test_state_that_is_never_used_costs_nothing(moe_32):
    """32 slots are 50 MiB of cache; one short session touches next to none of it."""
    script = ("import sys\nfrom colibri.engine import Engine\nfrom colibri.report import resident_bytes\n"
              "before = resident_bytes()\nengine = Engine(sys.argv[1], backend='host', num_slots=1000)\n"
              "engine.session().prefill(b'hello')\nprint(resident_bytes() - before)")
    command = [sys.executable, "-c", script, str(moe_32)]
    grown = subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    assert int(grown.stdout) < 25 << 20  # most of it is the model, 14 MiB


def test_usable_processors():
    assert 1 <= usable_processors() <= os.cpu_count()
