"""The mlp that every token takes, the sum of a layer's parts, and attention's own experts: the GPU against the host, op
by op; then whole models of them in every dispatch."""

import itertools

import gpu_model
import numpy as np
import pytest
import synthetic
from reference import CLAMPED_SWIGLU, GELU, TOPK_SOFTMAX
from test_cuda_ops import MOA, TOKENS, TOLERANCE, Pair

from colibri import headers
from colibri.engine import Engine

pytestmark = pytest.mark.gpu

MLPS = {
    "odd": {"hidden": 100, "ffn": 40, "shared_ffn": 37, "shared_gate": 1, "dense_ffn": 130,
            "dense_layers": headers.mask([0])},
    "segments": {"hidden": 1100, "ffn": 40, "shared_ffn": 1200, "dense_ffn": 700, "dense_layers": headers.mask([1]),
                 "weight_dtype": 2, "activation": CLAMPED_SWIGLU, "swiglu_alpha": 1.75, "swiglu_limit": 1.5,
                 "residual_multiplier": 0.25, "ffn_out_bias": 1},
    "no shared": {"hidden": 528, "ffn": 48, "dense_ffn": 2112, "dense_layers": headers.mask([0]), "activation": GELU,
                  "residual_multiplier": 3.0, "k": 5},
    "many items": {"hidden": 1544, "ffn": 40, "dense_ffn": 4100, "dense_layers": headers.mask([0])},
    "bare": {**synthetic.STACK, "hidden": 72, "ffn": 24, "shared_ffn": 9, "shared_gate": 1, "ffn_out_bias": 1},
}
MOAS = {
    "odd heads": {"attention_kind": MOA, "num_experts": 7, "k": 3, "num_heads": 6, "num_kv_heads": 2, "head_dim": 18,
                  "hidden": 100, "ffn": 40, "attention_out_bias": 1, "ffn_out_bias": 1, "residual_multiplier": 0.5,
                  "router_kind": TOPK_SOFTMAX, "shared_ffn": 24, "dense_ffn": 56, "dense_layers": headers.mask([1])},
    "splits": {"attention_kind": MOA, "num_experts": 32, "k": 2, "num_heads": 16, "num_kv_heads": 8, "head_dim": 160,
               "hidden": 1100, "ffn": 40, "weight_dtype": 2, "expert_bias": 1},
}
EXPERTS_TOLERANCE = {1: 2e-3, 2: 1e-2}  # whose inputs are rounded to the weights' dtype, as the mlp's are
BATCHES = [(512, (512, 65, 9, 1)), (64, (64, 33, 8, 1)), (None, (64, 33, 17, 16, 9, 8, 3, 1))]  # launched, tokens


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """{model: its file}, with the libraries of all built at once."""
    folder = tmp_path_factory.mktemp("mlp")
    files = {name: synthetic.write_model(folder / f"{name}.bin", **{"max_positions": 0, **config})
             for name, config in {**MLPS, **MOAS}.items()}
    gpu_model.build_all(files.values())
    return files


def opened(files, name):
    pair = Pair(files[name])
    yield pair
    pair.gpu.close()
    pair.host.close()


@pytest.fixture(scope="module", params=MLPS)
def mlp(request, files):
    for pair in opened(files, request.param):
        pair.input = "normed" if pair.header["num_heads"] else "x"
        pair.layers = [layer for layer in (0, 1) if pair.host._model.weights[1][layer]["mlp_up"]]
        yield pair


@pytest.fixture(scope="module", params=MOAS)
def moa(request, files):
    for pair in opened(files, request.param):
        pair.tolerance = EXPERTS_TOLERANCE[pair.header["weight_dtype"]]
        yield pair


@pytest.mark.parametrize("rows", TOKENS)
def test_mlp(mlp, rows):
    mlp.tolerance = EXPERTS_TOLERANCE[mlp.header["weight_dtype"]]
    for layer in mlp.layers:
        mlp.random(mlp.input, rows, scale=mlp.rng.choice([0.1, 1, 3]))
        mlp.random("mlp_mid", 0)
        mlp.random("mlp_out", 0)
        mlp.begin(rows)
        mlp.compare("mlp", "mlp_out", rows, layer)
        assert np.isnan(mlp.gpu.state("mlp_out")[rows:]).all()


@pytest.mark.parametrize("rows", TOKENS)
def test_combine(mlp, rows):
    """Also of outputs that f16 cannot hold."""
    mlp.tolerance = TOLERANCE[mlp.header["weight_dtype"]]
    for layer in (0, 1):
        mlp.begin(rows)
        mlp.random("x", rows)
        mlp.random("expert_out", rows * mlp.header["k"], scale=mlp.rng.choice([1, 1e5]))
        mlp.random("expert_weights", rows)
        mlp.random("mlp_out", rows, scale=10)
        mlp.compare("combine", "x", rows, layer)
        assert np.isnan(mlp.gpu.state("x")[rows:]).all()


