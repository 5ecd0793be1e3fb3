"""Routing by hand: what each kind of router must choose and how it must weigh, in numbers worked out on paper."""

import math

import numpy as np
import pytest
import reference
from reference import F16, SIGMOID, SOFTMAX, TOPK_SOFTMAX, fields
from test_host_ops import HostModel

SPARSEMIXER = 3


def routed(logits, bias=None, **config):
    """(ids, weights) for one token's logits, which an identity router passes on."""
    num_experts = len(logits)
    config = {**fields(num_experts=num_experts, hidden=num_experts, ffn=8, k=2, router_bias=int(bias is not None)), **config}
    model = reference.random_model(np.random.default_rng(0), **config)
    model["layers"][0]["router"] = np.eye(num_experts, dtype=np.float32)
    if bias is not None:
        model["layers"][0]["router_bias"] = np.float32(bias)
    ids, weights = HostModel(model, max_seq_len=32).route(np.float32([logits]))
    return ids[0].tolist(), weights[0].tolist()


def near(values):
    return pytest.approx(values, rel=2e-6, abs=1e-30)


LN = math.log


@pytest.mark.parametrize("renormalize, weights", [(1, [4 / 7, 3 / 7]), (0, [0.4, 0.3])])
def test_renormalised_or_not(renormalize, weights):
    assert routed([LN(0.1), LN(0.4), LN(0.3), LN(0.2)], renormalize=renormalize) == ([1, 2], near(weights))


def test_softmax_before_and_after_the_choice_under_underflow():
    """exp(-140) is 1.6e-61, which is 0 in fp32; the order must still be that of the logits."""
    logits = [200.0, 50.0, 60.0, 40.0]
    for kind, renormalize in ((SOFTMAX, 0), (SOFTMAX, 1), (TOPK_SOFTMAX, 0)):
        assert routed(logits, router_kind=kind, renormalize=renormalize) == ([0, 2], [1.0, 0.0])
    assert routed([-300.0, -1.0, -400.0, -300.0 + LN(3)], k=3) == ([1, 3, 0], near([1.0, 0.0, 0.0]))


def test_top_k_before_softmax_is_renormalised_by_itself():
    logits = [LN(0.1), LN(0.4), LN(0.3), LN(0.2)]
    assert routed(logits, router_kind=TOPK_SOFTMAX, renormalize=0) == ([1, 2], near([4 / 7, 3 / 7]))


def test_sigmoid_saturates_without_losing_the_order():
    assert routed([40.0, 50.0, 30.0], router_kind=SIGMOID, renormalize=0) == ([1, 0], [1.0, 1.0])
    ids, weights = routed([-100.0, -101.0, -120.0], router_kind=SIGMOID)  # both sigmoids are below the smallest normal
    assert (ids, weights) == ([0, 1], near([1 / (1 + math.exp(-1)), 1 / (1 + math.exp(1))]))


def test_chosen_with_the_bias_and_weighed_without():
    half, less = 0.0, LN(0.4 / 0.6)  # sigmoids .5 and .4
    assert routed([half, less], bias=[0, 10], k=1, router_kind=SIGMOID, renormalize=0) == ([1], near([0.4]))
    assert routed([LN(0.5), LN(0.4), LN(0.1)], bias=[0, 0, 10], renormalize=0) == ([2, 0], near([0.1, 0.5]))


def test_groups_are_masked_though_all_scores_are_negative():
    """Biased scores: -4.5, -4.6, -4.4, -9 in groups of two; the second group's sum is worse, so expert 2 is out."""
    logits = [0.0, LN(0.4 / 0.6), LN(0.6 / 0.4), 0.0]
    ids, weights = routed(logits, bias=[-5, -5, -5, -9.5], router_kind=SIGMOID, num_groups=2, topk_groups=1)
    assert (ids, weights) == ([0, 1], near([5 / 9, 4 / 9]))
    logits = [LN(0.3), LN(0.1), LN(0.35), LN(0.25)]  # softmax: a group counts as its best expert
    assert routed(logits, k=1, renormalize=0, num_groups=2, topk_groups=1) == ([2], near([0.35]))


@pytest.mark.parametrize("num_experts", [2, 4, 5, 8, 32, 60, 64, 256])
def test_ties_go_to_the_lower_index(num_experts):
    for kind in (SOFTMAX, TOPK_SOFTMAX, SIGMOID):
        assert routed([1.5] * num_experts, router_kind=kind)[0] == [0, 1]
    logits = [0.0] * num_experts
    logits[-1] = -0.0
    assert routed(logits)[0] == [0, 1]
    logits[-1] = 1.0
    assert routed(logits)[0] == [num_experts - 1, 0]


def test_small_differences_of_a_large_bias_count():
    """12 and 12.001 are the same number in f16 and bf16."""
    assert routed([0.0, 0.0, 0.0], bias=[12.0, 12.001, 12.002], router_kind=SIGMOID)[0] == [2, 1]


def test_one_expert_of_several_renormalised_weighs_one():
    for kind in (SOFTMAX, SIGMOID):
        assert routed([-90.0, -91.0, -95.0], k=1, router_kind=kind) == ([0], [1.0])


def test_the_sum_counts_as_at_least_its_minimum():
    logits = [LN(0.1), LN(0.4), LN(0.3), LN(0.2)]
    assert routed(logits, renormalize_min=0.9) == ([1, 2], near([0.4 / 0.9, 0.3 / 0.9]))
    assert routed(logits, renormalize_min=0.5) == ([1, 2], near([4 / 7, 3 / 7]))
    sigmoids = [LN(0.2 / 0.8), LN(0.1 / 0.9), -50.0]
    assert routed(sigmoids, router_kind=SIGMOID, renormalize_min=0.5) == ([0, 1], near([0.4, 0.2]))
    assert routed([-60.0, -61.0], k=1, router_kind=SIGMOID, renormalize_min=1e-20) == ([0], near([math.exp(-60) / 1e-20]))


def test_the_scaling_comes_last():
    assert routed([LN(0.4), LN(0.6)], routed_scaling=2.5) == ([1, 0], near([1.5, 1.0]))


def test_sparsemixer():
    """Far is (M - logit) / max(|logit|, M) > 2 * jitter: for M = 2 and jitter .25, logits below 1."""
    ids, weights = routed([2.0, 1.5, 0.9, -3.0], router_kind=SPARSEMIXER, router_jitter=0.25)
    assert ids == [0, 1]  # then M = 1.5, near from .75 on: expert 2 counts beside expert 1
    assert weights == near([1 / (1 + math.exp(-0.5)), 1 / (1 + math.exp(-0.6))])
    ids, weights = routed([-1.0, -2.0, -1.0], router_kind=SPARSEMIXER, router_jitter=0.01)
    assert (ids, weights) == ([0, 2], near([0.5, 1.0]))  # a tie: both are near, then one is left


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
    host = HostModel(beyond_f16(), max_seq_len=32)
    x = host.moe(np.ones((1, 2), np.float32))
    assert host.state["expert_out"][1, 0] == 1e5
    assert x[0].tolist() == near([1e4, 0])
