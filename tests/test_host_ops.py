"""Every op of the host backend against reference.py, through the library's own interface, at odd sizes."""

import os
import re
import subprocess
import sys

import numpy as np
import pytest
import reference
from host_model import (
    ROOT,
    VARIANTS,
    HostModel,
    host_model,
    library,
    random_inputs,
    relative_error,
    router_model,
    transformer,
)
from reference import BF16, F16, F32, GELU, RELU, ROUTERS, SILU, fields

from colibri.errors import ColibriError


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 7, 16, 33, 64, 129, 512])
@pytest.mark.parametrize("name", VARIANTS)
def test_moe_block(name, num_tokens):
    model, host = host_model(name)
    x = random_inputs(np.random.default_rng(num_tokens), num_tokens, model["hidden"])
    got = host.moe(x)
    expected, ids, weights = reference.moe(x.astype(np.float64), reference.as_float64(model["layers"][0]), model)
    assert np.array_equal(host.state["expert_ids"][:num_tokens], ids)
    assert np.allclose(host.state["expert_weights"][:num_tokens], weights, rtol=2e-5, atol=1e-7)
    assert relative_error(got, expected) < 3e-6


@pytest.mark.parametrize("name", ["gated f16 silu", "128 experts"])
def test_dispatch_lists_and_totals(name):
    model, host = host_model(name)
    k, num_experts = model["k"], model["num_experts"]
    totals, read = host.state["routed_tokens"].copy(), int(host.state["experts_read"][0, 0])
    host.moe(random_inputs(np.random.default_rng(5), 37, model["hidden"]))
    ids = host.state["expert_ids"][:37].ravel()
    counts = np.bincount(ids, minlength=num_experts)
    assert np.array_equal(host.state["expert_offsets"][0], np.concatenate([[0], np.cumsum(counts)]))
    assert np.array_equal(host.state["assignments"][0, :37 * k], np.argsort(ids, kind="stable"))
    active = np.flatnonzero(counts)
    assert host.state["num_active"][0, 0] == len(active)
    assert np.array_equal(host.state["active_experts"][0, :len(active)], active)
    assert np.array_equal(host.state["routed_tokens"] - totals, counts[None])
    assert host.state["experts_read"][0, 0] - read == len(active)


def test_all_tokens_to_one_expert():
    model, _ = host_model("gated f16 silu")
    rng = np.random.default_rng(11)
    x = np.abs(random_inputs(rng, 301, model["hidden"]))
    router = model["layers"][0]["router"]
    skewed = {**model["layers"][0], "router": np.zeros_like(router)}
    skewed["router"][5], skewed["router"][2] = 1, 0.5
    other = HostModel({**model, "layers": [skewed]})
    expected, ids, _ = reference.moe(x.astype(np.float64), reference.as_float64(skewed), model)
    assert np.all(ids == [5, 2])
    assert relative_error(other.moe(x), expected) < 3e-6


@pytest.mark.parametrize("name", ROUTERS)
def test_router_on_random_and_tied_logits(name):
    model, host = router_model(name)
    rng = np.random.default_rng(3)
    num_experts = model["num_experts"]
    logits = rng.standard_normal((400, num_experts)).astype(np.float32) * 3
    logits[100:200] = np.round(logits[100:200])           # many ties
    logits[200:250] = rng.choice([0.0, -0.0], (50, num_experts))
    logits[250:300] -= 60                                  # sigmoid close to 0
    bias, logit_bias = (model["layers"][0][name] for name in ("router_bias", "router_logit_bias"))
    ids, weights = host.route(logits)
    logits = logits if logit_bias is None else logits + logit_bias
    for t in range(len(logits)):
        expected_ids, expected = reference.route(logits[t].astype(np.float64) + 0.0, model, bias)
        if list(ids[t]) != expected_ids:  # only where float32 cannot tell two scores apart
            single = reference.route(logits[t] + np.float32(0), model, bias)
            assert bias is not None and list(ids[t]) == single[0], (t, ids[t], expected_ids)
            expected = single[1]
        assert np.allclose(weights[t], expected, rtol=2e-5, atol=1e-37), (t, weights[t], expected)


