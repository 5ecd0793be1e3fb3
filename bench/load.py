"""The service under load, as a client sees it: TTFT (from sending to the first token) and ITL (between tokens), in CSV.

    python -m bench.load latency --png load.png       # P50, P90, P99 against offered load, in requests a second
    python -m bench.load prefill                      # 8 clients decode while a prompt of 512 tokens comes each second
    python -m bench.load throughput                   # tokens a second of 16 clients against one, the same bits

latency sends requests at random times, whether earlier ones are answered or not; --png needs matplotlib, the extra
`plot`. prefill runs with each prompt in one piece and with the service's own --prefill-chunk. throughput's clients send
their next request when the last one is answered.
"""

import argparse
import asyncio
import csv
import json
import os
import sys
import time

import numpy as np

from bench.latency import plain
from bench.service import Service, example_model

PROMPT, NEW_TOKENS = 64, 64      # tokens of a request
DECODERS, LONG_PROMPT = 8, 512
CLIENTS = 16
PERCENTILES = (50, 90, 99)


class Record:
    """One request: when it was sent, when each token came, the tokens, its last line."""

    def __init__(self):
        self.sent, self.times, self.tokens, self.answer = time.perf_counter(), [], [], asyncio.Future()

    def itl(self):
        return 1e3 * np.diff(self.times)

    def ttft(self):
        return 1e3 * (self.times[0] - self.sent)


class Connection(asyncio.Protocol):
    """Requests of one connection. What arrives is only noted, and read when a request ends: it shares the processors."""

    def __init__(self):
        self.records, self.arrived = {}, []

    def connection_made(self, transport):
        self.transport = transport

    def data_received(self, data):
        self.arrived.append((time.perf_counter(), data))
        if b'"finish_reason"' in data or b'"error"' in data:
            self.read()

    def read(self):
        """Takes the whole lines that have arrived; a line's time is that of its last piece."""
        rest = b""
        for now, data in self.arrived:
            *lines, rest = (rest + data).split(b"\n")
            for answer in map(json.loads, lines):
                record = self.records[answer["id"]]
                if "token" in answer:
                    record.times.append(now)
                else:
                    record.tokens = answer.get("ids", [])
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
    """What the records of so many seconds say; refused ones only count."""
    served = [record for record in records if "error" not in record.answer.result()]
    itl = np.concatenate([record.itl() for record in served] or [[]])
    return {"requests": len(records), "refused": len(records) - len(served),
            "tokens_per_s": sum(len(record.tokens) for record in served) / seconds,
            **percentiles("ttft", [record.ttft() for record in served if record.times]), **percentiles("itl", itl)}


async def offered(service, rate, seconds, seed):
    """Requests at random times, `rate` of them a second on average."""
    generator = np.random.default_rng(seed)
    connections, tasks = await connect(service, CLIENTS), []
    start = time.perf_counter()
    at = start
    while (at := at + generator.exponential(1 / rate)) < start + seconds:
        await asyncio.sleep(max(0, at - time.perf_counter()))
        fields = {"prompt_ids": prompt(generator, PROMPT), "max_new_tokens": NEW_TOKENS, "stream": True}
        tasks.append(asyncio.create_task(connections[len(tasks) % CLIENTS].ask(fields)))
    records = await asyncio.gather(*tasks)
    row = figures(records, time.perf_counter() - start)
    disconnect(connections)
    return row


def latency(options):
    rows = []
    with Service(options.model, "--batch-size", CLIENTS) as service:
        asyncio.run(offered(service, 5, 2, 0))  # the first steps make what later ones find
        for rate in options.rates:
            row = {"offered_rps": rate, **asyncio.run(offered(service, rate, options.seconds, 1))}
            rows.append(row)
            yield row
    if options.png:
        draw(rows, options.png)


def draw(rows, path):
    """TTFT and ITL apart, a line a percentile."""
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


