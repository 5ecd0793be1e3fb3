"""The whole model on a GPU: the reference results, the same bits in every dispatch and every run, bounded memory."""

import subprocess
import sys

import numpy as np
import pytest
from conftest import ROOT, program
from test_golden import GOLDEN, GPT, PROMPTS, assert_same_experts, error, logits_of

from colibri.engine import Engine
from colibri.errors import ColibriError
from colibri.gpu import call

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def gpu(moe_32):
    with Engine(moe_32, backend="cuda") as engine:
        assert engine.path.startswith("cuda sm_")
        yield engine


@pytest.mark.parametrize("prompt", PROMPTS)
def test_logits(gpu, prompt):
    logits, _, ids, _, _ = logits_of(gpu, GOLDEN[f"{prompt}_bytes"])
    assert error(logits, GOLDEN[f"{prompt}_logits"]) < 2e-3
    sure = np.diff(-np.sort(-GOLDEN[f"{prompt}_router_logits"][-1])[:, :3]).max(axis=1) < -2e-2
    np.testing.assert_array_equal(ids[sure], GOLDEN[f"{prompt}_ids"][-1][sure])


@pytest.mark.parametrize("prompt", PROMPTS[:3])
def test_greedy_continuation(gpu, prompt):
    """The same bytes up to a step at which the two best are as near as f16 inputs of the experts can blur."""
    golden, margin = GOLDEN[f"{prompt}_greedy"], GOLDEN[f"{prompt}_greedy_margin"]
    with gpu.session() as session:
        out = np.array(list(session.generate(GOLDEN[f"{prompt}_bytes"], 200)))
    wrong = np.flatnonzero(out != golden)
    assert len(wrong) == 0 or margin[wrong[0]] < 0.02, (wrong[0], margin[wrong[0]])


def test_bf16(tmp_path):
    path = tmp_path / "moe-32-bf16.bin"
    made = program("converter", "models/moe-32.pt", path, "--dtype", "bf16")
    assert made.returncode == 0, made.stderr
    with Engine(path, backend="cuda") as gpu, Engine(path, backend="host") as host:
        out, expected = (logits_of(engine, GOLDEN["p1_bytes"])[0] for engine in (gpu, host))
        assert error(out, expected) < 1e-2


@pytest.mark.parametrize("activation", ["gelu", "silu", "relu"])
def test_gpt_style_layer(gpt_moe_32, activation):
    path, x = gpt_moe_32(activation), GPT["x"]
    with Engine(path, backend="cuda", num_layers=1) as engine:
        staged = engine.stack(x)
        assert error(staged, GPT[f"layer0_{activation}"]) < 2e-3
        assert_same_experts(engine.state("expert_ids", len(x)), GPT["layer0_ids"], GPT["layer0_router_logits"])
        np.testing.assert_array_equal(engine.stack(engine.pin(x.copy())), staged)
        np.testing.assert_array_equal(engine.stack(engine.memory.gpu._registered[0][2:7]), staged[2:7])


def decode(engine, count=20):
    """Logits of a few prefilled and decoded steps at changing batch sizes, as bits."""
    sessions, out = [], []
    for index in range(count):
        if index % 4 == 0:
            sessions.append(engine.session())
            out.append(engine.step([(sessions[-1], GOLDEN["p1_bytes"][:5 + index])]))
        out.append(engine.step([(session, [65 + index]) for session in sessions[index % len(sessions):]]))
    for session in sessions:
        session.close()
    return np.concatenate(out).view(np.uint32)


def test_every_dispatch_gives_the_same_bits(moe_32):
    results, statistics = {}, {}
    for dispatch in ("device", "combo", "dynamic"):
        with Engine(moe_32, backend="cuda", dispatch=dispatch) as engine:
            results[dispatch] = decode(engine)
            np.testing.assert_array_equal(decode(engine), results[dispatch])
            statistics[dispatch] = engine.memory.launcher.graphs.statistics()
    np.testing.assert_array_equal(results["combo"], results["device"])
    np.testing.assert_array_equal(results["dynamic"], results["device"])
    assert statistics["device"]["hits"] > 20 and statistics["dynamic"]["graphs"] == 0
    assert statistics["combo"]["graphs"] > statistics["device"]["graphs"]


