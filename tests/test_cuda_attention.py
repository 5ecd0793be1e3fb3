"""Attention on the GPU over long contexts: how positions are split must show in no bit but by their number."""

import numpy as np
import pytest
import synthetic
from test_cuda_ops import MODELS, Pair

pytestmark = pytest.mark.gpu

SHORT, LONG = 512, 20_000
# Positions seen: pieces are of 64, and spans double in length beyond 4096 and 8192 and 16384.
LENGTHS = [border + step for border in (2, 64, 65, 128, 512, 4096, 4160, 8192, 16384, 19_999) for step in (-1, 0, 1)]


@pytest.fixture(scope="module", params=("odd", "one kv head", "norms of heads, window", "latent"))
def pairs(request, tmp_path_factory):
    """One model with SHORT contexts and with LONG ones."""
    path = synthetic.write_model(tmp_path_factory.mktemp("attention") / "model.bin", **MODELS[request.param],
                                 max_positions=0)
    pairs = []
    for context in (SHORT, LONG):
        pairs.append(Pair(path, num_slots=5, context=context))
    yield pairs
    for pair in pairs:
        pair.gpu.close()
        pair.host.close()


def attend(pair, q, positions, slots, layer, launched=None):
    """The GPU's attention of rows of q, launched for as many rows or for more."""
    rows = len(positions)
    pair.gpu.write(pair.q, q)
    pair.random("attention", 0)
    pair.begin(rows, positions=positions, slots=slots)
    pair.gpu.run_op("attention", launched or rows, layer)
    return pair.gpu.state("attention", rows).copy()


def part(pair, name, layer):
    """A layer's part of the host's cache, (slots, kv heads, positions, dimensions)."""
    header, ring = pair.header, pair.host.library.headers.cache_values(pair.header, pair.host.context)["ring"]
    kept = [ring if header["window_layers"][0] >> number & 1 else pair.host.context for number in range(layer + 1)]
    rows = [pair.host.num_slots * int(header["num_kv_heads"]) * positions for positions in kept]
    cache = pair.host.state(name)[sum(rows[:-1]):sum(rows)]
    return cache.reshape(pair.host.num_slots, int(header["num_kv_heads"]), kept[-1], -1)


@pytest.mark.parametrize("layer", (0, 1))
@pytest.mark.parametrize("rows", (1, 2, 5, 33, 64, 65))
def test_unequal_lengths_around_the_borders_of_pieces(pairs, rows, layer):
    pair = pairs[1]
    pair.random(pair.q, rows, scale=2)
    positions = pair.rng.choice(LENGTHS, rows) - 1
    pair.begin(rows, positions=positions, slots=pair.rng.integers(0, pair.host.num_slots, rows))
    pair.random("attention", 0)
    pair.compare("attention", "attention", rows, layer)


@pytest.mark.parametrize("length", LENGTHS)
def test_every_border_alone(pairs, length):
    pair = pairs[1]
    pair.random(pair.q, 1, scale=2)
    pair.begin(1, positions=[length - 1], slots=[pair.rng.integers(0, pair.host.num_slots)])
    pair.random("attention", 0)
    pair.compare("attention", "attention", 1)


@pytest.mark.parametrize("layer", (0, 1))
def test_bits_depend_on_neither_batch_nor_launch(pairs, layer):
    """Nor on the run: a row with lengths of others, alone, in a prompt's kernel, and repeated."""
    pair = pairs[1]
    q = pair.rng.standard_normal((130, pair.host.state(pair.q).shape[1])).astype(np.float32) * 2
    positions = pair.rng.choice(LENGTHS, 130) - 1
    slots = pair.rng.integers(0, pair.host.num_slots, 130)
    whole = attend(pair, q, positions, slots, layer)
    for rows in (1, 2, 3, 7, 31, 32, 33, 63, 64, 65, 130):
        for first, launched in ((0, rows), (130 - rows, min(2 * rows, 130))):
            chosen = slice(first, first + rows)
            got = attend(pair, q[chosen], positions[chosen], slots[chosen], layer, launched)
            np.testing.assert_array_equal(got.view(np.uint32), whole[chosen].view(np.uint32))
    for _ in range(20):
        again = attend(pair, q[:33], positions[:33], slots[:33], layer)
        np.testing.assert_array_equal(again.view(np.uint32), whole[:33].view(np.uint32))


@pytest.mark.parametrize("layer", (0, 1))
@pytest.mark.parametrize("rows", (1, 3, 64, 130))
def test_bits_do_not_depend_on_the_capacity(pairs, rows, layer):
    short, long = pairs
    for name in ("key_cache", "value_cache"):
        values = part(short, name, layer)
        part(long, name, layer)[:, :, :values.shape[2]] = values
    long.share_caches()
    q = short.rng.standard_normal((rows, short.host.state(short.q).shape[1])).astype(np.float32) * 2
    positions = short.rng.integers(0, SHORT, rows)
    positions[0] = SHORT - 1
    slots = short.rng.integers(0, short.host.num_slots, rows)
    results = [attend(pair, q, positions, slots, layer) for pair in pairs]
    np.testing.assert_array_equal(results[0].view(np.uint32), results[1].view(np.uint32))
