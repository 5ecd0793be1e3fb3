"""How many positions a session has, and prompts of more tokens than a step."""

import json
import types

import numpy as np
import pytest
import reference_families
from conftest import opened, program
from converter_files import read_bin
from synthetic import DENSE, write_model

from colibri import capacity, weights
from colibri.errors import ColibriError
from colibri.headers import Headers
from colibri.sampling import Sampler

LENGTH = 20_000
# Sizes are multiples of 64, so that no padding is left to read back.
TINY = {**DENSE, "num_layers": 1, "hidden": 64, "ffn": 32, "num_experts": 64, "num_heads": 2, "num_kv_heads": 1,
        "head_dim": 16, "vocab_size": 64, "max_positions": 1 << 20, "weight_dtype": 0}
QWEN3_30B_A3B = {"num_experts": 128, "k": 8, "hidden": 2048, "ffn": 768, "num_heads": 32, "num_kv_heads": 4,
                 "head_dim": 128, "v_head_dim": 128, "rotary_dim": 128, "vocab_size": 151936}


@pytest.mark.parametrize("context", [512, 131072])
def test_workspaces_do_not_grow_with_the_context(context):
    header = {"num_layers": 48, "window": 0, "window_layers": [0] * 4}
    cache, workspaces = Headers(QWEN3_30B_A3B).state_bytes(header, 1, context)
    assert cache == 2 * 48 * 4 * context * 128 * 4
    assert workspaces == Headers(QWEN3_30B_A3B).state_bytes(header, 1, 1)[1] <= 1 << 30


def chosen(own, asked, available, each=1 << 20, num_heads=1):
    """The Context where weights take 100 MiB and a position 1 MiB."""
    checkpoint = types.SimpleNamespace(header={"max_positions": own, "num_heads": num_heads}, path="model.bin")
    return capacity.choose(checkpoint, asked, 3, lambda positions: (100 << 20) + positions * each, available << 20)


@pytest.mark.parametrize("own, asked, available, positions, text", [
    (512, None, 10, 512, "512 positions, the model's own"),
    (40960, None, 41060, 40960, "40960 positions, the model's own"),
    (40960, None, 41059, 40896, "40896 of 40960 positions, what memory allows; --context"),
    (1000, None, 1099, 960, "960 of 1000 positions, what memory allows; --context"),
    (131072, None, 40960 + 100 + 63, 40960, "40960 of 131072 positions, what memory allows; --context"),
    (131072, None, 0, 512, "512 of 131072 positions, what memory allows; --context"),
    (131072, 1000, 1100, 1000, "1000 positions, --context"),
    (131072, 512, 0, 512, "512 positions, --context"),
    (0, None, 9999, 4096, "4096 positions, of a model without a limit of its own; --context"),
    (0, None, 1124, 1024, "1024 of 4096 positions, what memory allows; --context"),
    (0, 9000, 9100, 9000, "9000 positions, --context")])
def test_context_by_model_memory_and_option(own, asked, available, positions, text):
    context = chosen(own, asked, available)
    assert (context.positions, context.text()) == (positions, text)


def test_a_context_that_does_not_fit_is_refused():
    needed = "--context: {}, expected at most {}, what memory holds with 3 sessions at once: {} GiB needed, weights "
    needed += "included, {} GiB free; use fewer, or lower --batch-size"
    own = "--context: 513, expected at most 512, the model's own positions (max_positions of model.bin); use fewer"
    for positions, asked, available, line in ((512, 513, 1 << 20, own),
                                              (0, 9001, 9100, needed.format(9001, 8960, "8.89", "8.89")),
                                              (0, 600, -5, needed.format(600, 512, "0.68", "0.00"))):
        with pytest.raises(ColibriError) as error:
            chosen(positions, asked, available)
        assert str(error.value) == line
    for wrong in (0, -1, 1.5, "512"):
        with pytest.raises(ColibriError, match="context: "):
            chosen(0, wrong, 100)
    with pytest.raises(ColibriError, match="--context: 5, expected only for a model with attention; model.bin is a "
                                           "bare"):
        chosen(0, 5, 100, num_heads=0)


def test_rule_of_a_context_that_memory_decided():
    assert chosen(131072, None, 40960 + 100).rule(50000, "model.bin") == (
        "40960, what memory holds (the model has 131072 positions); use fewer, or lower --batch-size")


