"""Every family, converted and run on the host: the original's logits and tokens, whatever the pieces and the batch."""

import json
import shutil

import numpy as np
import pytest
import reference_families
from conftest import opened
from reference import log_softmax
from test_families_reference import CASES, model

from colibri import score
from colibri.report import Meter
from converter import __main__ as converter
from converter import families

# Of the recorded logits, by the dtype of the checkpoint: their rotary frequencies had been rounded to it as well.
TOLERANCE = {"float32": 1e-4, "float16": 2e-3, "bfloat16": 1e-2}
CONTEXT = 1024


def converted(name, folder, dtype):
    """A family's checkpoint as folder/dtype.bin, with a config that allows the longer context."""
    checkpoint = folder / "model"
    shutil.copytree(CASES / name, checkpoint, dirs_exist_ok=True)
    config = json.loads((checkpoint / "config.json").read_text())
    for key in ("max_position_embeddings", "max_seq_len"):
        if key in config:
            config[key] = CONTEXT
    (checkpoint / "config.json").write_text(json.dumps(config))
    assert converter.main([str(checkpoint), str(folder / f"{dtype}.bin"), "--dtype", dtype]) == 0
    return folder / f"{dtype}.bin"


@pytest.fixture(scope="module", params=families.FAMILIES)
def family(request, tmp_path_factory):
    """(name, Engine of its f32 conversion)"""
    with opened(converted(request.param, tmp_path_factory.mktemp(request.param), "f32"), CONTEXT) as engine:
        yield request.param, engine


def logits(engine, ids, piece=None):
    """After each of ids (tokens,), fed in pieces."""
    with engine.session() as session:
        return np.concatenate([engine.step([(session, ids[start:start + (piece or len(ids))])], every=True)
                               for start in range(0, len(ids), piece or len(ids))])


def error(got, expected):
    return np.abs(got - expected).max() / np.abs(expected).max()


def test_logits_are_the_originals(family):
    name, engine = family
    recorded = np.load(CASES / f"{name}.npz")
    dtype = json.loads((CASES / name / "config.json").read_text()).get("dtype", "float32")
    got = np.stack([logits(engine, ids) for ids in recorded["ids"]])
    exact = np.stack([reference_families.logits(*model(name), ids, np.float64) for ids in recorded["ids"]])
    if name == "dbrx":  # its residual stream's mean is 800 times its deviation: float32 is no better than this
        assert error(got, exact) < error(recorded["logits"], exact)
    else:
        assert error(got, recorded["logits"]) < TOLERANCE[dtype]
        assert error(got, exact) < 1e-5


def test_log_likelihoods_are_the_originals(family):
    """--score's, of transformers' logits; where a checkpoint's rotary frequencies were rounded, of NumPy's."""
    name, engine = family
    recorded = np.load(CASES / f"{name}.npz")
    dtype = json.loads((CASES / name / "config.json").read_text()).get("dtype", "float32")
    for ids, rows in zip(recorded["ids"], recorded["logits"]):
        if dtype != "float32":
            rows = reference_families.logits(*model(name), ids, np.float64)
        expected = log_softmax(rows[:-1].astype(np.float64))[np.arange(len(ids) - 1), ids[1:]].sum()
        got = score.scores(engine, ids.tolist(), Meter(engine, 0.0), list).sum()
        assert abs(got - expected) < 1e-4 * abs(expected)


def test_greedy_tokens_are_the_originals(family):
    name, engine = family
    recorded = np.load(CASES / f"{name}.npz")
    for ids, tokens in zip(recorded["ids"], recorded["greedy"]):
        with engine.session() as session:
            assert list(session.generate(ids[:8], len(tokens))) == tokens.tolist()


@pytest.mark.parametrize("piece", [1, 3, 16])
def test_prefill_in_pieces_gives_the_same_bits(family, piece):
    name, engine = family
    ids = np.load(CASES / f"{name}.npz")["ids"][1]
    assert np.array_equal(logits(engine, ids, piece), logits(engine, ids))


@pytest.mark.parametrize("position", [15, 60, 1000])
def test_a_row_has_the_same_bits_alone_and_in_a_batch(family, position):
    name, engine = family
    if position >= engine.context:
        pytest.skip(f"{name} was trained for {engine.context} positions")
    generator = np.random.default_rng(position)
    prompts = [generator.integers(0, engine.checkpoint.header["vocab_size"], length)
               for length in (position, *generator.integers(1, 70, 31))]
    rows = []
    for batch in (1, 4, 32):
        sessions = [engine.session() for _ in range(batch)]
        engine.step(list(zip(sessions, prompts)))
        rows.append(engine.step([(session, [7]) for session in sessions][::-1])[-1])
        for session in sessions:
            session.close()
    assert np.array_equal(rows[0], rows[1]) and np.array_equal(rows[0], rows[2])


@pytest.mark.parametrize("name", ["deepseek_v3", "glm4_moe", "gpt_oss", "olmoe", "qwen3_moe"])
def test_16_bit_weights_are_used_as_they_are(name, tmp_path):
    recorded = np.load(CASES / f"{name}.npz")
    assert converter.main([str(CASES / name), str(tmp_path / "a.bin")]) == 0
    with opened(tmp_path / "a.bin", CONTEXT) as engine:
        assert engine.checkpoint.header["weight_dtype"] in (1, 2)
        exact = reference_families.logits(*model(name), recorded["ids"][0], np.float64)
        assert error(logits(engine, recorded["ids"][0]), exact) < 1e-5
