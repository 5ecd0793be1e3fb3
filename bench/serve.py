"""Measures a server under load, as CSV on stdout: throughput by clients, and how long prompts delay the others.

    python -m bench.serve                        # moe-32.bin on this machine, two to three minutes
    python -m bench.serve --chunks 512,64 --seconds 20 --options="--backend host"

In `clients` rows, so many clients each send one request after another. In `prompts` rows, 8 clients stream while a
prompt that fills the context arrives once a second, by --prefill-chunk. Latencies are those that the clients see.
"""

import csv
import json
import selectors
import shlex
import socket
import sys
import time

from bench.latency import plain
from bench.program import amount, count, example_model, make_parser, run, several
from bench.service import Service
from colibri.report import percentile

COLUMNS = ["kind", "clients", "prefill_chunk", "tokens_per_s", "itl_p50_ms", "itl_p99_ms", "itl_p999_ms", "itl_max_ms",
           "ttft_p50_ms", "ttft_p99_ms", "requests", "command"]
NEW_TOKENS = 200
STREAMED_TOKENS = 440  # which fill the example model's context: a stream decodes, and seldom begins


class Client:
    """Sends a request as soon as the one before has ended, and notes when its answers arrive."""

    def __init__(self, address, number, new_tokens, stream):
        self.socket = socket.create_connection(address)
        self.number, self.new_tokens, self.stream = number, new_tokens, stream
        self.gaps, self.ttft, self.tokens, self.requests = [], [], 0, 0
        self.rest = b""

    def send(self):
        self.requests += 1
        self.last = None
        prompt = f"Chapter {self.number}, page {self.requests}. It was the custom of "
        self.socket.sendall(json.dumps({"id": self.requests, "prompt": prompt, "max_new_tokens": self.new_tokens,
                                        "stream": self.stream}).encode() + b"\n")

    def receive(self):
        """Takes what has arrived. Returns whether the request has ended."""
        *lines, self.rest = (self.rest + self.socket.recv(1 << 16)).split(b"\n")
        now = time.perf_counter()
        for line in lines:
            if b'"token"' not in line:
                final = json.loads(line)
                self.tokens += 0 if self.stream else final["completion_tokens"]
                self.ttft.append(final["ttft_ms"])
                return True
            self.tokens += 1
            if self.last:
                self.gaps.append(1e3 * (now - self.last))
            self.last = now
        return False


def load(address, num_clients, new_tokens, stream, seconds, every_second=lambda: None):
    """Runs clients for so long, then leaves. Returns them and the seconds that it took."""
    clients = [Client(address, number, new_tokens, stream) for number in range(num_clients)]
    selector = selectors.DefaultSelector()
    for client in clients:
        selector.register(client.socket, selectors.EVENT_READ, client)
        client.send()
    start = tick = time.perf_counter()
    while time.perf_counter() < start + seconds:
        for key, _ in selector.select(0.1):
            if key.data.receive():
                key.data.send()
        if time.perf_counter() > tick:
            every_second()
            tick += 1
    for client in clients:
        client.socket.close()
    return clients, time.perf_counter() - start


def figures(clients, seconds):
    gaps = [gap for client in clients for gap in client.gaps]
    ttft = [value for client in clients for value in client.ttft]
    row = {"clients": len(clients), "tokens_per_s": sum(client.tokens for client in clients) / seconds,
           "requests": sum(client.requests for client in clients),
           **{f"ttft_p{part}_ms": percentile(ttft, part) if ttft else None for part in (50, 99)}}
    for name, percent in (("p50", 50), ("p99", 99), ("p999", 99.9), ("max", 100)):
        row[f"itl_{name}_ms"] = percentile(gaps, percent) if gaps else None
    return row


def service(options, *more):
    """Starts the service with these and more options. Runs its first steps, which are slower than later ones."""
    started = Service(example_model(options.model), *shlex.split(options.options), *more)
    load(started.address, 2, 20, False, 0.2)
    return started


def long_prompts(address):
    """Returns a function that sends a prompt which fills the context. Its answer is left unread until the next call."""
    connection = socket.create_connection(address)
    sent = []

    def send():
        if sent:
            connection.recv(1 << 16)
        sent.append(1)
        connection.sendall(json.dumps({"id": len(sent), "prompt": "x" * 512, "max_new_tokens": 1}).encode() + b"\n")
    return send


def parse():
    parser = make_parser("serve", __doc__)
    parser.add_argument("model", nargs="?", default="moe-32.bin", help="default: moe-32.bin")
    parser.add_argument("--clients", type=several(count), default=[1, 4, 8, 16, 32], metavar="N,N,...")
    parser.add_argument("--chunks", type=several(count), default=[512, 128, 64, 32, 16], metavar="N,N,...")
    parser.add_argument("--seconds", type=amount, default=5, metavar="N", help="of each row")
    parser.add_argument("--options", default="", metavar="TEXT", help="more options of the server")
    return parser.parse_args()


def main():
    options = parse()
    writer = csv.DictWriter(sys.stdout, COLUMNS, lineterminator="\n")

    def write(kind, row, chunk=None):
        row = {"kind": kind, "prefill_chunk": chunk, **row,
               "command": " ".join(["python -m bench.serve", *sys.argv[1:]])}
        writer.writerow({name: plain(value) if isinstance(value, float) else value for name, value in row.items()})
        sys.stdout.flush()
    with service(options) as running:
        writer.writeheader()
        for num_clients in options.clients:
            write("clients", figures(*load(running.address, num_clients, NEW_TOKENS, False, options.seconds)))
    for chunk in options.chunks:
        with service(options, "--prefill-chunk", chunk) as running:
            for kind, every_second in (("alone", lambda: None), ("prompts", long_prompts(running.address))):
                loaded = load(running.address, 8, STREAMED_TOKENS, True, options.seconds, every_second)
                write(kind, figures(*loaded), chunk)


if __name__ == "__main__":
    run(main)
