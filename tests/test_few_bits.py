"""Products of weights of few bits on the host: bits as NumPy computes them, on every instruction set that is here."""

import functools

import numpy as np
import pytest
import reference
import reference_formats
from host_model import HostModel, random_inputs, relative_error, with_isa
from reference import RELU, SILU, fields
from reference_formats import FORMS, FP8, INT4, INT8, MXFP4

from colibri.errors import ColibriError
from colibri.headers import Form, is_few

ISAS = ("portable", "avx2", "avxvnni", "vnni", "amx")
# Columns of a matrix are an input's: hidden for up and qkv, ffn for down, heads * head_dim for attention_out.
SIZES = {"odd": fields(hidden=157, ffn=205, num_heads=7, num_kv_heads=1, head_dim=10, vocab_size=131),
         "small": fields(hidden=3, ffn=1, num_heads=1, num_kv_heads=1, head_dim=2, vocab_size=5),
         "even": fields(hidden=256, ffn=128, num_heads=4, num_kv_heads=2, head_dim=16, vocab_size=64)}
LIBRARIES = [("odd", FORMS[0:3]), ("odd", FORMS[3:6]), ("odd", FORMS[6:9]), ("odd", FORMS[9:12]),
             ("odd", [Form(MXFP4, 32, 0), Form(FP8, 128, 0), Form(INT8, 64, 1)]),
             ("odd", [Form(FP8, 128, 0), Form(MXFP4, 32, 0), Form(FP8, 128, 0)]),
             ("small", [Form(INT8, 32, 0), Form(INT4, 64, 1), Form(MXFP4, 32, 0)]),
             ("small", [Form(INT4, 128, 0), Form(FP8, 128, 0), Form(INT8, 128, 1)]),
             ("even", [Form(INT4, 64, 0), Form(INT8, 64, 0), Form(INT4, 32, 1)]),
             ("even", [Form(MXFP4, 32, 0), Form(INT8, 128, 0), Form(FP8, 128, 0)])]


def config_of(size, forms):
    """Returns BinHeader's fields for forms of experts, dense matrices and embedding."""
    config = {**SIZES[size], "num_experts": 5, "k": 2, "compute_dtype": 2, "activation": SILU}
    for name, form in zip(("expert", "dense", "embed"), forms):
        values = form._replace(dtype=form.dtype + 1)._asdict()
        config |= {f"{name}_{field}": value for field, value in values.items()}
    return config


def title(library):
    return ", ".join([library[0], *map(reference_formats.name, library[1])])


@functools.cache
def here():
    """Returns the instruction sets that this machine has."""
    built, found = HostModel(reference.random_model(np.random.default_rng(0), **config_of(*LIBRARIES[0]))).library, []
    for isa in ISAS:
        try:
            found.append(with_isa(built, isa).path(0).decode().removeprefix("host "))
        except ColibriError:
            continue
    return found


@functools.cache
def models(index):
    """Returns the model of a library, and it on each instruction set."""
    size, forms = LIBRARIES[index]
    model = reference.random_model(np.random.default_rng(index), **config_of(size, forms))
    return model, {isa: HostModel(model, num_slots=3, num_threads=2, isa=isa) for isa in here()}


def test_every_form_is_in_one_of_the_libraries():
    assert {form for size, forms in LIBRARIES if size == "odd" for form in forms} == set(FORMS)
    assert here()[0] == "portable"


def inputs(rng, rows, columns):
    """Rows among which are zeros, one large value, and a scale that is subnormal."""
    x = random_inputs(rng, rows, columns) * np.float32(3)
    x[1 % rows] = 0
    x[2 % rows, -1] = 1e4
    x[4 % rows] *= np.float32(1e-38)
    return x


def bound(x, weights, form):
    """Returns how far products may be from those of dequantised weights: each input is off by half a step of its
    group's 127, but with fp8; and there is float32's rounding.
    """
    size = np.abs(x) @ np.abs(weights).T
    if form.dtype == FP8:
        return 1e-5 * size
    groups = [slice(first, first + form.group) for first in range(0, x.shape[1], form.group)]
    steps = [np.abs(x[:, part]).max(axis=1, keepdims=True) / 254 * np.abs(weights[:, part]).sum(axis=1)
             for part in groups]
    return 1.00001 * sum(steps) + 1e-6 * size


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 7, 16, 33, 97, 200])
@pytest.mark.parametrize("index", range(len(LIBRARIES)), ids=map(title, LIBRARIES))
def test_dense_products_have_the_bits_of_numpy(index, rows):
    model, hosts = models(index)
    layer, rng = model["layers"][0], np.random.default_rng(rows)
    normed, mixed = inputs(rng, rows, model["hidden"]), inputs(rng, rows, model["num_heads"] * model["head_dim"])
    before = random_inputs(rng, rows, model["hidden"])
    qkv = reference_formats.product(layer["qkv"], normed)
    out = before + reference_formats.product(layer["attention_out"], mixed)
    logits = reference_formats.product(model["lm_head"], normed)
    for isa, host in hosts.items():
        host.state["normed"][:rows], host.state["attention"][:rows] = normed, mixed
        host.state["x"][:rows] = before
        for op in ("qkv", "attention_out", "lm_head"):
            host.run(op, rows)
        for name, expected in (("qkv", qkv), ("x", out), ("logits", logits)):
            assert np.array_equal(host.state[name][:rows], expected), (isa, name)
    weights, wide = np.asarray(layer["qkv"], np.float64), normed.astype(np.float64)
    assert np.all(np.abs(qkv - wide @ weights.T) <= bound(wide, weights, layer["qkv"].parts[0]) + 1e-36)


