"""Routing by hand: what each kind of router must choose and how it must weigh, in numbers worked out on paper.

The oracles are a table, which tests/test_cuda_routing.py holds the GPU to as well.
"""

import math
from collections import namedtuple

import numpy as np
import pytest
import reference
from host_model import HostModel
from reference import F16, SIGMOID, SOFTMAX, TOPK_SOFTMAX, fields

SPARSEMIXER = 3
LN = math.log
HIDDEN = 8

# One token's logits and its router's correction bias or None; the choice and its weights; the header's other fields.
Oracle = namedtuple("Oracle", "logits ids weights bias config")


def oracle(logits, ids, weights, bias=None, **config):
    return Oracle(logits, ids, weights, bias, {**fields(k=len(ids)), **config})


TENTHS = [LN(0.1), LN(0.4), LN(0.3), LN(0.2)]
HALF, LESS, MORE = 0.0, LN(0.4 / 0.6), LN(0.6 / 0.4)  # sigmoids .5, .4 and .6
FAR = [200.0, 50.0, 60.0, 40.0]  # exp(-140) is 1.6e-61, which is 0 in fp32; the order must still be that of the logits
SPARSE = fields(router_kind=SPARSEMIXER, renormalize=0)
ORACLES = {
    "renormalised": oracle(TENTHS, [1, 2], [4 / 7, 3 / 7]),
    "not renormalised": oracle(TENTHS, [1, 2], [0.4, 0.3], renormalize=0),
    "top k before softmax": oracle(TENTHS, [1, 2], [4 / 7, 3 / 7], router_kind=TOPK_SOFTMAX, renormalize=0),
    "softmax before top k, underflow": oracle(FAR, [0, 2], [1, 0], renormalize=0),
    "softmax before top k, underflow, renormalised": oracle(FAR, [0, 2], [1, 0]),
    "top k before softmax, underflow": oracle(FAR, [0, 2], [1, 0], router_kind=TOPK_SOFTMAX, renormalize=0),
    "underflow below 0": oracle([-300.0, -1.0, -400.0, -300.0 + LN(3)], [1, 3], [1, 0]),
    "saturated sigmoids keep the order": oracle([40.0, 50.0, 30.0], [1, 0], [1, 1], router_kind=SIGMOID, renormalize=0),
    "sigmoids below the smallest normal": oracle(
        [-100.0, -101.0, -120.0], [0, 1], [1 / (1 + math.exp(-1)), 1 / (1 + math.exp(1))], router_kind=SIGMOID),
    "chosen with the bias, weighed without": oracle([HALF, LESS], [1], [0.4], [0, 10], router_kind=SIGMOID,
                                                    renormalize=0),
    "softmax chosen with the bias": oracle([LN(0.5), LN(0.4), LN(0.1)], [2, 0], [0.1, 0.5], [0, 0, 10], renormalize=0),
    # Biased scores -4.5, -4.6 | -4.4, -9: the second group's sum is worse, so expert 2 is out, and must be at -inf.
    "masked groups, all scores negative": oracle([HALF, LESS, MORE, HALF], [0, 1], [5 / 9, 4 / 9], [-5, -5, -5, -9.5],
                                                 router_kind=SIGMOID, num_groups=2, topk_groups=1),
    "a softmax group counts as its best": oracle([LN(0.3), LN(0.1), LN(0.35), LN(0.25)], [2], [0.35], renormalize=0,
                                                 num_groups=2, topk_groups=1),
    # 12 and 12.001 are the same number in f16 and bf16.
    "a bias is kept in fp32": oracle([0.0, 0.0, 0.0], [2], [0.5], [12.0, 12.001, 12.002], router_kind=SIGMOID,
                                     renormalize=0),
    "one of several, softmax": oracle([-90.0, -91.0, -95.0], [0], [1]),
    "one of several, sigmoid": oracle([-90.0, -91.0, -95.0], [0], [1], router_kind=SIGMOID),
    "a sum below its minimum": oracle(TENTHS, [1, 2], [0.4 / 0.9, 0.3 / 0.9], renormalize_min=0.9),
    "a sum above its minimum": oracle(TENTHS, [1, 2], [4 / 7, 3 / 7], renormalize_min=0.5),
    "a sum of sigmoids below its minimum": oracle([LN(0.2 / 0.8), LN(0.1 / 0.9), -50.0], [0, 1], [0.4, 0.2],
                                                  router_kind=SIGMOID, renormalize_min=0.5),
    "a tiny minimum": oracle([-60.0, -61.0], [0], [math.exp(-60) / 1e-20], router_kind=SIGMOID, renormalize_min=1e-20),
    "the scaling comes last": oracle([LN(0.4), LN(0.6)], [1, 0], [1.5, 1.0], routed_scaling=2.5),
    # Far is (M - logit) / max(|logit|, M) > 2 * jitter: for M = 2 logits below 1, then for M = 1.5 those below .75.
    "sparsemixer": oracle([2.0, 1.5, 0.9, -3.0], [0, 1], [1 / (1 + math.exp(-0.5)), 1 / (1 + math.exp(-0.6))],
                          router_jitter=0.25, **SPARSE),
    "sparsemixer, a tie": oracle([-1.0, -2.0, -1.0], [0, 2], [0.5, 1.0], router_jitter=0.01, **SPARSE),
}
TIED = (2, 4, 5, 8, 32, 60, 64, 256)  # numbers of experts