def test_router_underflow_and_large_logits():
    _, host = router_model("softmax")
    logits = np.full((2, 32), -1e30, np.float32)
    logits[0, :4] = 200, 50, 60, 40
    logits[1, 7], logits[1, 30] = -1e5, -2e5
    ids, weights = host.route(logits)
    assert ids.tolist() == [[0, 2], [7, 30]]
    assert weights.tolist() == [[1, 0], [1, 0]]


def test_one_expert_renormalised_weighs_one():
    _, host = host_model("smallest")
    host.moe(random_inputs(np.random.default_rng(0), 50, 1))
    assert np.all(host.state["expert_weights"][:50] == 1)


def test_masked_groups_never_win():
    model, _ = router_model("sigmoid, groups")
    layer = {**model["layers"][0], "router_bias": np.full(256, -5, np.float32)}
    layer["router_bias"][:128] -= 1  # groups 0 to 3 lose, and all biased scores are negative
    host = HostModel({**model, "layers": [layer]})
    ids, _ = host.route(np.random.default_rng(2).standard_normal((20, 256)).astype(np.float32))
    assert np.all(ids >= 128)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_bad_router_logits_name_layer_and_token(bad):
    _, host = router_model("softmax")
    logits = np.zeros((5, 32), np.float32)
    logits[3, 31] = bad
    with pytest.raises(ColibriError, match=r"^layers\.0\.router: logits of token 3 are NaN"):
        host.route(logits)
    assert (host.batch["fault"], host.batch["fault_layer"], host.batch["fault_token"]) == (1, 0, 3)
    host.route(np.zeros((5, 32), np.float32))
    assert host.batch["fault"] == 0


