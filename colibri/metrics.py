"""What a server counts, in Prometheus's text format."""

import bisect
import functools
import json
import os
import platform
import resource
import time

from colibri import __version__
from colibri.report import process_age, resident_bytes

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SECONDS = (.0001, .00025, .0005, .001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60)


class Histogram:
    def __init__(self, bounds=SECONDS):
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)  # the last: beyond all bounds
        self.sum = 0.0

    def add(self, value):
        self.counts[bisect.bisect_left(self.bounds, value)] += 1
        self.sum += value

    def lines(self, name):
        total = 0
        for bound, count in zip((*self.bounds, "+Inf"), self.counts):
            total += count
            yield f'{name}_bucket{{le="{bound}"}} {total}'
        yield f"{name}_sum {self.sum!r}"
        yield f"{name}_count {total}"


class Metrics:
    """Counts from the start of the process; written on the server's thread alone."""

    def __init__(self, finishes, codes):
        self.requests = dict.fromkeys(finishes, 0)   # ended, by finish reason
        self.errors = dict.fromkeys(codes, 0)        # error lines and responses, by code
        self.prompt_tokens = self.completion_tokens = self.connections = self.dropped_connections = 0
        self.ttft, self.itl = Histogram(), Histogram()
        self.start = time.time() - process_age()

    def ended(self, request):
        """Counts a request that was accepted and has ended."""
        self.requests[request.finish] += 1
        self.prompt_tokens += request.prefilled
        self.completion_tokens += len(request.tokens)
        if request.times:
            self.ttft.add(request.times[0] - request.arrived)
        for before, after in zip(request.times, request.times[1:]):
            self.itl.add(after - before)

    def text(self, scheduler, state, lost_log_lines, open_connections):
        """Returns the exposition. state: what inspect() gave."""
        engine, parts = scheduler.engine, []

        add = functools.partial(_add, parts)
        add("requests_total", "counter", "Accepted requests that ended, by finish reason.", {"finish": self.requests})
        add("errors_total", "counter", "Errors sent to clients, by code.", {"code": self.errors})
        add("prompt_tokens_total", "counter", "Tokens prefilled; rows of a bare stack.", self.prompt_tokens)
        add("completion_tokens_total", "counter", "Tokens generated.", self.completion_tokens)
        add("steps_total", "counter", "Calls of the engine, by kind.", {"kind": scheduler.steps})
        for name, histogram in (("ttft", self.ttft), ("itl", self.itl)):
            what = {"ttft": "From a request's arrival to its first token",
                    "itl": "Between two tokens of a request"}[name]
            parts.append(f"# HELP colibri_{name}_seconds {what}, counted when it ends.\n"
                         f"# TYPE colibri_{name}_seconds histogram")
            parts.extend(histogram.lines(f"colibri_{name}_seconds"))
        add("queue_depth", "gauge", "Requests that wait for a slot.", scheduler.num_waiting)
        add("queue_size", "gauge", "Requests that may wait.", scheduler.queue_size)
        add("running_requests", "gauge", "Requests that have a slot.", scheduler.num_running)
        add("kv_slots", "gauge", "Slots of the KV cache, in all.", engine.num_slots)
        add("kv_slots_free", "gauge", "Slots of the KV cache that nobody has.", engine.num_free_slots)
        add("open_connections", "gauge", "Connections that are open.", open_connections)
        add("connections_total", "counter", "Connections accepted.", self.connections)
        add("connections_dropped_total", "counter", "Connections ended because their client did not read, or too many "
            "were open.", self.dropped_connections)
        add("log_lines_lost_total", "counter", "Lines that the log could not take.", lost_log_lines)
        add("resident_bytes", "gauge", "Memory of this process that is in RAM.", resident_bytes())
        add("start_time_seconds", "gauge", "When the process started, seconds since 1970.", round(self.start, 3))
        add("experts_read_total", "counter", "Experts whose weights a step read, over all layers, by path.",
            {"path": {engine.path: state["experts_read"]}})
        add("routed_tokens_total", "counter", "Tokens that were routed to an expert, over all layers.",
            {"expert": dict(enumerate(state["routed_tokens"]))})
        if state["device_bytes"]:
            add("device_bytes", "gauge", "Memory of the GPU, by use; used and total are of all processes.",
                {"use": state["device_bytes"]})
            add("graph_cache", "gauge", "The cache of CUDA graphs, its counts since the start.",
                {"what": state["graphs"]})
        for name, (kind, what, value) in process_figures(self.start).items():
            _add(parts, name, kind, what, value, prefix="process_")
        labels = {"version": __version__, "path": engine.path, "python": platform.python_version()}
        shown = ",".join(f"{name}={json.dumps(text)}" for name, text in labels.items())
        parts.append("# HELP colibri_build_info What runs: Colibri, its path through the model, and Python.\n"
                     f"# TYPE colibri_build_info gauge\ncolibri_build_info{{{shown}}} 1")
        return "\n".join(parts) + "\n"


def _add(parts, name, kind, what, values, prefix="colibri_"):
    """Adds a metric's lines. values: a number, or {label: {value: number}}"""
    name = prefix + name
    parts.append(f"# HELP {name} {what}\n# TYPE {name} {kind}")
    if not isinstance(values, dict):
        parts.append(f"{name} {values}")
        return
    (label, numbers), = values.items()
    parts.extend(f'{name}{{{label}="{value}"}} {number}' for value, number in numbers.items())


def process_figures(start):
    """Returns {name: (kind, what it is, value)}: what Prometheus's own clients tell of their process."""
    times, soft = os.times(), resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    with open("/proc/self/statm") as file:
        virtual_pages = int(file.read().split()[0])
    return {
        "cpu_seconds_total": ("counter", "Processor time of this process, user and system.", times.user + times.system),
        "resident_memory_bytes": ("gauge", "Memory of this process that is in RAM.", resident_bytes()),
        "virtual_memory_bytes": ("gauge", "Addresses that this process has mapped.",
                                 virtual_pages * resource.getpagesize()),
        "start_time_seconds": ("gauge", "When the process started, seconds since 1970.", round(start, 3)),
        "open_fds": ("gauge", "Files that this process has open.", len(os.listdir("/proc/self/fd")) - 1),
        "max_fds": ("gauge", "Files that this process may have open.",
                    soft if soft != resource.RLIM_INFINITY else "+Inf")}


def inspect(engine):
    """Returns what only the engine's thread may read: {"experts_read": n, "routed_tokens": [n, ...], ...}."""
    usage = engine.memory.usage()
    return {"experts_read": int(engine.state("experts_read")[0, 0]),
            "routed_tokens": engine.state("routed_tokens").sum(axis=0, dtype="u8").tolist(),
            "device_bytes": usage.get("bytes"), "graphs": usage.get("graphs")}
