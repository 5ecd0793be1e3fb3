"""bench/host.py runs what it times, in a smaller model."""

import numpy as np
import pytest

from bench import host


@pytest.fixture(params=["f16", "int4"])
def stack(monkeypatch, request):
    for name, value in {"LEAST_BYTES": 1, "READ_BYTES": 1 << 20}.items():
        monkeypatch.setattr(host, name, value)
    return host.Stack(request.param)


def test_steps_and_rates(stack):
    for threads in (1, 2):
        value, ceiling, ratio = host.against(lambda t=threads: stack.decode_rate(t, 0.01),
                                             lambda t=threads: stack.read_rate(t))
        assert value > 0 and ceiling > 0 and ratio == pytest.approx(value / ceiling, rel=1e-6)
        assert 0 < stack.prefill_rate(threads) < np.inf
        _, batch, x = stack.bind(threads)
        assert batch["input"] == x.ctypes.data and batch["num_tokens"] == 512
        assert np.abs(x).min(axis=1).max() > 0  # fresh rows: none is zero
        out = stack.states(threads)
        assert 0.1 < np.abs(out).mean() < 100 and np.isfinite(out).all()


@pytest.mark.parametrize("rounds, expected", [(1, 5), (2, 4), (3, 5)])
def test_medians_of_the_quieter_half(monkeypatch, rounds, expected):
    times, values = iter([(0, 0), (3, 0), (3, 0), (4, 0), (4, 0), (6, 0)]), iter([5, 4, 6])
    monkeypatch.setattr(host, "busy_seconds", lambda: next(times))
    monkeypatch.setattr(host.time, "perf_counter", iter(range(100)).__next__)
    median, _ = host.medians(rounds, lambda: (next(values),))
    assert median == expected
