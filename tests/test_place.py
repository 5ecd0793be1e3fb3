"""Where experts stand in memory is data: other places give the same bits, and an expert without one is an error."""

import numpy as np
import pytest
import reference
from host_model import HostModel
from reference import fields
from synthetic import DENSE, STACK, write_model

from colibri import headers
from colibri.checkpoint import Checkpoint
from colibri.engine import Engine
from colibri.errors import ColibriError

SHAPES = {"stack": {**STACK, "gated": 0, "expert_bias": 1},
          "transformer": {**DENSE, "expert_bias": 1, "shared_ffn": 24}}


def permuted(path, places):
    """The model file with the experts of layer l at places[l], in place."""
    checkpoint = Checkpoint(path)
    header, shapes = checkpoint.header, {tensor.name: tensor for tensor in headers.default().tensors(checkpoint.header)}
    with open(path, "r+b") as file:
        for layer, place in enumerate(places):
            for name in ("experts_up", "experts_down", "experts_up_bias", "experts_down_bias"):
                view, shape = checkpoint.tensors[f"layers.{layer}.{name}"], shapes[f"layers.{layer}.{name}"].shape
                columns = 64 * shape[-1] if len(shape) == 3 else len(view) // header["num_experts"]
                panels = view.reshape(-1, header["num_experts"], columns)
                moved = np.empty_like(panels)
                moved[:, place] = panels
                file.seek(view.ctypes.data - checkpoint.data.ctypes.data)
                file.write(moved.tobytes())
    return path


def results(engine, rng):
    """Prompts of two sessions and their next tokens, or states through a stack; as bits."""
    if not engine.checkpoint.header["vocab_size"]:
        return engine.stack(rng.standard_normal((70, 64), np.float32)).view(np.uint32)
    with engine.session() as one, engine.session() as other:
        work = [(one, rng.integers(0, 256, 40)), (other, rng.integers(0, 256, 3))]
        return np.concatenate([engine.step(work), engine.step([(one, [5]), (other, [6])])]).view(np.uint32)


@pytest.mark.parametrize("name", SHAPES)
def test_permuted_experts_give_the_same_bits(tmp_path, name):
    places = [np.random.default_rng(seed).permutation(8) for seed in (3, 4)]
    path = write_model(tmp_path / "a.bin", SHAPES[name])
    with Engine(path, backend="host") as engine:
        expected = results(engine, np.random.default_rng(0))
    with Engine(permuted(path, places), backend="host") as engine:
        assert not np.array_equal(results(engine, np.random.default_rng(0)), expected)
        engine.write("place", np.array(places))
        assert np.array_equal(results(engine, np.random.default_rng(0)), expected)


def test_a_chosen_expert_that_is_not_here_is_an_error(tmp_path):
    with Engine(write_model(tmp_path / "a.bin", STACK), backend="host") as engine:
        x = np.random.default_rng(0).standard_normal((1, 64), np.float32)
        expected = engine.stack(x)
        chosen = set(engine.state("expert_ids", 1)[0].tolist())  # of the last layer
        place = engine.state("place").copy()
        for expert in set(range(8)) - chosen:
            place[1, expert] = -1
        engine.write("place", place)
        assert np.array_equal(engine.stack(x), expected)
        place[1, max(chosen)] = -1
        engine.write("place", place)
        with pytest.raises(ColibriError) as error:
            engine.stack(x)
        assert str(error.value) == (f"layers.1: expert {max(chosen)} was chosen and has no place in memory, expected "
                                    "all chosen experts there; give it one in State.place")
        place[1] = range(8)
        engine.write("place", place)
        assert np.array_equal(engine.stack(x), expected)


def test_fewer_places_than_experts():
    """Four of six experts, in an order of their own: chosen ones as with all in memory."""
    model = reference.random_model(np.random.default_rng(1), num_experts=6, hidden=6, ffn=70, expert_bias=1)
    model["layers"][0]["router"] = np.eye(6, dtype=np.float32)
    place, here = [2, -1, 0, 3, -1, 1], [2, 5, 0, 3]
    few = {**model, "layers": [{**model["layers"][0], **{name: model["layers"][0][name][here] for name in (
        "gate", "up", "down", "gate_bias", "up_bias", "down_bias")}}]}
    x = np.random.default_rng(2).standard_normal((90, 6)).astype(np.float32)
    x[:, [1, 4]] = -5 + x[:, [1, 4]] / 9
    host = HostModel(few, extra="-DSTORED_EXPERTS=4")
    host.state["place"][0] = place
    assert np.array_equal(host.moe(x).view(np.uint32), HostModel(model).moe(x).view(np.uint32))
    x[7, 4] = 9
    with pytest.raises(ColibriError, match="layers.0: expert 4 was chosen and has no place in memory"):
        host.moe(x)
    assert (host.batch["fault"], host.batch["fault_layer"], host.batch["fault_token"]) == (3, 0, 4)


def test_a_library_of_fewer_places_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("DEFINES", "-DSTORED_EXPERTS=7")
    with pytest.raises(ColibriError, match="libcolibri.so: stored_experts=7, expected num_experts=8, since a model's"):
        Engine(write_model(tmp_path / "a.bin", STACK), backend="host")


def test_an_attention_of_experts_keeps_an_order_of_its_own(tmp_path):
    """Of attention's experts none is moved."""
    shape = fields(**{**DENSE, "attention_kind": 2, "num_heads": 4, "num_kv_heads": 2, "k": 2, "router_kind": 1,
                      "expert_bias": 1})
    path, places = write_model(tmp_path / "a.bin", shape), [np.arange(8)[::-1]] * 2
    with Engine(path, backend="host") as engine:
        expected = results(engine, np.random.default_rng(0))
    with Engine(permuted(path, places), backend="host") as engine:
        engine.write("place", np.array(places))
        assert np.array_equal(results(engine, np.random.default_rng(0)), expected)
