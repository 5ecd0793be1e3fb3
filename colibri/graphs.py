"""Steps as CUDA graphs: the first sight of a key runs and is captured, later sights are one launch."""

from collections import OrderedDict

MAX_NODES = 1 << 17


class GraphCache:
    """Graphs by key, the least recently used dropped when they have more than max_nodes nodes together.

    capture(enqueue) records what enqueue() starts, without running it; it returns a graph with the attribute
    num_nodes and the methods launch() and destroy(). A key must hold every value and address that its graph has
    baked in. hits, misses, captures and evictions count from the start.
    """

    def __init__(self, capture, max_nodes=MAX_NODES):
        self._capture, self._max_nodes = capture, max_nodes
        self._graphs = OrderedDict()
        self.hits = self.misses = self.captures = self.evictions = self.num_nodes = 0

    def get_or_create(self, key, enqueue):
        """Starts the key's work once: by its graph, or by enqueue() at first sight, which is then captured."""
        graph = self._graphs.get(key)
        if graph is None:
            self.misses += 1
            enqueue()
            self.create(key, enqueue)
        else:
            self._graphs.move_to_end(key)
            self.hits += 1
            graph.launch()

    def create(self, key, enqueue):
        """Captures the key's graph, if there is none, without running it."""
        if key in self._graphs:
            return
        self._graphs[key] = graph = self._capture(enqueue)
        self.captures += 1
        self.num_nodes += graph.num_nodes
        while self.num_nodes > self._max_nodes and len(self._graphs) > 1:
            _, oldest = self._graphs.popitem(last=False)
            self.num_nodes -= oldest.num_nodes
            self.evictions += 1
            oldest.destroy()

    def statistics(self):
        return {"graphs": len(self._graphs), "nodes": self.num_nodes, "hits": self.hits, "misses": self.misses,
                "captures": self.captures, "evictions": self.evictions}

    def close(self):
        for graph in self._graphs.values():
            graph.destroy()
        self._graphs.clear()
        self.num_nodes = 0
