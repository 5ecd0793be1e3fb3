"""Longrope and dynamic NTK: which frequencies a token has, whatever the steps, the batch and the chunks."""

import json
import shutil
import struct

import numpy as np
import pytest
import reference_families
from conftest import DATA, opened
from converter_files import read_bin
from synthetic import DENSE, write_model

from colibri.errors import ColibriError
from colibri.headers import mask
from colibri.model import Model as Bound
from colibri.requests import Request
from colibri.sampling import Sampler
from colibri.scheduler import Scheduler
from converter import __main__ as converter

ORIGINAL, CONTEXT = 24, 96
BASE = {**DENSE, "hidden": 64, "ffn": 64, "num_experts": 64, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16,
        "vocab_size": 64, "max_positions": CONTEXT, "weight_dtype": 0, "rope_original_positions": ORIGINAL}
LONG = {**BASE, "rope_kind": 2, "rope_attention_factor": 1.25, "rope_long_attention_factor": 1.5}
DYNAMIC = {**BASE, "rope_kind": 3, "rope_dynamic_factor": 4.0}
LATENT = {"attention_kind": 1, "num_heads": 4, "num_kv_heads": 4, "head_dim": 32, "rotary_dim": 16, "v_head_dim": 16,
          "kv_lora_rank": 48, "latent_norm_eps": 1e-6}
MODELS = {"longrope": LONG, "dynamic": DYNAMIC, "longrope, latent": {**LONG, **LATENT},
          "dynamic, part of a head": {**DYNAMIC, "rotary_dim": 6}}
CHUNKS = (1, 2, 5, ORIGINAL - 1, ORIGINAL, ORIGINAL + 1, 50)


