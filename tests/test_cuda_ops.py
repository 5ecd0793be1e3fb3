"""The CUDA backend's ops, apart from the experts', against the host's: the same model, the same state, op by op."""

import gpu_model
import numpy as np
import pytest
import synthetic

from colibri import gpu

pytestmark = pytest.mark.gpu

TOKENS = (1, 2, 3, 7, 16, 31, 32, 33, 64, 65, 127, 128, 129, 512)
BIASES = dict.fromkeys(("norm_bias", "qkv_bias", "attention_out_bias", "lm_head_bias"), 1)
MODELS = {
    "example": {"hidden": 128, "ffn": 96, "num_experts": 32, "num_heads": 8, "num_kv_heads": 4, "head_dim": 16},
    "odd": {"hidden": 100, "num_heads": 6, "num_kv_heads": 2, "head_dim": 18, "vocab_size": 301, "rope_theta": 5e5},
    "bf16, segments": {"hidden": 1100, "num_heads": 10, "num_kv_heads": 2, "head_dim": 80, "vocab_size": 3000,
                       "weight_dtype": 2},
    "one kv head": {"num_heads": 24, "num_kv_heads": 1, "head_dim": 128, "hidden": 520, "vocab_size": 1000},
    "long heads": {"num_heads": 2, "num_kv_heads": 2, "head_dim": 512, "rope_kind": 0, "tied_embeddings": 1},
    "layer norm, biases, multipliers": {
        "hidden": 1100, "num_heads": 6, "num_kv_heads": 2, "head_dim": 18, "vocab_size": 301, "norm_kind": 2, **BIASES,
        "clip_qkv": 1.5, "attention_scale": 0.4, "final_norm_eps": 1e-2, "embedding_multiplier": 12.0,
        "residual_multiplier": 0.22, "logits_multiplier": 0.125},
    "norms of heads, window": {
        "hidden": 100, "num_heads": 12, "num_kv_heads": 2, "head_dim": 42, "rotary_dim": 22, "qk_norm": 1, "sinks": 1,
        "window": 37, "window_layers": [2, 0, 0, 0], "rope_attention_factor": 1.3, "weight_dtype": 2},
    "norms of all heads, long window": {
        "num_heads": 24, "num_kv_heads": 4, "head_dim": 128, "rotary_dim": 64, "qk_norm": 2, "sinks": 1,
        "clip_qkv": 2.0, "window": 200, "window_layers": [2, 0, 0, 0]},
    "latent": {"attention_kind": 1, "num_heads": 5, "num_kv_heads": 5, "head_dim": 22, "rotary_dim": 10,
               "v_head_dim": 13, "kv_lora_rank": 18, "latent_norm_eps": 1e-2, "qkv_bias": 1},
    "latents": {"attention_kind": 1, "num_heads": 8, "num_kv_heads": 8, "head_dim": 192, "rotary_dim": 64,
                "v_head_dim": 128, "q_lora_rank": 600, "kv_lora_rank": 512, "latent_norm_eps": 1e-6, "weight_dtype": 2},
    "mixture of attention": {"attention_kind": 2, "k": 3, "num_heads": 9, "num_kv_heads": 3, "head_dim": 34,
                             "attention_scale": 0.1},
}
TOLERANCE = {1: 5e-6, 2: 2e-5}
LATENT, MOA = 1, 2
SOURCES = ("x", "normed", "qkv", "q", "kv", "attention")