def test_memory_of_the_machine_and_its_cgroups(monkeypatch, tmp_path):
    with open("/proc/meminfo") as file:
        total = int(file.readline().split()[1]) << 10
    monkeypatch.setattr(weights, "CGROUPS", str(tmp_path))
    whole = weights.available_bytes()
    assert 0 < whole <= total
    (tmp_path / "memory.stat").write_text("file 7\nanon 1000\nanon_thp 3\n")
    for limit, left in (("5000\n", 4000), ("500\n", 0), ("max\n", None)):
        (tmp_path / "memory.max").write_text(limit)
        assert (weights.available_bytes() == left) == (left is not None)


def test_table_and_json_name_the_context(moe_32):
    run = program("colibri.run", "--model", moe_32, "--prompt", "It was", "--max-new-tokens", 2, "--context", 100)
    assert b"\ncontext     100 positions, --context\n" in run.stdout
    run = program("colibri.run", "--model", moe_32, "--prompt", "It was", "--max-new-tokens", 2, "--json")
    figures = json.loads(run.stdout)
    assert (figures["context"], figures["context_is"]) == (512, "512 positions, the model's own")


def last_logits(header, tensors, prompt, rows):
    """The reference's logits of a TINY model after the last `rows` tokens of a prompt, in float64."""
    h, w = header, {name.removeprefix("layers.0."): array.astype(np.float64) for name, array in tensors.items()}
    x = w["embed"][prompt] * h["embedding_multiplier"]
    normed = reference_families.norm(h, x, w["attention_norm"], None, h["norm_eps"])
    q, k, v, _ = reference_families.split_gqa(h, w, normed, normed @ w["qkv"].T)
    rotation = reference_families.frequencies(h, tensors, np.full(len(prompt), len(prompt)))
    q, k = (reference_families.rope(part, *rotation) for part in (q, k))
    k, v = (part.repeat(2, axis=1) for part in (k, v))
    out = np.empty((rows, *q.shape[1:]))
    for row, position in enumerate(range(len(prompt) - rows, len(prompt))):
        scores = np.einsum("hd,shd->hs", q[position], k[:position + 1]) * h["attention_scale"]
        out[row] = np.einsum("hs,shd->hd", reference_families.softmax(scores), v[:position + 1])
    x = x[-rows:] + out.reshape(rows, -1) @ w["attention_out"].T
    x = x + reference_families.ffn_block(h, w, reference_families.norm(h, x, w["ffn_norm"], None, h["norm_eps"]), 0)
    return reference_families.norm(h, x, w["final_norm"], None, h["final_norm_eps"]) @ w["lm_head"].T


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A model of one layer with a long context, as a file and as (header, weights)."""
    path = write_model(tmp_path_factory.mktemp("tiny") / "model.bin", TINY)
    header, tensors = read_bin(path)
    fields = {name: header[name].item() for name in header.dtype.names if header[name].ndim == 0}
    return path, {**fields, "window_layers": [], "dense_layers": []}, tensors


def test_a_long_prompt_in_steps_of_any_size(tiny):
    path, header, tensors = tiny
    prompt = np.random.default_rng().integers(0, 64, LENGTH)
    with opened(path, LENGTH + 1, num_slots=1) as engine:
        assert engine.max_tokens == 512 and engine.state("x").shape[0] == 512 and engine.state("logits").shape[0] == 64
        results = []
        for last in (100, 333):  # in steps of 512, and in steps of other borders
            with engine.session() as session:
                if last == 333:
                    for start in range(0, LENGTH - last, 401):
                        session.prefill(prompt[start:min(start + 401, LENGTH - last)])
                else:
                    session.prefill(prompt[:LENGTH - last])
                results.append(engine.step([(session, prompt[LENGTH - last:])], every=True)[-100:])
                assert session.length == LENGTH
    exact = last_logits(header, tensors, prompt, 100)
    assert np.array_equal(results[0], results[1])
    assert np.abs(results[0] - exact).max() < 1e-4 * np.abs(exact).max()


def test_logits_of_more_tokens_than_are_computed_at_once(tiny):
    """Of each token what it has alone, also sampled, where sessions are more than the logits of a step."""
    path, *_ = tiny
    with opened(path, 1000, num_slots=70) as engine:
        assert engine.batch.max_logits == 64
        prompt = np.random.default_rng().integers(0, 64, 700)
        with engine.session() as session:
            every = engine.step([(session, prompt)], every=True)
        assert every.shape == (700, 64)
        sessions = [engine.session() for _ in range(70)]
        alone = []
        for number, session in enumerate(sessions):
            alone.append(session.prefill(prompt[:number + 600]))
        assert np.array_equal(alone, every[599:669])
        greedy = engine.step([(session, [7]) for session in sessions], [Sampler()] * 70)
        for session in sessions:
            session.length -= 1
        rows = engine.step([(session, [7]) for session in sessions])
        assert greedy == rows.argmax(axis=1).tolist()
