"""Longrope and dynamic NTK on the GPU: the host's logits, and the same bits alone, in a batch and in chunks."""

import gpu_model
import numpy as np
import pytest
import synthetic
from synthetic import DENSE

pytestmark = pytest.mark.gpu

ORIGINAL, CONTEXT = 100, 320
# All experts are chosen: a token for which rounding chose another would change all tokens that see it.
BASE = {**DENSE, "hidden": 128, "ffn": 96, "num_layers": 3, "max_positions": CONTEXT, "router_kind": 1,
        "num_experts": 4,
        "k": 4, "rope_original_positions": ORIGINAL}
MODELS = {"longrope": {**BASE, "rope_kind": 2, "rope_attention_factor": 1.25, "rope_long_attention_factor": 1.5},
          "dynamic": {**BASE, "rope_kind": 3, "rope_dynamic_factor": 4.0, "weight_dtype": 2},
          "longrope, latent": {**BASE, "rope_kind": 2, "rope_attention_factor": 1.0, "rope_long_attention_factor": 0.5,
                               "attention_kind": 1, "num_kv_heads": 4, "head_dim": 22, "rotary_dim": 10,
                               "v_head_dim": 13, "kv_lora_rank": 18, "latent_norm_eps": 1e-6},
          "dynamic, part of a head": {**BASE, "rope_kind": 3, "rope_dynamic_factor": 2.0, "rotary_dim": 6}}
TOLERANCE = {1: 2e-3, 2: 1e-2}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rope")
    paths = {name: synthetic.write_model(folder / f"{name}.bin", MODELS[name]) for name in MODELS}
    gpu_model.build_all(paths.values())
    return paths


@pytest.fixture(scope="module", params=MODELS)
def pair(request, files):
    """(Engine on the host, Engine on the GPU)"""
    host, gpu = gpu_model.engines(files[request.param], num_slots=8)
    yield host, gpu
    gpu.close()
    host.close()


def tokens(count, seed=0):
    return np.random.default_rng((count, seed)).integers(0, 256, count)


def run(engine, prompt, after=(), chunk=None):
    """The logits after the prompt, all of it expected, and after each token of `after`, alone."""
    with engine.session() as session:
        session.expect(len(prompt))
        rows = [session.prefill(prompt[start:start + (chunk or len(prompt))])
                for start in range(0, len(prompt), chunk or len(prompt))]
        return np.array([rows[-1], *(session.decode(token) for token in after)])


def assert_close(gpu, got, expected):
    wrong = np.linalg.norm(got - expected, axis=1) / np.linalg.norm(expected, axis=1)
    assert (wrong < TOLERANCE[gpu.checkpoint.header["weight_dtype"]]).all(), np.sort(wrong)[-5:]


@pytest.mark.parametrize("length", [7, ORIGINAL - 6, ORIGINAL, ORIGINAL + 1, 300])
def test_the_hosts_logits_also_beyond_the_original_length(pair, length):
    host, gpu = pair
    prompt, after = tokens(length), tokens(19, 1)
    assert_close(gpu, run(gpu, prompt, after), run(host, prompt, after))


@pytest.mark.parametrize("rows", [1, 5, 64, 65, 200])
def test_the_op_has_each_tokens_own_frequencies(pair, rows):
    """Tokens of both kinds of lengths in one step, in an order at random."""
    rng = np.random.default_rng(rows)
    lengths, places = rng.choice([1, ORIGINAL, ORIGINAL + 1, 200, CONTEXT], rows), rng.permutation(8 * CONTEXT)[:rows]
    header, got = pair[0].checkpoint.header, []
    for engine in pair:
        for index, name in enumerate(("qkv", "kv", "key_cache")):
            shape = engine.state(name).shape
            engine.write(name, np.random.default_rng(index).standard_normal(shape, dtype=np.float32))
        for name, values in (("rope_lengths", lengths), ("positions", places % CONTEXT), ("slots", places // CONTEXT)):
            engine.batch.fields[name][:rows] = values
        engine.run_op("begin", rows)
        engine.run_op("rope", rows)
        queries = engine.state("qkv", rows)[:, :header["num_heads"] * header["head_dim"]]
        got.append((queries.copy(), engine.state("key_cache").copy()))
    for expected, values in zip(*got):
        np.testing.assert_allclose(values, expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("length", [5, 60, ORIGINAL, ORIGINAL + 1, 300])
def test_chunks_of_an_expected_prompt_give_the_same_bits(pair, length):
    """Of at most 64 tokens: steps of more have other kernels."""
    _, gpu = pair
    prompt, after = tokens(length, 2), tokens(19, 3)
    whole = run(gpu, prompt, after, 64)
    for chunk in (1, 7, 33):
        assert np.array_equal(run(gpu, prompt, after, chunk), whole), chunk


def test_a_row_has_the_same_bits_alone_and_in_a_batch(pair):
    """Others cross in the same steps, in others, or not at all."""
    _, gpu = pair
    starts, steps = (1, ORIGINAL - 5, ORIGINAL - 5, ORIGINAL - 1, ORIGINAL + 1, 250), 20
    texts = [tokens(start + steps, 4 + index) for index, start in enumerate(starts)]
    alone = [run(gpu, text[:start], text[start:]) for text, start in zip(texts, starts)]
    sessions, rows = [gpu.session() for _ in starts], []
    rows.append([session.prefill(text[:start]) for session, text, start in zip(sessions, texts, starts)])
    for step in range(steps):
        rows.append(gpu.step([(session, text[start + step:start + step + 1])
                              for session, text, start in zip(sessions, texts, starts)]))
    for session in sessions:
        session.close()
    for index, expected in enumerate(alone):
        assert np.array_equal([row[index] for row in rows], expected), starts[index]
