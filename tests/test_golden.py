"""The example models against the reference results that came with them."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import DATA, ROOT

from colibri.engine import Engine

GOLDEN = np.load(DATA / "golden.npz")
GPT = np.load(DATA / "gpt-moe-32.golden.npz")
PROMPTS = ("p0", "p1", "p2", "p3")
GAP = 1e-3  # two scores closer than this may rightly change places


def error(out, reference):
    return np.linalg.norm(out - reference) / np.linalg.norm(reference)


def logits_of(engine, prompt):
    """Logits after every byte, and what the last layer left of the routing."""
    with engine.session() as session:
        logits = engine.step([(session, prompt)], every=True)
        return logits, *(engine.state(name, len(prompt)).copy() for name in ("router_logits", "expert_ids",
                                                                             "expert_weights", "x"))


def assert_same_experts(ids, golden_ids, golden_scores):
    """The same experts in the same order, where the scores of the first three are apart."""
    best = -np.sort(-golden_scores, axis=-1)[:, :3]
    sure = (best[:, :-1] - best[:, 1:] > GAP).all(axis=1)
    assert sure.mean() > 0.5
    np.testing.assert_array_equal(ids[sure], golden_ids[sure])


@pytest.mark.parametrize("prompt", PROMPTS)
def test_logits(engine, prompt):
    logits = logits_of(engine, GOLDEN[f"{prompt}_bytes"])[0]
    assert error(logits, GOLDEN[f"{prompt}_logits"]) < 1e-4


@pytest.mark.parametrize("layer", range(6))
def test_routing_of_every_layer(moe_32, layer):
    with Engine(moe_32, backend="host", num_layers=layer + 1) as engine:
        for prompt in PROMPTS:
            _, scores, ids, weights, x = logits_of(engine, GOLDEN[f"{prompt}_bytes"])
            assert error(scores, GOLDEN[f"{prompt}_router_logits"][layer]) < 1e-4
            assert_same_experts(ids, GOLDEN[f"{prompt}_ids"][layer], GOLDEN[f"{prompt}_router_logits"][layer])
            same = (ids == GOLDEN[f"{prompt}_ids"][layer]).all(axis=1)
            np.testing.assert_allclose(weights[same], GOLDEN[f"{prompt}_weights"][layer][same], atol=1e-4)
            if prompt == "p0":
                assert error(x, GOLDEN["p0_hidden"][layer + 1]) < 1e-4


@pytest.mark.parametrize("prompt", PROMPTS[:3])
def test_greedy_continuation(engine, prompt):
    golden, margin = GOLDEN[f"{prompt}_greedy"], GOLDEN[f"{prompt}_greedy_margin"]
    assert margin.min() > GAP  # so all 200 bytes are to be the same
    with engine.session() as session:
        assert list(session.generate(GOLDEN[f"{prompt}_bytes"], 200)) == golden.tolist()


def test_moe_block(engine):
    """The third layer's block by itself: router, experts and combine on the golden's own input."""
    x = GOLDEN["moe2_x"]
    engine.write("normed", x)
    engine.write("x", np.zeros_like(x))
    for op in ("router", "experts_up", "experts_down", "combine"):
        engine.run_op(op, len(x), layer=2)
    assert error(engine.state("router_logits", len(x)), GOLDEN["moe2_router_logits"]) < 1e-5
    assert_same_experts(engine.state("expert_ids", len(x)), GOLDEN["moe2_ids"], GOLDEN["moe2_router_logits"])
    assert error(engine.state("x", len(x)), GOLDEN["moe2_y"]) < 1e-5


def test_heldout_text(moe_32):
    """Bits per byte of 128 windows, and how often each expert is used in them."""
    windows = np.frombuffer((DATA / "heldout.txt").read_bytes(), np.uint8).reshape(128, 512)
    nats = np.empty(len(windows))
    with Engine(moe_32, backend="host") as engine:
        for index, window in enumerate(windows):
            logits = logits_of(engine, window)[0][:-1].astype(np.float64)
            shifted = logits - logits.max(axis=1, keepdims=True)
            chosen = np.take_along_axis(shifted, window[1:, None].astype(int), axis=1)[:, 0]
            nats[index] = (np.log(np.exp(shifted).sum(axis=1)) - chosen).sum()
        routed = engine.state("routed_tokens").astype(int)
    assert abs(nats.sum() / np.log(2) / (128 * 511) - 1.316065) < 0.005
    np.testing.assert_allclose(nats, GOLDEN["heldout_window_nats"], rtol=1e-3)
    assert abs(routed - GOLDEN["heldout_expert_counts"]).sum() <= 0.001 * routed.sum()


@pytest.mark.parametrize("activation", ["gelu", "silu", "relu"])
def test_gpt_style_layers(gpt_moe_32, activation):
    """Both layers are fed x itself: the first by a stack of one layer, the second op by op."""
    path, x = gpt_moe_32(activation), GPT["x"]
    with Engine(path, backend="host", num_layers=1) as engine:
        assert error(engine.stack(x), GPT[f"layer0_{activation}"]) < 1e-3
        assert_same_experts(engine.state("expert_ids", len(x)), GPT["layer0_ids"], GPT["layer0_router_logits"])
    with Engine(path, backend="host") as engine:
        engine.write("x", x)
        for op in ("router", "experts_up", "experts_down", "combine"):
            engine.run_op(op, len(x), layer=1)
        assert error(engine.state("x", len(x)), GPT[f"layer1_{activation}"]) < 1e-3
        np.testing.assert_allclose(engine.state("expert_weights", len(x)), GPT["layer1_weights"], atol=1e-4)


def test_portable_path_agrees(moe_32, tmp_path):
    """The same logits without AVX2, in a process of its own since the choice is made once."""
    script = ("import sys, numpy as np\nfrom colibri.engine import Engine\nfrom test_golden import GOLDEN, logits_of\n"
              "with Engine(sys.argv[1], backend='host') as e:\n    assert e.path == 'host portable', e.path\n"
              "    np.save(sys.argv[2], logits_of(e, GOLDEN['p2_bytes'])[0])")
    places = os.pathsep.join([str(ROOT), str(Path(__file__).parent)])
    subprocess.run([sys.executable, "-c", script, str(moe_32), str(tmp_path / "logits.npy")], check=True,
                   env={**os.environ, "COLIBRI_ISA": "portable", "PYTHONPATH": places})
    assert error(np.load(tmp_path / "logits.npy"), GOLDEN["p2_logits"]) < 1e-4
