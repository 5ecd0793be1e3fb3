"""Layers with a window, which keep a ring of positions: what a model that keeps and masks everything computes."""

import numpy as np
import pytest
import reference_families
from conftest import opened
from converter_files import read_bin
from synthetic import DENSE, write_model

from colibri.errors import ColibriError
from colibri.headers import mask

CONTEXT = 1100
WINDOWS = [1, 2, 3]  # of four layers: the caches of layers 0 and 3 lie before, between and after rings
# 5, 16 and 64 have a ring of 256 positions and pieces of 128; 128 fills that ring, and 200 has one of 512.
RINGS = {5: 256, 16: 256, 64: 256, 128: 256, 129: 384, 200: 512, 1000: CONTEXT}
# Sizes are multiples of 64, so that no padding is left to read back.
MODEL = {**DENSE, "num_layers": 4, "hidden": 64, "ffn": 32, "num_experts": 64, "num_heads": 4, "num_kv_heads": 2,
         "head_dim": 8, "vocab_size": 64, "max_positions": CONTEXT, "weight_dtype": 0, "sinks": 1, "router_kind": 1}


@pytest.fixture(scope="module")
def make(tmp_path_factory):
    """A function: (Engine, header, weights) of the model with that window."""
    folder = tmp_path_factory.mktemp("windows")

    def made(window, layers=WINDOWS, **changes):
        path = write_model(folder / "model.bin", MODEL, window=window, window_layers=mask(layers), **changes)
        header, weights = read_bin(path)
        header = {name: header[name].item() for name in header.dtype.names if header[name].ndim == 0}
        return opened(path, CONTEXT, num_slots=4), {**header, "window_layers": layers, "dense_layers": []}, weights
    return made


def logits(engine, prompts, piece):
    """After each token of each prompt, all sessions a piece further in every step."""
    sessions, rows = [engine.session() for _ in prompts], [[] for _ in prompts]
    for start in range(0, max(map(len, prompts)), piece):
        work = [(number, prompt[start:start + piece]) for number, prompt in enumerate(prompts) if len(prompt) > start]
        step = engine.step([(sessions[number], tokens) for number, tokens in work], every=True)
        for (number, _), part in zip(work, np.split(step, np.cumsum([len(tokens) for _, tokens in work])[:-1])):
            rows[number].append(part)
    for session in sessions:
        session.close()
    return [np.concatenate(part) for part in rows]


def same(got, expected):
    return all(np.array_equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("window", RINGS)
def test_a_ring_computes_what_the_whole_cache_does(make, window):
    engine, header, weights = make(window)
    generator = np.random.default_rng(window)
    prompts = [generator.integers(0, 64, length) for length in (1100, 1, 513, 1050)]
    with engine:
        whole = logits(engine, prompts, CONTEXT)
        for prompt, got in zip(prompts, whole):
            exact = reference_families.logits(header, weights, prompt, np.float64)
            assert np.abs(got - exact).max() < 1e-4 * np.abs(exact).max()
        for piece in (1, 3, 16, 128, 1000):  # also: slots that hold another text's positions
            assert same(logits(engine, prompts[::-1], piece), whole[::-1]), piece
        for prompt, rows in zip(prompts, whole):
            assert np.array_equal(logits(engine, [prompt], CONTEXT)[0], rows)


def test_a_window_decides(make):
    """Models that differ in the window alone differ from the first token on that it hides something from."""
    prompt = np.random.default_rng(1).integers(0, 64, 300)
    rows = {}
    for window in (64, 65):
        with make(window)[0] as engine:
            rows[window], = logits(engine, [prompt], CONTEXT)
    assert np.array_equal(rows[64][:64], rows[65][:64])
    assert not (rows[64][64:] == rows[65][64:]).all(axis=1).any()


@pytest.mark.parametrize("window", RINGS)
def test_bytes_of_the_cache(make, window):
    engine, *_ = make(window)
    whole, *_ = make(0, [])
    position = 2 * 8 * 4  # of a slot in one layer: kv heads, head_dim, sizeof(float)
    with engine, whole:
        for name in ("key_cache", "value_cache"):
            assert engine.state(name).nbytes == engine.num_slots * position * (CONTEXT + 3 * RINGS[window])
            assert whole.state(name).nbytes == whole.num_slots * position * 4 * CONTEXT
        headers = [np.frombuffer(model.checkpoint.header_bytes, np.uint8) for model in (engine, whole)]
        small, large = (model.library.state_bytes(0, header.ctypes.data, 3, CONTEXT)
                        for model, header in zip((engine, whole), headers))
        assert abs(large - small - 2 * 3 * position * 3 * (CONTEXT - RINGS[window])) <= 2 * 4096


def test_results_are_in_the_order_of_the_sessions(make):
    """The last of the first session's pieces comes after all of the others'."""
    engine, *_ = make(5)
    generator = np.random.default_rng(2)
    prompts = [generator.integers(0, 64, length) for length in (1000, 3, 300)]
    with engine:
        alone = [logits(engine, [prompt], CONTEXT)[0][-1] for prompt in prompts]
        sessions = [engine.session() for _ in prompts]
        assert np.array_equal(engine.step(list(zip(sessions, prompts))), alone)
        assert [session.length for session in sessions] == [1000, 3, 300]


def test_the_library_refuses_more_than_a_piece_of_a_slot(make):
    engine, *_ = make(5)
    with engine, engine.session():
        fields = engine.batch.fields
        fields["slots"][:], fields["positions"][:] = 0, np.arange(engine.max_tokens)
        engine.run_op("begin", 128)
        with pytest.raises(ColibriError, match="batch: more than 128 tokens of slot 0, expected no more in one step"):
            engine.run_op("begin", 129)
        fields["slots"][1::2] = 1
        fields["positions"][:] = np.arange(engine.max_tokens) // 2
        engine.run_op("begin", 256)
