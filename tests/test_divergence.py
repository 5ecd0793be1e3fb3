"""The example model in few bits, beside NumPy with its dequantised weights: what int8 activations alone change."""

import numpy as np
import pytest
import reference_families
from conftest import DATA, program
from converter_files import read_bin

from bench.quality import log_softmax
from colibri.engine import Engine

TEXT = np.frombuffer((DATA / "heldout.txt").read_bytes(), np.uint8)
MOST = 1e-3  # nats a token


def exact(path, tokens):
    """The logits of the weights that a .bin stands for, in float64."""
    header, weights = read_bin(path)
    fields = {name: header[name].item() for name in header.dtype.names if header[name].ndim == 0}
    return reference_families.logits({**fields, "window_layers": [], "dense_layers": []}, weights, tokens, np.float64)


@pytest.mark.parametrize("dtype", ["int8", "int4", "fp8"])
def test_divergence_from_the_dequantised_weights(tmp_path, dtype):
    made = program("converter", "models/moe-32.pt", tmp_path / "a.bin", "--dtype", dtype)
    assert made.returncode == 0, made.stderr.decode()
    found = []
    with Engine(tmp_path / "a.bin", backend="host") as engine:
        for start in (0, 20_000):
            tokens = TEXT[start:start + 384].astype(int)
            with engine.session() as session:
                got = log_softmax(engine.step([(session, tokens)], every=True))
            expected = log_softmax(exact(tmp_path / "a.bin", tokens))
            found.append((np.exp(expected) * (expected - got)).sum(axis=1))
    mean = np.concatenate(found).mean()
    assert mean < MOST
