"""The MoE ops of the CUDA backend against the host's and NumPy, at odd sizes, on fresh random input."""

import concurrent.futures
import functools
import os

import gpu_model
import numpy as np
import pytest
import reference
from reference import (
    BF16,
    CLAMPED_SWIGLU,
    F16,
    GELU,
    RELU,
    ROUTERS,
    SIGMOID,
    SPARSEMIXER,
    TOPK_SOFTMAX,
    fields,
)
from test_routing import beyond_f16

pytestmark = pytest.mark.gpu

MODELS = {
    "smallest": fields(num_experts=1, k=1, hidden=9, ffn=1),
    "1 expert": fields(num_experts=1, k=1, hidden=130, ffn=130, gated=0, activation=GELU),
    "2 experts": fields(num_experts=2, k=2, hidden=65, ffn=9, weight_dtype=BF16, gated=0, activation=RELU),
    "3 experts": fields(num_experts=3, k=2, hidden=1000, ffn=72, renormalize=0),
    "5 experts": fields(num_experts=5, k=3, hidden=64, ffn=1500, weight_dtype=BF16, activation=GELU),
    "8 experts": fields(num_experts=8, k=8, hidden=130, ffn=257),
    "32 experts": fields(num_experts=32, k=2, hidden=1024, ffn=1792, weight_dtype=BF16),
    "example": fields(num_experts=32, k=2, hidden=128, ffn=96),
    "60 experts": fields(num_experts=60, k=16, hidden=72, ffn=40, router_kind=TOPK_SOFTMAX, routed_scaling=2.5),
    "128 experts": fields(num_experts=128, k=8, hidden=2048, ffn=96, weight_dtype=BF16),
    "256 experts": fields(num_experts=256, k=16, hidden=40, ffn=33, router_kind=SIGMOID, router_bias=1, num_groups=8,
                        topk_groups=4, routed_scaling=2.5),
    "biases": fields(num_experts=7, k=2, hidden=65, ffn=41, expert_bias=1, router_kind=SPARSEMIXER, router_jitter=0.2),
    "biases, two matrices": fields(num_experts=5, k=2, hidden=200, ffn=70, expert_bias=1, gated=0, activation=GELU,
                                 renormalize_min=0.8),
    "clamped": fields(num_experts=6, k=3, hidden=130, ffn=72, activation=CLAMPED_SWIGLU, routed_scaling=0.5),
    "biases, clamped, splits": fields(num_experts=32, k=4, hidden=1100, ffn=1200, activation=CLAMPED_SWIGLU,
                                    weight_dtype=BF16, expert_bias=1, router_logit_bias=1, router_kind=TOPK_SOFTMAX),
}
PORTABLE = ("1 expert", "8 experts", "32 experts", "256 experts")
CASES = [(name, "") for name in MODELS] + [(name, "-DPORTABLE_COPY") for name in PORTABLE]
TOKENS = [1, 2, 3, 7, 16, 31, 32, 33, 64, 65, 127, 128, 129, 512]
TOLERANCE = {F16: 2e-3, BF16: 1e-2}


def build_all():
    """All libraries at once, for each is a compilation."""
    models = [(model_of(name), extra) for name, extra in CASES]
    models += [(router_config(name), "") for name in ROUTERS] + [(beyond_f16(), "")]
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda case: gpu_model.library_file(case[1], **gpu_model.baked(case[0])), models))


@pytest.fixture(scope="module", autouse=True)
def libraries(request):
    if len(request.session.items) > 50:
        build_all()


def router_config(name):
    config = ROUTERS[name]
    model = reference.random_model(np.random.default_rng(1), hidden=config["num_experts"], ffn=8, **config)
    model["layers"][0]["router"] = np.eye(config["num_experts"], dtype=np.float32)
    return model


@functools.cache
def model_of(name):
    return reference.random_model(np.random.default_rng(list(MODELS).index(name)), **MODELS[name])


@functools.lru_cache(maxsize=4)
def gpu_of(name, extra=""):
    return gpu_model.GpuModel(model_of(name), extra)


@functools.lru_cache(maxsize=4)
def router_of(name):
    model = router_config(name)
    return model, gpu_model.GpuModel(model)


def random_inputs(rng, num_tokens, hidden):
    return rng.standard_normal((num_tokens, hidden)).astype(np.float32)


def relative_error(got, expected):
    return np.linalg.norm(got - expected) / max(np.linalg.norm(expected), 1e-30)


