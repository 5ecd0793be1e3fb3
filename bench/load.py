"""Measures the service's latency against offered load, as a client sees it, as CSV on stdout and as a plot.

    python -m bench.load                              # models/moe-32.pt's .bin, made where it is missing
    python -m bench.load --rates 10,20,40 --png load.png

Requests come at random times at the given mean rate, whether earlier ones are answered or not. TTFT is the time from
sending to the first token. ITL is the time between two arrivals divided by the tokens that the later one brings, once
for each of them: under load a client finds several tokens of a request in one read. Tokens that come with a request's
first one have no ITL. The plot needs matplotlib, the extra `plot`.
"""

import asyncio
import csv
import importlib.util
import json
import shlex
import sys
import time

import numpy as np

from bench.latency import plain
from bench.program import amount, example_model, make_parser, run, several
from bench.service import Service
from colibri.errors import ColibriError

PROMPT, NEW_TOKENS = 64, 64  # tokens of a request
CONNECTIONS = 16             # and slots
PERCENTILES = (50, 90, 99)
COLUMNS = ["offered_rps", "requests", "refused", "tokens_per_s",
           *(f"{name}_p{part}_ms" for name in ("ttft", "itl") for part in PERCENTILES), "command"]


class Record:
    """Records one request: when it was sent, when each token came, and its last line."""

    def __init__(self):
        self.sent, self.times, self.answer = time.perf_counter(), [], asyncio.Future()

    def itl(self):
        arrivals, counts = np.unique(self.times, return_counts=True)
        return np.repeat(1e3 * np.diff(arrivals) / counts[1:], counts[1:])

    def ttft(self):
        return 1e3 * (self.times[0] - self.sent)


class Connection(asyncio.Protocol):
    """Sends the requests of one connection.

    What arrives is noted at once, and read when a request ends: reading takes time on the processors of the service.
    """

    def __init__(self):
        self.records, self.arrived = {}, []

    def connection_made(self, transport):
        self.transport = transport

    def data_received(self, data):
        self.arrived.append((time.perf_counter(), data))
        if b'"finish_reason"' in data or b'"error"' in data:
            self.read()

    def read(self):
        """Takes the whole lines that have arrived. A line's time is that of its last piece."""
        rest = b""
        for now, data in self.arrived:
            *lines, rest = (rest + data).split(b"\n")
            for answer in map(json.loads, lines):
                record = self.records[answer["id"]]
                if "token" in answer:
                    record.times.append(now)
                else:
                    record.answer.set_result(answer)
        self.arrived = [(now, rest)] if rest else []

    async def ask(self, fields):
        """A finished Record."""
        number = len(self.records)
        record = self.records[number] = Record()
        self.transport.write(json.dumps({"id": number, **fields}).encode() + b"\n")
        await record.answer
        return record


async def connect(service, count):
    loop = asyncio.get_running_loop()
    return [(await loop.create_connection(Connection, *service.address))[1] for _ in range(count)]


def disconnect(connections):
    for connection in connections:
        connection.transport.close()


def prompt(generator, length):
    return generator.integers(32, 127, length).tolist()


def percentiles(name, values):
    return {f"{name}_p{part}_ms": float(np.percentile(values, part)) if len(values) else None for part in PERCENTILES}


def figures(records, seconds):
    """Returns what the records of so many seconds say. Refused requests are only counted."""
    served = [record for record in records if "error" not in record.answer.result()]
    itl = np.concatenate([record.itl() for record in served] or [[]])
    return {"requests": len(records), "refused": len(records) - len(served),
            "tokens_per_s": sum(len(record.times) for record in served) / seconds,
            **percentiles("ttft", [record.ttft() for record in served if record.times]), **percentiles("itl", itl)}


async def offered(service, rate, seconds, seed):
    """Requests at random times, `rate` of them a second on average."""
    generator = np.random.default_rng(seed)
    connections, tasks = await connect(service, CONNECTIONS), []
    start = time.perf_counter()
    at = start
    while (at := at + generator.exponential(1 / rate)) < start + seconds:
        await asyncio.sleep(max(0, at - time.perf_counter()))
        fields = {"prompt_ids": prompt(generator, PROMPT), "max_new_tokens": NEW_TOKENS, "stream": True}
        tasks.append(asyncio.create_task(connections[len(tasks) % CONNECTIONS].ask(fields)))
    records = await asyncio.gather(*tasks)
    row = figures(records, time.perf_counter() - start)
    disconnect(connections)
    return row


def draw(rows, path):
    """Draws TTFT and ITL apart, with a line for each percentile."""
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot
    figure, panels = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for panel, name, title in zip(panels, ("ttft", "itl"), ("time to first token", "time between tokens")):
        for part in PERCENTILES:
            panel.plot([row["offered_rps"] for row in rows], [row[f"{name}_p{part}_ms"] for row in rows], marker="o",
                       label=f"P{part}")
        panel.set(title=title, xlabel="requests a second, offered", ylabel="ms", yscale="log")
        panel.grid(alpha=0.3, which="both")
        panel.legend()
    figure.savefig(path, dpi=120)


def main():
    parser = make_parser("load", __doc__)
    parser.add_argument("model", nargs="?", default="moe-32.bin", help="default: moe-32.bin")
    parser.add_argument("--seconds", type=amount, default=20, metavar="N", help="of each load (default 20)")
    parser.add_argument("--rates", type=several(amount), metavar="R,R,...",
                        default=[5, 10, 20, 40, 60, 80, 100], help="offered loads, requests a second")
    parser.add_argument("--png", metavar="FILE", help="the plot")
    parser.add_argument("--options", default="", metavar="TEXT", help="more options of the service")
    options = parser.parse_args()
    if options.png and not importlib.util.find_spec("matplotlib"):
        raise ColibriError("--png", "matplotlib is not installed", "it for a plot", "run pip install matplotlib")
    rows = []
    writer = csv.DictWriter(sys.stdout, COLUMNS, lineterminator="\n")
    with Service(example_model(options.model), "--batch-size", CONNECTIONS, *shlex.split(options.options)) as service:
        writer.writeheader()
        asyncio.run(offered(service, 5, 2, 0))  # the first steps make what later ones find
        for rate in options.rates:
            rows.append({"offered_rps": rate, **asyncio.run(offered(service, rate, options.seconds, 1)),
                         "command": " ".join(["python -m bench.load", *sys.argv[1:]])})
            writer.writerow({name: plain(value) if isinstance(value, float) else value
                             for name, value in rows[-1].items()})
            sys.stdout.flush()
    if options.png:
        draw(rows, options.png)


if __name__ == "__main__":
    run(main)
