"""bench/whole.py runs what it times, in a smaller model."""

import numpy as np
import pytest

from bench import whole
from colibri.engine import Engine


@pytest.mark.parametrize("dtype", whole.DTYPES)
def test_a_model_of_random_weights(monkeypatch, tmp_path, dtype):
    shape = {**whole.SHAPES["qwen3-30b"], "num_layers": 2, "num_experts": 12, "k": 3, "hidden": 192, "ffn": 128,
             "num_heads": 4, "num_kv_heads": 2, "head_dim": 32, "vocab_size": 300}
    monkeypatch.setitem(whole.SHAPES, "small", shape)
    whole.write_model(tmp_path / "model.bin", "small", dtype)
    with Engine(tmp_path / "model.bin", backend="host", threads=2) as engine, engine.session() as session:
        logits = session.prefill(range(0, 300, 7))
        assert 0.5 < np.std(logits) < 2 and len(set(logits.tolist())) > 250
        routed = engine.state("routed_tokens")
        assert (routed > 0).sum() > 20 and routed.sum() == 2 * 3 * 43
    rows = {what: figures for what, *figures in whole.measure(tmp_path / "model.bin", 2, 5, 2)}
    unit, value, ceiling, ratio, _ = rows["decode"]
    assert unit == "GB/s" and float(value) > 0 and float(ceiling) > 0 and float(ratio) > 0
    assert 0 < float(rows["ITL P50"][1]) <= float(rows["ITL P99"][1])
