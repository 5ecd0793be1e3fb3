"""The figures of a run: how fast, how close to the machine's limit, how much memory; as a table or as JSON."""

import math
import os
import statistics
import textwrap
import time

PERCENTILES = (50, 90, 99)
MIN_STEPS = 50  # of decoding, below which a rate is noise
COLUMNS = 80


def process_age():
    """Returns the seconds since this process started (to the kernel's 10 ms)."""
    with open("/proc/self/stat") as file:
        ticks = int(file.read().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def resident_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def percentile(values, percent):
    """The nearest-rank percentile: the smallest value that at least so many percent of the values do not exceed."""
    return sorted(values)[max(math.ceil(percent / 100 * len(values)), 1) - 1]


class Meter:
    """Collects a run's times and takes its counters from the engine's state.

    ttft, itl: seconds; add to them as the run goes. A step gives one token to each of `rows` rows.
    """

    def __init__(self, engine, process_seconds):
        self.engine = engine
        self.cold_start = {"process": process_seconds, **engine.seconds}
        self.ttft, self.itl = [], []
        self.prefilled = self.decoded = 0
        self.start_resident = 0
        self._decode_reads = 0
        self._routed = engine.state("routed_tokens").copy()

    def restart(self):
        """Forgets the warm-up, which touched for the first time what later rounds use again."""
        self.ttft, self.itl = [], []
        self.start_resident = 0
        self.prefilled = self.decoded = self._decode_reads = 0
        self._routed = self.engine.state("routed_tokens").copy()

    def prefill(self, num_tokens, call, *arguments):
        """Times call(*arguments), which prefills num_tokens and gives a first token, and returns what it returned."""
        start = time.perf_counter()
        result = call(*arguments)
        self.ttft.append(time.perf_counter() - start)
        self.prefilled += num_tokens
        self.cold_start.setdefault("first_token", self.ttft[-1])
        self.start_resident = self.start_resident or resident_bytes()
        return result

    def decode(self, num_tokens, call, *arguments):
        """Times call(*arguments), one step that gives num_tokens tokens. Returns what it returned."""
        before = self._experts_read()
        start = time.perf_counter()
        result = call(*arguments)
        self.itl.append(time.perf_counter() - start)
        self._decode_reads += self._experts_read() - before
        self.decoded += num_tokens
        return result

    def _experts_read(self):
        return int(self.engine.state("experts_read")[0, 0])

    def figures(self):
        """Returns everything measured, in the units that the names say, for --json; the table prints these."""
        engine, resident = self.engine, resident_bytes()  # before the probe below adds its buffer
        routed = (engine.state("routed_tokens") - self._routed).ravel().tolist()
        if engine.checkpoint.header["vocab_size"] == 0:
            measured = "a step"
        else:
            measured = "a token" if self.itl else "to the first token"
        figures = {
            "backend": engine.path, "why_host": engine.why_host, "threads": engine.threads,
            "library": engine.library.file, "model": engine.checkpoint.path, **_context(engine),
            "cold_start_ms": {name.replace(" ", "_"): seconds * 1e3 for name, seconds in self.cold_start.items()},
            "ttft_ms": _percentiles(self.ttft), "itl_ms": _percentiles(self.itl),
            "p99_latency_ms": percentile(self.itl or self.ttft, 99) * 1e3, "p99_latency_is": measured,
            "prefill_tokens_per_s": self.prefilled / sum(self.ttft),
            "decode_tokens_per_s": self.decoded / sum(self.itl) if self.itl else None,
            "resident_mib": resident / 2**20, "resident_growth_mib": (resident - self.start_resident) / 2**20,
            "routed_tokens_per_expert": {"min": min(routed), "median": statistics.median(routed), "max": max(routed)},
        }
        if self.itl:
            figures.update(self._bandwidth())
        figures.update(engine.memory.figures())
        return figures

    def _bandwidth(self):
        dense, expert = weight_bytes(self.engine.checkpoint)
        touched = dense * len(self.itl) + expert * self._decode_reads
        if len(self.itl) < MIN_STEPS:
            return {"weight_bytes_per_token": touched / self.decoded}
        try:
            ceiling = self.engine.memory.read_bandwidth(self.engine.checkpoint, self.engine.threads)
        except MemoryError:  # its buffer is larger than a small model
            return {"weight_bytes_per_token": touched / self.decoded}
        rate = touched / sum(self.itl)
        return {"weight_bytes_per_token": touched / self.decoded, "weight_gb_per_s": rate / 1e9,
                "read_gb_per_s": ceiling / 1e9,
                "fraction_of_read_bandwidth": rate / ceiling if rate <= ceiling else None}


def _context(engine):
    """The positions of a session; of a bare stack nothing."""
    if engine.checkpoint.header["num_heads"] == 0:
        return {}
    return {"context": engine.context, "context_is": engine.capacity.text()}


def weight_bytes(checkpoint):
    """Returns the stored bytes that every step reads, and those of one expert in one layer.

    Of an embedding that is not also the LM head a step reads a few rows: not counted.
    """
    dense = experts = 0
    for name, view in checkpoint.tensors.items():
        if "experts" in name:
            experts += view.nbytes
        elif name != "embed" or checkpoint.header["tied_embeddings"]:
            dense += view.nbytes
    return dense, experts / (checkpoint.header["num_experts"] * checkpoint.header["num_layers"])


def table(figures):
    """Returns the figures as lines of text; one begins with `P99 latency:`."""
    cold = figures["cold_start_ms"]
    routed = figures["routed_tokens_per_expert"]
    decode, prefill = figures["decode_tokens_per_s"], figures["prefill_tokens_per_s"]
    note = f" ({figures['why_host']})" if figures["why_host"] else ""
    lines = [
        ("backend", f"{figures['backend']}, {counted(figures['threads'], 'thread')}{note}"),
        ("library", figures["library"]),
        *([("context", figures["context_is"])] if "context" in figures else []),
        *([("sampling", figures["sampling_is"])] if figures.get("temperature") else []),
        *([("score", _score(figures))] if "log_likelihood" in figures else []),
        ("cold start", f"{sum(cold.values()):.1f} ms: "
                       + ", ".join(f"{name.replace('_', ' ')} {value:.1f}" for name, value in cold.items())),
        ("TTFT", _times(figures["ttft_ms"])),
        ("ITL", _times(figures["itl_ms"])),
        ("tokens/s", f"{_number(decode)} decoded, {_number(prefill)} prefilled"),
        ("memory", f"{figures['resident_mib']:.1f} MiB resident"),
    ]
    if "weight_bytes_per_token" in figures:
        lines.append(("weights", f"{figures['weight_bytes_per_token'] / 2**20:.2f} MiB a token, {_rate(figures)}"))
    spread = ", ".join(f"{name} {_number(value)}" for name, value in routed.items())
    lines.append(("routing", f"tokens per expert: {spread}"))
    if "device" in figures:
        lines += _device_lines(figures["device"])
    text = [f"{label:<12}{value}" if label == "library" else  # a path, in one piece whatever its name
            textwrap.fill(value, COLUMNS, initial_indent=f"{label:<12}", subsequent_indent=" " * 12,
                          break_long_words=False, break_on_hyphens=False) for label, value in lines]
    return "\n".join([*text, f"P99 latency: {figures['p99_latency_ms']:.3f} ms {figures['p99_latency_is']}"])


def _score(figures):
    counts = f"{figures['scored_tokens']} tokens, {figures['scored_bytes']} bytes"
    if figures["log_likelihood"] is None:
        return f"minus infinity, a token of probability 0 ({counts})"
    return (f"{figures['log_likelihood']:.4f} nats, perplexity {_number(figures['perplexity'])}, "
            f"{_number(figures['bits_per_byte'])} bits a byte ({counts})")


def _rate(figures):
    if "fraction_of_read_bandwidth" not in figures and figures["itl_ms"]["count"] >= MIN_STEPS:
        return "no rate: too little memory to measure this machine's"
    if "fraction_of_read_bandwidth" not in figures:
        return f"no rate: {counted(figures['itl_ms']['count'], 'step')} decoded, fewer than {MIN_STEPS}"
    if figures["fraction_of_read_bandwidth"] is None:
        return (f"{figures['weight_gb_per_s']:.1f} GB/s, above the {figures['read_gb_per_s']:.1f} GB/s measured of "
                "this machine: other processes disturbed that measurement")
    return (f"{figures['weight_gb_per_s']:.1f} GB/s: {figures['fraction_of_read_bandwidth']:.2f} of this machine's "
            f"{figures['read_gb_per_s']:.1f} GB/s")


def _device_lines(device):
    memory = ", ".join(f"{name.replace('_', ' ')} {size:.1f}" for name, size in device["memory_mib"].items())
    graphs = ", ".join(f"{_number(count)} {name}" for name, count in device["graphs"].items())
    rate, ceiling = device["weights_gb_per_s"], device["pinned_gb_per_s"]
    return [
        ("GPU",
         f"{device['name']}: {device['used_mib']:.0f} of {device['total_mib']:.0f} MiB in use, by all processes"),
        ("GPU memory", f"MiB: {memory}"),
        ("loading", f"{rate:.1f} GB/s, {rate / ceiling:.2f} of a page-locked copy's {ceiling:.1f} GB/s"),
        ("graphs", f"--dispatch {device['dispatch']}: {graphs}"),
    ]


def _percentiles(seconds):
    """Returns {"p50": ms, ..., "max": ms, "count": n}, or None without a value."""
    if not seconds:
        return None
    figures = {f"p{percent}": percentile(seconds, percent) * 1e3 for percent in PERCENTILES}
    return {**figures, "max": max(seconds) * 1e3, "count": len(seconds)}


def _times(figures):
    if figures is None:
        return "none measured"
    values = ", ".join(f"{label} {figures[label.lower()]:.3f}" for label in ("P50", "P90", "P99", "max"))
    return f"{values} ms ({figures['count']} measured)"


def counted(number, what):
    """Returns "1 thread", "2 threads"."""
    return f"{number} {what}" + ("s" if number != 1 else "")


def _number(value):
    return "none" if value is None else f"{value:.0f}" if value >= 100 else f"{value:.4g}"