def bits_of(gpu, op, source, out, values, sizes, launched, layer=0):
    """What op makes of the first so many rows of `values`, for each size, as bits. launched: None: for as many."""
    for size in sizes:
        gpu.write(source, values[:size])
        gpu.run_op("begin", size)  # also sets the true number, which the launch of more keeps
        gpu._model.run(lambda model, rows: gpu.library.run_op(model, op.encode(), rows, layer), launched or size)
        yield gpu.state(out, size).view(np.uint32)


def assert_same_rows(results):
    first, *others = results
    for other in others:
        np.testing.assert_array_equal(other, first[:len(other)])


@pytest.mark.parametrize("launched, sizes", BATCHES)
def test_rows_of_mlp_do_not_depend_on_their_batch(mlp, launched, sizes):
    values = mlp.rng.standard_normal((512, mlp.header["hidden"])).astype(np.float32)
    for layer in mlp.layers:
        assert_same_rows(bits_of(mlp.gpu, "mlp", mlp.input, "mlp_out", values, sizes, launched, layer))


@pytest.mark.parametrize("rows", TOKENS)
def test_attention_experts(moa, rows):
    """Their routing, queries and outputs; what counts an FFN's routing does not count theirs."""
    used = rows * moa.header["k"]
    for layer in (0, 1):
        moa.random("normed", rows)
        moa.random("q", 0)
        for name in ("expert_ids", "expert_weights", "assignments"):
            moa.write(name, np.full(moa.host.state(name).shape, -1))
        moa.begin(rows)
        counted = {name: moa.gpu.state(name).copy() for name in ("routed_tokens", "experts_read")}
        moa.compare("queries", "q", rows, layer)
        assert np.isnan(moa.gpu.state("q")[rows:]).all()
        for name in ("expert_ids", "expert_offsets", "num_active"):
            np.testing.assert_array_equal(moa.gpu.state(name), moa.host.state(name))
        np.testing.assert_array_equal(moa.gpu.state("assignments")[0, :used], moa.host.state("assignments")[0, :used])
        np.testing.assert_allclose(*(engine.state("expert_weights", rows) for engine in (moa.gpu, moa.host)), rtol=2e-5)
        for name, before in counted.items():
            np.testing.assert_array_equal(moa.gpu.state(name), before)
        moa.random("attention", rows)
        moa.random("x", rows, scale=0.1)
        moa.random("expert_out", 0)
        moa.compare("attention_out", "x", rows, layer)
        assert np.isnan(moa.gpu.state("x")[rows:]).all()


@pytest.mark.parametrize("launched, sizes", BATCHES)
def test_rows_of_queries_do_not_depend_on_their_batch(moa, launched, sizes):
    values = moa.rng.standard_normal((512, moa.header["hidden"])).astype(np.float32)
    assert_same_rows(bits_of(moa.gpu, "queries", "normed", "q", values, sizes, launched))


def steps(engine):
    """Logits of a prompt and of some decoded steps, alone and two together."""
    out = []
    with engine.session() as a, engine.session() as b:
        out.append(engine.step([(a, b"A long while ago")], every=True))
        out += [engine.step([(a, [token])]) for token in b"there was a man"]
        out.append(engine.step([(b, bytes(range(100)))]))
        out += [engine.step([(a, [token]), (b, [token + 1])]) for token in b"who had"]
    return np.concatenate(out)


@pytest.mark.parametrize("name", ["odd", "odd heads"])
def test_every_dispatch_gives_the_same_bits(files, name):
    """Of two layers, one of them dense, whose decoding graphs can be made ahead."""
    host, gpu = gpu_model.engines(files[name])
    expected, results, made = steps(host), {"device": steps(gpu)}, 0
    combinations = len(list(itertools.combinations(range(host.checkpoint.header["num_experts"]),
                                                   host.checkpoint.header["k"])))
    host.close()
    gpu.close()
    for dispatch in ("combo", "dynamic"):
        with Engine(files[name], backend="cuda", dispatch=dispatch) as engine:
            if dispatch == "combo":
                engine.precapture()
                made = engine.memory.launcher.graphs.statistics()["graphs"]
            results[dispatch] = steps(engine)
    assert made == 2 + combinations  # the first part, the one after the dense layer, and the others
    error = np.linalg.norm(results["device"] - expected, axis=1) / np.linalg.norm(expected, axis=1)
    assert np.mean(error < 2e-3) > 0.9  # where no choice of experts hung on a rounding
    for dispatch in ("combo", "dynamic"):
        np.testing.assert_array_equal(results[dispatch].view(np.uint32), results["device"].view(np.uint32))