async def decode_under_prefill(service, seconds):
    """ITL of DECODERS streams while long prompts arrive once a second."""
    generator, end = np.random.default_rng(1), time.perf_counter() + seconds
    records, long_records = [], []

    async def decoder(connection):
        while time.perf_counter() < end:
            fields = {"prompt_ids": prompt(generator, 16), "max_new_tokens": 400, "temperature": 1.0, "seed": len(records),
                      "stream": True}
            records.append(await connection.ask(fields))

    async def prompts(connection):
        tasks = []
        while time.perf_counter() < end:
            fields = {"prompt_ids": prompt(generator, LONG_PROMPT), "max_new_tokens": 1, "stream": True}
            tasks.append(asyncio.create_task(connection.ask(fields)))
            await asyncio.sleep(1)
        long_records.extend(await asyncio.gather(*tasks))
    connections = await connect(service, DECODERS + 1)
    await asyncio.gather(prompts(connections[0]), *map(decoder, connections[1:]))
    disconnect(connections)
    row = figures(records, seconds)
    return {**{name: row[name] for name in row if name.startswith("itl")},
            "itl_p99_over_p50": row["itl_p99_ms"] / row["itl_p50_ms"],
            **percentiles("long_prompt_ttft", [record.ttft() for record in long_records])}


def prefill(options):
    for chunk in (str(LONG_PROMPT), "default"):
        chosen = [] if chunk == "default" else ["--prefill-chunk", chunk]
        with Service(options.model, "--batch-size", CLIENTS, *chosen) as service:
            asyncio.run(offered(service, 5, 2, 0))
            yield {"prefill_chunk": chunk, **asyncio.run(decode_under_prefill(service, options.seconds))}


async def closed(service, clients, requests):
    """Each request once, by so many clients. Returns (tokens a second, what was generated)."""
    connections, waiting, records = await connect(service, clients), list(enumerate(requests))[::-1], {}

    async def client(connection):
        while waiting:
            number, fields = waiting.pop()
            records[number] = await connection.ask(fields)
    start = time.perf_counter()
    await asyncio.gather(*map(client, connections))
    seconds = time.perf_counter() - start
    disconnect(connections)
    tokens = [records[number].tokens for number in range(len(requests))]
    return sum(map(len, tokens)) / seconds, tokens


def throughput(options):
    generator = np.random.default_rng(1)
    requests = [{"prompt_ids": prompt(generator, PROMPT), "max_new_tokens": NEW_TOKENS, "temperature": 0.8, "seed": number}
                for number in range(4 * CLIENTS)]
    with Service(options.model, "--batch-size", CLIENTS) as service:
        asyncio.run(offered(service, 5, 2, 0))
        alone, expected = None, None
        for clients in (1, CLIENTS):
            speed, tokens = asyncio.run(closed(service, clients, requests))
            alone, expected = alone or speed, expected or tokens
            yield {"clients": clients, "tokens_per_s": speed, "over_one_client": speed / alone,
                   "same_tokens": tokens == expected}


MODES = {"latency": latency, "prefill": prefill, "throughput": throughput}


def main():
    parser = argparse.ArgumentParser(prog="python -m bench.load", description=__doc__.split("\n")[0])
    parser.add_argument("mode", choices=MODES)
    parser.add_argument("--model", default="moe-32.bin")
    parser.add_argument("--seconds", type=float, default=20, metavar="N", help="of each measurement (default 20)")
    parser.add_argument("--rates", type=lambda text: [float(rate) for rate in text.split(",")], metavar="R,R,...",
                        default=[1, 2, 4, 8, 12, 16], help="offered loads of latency, requests a second")
    parser.add_argument("--png", metavar="FILE", help="latency's plot")
    options = parser.parse_args()
    options.model = example_model(options.model)
    writer = None
    for row in MODES[options.mode](options):
        row |= {"processors": len(os.sched_getaffinity(0)), "command": f"python -m bench.load {' '.join(sys.argv[1:])}"}
        if writer is None:
            writer = csv.DictWriter(sys.stdout, row, lineterminator="\n")
            writer.writeheader()
        writer.writerow({name: plain(value) if isinstance(value, float) else value for name, value in row.items()})
        sys.stdout.flush()


if __name__ == "__main__":
    main()