class Pair:
    """One model on the host and on the GPU. Inputs go to both; an op's outputs are compared, starting from NaN."""

    def __init__(self, path, **options):
        self.host, self.gpu = gpu_model.engines(path, **options)
        self.header = self.host.checkpoint.header
        self.rng = np.random.default_rng()
        self.tolerance = TOLERANCE[self.header["weight_dtype"]]
        self.q = "q" if self.host.state("q").size else "qkv"
        for name in ("key_cache", "value_cache"):
            self.write(name, self.rng.standard_normal(self.host.state(name).shape, dtype=np.float32))

    def write(self, name, array):
        for engine in (self.host, self.gpu):
            if array.size:
                engine.write(name, array)

    def share_caches(self):
        """The host's on the GPU too."""
        for name in ("key_cache", "value_cache"):
            self.write(name, self.host.state(name).copy())

    def random(self, name, rows, scale=1.0, mean=0.0):
        """Rows of a buffer, and NaN in all rows after them."""
        buffer = np.full(self.host.state(name).shape, np.nan, np.float32)
        buffer[:rows] = mean + self.rng.standard_normal((rows, buffer.shape[1])) * scale
        self.write(name, buffer)

    def begin(self, rows, **values):
        for engine in (self.host, self.gpu):
            for name, value in {"num_logits": rows, "logit_rows": range(rows), "slots": [0] * rows,
                                "positions": [0] * rows, **values}.items():
                field = engine.batch.fields[name]
                field[:len(value) if np.ndim(value) else 1] = value
            engine.run_op("begin", rows)

    def compare(self, op, out, rows, layer=0, exact=False, columns=None):
        for engine in (self.host, self.gpu):
            engine.run_op(op, rows, layer)
        return self.same(out, rows, exact, columns)

    def same(self, out, rows, exact=False, columns=None):
        got, expected = (engine.state(out, rows)[:, :columns].copy() for engine in (self.gpu, self.host))
        assert np.isfinite(got).all()
        if exact:
            np.testing.assert_array_equal(got, expected)
        error = np.linalg.norm((got - expected).astype(np.float64)) / np.linalg.norm(expected.astype(np.float64))
        assert error < self.tolerance, error
        return got

    def places(self, rows):
        """(slot, position) for every token, no two at the same place of a cache."""
        values = self.host.library.headers.cache_values(self.header, self.host.context)
        kept = values["ring"] if values["num_windowed"] else self.host.context
        flat = np.sort(self.rng.choice(self.host.num_slots * kept, rows, replace=False))
        rounds = self.rng.integers(0, self.host.context // kept, rows)
        return {"slots": flat // kept, "positions": flat % kept + kept * rounds}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ops")
    paths = {name: synthetic.write_model(folder / f"{name}.bin", **MODELS[name], max_positions=0) for name in MODELS}
    gpu_model.build_all(paths.values())
    return paths


@pytest.fixture(scope="module", params=MODELS)
def pair(request, files):
    pair = Pair(files[request.param])
    yield pair
    pair.gpu.close()
    pair.host.close()


@pytest.mark.parametrize("num_threads", (1, 3, 8))
@pytest.mark.parametrize("num_bytes", (1, 511, 512, 10_001, 3_000_003))
def test_upload(pair, num_bytes, num_threads):
    """Through chunks so small that each is filled many times; what lies behind the target stays."""
    source = pair.rng.integers(0, 256, num_bytes).astype(np.uint8)
    memory, chunks = pair.gpu.memory, np.empty(num_threads * 2 * 512, np.uint8)
    with gpu.temporary(num_bytes + 100) as target:
        memory.write(target, np.full(num_bytes + 100, 7, np.uint8))
        pair.gpu.library.upload(target, source.ctypes.data, num_bytes, chunks.ctypes.data, 512, num_threads,
                                memory.stream)
        got = memory.read(target, (num_bytes + 100,), np.uint8)
    np.testing.assert_array_equal(got, np.pad(source, (0, 100), constant_values=7))


@pytest.mark.parametrize("rows", TOKENS)
def test_embed_and_norms(pair, rows):
    pair.random("x", 0)
    pair.begin(rows, tokens=pair.rng.integers(0, pair.header["vocab_size"], rows))
    pair.compare("embed", "x", rows, exact=True)
    pair.random("normed", 0)
    pair.compare("attention_norm", "normed", rows, layer=1)
    pair.random("normed", 0)
    pair.compare("ffn_norm", "normed", rows, layer=1)
    pair.random("x", rows, scale=1e-3, mean=pair.rng.choice([0, 1e-3]))
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
    if pair.header["attention_kind"] == MOA:  # products of experts
        return
    pair.random("attention", rows)
    pair.random("x", rows)
    pair.compare("attention_out", "x", rows, layer=1)


@pytest.mark.parametrize("rows", TOKENS)
@pytest.mark.parametrize("pair", ["latent", "latents"], indirect=True)
def test_latent_queries(pair, rows):
    pair.begin(rows)
    for name in ("qkv", "q", "kv"):
        pair.random(name, rows if name == "qkv" else 0)
    pair.compare("queries", "kv", rows, layer=1)
    if pair.q == "q":
        pair.same("q", rows)


@pytest.mark.parametrize("rows", TOKENS)
def test_rope_and_caches(pair, rows):
    for name in ("qkv", "q", "kv"):
        pair.random(name, rows)
    pair.begin(rows, **pair.places(rows))
    pair.compare("rope", pair.q, rows, layer=1, columns=pair.header["num_heads"] * pair.header["head_dim"])
    for cache in ("key_cache", "value_cache"):
        got, expected = pair.gpu.state(cache), pair.host.state(cache)
        np.testing.assert_allclose(got, expected, rtol=0, atol=1e-5)
    pair.share_caches()


@pytest.mark.parametrize("layer", (0, 1))
@pytest.mark.parametrize("rows", TOKENS)
def test_attention(pair, rows, layer):
    pair.random(pair.q, rows, scale=2)
    places = pair.places(rows)
    places["positions"][:6] = (511, 127, 128, 36, 37, 256)[:rows]
    pair.begin(rows, **places)
    pair.random("attention", 0)
    pair.compare("attention", "attention", rows, layer)


@pytest.mark.parametrize("rows", (1, 33, 512))
def test_sampling(pair, rows):
    vocab_size = pair.header["vocab_size"]
    logits = pair.rng.standard_normal((rows, vocab_size)).astype(np.float32) * 4
    logits[::3] = np.round(logits[::3])  # ties
    logits[1::5, :3] = np.array([0.0, -0.0, -np.inf])
    pair.write("logits", logits)
    choose = pair.rng.choice
    kinds = {"temperature": choose([0, 0.5, 1, 3], rows), "top_k": choose([0, 1, 2, 5, 40, vocab_size - 1], rows),
             "top_p": choose([1, 0.9, 0.5, 0.01], rows), "uniform": pair.rng.random(rows).astype(np.float32)}
    pair.begin(rows, sample=1, **kinds)
    for engine in (pair.host, pair.gpu):
        engine.batch.fields["sampled"][:] = -7
        engine.run_op("sample", rows)
    got, expected = pair.gpu.batch.fields["sampled"][:rows], pair.host.batch.fields["sampled"][:rows]
    greedy = kinds["temperature"] == 0
    np.testing.assert_array_equal(got[greedy], expected[greedy])
    assert (got != expected).sum() <= rows // 200  # a draw may fall within a rounding of the border of two tokens


def test_nan_logit_is_a_fault(pair):
    logits = np.zeros((5, pair.header["vocab_size"]), np.float32)
    logits[3, -1] = logits[4] = np.nan
    pair.write("logits", logits)
    pair.begin(5, sample=1, temperature=[0] * 5, logit_rows=[4, 3, 2, 1, 0])
    with pytest.raises(Exception, match="lm_head: logits of token 1 hold NaN"):
        pair.gpu.run_op("sample", 5)
    pair.begin(5, sample=0)


@pytest.mark.parametrize("op", ["ffn_norm", "qkv", "queries", "rope", "attention", "attention_out", "lm_head"])
def test_rows_do_not_depend_on_their_batch(pair, op):
    """The same bits for a row by itself, in a batch, and launched for more rows than there are; beyond 64 rows products
    have kernels of their own."""
    kind = pair.header["attention_kind"]
    if (op == "queries" and kind != LATENT) or (op == "attention_out" and kind == MOA):
        pytest.skip("not in this model, or a product of experts")
    out = {"ffn_norm": "normed", "queries": "kv", "rope": pair.q, "attention_out": "x", "lm_head": "logits"}.get(op, op)
    values = {name: pair.rng.standard_normal((512, pair.host.state(name).shape[1])).astype(np.float32)
              for name in SOURCES}
    places = pair.places(512)
    results = []
    for rows in (512, 65, 33, 9, 3, 1):
        for name, array in values.items():
            if array.size:
                pair.gpu.write(name, array[:rows])
        for name, array in {"num_logits": rows, **places}.items():
            pair.gpu.batch.fields[name][:rows if np.ndim(array) else 1] = array[:rows] if np.ndim(array) else array
        pair.gpu.run_op("begin", rows)
        pair.gpu.run_op(op, min(rows + rows // 2, 512), 1)
        results.append(pair.gpu.state(out, rows))
    groups = [results[:2], results[2:]] if op in ("qkv", "queries", "attention_out", "lm_head") else [results]
    for first, *others in groups:
        for result in others:
            np.testing.assert_array_equal(result.view(np.uint32), first[:len(result)].view(np.uint32))
    pair.share_caches()  # rope has written the GPU's alone