def bucket(num_tokens):
    """A launch size that leaves padding rows."""
    return min(-(-num_tokens // 8) * 8, 512)


def check_lists(gpu, ids, num_experts):
    counts = np.bincount(ids.ravel(), minlength=num_experts)
    active = np.flatnonzero(counts)
    assert np.array_equal(gpu.read("expert_offsets")[0], np.concatenate([[0], np.cumsum(counts)]))
    assert np.array_equal(gpu.read("assignments")[0, :ids.size], np.argsort(ids.ravel(), kind="stable"))
    assert gpu.read("num_active")[0, 0] == len(active)
    assert np.array_equal(gpu.read("active_experts")[0, :len(active)], active)
    return counts


def experts_of(model, x, ids):
    """Each assignment's middle and output, in float64, of inputs as float64."""
    layer = model["layers"][0]
    mid = np.zeros((*ids.shape, model["ffn"]))
    out = np.zeros((*ids.shape, model["hidden"]))
    for e in np.unique(ids):
        tokens, slots = np.nonzero(ids == e)
        mid[tokens, slots] = reference.middle(x[tokens], layer, e, model)
        out[tokens, slots] = reference.product(mid[tokens, slots], layer, "down", e)
    return mid, out


@pytest.mark.parametrize("num_tokens", TOKENS)
@pytest.mark.parametrize("name, extra", CASES)
def test_moe_block(name, extra, num_tokens):
    model, gpu = model_of(name), gpu_of(name, extra)
    x = random_inputs(np.random.default_rng(num_tokens), num_tokens, model["hidden"])
    totals, read = gpu.read("routed_tokens"), gpu.read("experts_read")
    gpu.poison("router_logits", "expert_ids", "expert_weights", "expert_mid", "expert_out")
    got = gpu.moe(x, bucket(num_tokens))
    layer = model["layers"][0]
    logits = gpu.read("router_logits", num_tokens)
    logit_bias = 0 if layer["router_logit_bias"] is None else layer["router_logit_bias"]
    assert relative_error(logits, x.astype(np.float64) @ layer["router"].T.astype(np.float64) + logit_bias) < 2e-6
    ids, weights = gpu.read("expert_ids", num_tokens), gpu.read("expert_weights", num_tokens)
    for t in range(num_tokens):  # from the GPU's own logits, so that no order hangs on a rounding
        expected_ids, expected_weights = reference.route(logits[t].astype(np.float64), model, layer["router_bias"])
        assert np.array_equal(ids[t], expected_ids)
        assert np.allclose(weights[t], expected_weights, rtol=2e-5, atol=1e-7)
    counts = check_lists(gpu, ids, model["num_experts"])
    assert np.array_equal(gpu.read("routed_tokens") - totals, counts[None])
    assert gpu.read("experts_read")[0, 0] - read[0, 0] == np.count_nonzero(counts)
    mid, out = experts_of(model, x.astype(np.float64), ids)
    tolerance, used = TOLERANCE[model["weight_dtype"]], num_tokens * model["k"]
    got_mid, got_out = gpu.read("expert_mid"), gpu.read("expert_out")
    assert relative_error(got_mid[:used], mid.reshape(used, -1)) < tolerance
    assert relative_error(got_out[:used], out.reshape(used, -1)) < tolerance
    assert np.all(np.isnan(got_mid[used:])) and np.all(np.isnan(got_out[used:]))
    assert relative_error(got, np.einsum("tk,tkh->th", weights, out)) < tolerance


@pytest.mark.parametrize("num_tokens", [5, 40, 64, 301])
@pytest.mark.parametrize("name, extra", [("example", ""), ("32 experts", ""), ("32 experts", "-DPORTABLE_COPY")])
def test_all_tokens_to_one_expert(name, extra, num_tokens):
    model = model_of(name)
    router = np.zeros_like(model["layers"][0]["router"])
    router[5], router[2] = 1, 0.5
    skewed = {**model, "layers": [{**model["layers"][0], "router": router}]}
    gpu = gpu_model.GpuModel(skewed, extra)
    x = np.abs(random_inputs(np.random.default_rng(11), num_tokens, model["hidden"]))
    got = gpu.moe(x)
    ids, weights = gpu.read("expert_ids", num_tokens), gpu.read("expert_weights", num_tokens)
    assert np.all(ids == [5, 2])
    _, out = experts_of(model, x.astype(np.float64), ids)
    assert relative_error(got, np.einsum("tk,tkh->th", weights, out)) < TOLERANCE[model["weight_dtype"]]
    gpu.close()


@pytest.mark.parametrize("num_tokens", [1, 8, 33, 130])
@pytest.mark.parametrize("name, extra", [("32 experts", ""), ("32 experts", "-DPORTABLE_COPY"), ("128 experts", "")])
def test_repeatable_in_a_graph(name, extra, num_tokens):
    """100 launches of one graph give the bits that direct launches gave."""
    model, gpu = model_of(name), gpu_of(name, extra)
    x = random_inputs(np.random.default_rng(7), num_tokens, model["hidden"])
    expected = gpu.moe(x, bucket(num_tokens))
    graph = gpu.capture("begin", "router", "experts_up", "experts_down", "combine", rows=bucket(num_tokens))
    for _ in range(100):
        gpu.poison("expert_mid", "expert_out")
        gpu.write("x", x)
        gpu.launch(graph)
        assert np.array_equal(gpu.read("x", num_tokens), expected)


@pytest.mark.parametrize("size", [8, 64, 512])
@pytest.mark.parametrize("name", ["example", "32 experts", "128 experts"])
def test_row_is_independent_of_its_batch(name, size):
    model, gpu = model_of(name), gpu_of(name)
    x = random_inputs(np.random.default_rng(9), size, model["hidden"])
    together = gpu.moe(x)
    for t in range(0, size, max(size // 8, 1)):
        assert np.array_equal(gpu.moe(x[t:t + 1], size)[0], together[t])


@pytest.mark.parametrize("name", ["example", "32 experts", "128 experts", "256 experts"])
def test_routing_is_independent_of_the_launch(name):
    """One kernel for few rows, two for more, in clusters or not: a row has the same bits."""
    model, gpu = model_of(name), gpu_of(name)
    gpu.write("x", random_inputs(np.random.default_rng(13), 1, model["hidden"]))
    expected = None
    for rows in (1, 2, 4, 5, 16, 17, 40, 128, 129, 512):
        gpu.batch["num_tokens"], gpu.batch["fault"] = 1, 0
        gpu.poison("router_logits", "expert_ids", "expert_weights")
        gpu.run("begin", "router", rows=rows)
        got = [gpu.read(buffer, 1) for buffer in ("router_logits", "expert_ids", "expert_weights")]
        expected = expected or got
        for array, first in zip(got, expected):
            np.testing.assert_array_equal(array, first)
        check_lists(gpu, got[1], model["num_experts"])


@pytest.mark.parametrize("name", ROUTERS)
def test_router_on_random_and_tied_logits(name):
    model, gpu = router_of(name)
    num_experts, bias = model["num_experts"], model["layers"][0]["router_bias"]
    logit_bias = model["layers"][0]["router_logit_bias"]
    logits = np.random.default_rng(3).standard_normal((400, num_experts)).astype(np.float32) * 3
    logits[100:200] = np.round(logits[100:200])
    logits[200:300] = np.where(logits[200:300] > 0, 0.0, -0.0)
    logits[300:350, ::3] *= 30
    for first, count in ((0, 400), (150, 1), (199, 7), (280, 32)):
        chosen = logits[first:first + count]
        gpu.write("x", chosen)
        gpu.batch["num_tokens"], gpu.batch["fault"] = count, 0
        gpu.run("begin", "router", rows=count)
        ids, weights = gpu.read("expert_ids", count), gpu.read("expert_weights", count)
        chosen = chosen if logit_bias is None else chosen + logit_bias
        for t in range(count):
            expected = reference.route(chosen[t] if bias is None else chosen[t].astype(np.float64), model, bias)
            assert np.array_equal(ids[t], expected[0])
            assert np.allclose(weights[t], expected[1], rtol=3e-5, atol=1e-7)
        check_lists(gpu, ids, num_experts)
        assert gpu.batch["fault"] == 0


@pytest.mark.parametrize("num_tokens", [1, 100])
def test_an_output_beyond_f16_is_kept(num_tokens):
    gpu = gpu_model.GpuModel(beyond_f16())
    x = gpu.moe(np.ones((num_tokens, 2), np.float32))
    assert np.all(gpu.read("expert_out", num_tokens * 2)[1::2, 0] == 1e5)
    assert np.allclose(x, [1e4, 0], rtol=2e-6)
    gpu.close()


@pytest.mark.parametrize("num_tokens", [1, 20, 300])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["softmax", "k=16 of 60", "sigmoid, groups", "sparsemixer", "sparsemixer of 200"])
def test_logits_that_allow_no_choice(name, bad, num_tokens):
    model, gpu = router_of(name)
    num_experts, token = model["num_experts"], num_tokens * 2 // 3
    x = np.random.default_rng(4).standard_normal((num_tokens, num_experts)).astype(np.float32)
    x[token, 3] = bad           # 0 * inf is NaN, so what the router sees in that row is NaN all over
    gpu.write("x", x)
    gpu.batch["num_tokens"], gpu.batch["fault"] = num_tokens, 0
    gpu.run("begin", "router", rows=num_tokens)
    ids = gpu.read("expert_ids", num_tokens)
    assert (gpu.batch["fault"], gpu.batch["fault_layer"], gpu.batch["fault_token"]) == (1, 0, token)
    assert ids.min() >= 0 and ids.max() < num_experts
    assert all(len(set(row)) == model["k"] for row in ids)
    check_lists(gpu, ids, num_experts)
