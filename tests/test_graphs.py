"""The graph cache, with graphs that only count what happens to them."""

import pytest

from colibri.graphs import GraphCache


class FakeGraph:
    def __init__(self, num_nodes=3):
        self.num_nodes, self.launches, self.destroyed = num_nodes, 0, False

    def launch(self):
        assert not self.destroyed
        self.launches += 1

    def destroy(self):
        assert not self.destroyed
        self.destroyed = True


class Recorder:
    """Stands for the device: enqueue() counts a run, or nothing while capture is on."""

    def __init__(self, num_nodes=3):
        self.runs, self.capturing, self.graphs, self.num_nodes = [], False, [], num_nodes

    def enqueue(self, key):
        def run():
            if not self.capturing:
                self.runs.append(key)
        return run

    def capture(self, enqueue):
        self.capturing = True
        enqueue()
        self.capturing = False
        self.graphs.append(FakeGraph(self.num_nodes))
        return self.graphs[-1]


def test_first_sight_runs_and_captures_later_sights_launch():
    device = Recorder()
    cache = GraphCache(device.capture)
    for _ in range(3):
        cache.get_or_create("a", device.enqueue("a"))
    assert device.runs == ["a"]
    assert [graph.launches for graph in device.graphs] == [2]
    assert cache.statistics() == {"graphs": 1, "nodes": 3, "hits": 2, "misses": 1, "captures": 1, "evictions": 0}


def test_least_recently_used_goes_first_and_nodes_stay_bounded():
    device = Recorder()
    cache = GraphCache(device.capture, max_nodes=8)
    for key in "abacab":  # two of them fit: c drops b, then b drops c
        cache.get_or_create(key, device.enqueue(key))
        assert cache.num_nodes <= 8
    assert device.runs == ["a", "b", "c", "b"]
    assert [graph.destroyed for graph in device.graphs] == [False, True, True, False]
    assert cache.evictions == 2


def test_one_graph_is_kept_however_large():
    device = Recorder(num_nodes=100)
    cache = GraphCache(device.capture, max_nodes=8)
    for key in "aab":
        cache.get_or_create(key, device.enqueue(key))
    assert [graph.destroyed for graph in device.graphs] == [True, False]


def test_create_captures_once_and_does_not_run():
    device = Recorder()
    cache = GraphCache(device.capture)
    cache.create("a", device.enqueue("a"))
    cache.create("a", device.enqueue("a"))
    cache.get_or_create("a", device.enqueue("a"))
    assert device.runs == [] and cache.captures == 1 and device.graphs[0].launches == 1


def test_failed_capture_leaves_no_graph():
    device = Recorder()

    def broken(_):
        raise RuntimeError("capture")
    cache = GraphCache(broken)
    with pytest.raises(RuntimeError):
        cache.get_or_create("a", device.enqueue("a"))
    assert cache.statistics()["graphs"] == 0
    cache._capture = device.capture
    cache.get_or_create("a", device.enqueue("a"))
    assert device.runs == ["a", "a"]


def test_close_destroys_everything():
    device = Recorder()
    cache = GraphCache(device.capture)
    for key in "abc":
        cache.get_or_create(key, device.enqueue(key))
    cache.close()
    assert all(graph.destroyed for graph in device.graphs)