def test_precapture_leaves_no_misses(moe_32):
    for dispatch in ("device", "combo"):
        with Engine(moe_32, backend="cuda", dispatch=dispatch) as engine, engine.session() as session:
            engine.step([(session, b"A man")])
            engine.precapture()
            before = engine.memory.launcher.graphs.statistics()
            for token in b"went to":
                session.decode(token)
            after = engine.memory.launcher.graphs.statistics()
            assert after["misses"] == before["misses"] and after["hits"] > before["hits"]
            assert dispatch == "device" or before["graphs"] >= 6 * 496


def test_repeatable(gpu):
    first = decode(gpu, 8)
    for _ in range(100):
        np.testing.assert_array_equal(decode(gpu, 8), first)


def test_row_does_not_depend_on_its_batch(gpu):
    """A sequence decoded alone, and beside 31 others."""
    def run(others):
        sessions = [gpu.session() for _ in range(1 + others)]
        work = [(session, GOLDEN["p3_bytes"][9 * i:9 * i + 5 + i]) for i, session in enumerate(sessions)]
        gpu.step(work[:1])
        if others:
            gpu.step(work[1:])
        out = [gpu.step([(session, [65 + step]) for session in sessions])[0] for step in range(5)]
        for session in sessions:
            session.close()
        return np.stack(out).view(np.uint32)
    np.testing.assert_array_equal(run(31), run(0))


def test_memory_is_flat(gpu):
    """Free device memory after many steps of every size is what it was after a first round of them."""
    rng = np.random.default_rng()

    def steps(count):
        for _ in range(count):
            sessions = [gpu.session() for _ in range(rng.integers(1, 33))]
            gpu.step([(session, rng.integers(0, 256, rng.integers(1, 60))) for session in sessions])
            for _ in range(9):
                gpu.step([(session, [1]) for session in sessions])
            for session in sessions:
                session.close()
    for size in range(1, 33):  # every bucket
        sessions = [gpu.session() for _ in range(size)]
        gpu.step([(session, [1] * 16) for session in sessions])
        gpu.step([(session, [1]) for session in sessions])
        for session in sessions:
            session.close()
    steps(20)
    before = call("cuMemGetInfo")[0]
    steps(100)
    assert call("cuMemGetInfo")[0] >= before - (4 << 20)


def test_nan_in_the_router_names_layer_and_token(moe_32, tmp_path):
    with Engine(moe_32, backend="cuda") as engine, engine.session() as session:
        engine.memory.write(int(engine._model.weights[1][2]["ffn_norm"]), np.full(128, np.nan, np.float32))
        with pytest.raises(ColibriError, match=r"layers\.2\.router: logits of token 0 are NaN"):
            engine.step([(session, b"AB")])


def test_command_line(moe_32):
    run = program("colibri.run", "--model", moe_32, "--backend", "cuda", "--dispatch", "combo", "--precapture",
                  "--prompt", "It was", "--max-new-tokens", 20)
    text = run.stdout.decode()
    assert run.returncode == 0, run.stderr
    assert "cuda sm_" in text and "--dispatch combo: " in text and "loading" in text


def test_device_error_is_one_line(moe_32):
    """A batch that points out of the KV cache: the process says so and ends with 2."""
    script = ("import sys\nfrom colibri.engine import Engine\nfrom colibri.errors import ColibriError\n"
              "try:\n    with Engine(sys.argv[1], backend='cuda') as e, e.session() as s:\n"
              "        s.prefill(b'A')\n        s.slot = 1 << 28\n        s.decode(66)\n"
              "except ColibriError as error:\n    sys.exit(str(error))\n")
    run = subprocess.run([sys.executable, "-c", script, str(moe_32)], cwd=ROOT, check=False, capture_output=True,
                         text=True)
    assert run.returncode == 1 and run.stderr.startswith("GPU: step 2: CUDA_ERROR_ILLEGAL_ADDRESS"), run.stderr
    assert len(run.stderr.strip().splitlines()) == 1