class Model:
    """An Engine and what the reference computes from its file."""

    def __init__(self, path, context=CONTEXT, num_slots=6):
        self.engine = opened(path, context, num_slots)
        header, self.weights = read_bin(path)
        self.header = {name: header[name].item() for name in header.dtype.names if header[name].ndim == 0}
        for name in ("window_layers", "dense_layers"):
            self.header[name] = [layer for layer in range(128) if int(header[name][layer // 32]) >> layer % 32 & 1]

    def exact(self, tokens, lengths=None):
        """The logits after each token."""
        return reference_families.logits(self.header, self.weights, np.array(tokens), np.float64, lengths)

    def run(self, prompt, after=(), chunk=None):
        """The logits after the prompt, all of it expected, and after each token of `after`, alone."""
        with self.engine.session() as session:
            session.expect(len(prompt))
            rows = [session.prefill(prompt[start:start + (chunk or len(prompt))])
                    for start in range(0, len(prompt), chunk or len(prompt))]
            return np.array([rows[-1], *(session.decode(token) for token in after)])


@pytest.fixture(scope="module", params=MODELS)
def model(request, tmp_path_factory):
    model = Model(write_model(tmp_path_factory.mktemp("rope") / "model.bin", MODELS[request.param]))
    with model.engine:
        yield model


def tokens(count, seed=0):
    return np.random.default_rng((count, seed)).integers(0, 64, count)


def close(got, expected):
    return np.abs(got - expected).max() < 1e-4 * np.abs(expected).max()


@pytest.mark.parametrize("length", [1, 7, ORIGINAL - 1, ORIGINAL, ORIGINAL + 1, 60, CONTEXT])
def test_a_prompt_has_the_frequencies_of_its_length(model, length):
    prompt = tokens(length)
    with model.engine.session() as session:
        got = model.engine.step([(session, prompt)], every=True)
    assert close(got, model.exact(prompt))
    if 1 < length <= ORIGINAL:  # the others are others
        assert not close(got, model.exact(prompt, [CONTEXT] * length))
    elif length > 1:
        assert not close(got, reference_families.logits({**model.header, "rope_kind": 1}, model.weights, prompt,
                                                        np.float64))


def test_decoding_from_one_side_to_the_other(model):
    """Longrope's earlier tokens are computed again; dynamic NTK's keep the keys that they have."""
    text, start = tokens(45, 1), ORIGINAL - 4
    got = model.run(text[:start], text[start:])
    for row, length in zip(got, range(start, 46), strict=True):
        assert close(row, model.exact(text[:length], [max(start, t + 1) for t in range(length)])[-1]), length


@pytest.mark.parametrize("length", [5, ORIGINAL, ORIGINAL + 1, 70])
def test_chunks_of_an_expected_prompt_give_the_same_bits(model, length):
    prompt, after = tokens(length, 2), tokens(26, 3)
    whole = model.run(prompt, after)
    for chunk in CHUNKS:
        assert np.array_equal(model.run(prompt, after, chunk), whole), chunk


def test_prompts_one_after_another(model):
    """Of which nothing was expected: each has the frequencies of the length that it ends with."""
    text, ends = tokens(60, 4), [3, 20, ORIGINAL, 31, 32, 60]
    lengths, rows = [], []
    with model.engine.session() as session:
        for start, end in zip([0, *ends], ends):
            rows.append(session.prefill(text[start:end]))
            lengths += [end] * (end - start)
    for row, end in zip(rows, ends):
        assert close(row, model.exact(text[:end], lengths[:end])[-1]), end
    if model.header["rope_kind"] == 2:
        assert np.array_equal(rows[-1], model.run(text)[0])


def test_a_row_has_the_same_bits_alone_and_in_a_batch(model):
    """Others cross in the same steps, in others, or not at all."""
    starts, steps = (1, ORIGINAL - 5, ORIGINAL - 5, ORIGINAL - 1, ORIGINAL + 1, 60), 30
    texts = [tokens(start + steps, 5 + index) for index, start in enumerate(starts)]
    alone = [model.run(text[:start], text[start:]) for text, start in zip(texts, starts)]
    sessions = [model.engine.session() for _ in starts]
    rows = [model.engine.step([(session, text[:start]) for session, text, start in zip(sessions, texts, starts)])]
    for step in range(steps):
        rows.append(model.engine.step([(session, text[start + step:start + step + 1])
                                       for session, text, start in zip(sessions, texts, starts)]))
    for session in sessions:
        session.close()
    for index, expected in enumerate(alone):
        assert np.array_equal([row[index] for row in rows], expected), starts[index]


@pytest.mark.parametrize("broken", [1, 2])  # of longrope's step: computing 10 tokens again, and the step itself
@pytest.mark.parametrize("ends", [(20, 41), (40, 41)])
def test_a_step_that_fails_leaves_the_session_as_it_was(model, broken, ends, monkeypatch):
    """Whichever of its calls fails: then a shorter step has the short frequencies, and the same one the long ones."""
    text, lengths, calls, run = tokens(60, 6), [10] * 10, [], Bound.run
    with model.engine.session() as session, model.engine.session() as other:
        session.prefill(text[:10])
        other.prefill(text[:20])

        def fail(engine, *arguments):
            calls.append(arguments)
            if len(calls) == min(broken, 2 if model.header["rope_kind"] == 2 else 1):
                raise ColibriError("test: broken")
            run(engine, *arguments)
        monkeypatch.setattr(Bound, "run", fail)
        with pytest.raises(ColibriError, match="broken"):
            model.engine.step([(other, text[20:21]), (session, text[10:40])])
        monkeypatch.setattr(Bound, "run", run)
        assert (session.length, other.length) == (10, 20)
        for end in ends:
            row = session.prefill(text[len(lengths):end])
            lengths += [end] * (end - len(lengths))
            assert close(row, model.exact(text[:end], lengths)[-1])
        assert close(other.prefill(text[20:50]), model.exact(text[:50], [20] * 20 + [50] * 30)[-1])


def test_a_window_and_pieces(tmp_path):
    """A ring has lost what is to be computed again, which a step brings in two pieces."""
    path = write_model(tmp_path / "model.bin", LONG, num_layers=3, window=40, window_layers=mask([1]),
                       rope_original_positions=150, max_positions=600)
    model = Model(path, 600)
    text = tokens(320, 7)
    with model.engine:
        assert model.engine.max_piece == 128
        got = model.run(text[:148], text[148:160])
        for row, length in zip(got, range(148, 161), strict=True):
            assert close(row, model.exact(text[:length])[-1]), length
        for chunk in (50, 128, 300):
            assert np.array_equal(model.run(text, [], chunk), model.run(text)), chunk


def test_what_is_expected_must_fit(model):
    with model.engine.session() as session:
        session.prefill([1, 2])
        for wrong in (0, CONTEXT - 1, "3"):
            with pytest.raises(ColibriError, match=f"num_tokens: .*, expected .*1 to {CONTEXT - 2}"):
                session.expect(wrong)


def test_a_library_for_the_original_length_alone(tmp_path):
    path = write_model(tmp_path / "model.bin", LONG)
    model, prompt = Model(path, ORIGINAL), tokens(ORIGINAL, 8)
    with model.engine:
        assert close(model.run(prompt[:-2], prompt[-2:])[-1], model.exact(prompt)[-1])


def test_requests_of_all_lengths(model, monkeypatch):
    """A scheduler's tokens are those of Session.generate, and no prompt is computed twice."""
    requests, calls, run = [], [], Bound.run
    for index, length in enumerate((3, ORIGINAL - 3, ORIGINAL, ORIGINAL + 2, 60, 75)):
        requests.append(Request(index, prompt=tokens(length, 9).tolist(), max_new_tokens=20,
                                sampler=Sampler(1.0, 0, 1.0, index)))
    expected = []
    for request in requests:
        with model.engine.session() as session:
            expected.append(list(session.generate(request.prompt, 20, 1.0, seed=request.id)))
    scheduler = Scheduler(model.engine, 9, 7, lambda: None)
    monkeypatch.setattr(Bound, "run", lambda engine, *rest: (calls.append(rest), run(engine, *rest)))
    for request in requests:
        scheduler.reserve(request.id)
        scheduler.enter(request)
    while not all(request.finish for request in requests):
        scheduler._turn()
    assert [request.tokens for request in requests] == expected
    crossing = 2 if model.header["rope_kind"] == 2 else 0  # those of 21 and of 24 tokens
    assert len(calls) == sum(scheduler.steps.values()) + crossing


def test_phimoe_from_its_config(tmp_path):
    """Its own factors of cosine and sine, by the length."""
    shutil.copytree(DATA / "families" / "phimoe", tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    pairs = config["hidden_size"] // config["num_attention_heads"] // 2
    del config["rope_parameters"]
    config |= {"max_position_embeddings": CONTEXT, "original_max_position_embeddings": ORIGINAL, "rope_theta": 1e4,
               "rope_scaling": {"type": "longrope", "short_factor": [1 + i / 8 for i in range(pairs)],
                                "long_factor": [2.0 + i for i in range(pairs)], "short_mscale": 1.125,
                                "long_mscale": 1.75}}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    assert converter.main([str(tmp_path / "model"), str(tmp_path / "a.bin"), "--dtype", "f32"]) == 0
    model = Model(tmp_path / "a.bin")
    assert struct.pack("ff", model.header["rope_attention_factor"], model.header["rope_long_attention_factor"]) \
        == struct.pack("ff", 1.125, 1.75)
    text = tokens(40, 10)
    with model.engine:
        got = model.run(text[:20], text[20:])
        for row, length in zip(got, range(20, 41), strict=True):
            assert close(row, model.exact(text[:length])[-1]), length