@pytest.mark.parametrize("rows", [1, 3, 6, 40, 300])
@pytest.mark.parametrize("index", range(len(LIBRARIES)), ids=map(title, LIBRARIES))
def test_experts(index, rows):
    """Their second product has the bits of NumPy; all is near the dequantised weights, and alike everywhere."""
    model, hosts = models(index)
    x, results = inputs(np.random.default_rng(rows), rows, model["hidden"]), {}
    for isa, host in hosts.items():
        host.state["normed"][:rows], host.state["x"][:rows] = x, x
        host.begin(rows, tokens=[0] * rows, positions=range(rows), slots=[0] * rows)
        for op in ("router", "experts_up", "experts_down", "combine"):
            host.run(op, rows)
        results[isa] = [host.state[name][:count].copy() for name, count in (
            ("expert_ids", rows), ("expert_mid", 2 * rows), ("expert_out", 2 * rows), ("x", rows))]
    ids, middle, out, _ = results["portable"]
    layer = model["layers"][0]
    for expert in np.unique(ids):
        chosen = ids.ravel() == expert
        form, codes, scales, zeros = layer["down"].parts
        down = layer["down"][expert].view(reference_formats.Few)
        down.parts = form, codes[expert], scales[expert], None if zeros is None else zeros[expert]
        assert np.array_equal(out[chosen], reference_formats.product(down, middle[chosen]))
        wide = {name: value if value is None else np.asarray(value, np.float64) for name, value in layer.items()}
        expected = reference.middle(np.repeat(x, 2, axis=0)[chosen].astype(np.float64), wide, expert, model)
        assert relative_error(middle[chosen], expected) < (1e-5 if form.dtype == FP8 else 0.03)
    for isa, result in results.items():
        for one, other in zip(results["avx2" if "avx2" in results and isa != "portable" else isa], result):
            assert np.array_equal(one, other), isa


@pytest.mark.parametrize("isa", ISAS)
def test_up_without_a_gate_has_the_bits_of_numpy(isa):
    if isa not in here():
        pytest.skip(f"this machine has no {isa}")
    config = {**config_of("odd", [Form(INT4, 32, 1), Form(INT8, 32, 0), Form(INT8, 32, 0)]), "gated": 0,
              "activation": RELU, "num_experts": 1, "k": 1}
    model = reference.random_model(np.random.default_rng(7), **config)
    host, x = HostModel(model, isa=isa), inputs(np.random.default_rng(8), 30, model["hidden"])
    up = model["layers"][0]["up"][0].view(reference_formats.Few)
    up.parts = model["layers"][0]["up"].parts[0], *(part[0] for part in model["layers"][0]["up"].parts[1:])
    host.state["normed"][:30] = x
    host.begin(30, tokens=[0] * 30, positions=range(30), slots=[0] * 30)
    host.run("router", 30)
    host.run("experts_up", 30)
    assert np.array_equal(host.state["expert_mid"][:30], np.maximum(reference_formats.product(up, x), 0))


@pytest.mark.parametrize("index", range(len(LIBRARIES)), ids=map(title, LIBRARIES))
def test_embedding_rows_are_the_dequantised_ones(index):
    model, hosts = models(index)
    tokens = np.arange(model["vocab_size"])
    for isa, host in hosts.items():
        host.begin(len(tokens), tokens=tokens, positions=tokens, slots=tokens * 0)
        host.run("embed", len(tokens))
        assert np.array_equal(host.state["x"][:len(tokens)], np.asarray(model["embed"])), isa


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_makes_nan(bad):
    _, hosts = models(0)
    for isa, host in hosts.items():
        for rows in (2, 9):
            host.state["normed"][:rows] = 1
            host.state["normed"][1, 5] = bad
            host.run("qkv", rows)
            assert np.isnan(host.state["qkv"][1]).all() and np.isfinite(host.state["qkv"][0]).all(), isa


@pytest.mark.parametrize("index", [0, 3, 5, 8], ids=[title(LIBRARIES[index]) for index in (0, 3, 5, 8)])
def test_bits_do_not_depend_on_threads_or_on_the_batch(index):
    model, hosts = models(index)
    tokens = np.random.default_rng(14).integers(0, model["vocab_size"], 61)
    for isa in hosts:
        results = []
        for threads in (1, 2, 3):
            host = HostModel(model, num_threads=threads, isa=isa)
            results.append(host.forward(tokens, range(61), [0] * 61))
            results.append(np.concatenate([host.forward(tokens[part], range(61)[part], [1] * len(tokens[part]))
                                           for part in (slice(0, 1), slice(1, 3), slice(3, 20), slice(20, 61))]))
        assert all(np.array_equal(results[0], other) for other in results), isa


@pytest.mark.parametrize("index", range(len(LIBRARIES)), ids=map(title, LIBRARIES))
def test_whole_models_are_near_their_dequantised_weights(index):
    model, hosts = models(index)
    tokens = np.random.default_rng(15).integers(0, model["vocab_size"], 40)
    expected = reference.forward(reference.as_float64(model), tokens, range(40), [0] * 40, {})
    assert any(is_few(form.dtype) for form in LIBRARIES[index][1])
    for isa, host in hosts.items():
        got = host.forward(tokens, range(40), [0] * 40)
        wrong = np.linalg.norm(got - expected, axis=1) / np.linalg.norm(expected, axis=1)
        assert np.median(wrong) < 0.05, isa  # a token whose choice of experts is close may have another
