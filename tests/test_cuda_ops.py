"""The CUDA backend's ops, apart from the experts', against the host's: the same model, the same state, op by op."""

import numpy as np
import pytest
import synthetic

from colibri.engine import Engine

pytestmark = pytest.mark.gpu

TOKENS = (1, 2, 3, 7, 16, 31, 32, 33, 64, 65, 127, 128, 129, 512)
MODELS = {
    "example": {"hidden": 128, "ffn": 96, "num_experts": 32, "num_heads": 8, "num_kv_heads": 4, "head_dim": 16},
    "odd": {"hidden": 100, "num_heads": 6, "num_kv_heads": 2, "head_dim": 18, "vocab_size": 301, "rope_theta": 500000.0},
    "bf16, segments": {"hidden": 1100, "num_heads": 10, "num_kv_heads": 2, "head_dim": 80, "vocab_size": 3000,
                       "weight_dtype": 2},
    "one kv head": {"num_heads": 24, "num_kv_heads": 1, "head_dim": 128, "hidden": 520, "vocab_size": 1000},
    "long heads": {"num_heads": 2, "num_kv_heads": 2, "head_dim": 512, "rope_kind": 0, "tied_embeddings": 1},
}
TOLERANCE = {1: 5e-6, 2: 2e-5}


class Pair:
    """One model on the host and on the GPU. Inputs go to both; an op's outputs are compared, starting from NaN."""

    def __init__(self, path):
        self.host, self.gpu = (Engine(path, backend=backend) for backend in ("host", "cuda"))
        self.rng = np.random.default_rng()
        self.tolerance = TOLERANCE[self.host.checkpoint.header["weight_dtype"]]
        for name in ("key_cache", "value_cache"):
            self.write(name, self.rng.standard_normal(self.host.state(name).shape, dtype=np.float32))

    def write(self, name, array):
        for engine in (self.host, self.gpu):
            engine.write(name, array)

    def random(self, name, rows, scale=1.0):
        """Rows of a buffer, and NaN in all rows after them."""
        buffer = np.full(self.host.state(name).shape, np.nan, np.float32)
        buffer[:rows] = self.rng.standard_normal((rows, buffer.shape[1])) * scale
        self.write(name, buffer)

    def begin(self, rows, **values):
        for engine in (self.host, self.gpu):
            for name, value in {"num_logits": rows, "logit_rows": range(rows), **values}.items():
                field = engine._fields[name]
                field[:len(value) if np.ndim(value) else 1] = value
            engine.run_op("begin", rows)

    def compare(self, op, out, rows, layer=0, exact=False):
        for engine in (self.host, self.gpu):
            engine.run_op(op, rows, layer)
        got, expected = (engine.state(out, rows).copy() for engine in (self.gpu, self.host))
        assert np.isfinite(got).all()
        if exact:
            np.testing.assert_array_equal(got, expected)
        error = np.linalg.norm((got - expected).astype(np.float64)) / np.linalg.norm(expected.astype(np.float64))
        assert error < self.tolerance, error
        return got

    def places(self, rows):
        """Different (slot, position) for every token."""
        context = self.host.library.baked["max_seq_len"]
        flat = self.rng.choice(self.host.num_slots * context, rows, replace=False)
        return {"slots": flat // context, "positions": flat % context}


@pytest.fixture(scope="module", params=MODELS)
def pair(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("ops") / "model.bin"
    synthetic.write_model(path, **MODELS[request.param], max_positions=0)
    pair = Pair(path)
    yield pair
    pair.gpu.close()
    pair.host.close()


@pytest.mark.parametrize("rows", TOKENS)
def test_embed_and_norms(pair, rows):
    header = pair.host.checkpoint.header
    pair.random("x", 0)
    pair.begin(rows, tokens=pair.rng.integers(0, header["vocab_size"], rows))
    pair.compare("embed", "x", rows, exact=True)
    pair.random("normed", 0)
    pair.compare("norm", "normed", rows, layer=1)
    pair.random("x", rows, scale=1e-3)
    pair.begin(rows, logit_rows=pair.rng.permutation(rows))
    pair.random("normed", 0)
    pair.compare("gather_norm", "normed", rows)


@pytest.mark.parametrize("rows", TOKENS)
def test_dense_products(pair, rows):
    pair.begin(rows)
    for op, source, out in (("qkv", "normed", "qkv"), ("lm_head", "normed", "logits")):
        pair.random(source, rows, scale=pair.rng.choice([1e-2, 1, 100]))
        pair.random(out, 0)
        pair.compare(op, out, rows, layer=1)
    pair.random("attention", rows)
    pair.random("x", rows)
    pair.compare("attention_out", "x", rows, layer=1)


@pytest.mark.parametrize("rows", TOKENS)
def test_rope_and_caches(pair, rows):
    pair.random("qkv", rows)
    pair.begin(rows, **pair.places(rows))
    pair.compare("rope", "qkv", rows, layer=1)
    for cache in ("key_cache", "value_cache"):
        got, expected = pair.gpu.state(cache), pair.host.state(cache)
        np.testing.assert_allclose(got, expected, rtol=0, atol=1e-5)
        pair.write(cache, expected.copy())


@pytest.mark.parametrize("rows", TOKENS)
def test_attention(pair, rows):
    pair.random("qkv", rows, scale=2)
    places = pair.places(rows)
    places["positions"][:3] = (511, 127, 128)[:rows]
    pair.begin(rows, **places)
    pair.random("attention", 0)
    pair.compare("attention", "attention", rows, layer=1)


@pytest.mark.parametrize("rows", (1, 33, 512))
def test_sampling(pair, rows):
    vocab_size = pair.host.checkpoint.header["vocab_size"]
    logits = pair.rng.standard_normal((rows, vocab_size)).astype(np.float32) * 4
    logits[::3] = np.round(logits[::3])  # ties
    logits[1::5, :3] = np.array([0.0, -0.0, -np.inf])
    pair.write("logits", logits)
    choose = pair.rng.choice
    kinds = {"temperature": choose([0, 0.5, 1, 3], rows), "top_k": choose([0, 1, 2, 5, 40, vocab_size - 1], rows),
             "top_p": choose([1, 0.9, 0.5, 0.01], rows), "uniform": pair.rng.random(rows).astype(np.float32)}
    pair.begin(rows, sample=1, **kinds)
    for engine in (pair.host, pair.gpu):
        engine._fields["sampled"][:] = -7
        engine.run_op("sample", rows)
    got, expected = pair.gpu._fields["sampled"][:rows], pair.host._fields["sampled"][:rows]
    greedy = kinds["temperature"] == 0
    np.testing.assert_array_equal(got[greedy], expected[greedy])
    assert (got != expected).sum() <= rows // 200  # a draw may fall within a rounding of the border of two tokens


def test_nan_logit_is_a_fault(pair):
    logits = np.zeros((5, pair.host.checkpoint.header["vocab_size"]), np.float32)
    logits[3, -1] = np.nan
    pair.write("logits", logits)
    pair.begin(5, sample=1, temperature=[0] * 5, logit_rows=[4, 3, 2, 1, 0])
    with pytest.raises(Exception, match="lm_head: logits of token 1 hold NaN"):
        pair.gpu.run_op("sample", 5)
    pair.begin(5, sample=0)


@pytest.mark.parametrize("op, source, out", [("norm", "x", "normed"), ("qkv", "normed", "qkv"), ("rope", "qkv", "qkv"),
                                             ("attention", "qkv", "attention"), ("lm_head", "normed", "logits")])
def test_rows_do_not_depend_on_their_batch(pair, op, source, out):
    """The same bits for a row by itself, in a batch of any size, and launched for more rows than there are."""
    values = pair.rng.standard_normal((512, pair.host.state(source).shape[1])).astype(np.float32)
    places = pair.places(512)
    results = []
    for rows in (512, 65, 33, 9, 3, 1):
        pair.gpu.write(source, values[:rows])
        for name, array in {"num_logits": rows, **places}.items():
            pair.gpu._fields[name][:rows if np.ndim(array) else 1] = array[:rows] if np.ndim(array) else array
        pair.gpu.run_op("begin", rows)
        pair.gpu.run_op(op, min(rows + rows // 2, 512), 1)
        results.append(pair.gpu.state(out, rows))
    for result in results:
        np.testing.assert_array_equal(result.view(np.uint32), results[0][:len(result)].view(np.uint32))