@pytest.mark.parametrize("name", ["softmax, bias", "sigmoid, groups"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_bad_router_bias_is_an_error(name, bad):
    model, _ = router_model(name)
    layer = {**model["layers"][0], "router_bias": np.zeros(model["num_experts"], np.float32)}
    layer["router_bias"][3] = bad
    host = HostModel({**model, "layers": [layer]})
    with pytest.raises(ColibriError, match=r"^layers\.0\.router: logits of token 0 are NaN"):
        host.route(np.zeros((5, model["num_experts"]), np.float32))


def test_minus_infinity_is_allowed_while_k_are_finite():
    # through a router of ones in one column, an input of inf reaches only that expert
    config = fields(num_experts=3, k=2, hidden=3, ffn=8)
    model = reference.random_model(np.random.default_rng(1), **config)
    model["layers"][0]["router"] = np.eye(3, dtype=np.float32)
    host = HostModel(model)
    host.state["x"][:2] = [[-3e38, 1, 2], [-3e38, -3e38, 2]]
    model["layers"][0]["router"] *= 1
    router = host.keep[0]["layers.0.router"]
    router *= 2  # -6e38 is -inf in float32
    host.begin(1)
    host.run("router", 1)
    assert host.state["router_logits"][0, 0] == -np.inf
    assert host.state["expert_ids"][0].tolist() == [2, 1]
    host.begin(2)
    with pytest.raises(ColibriError, match="token 1 .* fewer than k=2 finite"):
        host.run("router", 2)


@pytest.mark.parametrize("weight_dtype, tied, dtypes", [
    (F16, 0, {}), (BF16, 1, {}), (F32, 0, {}), (BF16, 0, {"expert_dtype": F16 + 1}), (F16, 1, {"dense_dtype": F32 + 1}),
    (F32, 0, {"expert_dtype": BF16 + 1, "dense_dtype": F16 + 1})])
def test_forward_in_pieces_and_mixed_batches(weight_dtype, tied, dtypes):
    model, host = transformer(weight_dtype, tied, **dtypes)
    wide, cache = reference.as_float64(model), {}
    rng = np.random.default_rng(4)
    steps = [[(0, p) for p in range(70)], [(1, p) for p in range(3)], [(0, 70), (1, 3), (2, 0)],
             [(2, 1), (2, 2), (0, 71), (1, 4)]]
    for step in steps:
        slots, positions = (list(values) for values in zip(*step))
        tokens = rng.integers(0, 131, len(step))
        expected = reference.forward(wide, tokens, positions, slots, cache)
        assert relative_error(host.forward(tokens, positions, slots), expected) < 1e-5


def test_each_op_of_the_transformer():
    model, host = transformer()
    layer = reference.as_float64(model["layers"][1])
    rng = np.random.default_rng(8)
    tokens, positions = rng.integers(0, 131, 5), [500, 3, 0, 511, 77]
    host.begin(5, tokens=tokens, positions=positions, slots=[0, 1, 2, 2, 1], num_logits=2, logit_rows=[4, 1])
    host.run("embed", 5)
    assert np.array_equal(host.state["x"][:5], model["embed"][tokens])
    for norm in ("attention_norm", "ffn_norm"):
        host.run(norm, 5, 1)
        normed = reference.rms_norm(model["embed"][tokens].astype(np.float64), layer[norm], 1e-5)
        assert np.allclose(host.state["normed"][:5], normed, rtol=1e-5, atol=1e-7)
    host.run("qkv", 5, 1)
    assert relative_error(host.state["qkv"][:5], normed @ layer["qkv"].T) < 1e-6
    before = host.state["qkv"][:5].reshape(5, 10, 10).astype(np.float64)
    host.run("rope", 5, 1)
    expected = np.concatenate([reference.rope(before[:, :8], positions, 10000.0), before[:, 8:]], axis=1)
    assert np.allclose(host.state["qkv"][:5].reshape(5, 10, 10), expected, rtol=1e-5, atol=1e-6)
    cache = host.state["key_cache"].reshape(2, 3, 2, 512, 10)
    assert np.array_equal(cache[1, 2, 1, 511], host.state["qkv"][3].reshape(10, 10)[7])
    host.state["key_cache"][...] = rng.standard_normal(host.state["key_cache"].shape)
    host.state["value_cache"][...] = rng.standard_normal(host.state["key_cache"].shape)
    host.run("attention", 5, 1)
    values = host.state["value_cache"].reshape(2, 3, 2, 512, 10)
    for t, (slot, position) in enumerate(zip([0, 1, 2, 2, 1], positions)):
        past = (part[1, slot, :, :position + 1].transpose(1, 0, 2).astype(np.float64) for part in (cache, values))
        expected = reference.attention(host.state["qkv"][t].reshape(10, 10)[:6].astype(np.float64), *past)
        assert relative_error(host.state["attention"][t], expected.ravel()) < 2e-6
    x = host.state["x"][:5].copy()
    host.run("attention_out", 5, 1)
    out = x + host.state["attention"][:5].astype(np.float64) @ layer["attention_out"].T
    assert relative_error(host.state["x"][:5], out) < 1e-6
    host.run("gather_norm", 2)
    normed = reference.rms_norm(host.state["x"][[4, 1]].astype(np.float64), model["final_norm"], 1e-5)
    assert np.allclose(host.state["normed"][:2], normed, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("wrong, message", [
    (fields(tokens=[0, 131]), r"^batch: tokens\[1\]=131, expected 0 to 130; "),
    (fields(slots=[3, 0]), r"^batch: slots\[0\]=3, expected 0 to 2; "),
    (fields(positions=[0, 512]), r"^batch: positions\[1\]=512, expected 0 to 511; "),
    (fields(positions=[-1, 0]), r"^batch: positions\[0\]=-1, "),
    (fields(num_logits=3), r"^batch: num_logits=3, expected 0 to num_tokens=2 and at most MAX_STEP_LOGITS=512; "),
    (fields(num_logits=1, logit_rows=[2]), r"^batch: logit_rows\[0\]=2, expected 0 to 1; "),
])
def test_begin_checks_the_batch(wrong, message):
    _, host = transformer()
    good = fields(tokens=[0, 0], slots=[0, 0], positions=[0, 1], num_logits=0)
    host.begin(2, **good)
    with pytest.raises(ColibriError, match=message):
        host.begin(2, **{**good, **wrong})
    with pytest.raises(ColibriError, match="^batch: num_tokens=2 in a step of 3"):
        host.run("begin", 3)


def test_sampling():
    _, host = transformer()
    rng = np.random.default_rng(6)
    cases = [(temperature, top_k, top_p) for temperature in (0, 0.3, 1, 2) for top_k in (0, 1, 5, 130, 131, 1000)
             for top_p in (1, 0.9, 0.5, 0.01)]
    temperature, top_k, top_p = (np.array(values) for values in zip(*cases))
    for trial in range(20):
        logits = rng.standard_normal((len(cases), 131)).astype(np.float32) * 3
        if trial % 2:
            logits = np.round(logits)  # ties
        if trial == 4:
            logits[:, 7] = np.inf
        if trial == 5:
            logits[:, 3:50] = -np.inf
        uniform = rng.random(len(cases)).astype(np.float32)
        if trial == 6:
            uniform[:] = 0
        rows = len(cases)
        host.begin(rows, tokens=np.zeros(rows), positions=np.zeros(rows), slots=np.zeros(rows), num_logits=rows,
                   logit_rows=range(rows), temperature=temperature, top_k=top_k, top_p=top_p, uniform=uniform, sample=1)
        host.state["logits"][:rows] = logits
        host.run("sample", rows)
        expected = [reference.sample(*row) for row in zip(logits, temperature.astype(np.float32), top_k,
                                                          top_p.astype(np.float32), uniform)]
        assert host.batch["sampled"][:rows].tolist() == expected


def test_sampling_follows_the_probabilities():
    _, host = transformer()
    logits = np.full(131, -np.inf, np.float32)
    logits[[3, 50, 130]] = np.log([0.2, 0.5, 0.3])
    host.begin(500, tokens=np.zeros(500), positions=np.zeros(500), slots=np.zeros(500), num_logits=500, sample=1,
               logit_rows=range(500), temperature=np.ones(500), top_k=np.zeros(500), top_p=np.ones(500),
               uniform=np.arange(500) / 500)
    host.state["logits"][:500] = logits
    host.run("sample", 500)
    counts = np.bincount(host.batch["sampled"][:500], minlength=131)
    assert np.all(np.abs(counts[[3, 50, 130]] - [100, 250, 150]) <= 1)


def test_nan_logits_are_an_error():
    """The first row that has them is named."""
    _, host = transformer()
    host.begin(3, tokens=[0] * 3, positions=[0, 1, 2], slots=[0] * 3, num_logits=3, logit_rows=[2, 1, 0],
               temperature=[0] * 3, sample=1)
    host.state["logits"][:2] = 0
    host.state["logits"][1, 130] = host.state["logits"][2] = np.nan
    with pytest.raises(ColibriError, match="^lm_head: logits of token 1 hold NaN"):
        host.run("sample", 3)
    host.batch["sample"] = 0


@pytest.mark.parametrize("name", ["gated f16 silu", "two-matrix f32 gelu", "128 experts"])
def test_rows_keep_their_bits_in_any_batch_and_thread_count(name):
    model, host = host_model(name)
    single = HostModel(model, num_threads=1)
    x = random_inputs(np.random.default_rng(12), 512, model["hidden"])
    alone = np.concatenate([single.moe(row[None]) for row in x[:32]])
    for count in (2, 3, 5, 7, 32, 33, 300, 512):
        assert np.array_equal(host.moe(x[:count])[:32], alone[:count]), count
        assert np.array_equal(single.moe(x[:count])[:32], alone[:count]), count


def test_100_runs_give_the_same_bits():
    model, host = host_model("gated f16 silu")
    x = random_inputs(np.random.default_rng(13), 64, model["hidden"])
    first = host.moe(x)
    assert all(np.array_equal(host.moe(x), first) for _ in range(100))


def test_forward_gives_the_same_bits_alone_and_in_a_batch():
    _, host = transformer()
    rng = np.random.default_rng(14)
    tokens = rng.integers(0, 131, 33)
    together = host.forward(tokens, range(33), [0] * 33)
    alone = [host.forward(tokens[t:t + 1], [t], [1])[0] for t in range(33)]
    assert np.array_equal(together, alone)


@pytest.mark.parametrize("weight_dtype", [F16, BF16])
def test_every_16_bit_weight_converts_exactly(weight_dtype):
    """All finite values, subnormal ones too, through a product with 1 and through the blocked path."""
    config = fields(num_experts=1, k=1, hidden=1, ffn=65536, weight_dtype=weight_dtype, activation=RELU, gated=0)
    model = reference.random_model(np.random.default_rng(0), **config)
    bits = np.arange(65536, dtype=np.uint16)
    values = bits.view(np.float16).astype(np.float32) if weight_dtype == F16 else (
        bits.astype(np.uint32) << 16).view(np.float32)
    host = HostModel(model, context=32)
    host.keep[0]["layers.0.experts_up"][...] = bits.reshape(host.keep[0]["layers.0.experts_up"].shape)
    positive = np.where(values < 0, 0, values)
    for num_tokens in (1, 7):
        host.state["x"][:num_tokens] = 1
        host.begin(num_tokens)
        host.run("router", num_tokens)
        host.run("experts_up", num_tokens)
        assert np.array_equal(host.state["expert_mid"][:num_tokens], np.tile(positive, (num_tokens, 1)), equal_nan=True)


@pytest.mark.parametrize("activation", [SILU, GELU])
def test_activation_is_accurate(activation):
    config = fields(num_experts=1, k=1, hidden=1, ffn=8192, weight_dtype=F32, activation=activation, gated=0)
    model = reference.random_model(np.random.default_rng(0), **config)
    x = np.linspace(-12.5, 12.5, 8192).astype(np.float32)
    model["layers"][0]["up"][0, :, 0] = x
    host = HostModel(model, context=32)
    host.moe(np.ones((1, 1), np.float32))
    expected = reference.activation(x.astype(np.float64), activation)
    assert np.max(np.abs(host.state["expert_mid"][0] / expected - 1)) < 1e-6
    special = np.array([0, -0.0, 1e-30, 90, 1e30, np.inf, -90, -200, -1e30, np.nan], np.float32)
    host.keep[0]["layers.0.experts_up"].ravel()[:10] = special
    host.moe(np.ones((1, 1), np.float32))
    got = host.state["expert_mid"][0, :10]
    assert np.array_equal(got[3:6], special[3:6]) and np.isnan(got[9])
    assert np.all(got[:2] == 0) and got[2] == np.float32(5e-31) and np.all(np.abs(got[6:9]) < 1e-36)


def test_portable_path_passes_the_same_tests_and_agrees():
    """Runs this file again with COLIBRI_ISA=portable; the two paths' outputs are compared through the reference."""
    if os.environ.get("COLIBRI_ISA"):
        pytest.skip("is the inner run")
    environment = {**os.environ, "COLIBRI_ISA": "portable"}
    inner = subprocess.run([sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", __file__], cwd=ROOT,
                           env=environment, text=True, capture_output=True, check=False)
    assert inner.returncode == 0, inner.stdout[-3000:]


@pytest.mark.parametrize("isa, expected", [
    ("portable", "^host portable$"), ("", "^host (avx2|portable)$"),
    ("sse9", "^environment: COLIBRI_ISA=sse9, expected portable, avx2, avxvnni, vnni, amx; unset it to let")])
def test_isa_is_named_and_checked(isa, expected):
    program = ("import sys; from colibri.native import Library; from colibri.errors import ColibriError\n"
               "try: print(Library(sys.argv[1]).path(0).decode())\nexcept ColibriError as error: print(error)")
    found = subprocess.run([sys.executable, "-c", program, library().file], cwd=ROOT, text=True, capture_output=True,
                           env={**os.environ, "COLIBRI_ISA": isa}, check=True).stdout
    assert re.match(expected, found)


def test_probes():
    data = np.random.default_rng(0).integers(0, 2**32, 3_000_001, dtype=np.uint32)
    for num_threads in (1, 2):
        assert library().read_sum(data.ctypes.data, data.nbytes, num_threads) == int(data.sum(dtype=np.uint64) % 2**32)
        assert library().fma_rate(0.01, num_threads) > 1e8
