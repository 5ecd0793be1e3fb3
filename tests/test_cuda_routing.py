"""The oracles of tests/test_routing.py on the GPU, and a row's bits at several positions and batch sizes."""

import concurrent.futures
import os

import gpu_model
import numpy as np
import pytest
from synthetic import DENSE, write_model
from test_routing import (
    ORACLES,
    TIED,
    model_for,
    model_of,
    near,
    tied_logits,
    token,
)

from colibri.engine import Engine

pytestmark = pytest.mark.gpu

MORE = 8  # experts of all oracles but those with groups, so that they share libraries


def oracle_model(name):
    case = ORACLES[name]
    return model_of(case, 0 if case.config.get("num_groups") else MORE)


@pytest.fixture(scope="module", autouse=True)
def libraries(request):
    """All at once, for each is a compilation."""
    if len(request.session.items) < len(ORACLES):
        return
    models = [*map(oracle_model, ORACLES), *map(model_for, TIED)]
    configs = {tuple(sorted(gpu_model.baked(model).items())) for model in models}
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda config: gpu_model.library_file(**dict(config)), configs))


def routed(model, rows):
    """Ids and weights of so many tokens alike."""
    gpu = gpu_model.GpuModel(model)
    gpu.write("x", np.repeat(token(), rows, axis=0))
    gpu.batch["num_tokens"] = rows
    gpu.run("begin", "router", rows=rows)
    ids, weights = gpu.read("expert_ids", rows), gpu.read("expert_weights", rows)
    assert gpu.batch["fault"] == 0
    gpu.close()
    assert (ids == ids[0]).all() and (weights == weights[0]).all()
    return ids[0].tolist(), weights[0].tolist()


@pytest.mark.parametrize("rows", [1, 33])
@pytest.mark.parametrize("name", ORACLES)
def test_oracle(name, rows):
    assert routed(oracle_model(name), rows) == (ORACLES[name].ids, near(ORACLES[name].weights))


@pytest.mark.parametrize("num_experts", TIED)
def test_ties_go_to_the_lower_index(num_experts):
    model = model_for(num_experts)
    for logits, ids in tied_logits(num_experts):
        model["layers"][0]["router"][:, 0] = logits
        assert routed(model, 1)[0] == ids


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    path = write_model(tmp_path_factory.mktemp("long") / "model.bin", DENSE, max_positions=1024)
    with Engine(path, backend="cuda") as engine:
        yield engine


@pytest.mark.parametrize("position", [15, 60, 1000])
def test_a_row_has_the_same_bits_alone_and_in_a_batch(engine, position):
    """Of one token in a step, alone, beside 3 and beside 31 others: so few that the same kernels run."""
    generator = np.random.default_rng(position)
    prompts = [generator.integers(0, 256, length) for length in (position, *generator.integers(1, 70, 31))]
    rows = []
    for batch in (1, 4, 32):
        sessions = [engine.session() for _ in range(batch)]
        for session, prompt in zip(sessions, prompts):
            session.prefill(prompt)
        rows.append(engine.step([(session, [7]) for session in sessions][::-1])[-1])
        for session in sessions:
            session.close()
    assert np.array_equal(rows[0], rows[1]) and np.array_equal(rows[0], rows[2])