def model_for(num_experts, bias=None, **config):
    """A model of one layer whose router is zeros; its logits are then its first column, for tokens of 1, 0, 0, ..."""
    config = {**fields(num_experts=num_experts, hidden=HIDDEN, ffn=8, k=2, router_bias=int(bias is not None)), **config}
    model = reference.random_model(np.random.default_rng(0), **config)
    model["layers"][0]["router"] = np.zeros((num_experts, HIDDEN), np.float32)
    if bias is not None:
        model["layers"][0]["router_bias"] = np.float32(bias)
    return model


def model_of(case, num_experts=0):
    """The model of an oracle; experts beyond its own, up to num_experts, have logits of -inf: they cannot be chosen."""
    more = max(num_experts - len(case.logits), 0)
    bias = None if case.bias is None else case.bias + [0] * more
    model = model_for(len(case.logits) + more, bias, **case.config)
    model["layers"][0]["router"][:, 0] = case.logits + [-np.inf] * more
    return model


def token():
    return np.eye(1, HIDDEN, dtype=np.float32)


def near(values):
    return pytest.approx(values, rel=2e-6, abs=1e-30)


@pytest.mark.parametrize("name, more", [
    *((name, 0) for name in ORACLES),
    *((name, 8) for name in ("not renormalised", "sigmoids below the smallest normal", "sparsemixer"))])
def test_oracle(name, more):
    case = ORACLES[name]
    ids, weights = HostModel(model_of(case, more), context=32).route(token())
    assert (ids[0].tolist(), weights[0].tolist()) == (case.ids, near(case.weights))


def tied_logits(num_experts):
    """(logits, the two to choose): all equal, but for the sign of a zero, or the last one larger."""
    yield np.full(num_experts, 1.5), [0, 1]
    zeros = np.zeros(num_experts)
    zeros[-1] = -0.0
    yield zeros, [0, 1]
    last = np.zeros(num_experts)
    last[-1] = 1
    yield last, [num_experts - 1, 0]


@pytest.mark.parametrize("kind", [SOFTMAX, TOPK_SOFTMAX, SIGMOID])
@pytest.mark.parametrize("num_experts", TIED)
def test_ties_go_to_the_lower_index(num_experts, kind):
    model = model_for(num_experts, router_kind=kind)
    for logits, ids in tied_logits(num_experts):
        model["layers"][0]["router"][:, 0] = logits
        assert HostModel(model, context=32).route(token())[0][0].tolist() == ids


def beyond_f16():
    """A model of which an expert gives 1e5, weighed .1, for ones: the second of two, by softmax .9 and .1."""
    config = fields(num_experts=2, k=2, hidden=2, ffn=8, weight_dtype=F16, activation=reference.RELU, gated=0)
    model = reference.random_model(np.random.default_rng(0), **config)
    layer = model["layers"][0]
    layer["router"] = np.float32([[0, LN(9)], [0, 0]])
    layer["up"][:], layer["down"][:] = 0, 0
    layer["up"][1, 0, 0], layer["down"][1, 0, 0] = 1000, 100
    return model


def test_an_output_beyond_f16_is_kept():
    host = HostModel(beyond_f16(), context=32)
    x = host.moe(np.ones((1, 2), np.float32))
    assert host.state["expert_out"][1, 0] == 1e5
    assert x[0].tolist() == near([1e4, 0])
