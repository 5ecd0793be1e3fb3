"""Keeps the service under random load, and checks that nothing is lost, wrong, doubled or growing.

    python -m bench.soak --soak 20 --clients 16       # minutes; bench/stress.sh --soak 20 --clients 16 is the same
    python -m bench.soak --soak 3 --json

Each client is a process with a connection. It sends several requests of a catalogue at once, with random prompts,
lengths and samplings. It also cancels, leaves in the middle, sends lines that are no requests, sets deadlines, reads
slowly, and is stopped (SIGSTOP) for seconds. Some requests go over HTTP. Before the load the service answers the whole
catalogue, one request at a time. Under load every answer must be the same, and a cut one must be the beginning of it.
Every request must end once. Afterwards all KV slots must be free, and memory where it was after the warm-up, within 2%.
Where something is not so, the reason is printed and the status is 1.
"""

import argparse
import contextlib
import http.client
import json
import os
import random
import re
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import numpy as np

from bench.program import ROOT, Seconds, amount, count, example_model, make_parser, run
from bench.service import Lines, Service
from colibri.program import integer

CATALOGUE = 60          # requests
CONTEXT = 512           # tokens that no request goes beyond
HTTP_SHARE = 0.05       # of the episodes
GROWTH = 0.02           # of memory, from after the warm-up to the end
WARM_UP = 0.2           # of the time
IDLE_SECONDS = 20       # for slots to become free at the end
FAIL_SECONDS = 2        # for others to notice what one has failed of
TERMINATED = 143, -signal.SIGTERM
STOPPED_SECONDS = 0.2, 3.0
LOG_LINE = re.compile(r"""\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ \w+( \w+=("([^"\\]|\\.)*"|[^\s"]+))*\n""")
BAD_LINES = [
    b"\n", b"{}\n", b"[]\n", b"null\n", b"{\n", b'{"id": "x"}\n', b'{"id": "x", "prompt": ""}\n', b"\xff\xfe\n",
    b"\0\n", b'{"id": "x", "prompt": "\xe2\x82"}\n', b'{"id": "x", "prompt": "a", "prompt_ids": [1]}\n',
    b'{"cancel": 1, "id": 2}\n', b'{"id": "x", "prompt": "a", "colour": 1}\n',
    b'{"id": "x", "prompt_ids": [1, 99999999]}\n', b"[" * 10000 + b"\n",
    b'{"id": "x", "prompt": "a", "max_new_tokens": 0}\n', b'{"id": "x", "prompt": "a", "temperature": "hot"}\n',
    b'{"id": "x", "prompt": "a", "max_new_tokens": 1e99}\n', b'{"id": "x", "prompt": "' + b"a" * 20000 + b'"}\n',
    b'{"id": "x", "prompt": "a", "deadline_ms": -1}\n', b'{"id": "x", "input": "/none.npy", "output": "/none/y.npy"}\n']
QUIET = {b"\n"}  # a blank line may be ignored
FINISHED, CUT = ("length", "stop"), ("cancelled", "deadline", "shutdown")


def catalogue(seed):
    """Returns requests without their id and stream."""
    source = random.Random(seed)
    words = (ROOT / "tests" / "data" / "heldout.txt").read_bytes()
    requests = []
    for number in range(CATALOGUE):
        length = min(int(source.expovariate(1 / 60)) + 1, CONTEXT - 1)
        start = source.randrange(len(words) - length)
        request = {"max_new_tokens": min(int(source.expovariate(1 / 40)) + 1, CONTEXT - length), "seed": number}
        if number % 2:
            request["prompt_ids"] = list(words[start:start + length])
        else:
            request["prompt"] = words[start:start + length].decode("ascii", "replace").replace("\ufffd", "?")
        if number % 3:
            request |= {"temperature": source.choice([0.5, 0.8, 1.5]), "top_k": source.choice([0, 5]),
                        "top_p": source.choice([1.0, 0.9])}
        if number % 4 == 0:
            request |= {"repetition_penalty": 1.2, "min_p": 0.05, "logit_bias": {"101": -1}, "logprobs": number % 3}
        if "prompt" in request and number % 5 == 0:
            request["stop"] = source.sample(["\n", "the", ". ", "and he"], 2)
        requests.append(request)
    return requests


def output(answer):
    """Returns what a final line says: token numbers or text."""
    return answer["ids"] if "ids" in answer else answer["text"]


class Client:
    """Holds one client's connection, what it waits for, and what it counted."""

    def __init__(self, address, http, model, cases, seed):
        self.address, self.http, self.model, self.cases, self.random = address, http, model, cases, random.Random(seed)
        self.counts, self.ttft, self.itl = Counter(), [], []
        self.pending, self.connection, self.errors_due, self.number = {}, None, 0, 0
        self.name = f"client {seed}"

    def run(self, until):
        while time.time() < until:
            if self.connection is None:
                self.connection = Lines(self.address)
                self.counts["connections"] += 1
            self.episode()
            if self.random.random() < HTTP_SHARE:
                self.http_episode()
        if self.connection:
            self.connection.close()

    def episode(self):
        """Sends some requests at once. Then reads all their lines, or leaves before that."""
        pick = self.random
        lines = [self.request() for _ in range(pick.choice([1, 1, 1, 2, 4]))]
        for _ in range(pick.choice([0, 0, 0, 1, 3])):
            lines.append(bad := pick.choice(BAD_LINES))
            self.errors_due += bad not in QUIET
            self.counts["bad lines"] += 1
        pick.shuffle(lines)
        leaves = pick.random() < 0.1
        try:
            if pick.random() < 0.2:  # in pieces
                for start in range(0, len(data := b"".join(lines)), size := pick.randrange(1, 2000)):
                    self.connection.send_bytes(data[start:start + size])
            else:
                self.connection.send_bytes(b"".join(lines))
            patience = pick.randrange(20) if leaves else None
            while self.pending or self.errors_due:
                if patience == 0:
                    self.leave()
                    return
                patience = patience and patience - 1
                self.read_line()
                if pick.random() < 0.002:
                    time.sleep(pick.random())
        except TimeoutError:
            self.fail(f"lost: {len(self.pending)} requests and {self.errors_due} errors without an answer")
        except OSError as error:
            self.fail(f"connection: {error}")

    def http_episode(self):
        """Asks for a completion over HTTP. A stream is left in its middle."""
        case = self.random.choice([case for case in self.cases if "prompt" in case["request"]])
        fields = dict(case["request"])
        body = {"model": self.model, "max_tokens": fields.pop("max_new_tokens"), **fields,
                "stream": self.random.random() < 0.3}
        self.counts["HTTP requests"] += 1
        connection = http.client.HTTPConnection(*self.http, timeout=60)
        connection.request("POST", "/v1/completions", json.dumps(body))
        response = connection.getresponse()
        if body["stream"]:
            response.read(self.random.randrange(1000))
        else:
            answer = json.loads(response.read())
            if response.status != 429 and answer.get("choices", [{}])[0].get("text") != case["output"]:
                self.fail(f"wrong: HTTP {response.status} {str(answer)[:300]}, expected {case['output'][:300]!r}")
        connection.close()

    def request(self):
        pick = self.random
        case = pick.randrange(len(self.cases))
        identity = self.number if pick.random() < 0.3 else f"{self.name}/{self.number}"
        self.number += 1
        request = {"id": identity, **self.cases[case]["request"], "stream": pick.random() < 0.5}
        if pick.random() < 0.1:
            request["deadline_ms"] = pick.choice([1, 20, 100, 1000, 100000])
        self.pending[identity] = {"case": case, "stream": request["stream"], "seen": [],
                                  "deadline": "deadline_ms" in request, "cancelled": False,
                                  "cancel_after": pick.randrange(12) if pick.random() < 0.15 else None}
        self.counts["requests"] += 1
        return json.dumps(request).encode() + b"\n"

    def leave(self):
        """Leaves with what is pending unread: politely, by a reset, or in the middle of a line."""
        how = self.random.randrange(3)
        if how == 0:
            self.connection.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        elif how == 1:
            with contextlib.suppress(OSError):
                self.connection.send_bytes(b'{"id": "half of a li')
        self.connection.close()
        self.connection, self.errors_due = None, 0
        self.counts["left"] += len(self.pending)
        self.counts["leaves"] += 1
        self.pending.clear()

    def read_line(self):
        answer = self.connection.receive()
        if answer is None:
            self.fail("connection: closed by the service, expected open")
        identity = answer.get("id")
        if "error" in answer and identity not in self.pending:
            if self.errors_due == 0 or answer["error"]["code"] == "internal":
                self.fail(f"error that nothing asked for: {answer}")
            self.errors_due -= 1
            return
        if identity not in self.pending:
            self.fail(f"duplicated, or of another: {answer}")
        waiting = self.pending[identity]
        if "token" in answer:
            self.token(identity, waiting, answer)
        else:
            del self.pending[identity]
            self.end(waiting, answer)

    def token(self, identity, waiting, answer):
        if not waiting["stream"]:
            self.fail(f"token event without stream: {answer}")
        waiting["seen"].append(answer)
        if len(waiting["seen"]) == waiting["cancel_after"]:
            waiting["cancelled"] = True
            self.connection.send({"cancel": identity})

    def end(self, waiting, answer):
        if "error" in answer:
            code = answer["error"]["code"]
            allowed = code == "queue_full" or code == "deadline" and waiting["deadline"]
            self.counts[f"refused: {code}"] += 1
            if not allowed:
                self.fail(f"error: {answer}")
            return
        finish, got, expected = answer["finish_reason"], output(answer), self.cases[waiting["case"]]["output"]
        whole = finish in FINISHED
        if not whole and not (waiting["deadline"] if finish == "deadline" else waiting["cancelled"]):
            self.fail(f"ended as {finish} without a cause: {answer}")
        begins = got if whole or not isinstance(got, str) else got.rstrip("\ufffd")
        if got != expected if whole else begins != expected[:len(begins)]:
            self.fail(f"wrong: case {waiting['case']} gives {str(got)[:300]!r}, expected {str(expected)[:300]!r}")
        if waiting["stream"]:
            parts = [event["token"] if "ids" in answer else event["text"] for event in waiting["seen"]]
            joined = parts if "ids" in answer else "".join(parts)
            if joined != got:
                self.fail(f"events: {str(joined)[:300]!r} add up to another text than {str(got)[:300]!r}")
        self.counts[finish] += 1
        self.counts["tokens"] += answer["completion_tokens"]
        if whole:
            self.ttft.append(answer["ttft_ms"])
            if answer["itl_p50_ms"] is not None:
                self.itl.append((answer["itl_p50_ms"], answer["itl_p99_ms"]))

    def fail(self, reason):
        print(json.dumps({"failure": f"{self.name}: {reason}"}), flush=True)
        os._exit(1)


def client_main(arguments):
    """Runs python -m bench.soak --client HOST PORT HTTP_PORT MODEL CASES SEED UNTIL, and prints what it counted."""
    (host, port, http_port), (model, cases, seed, until) = arguments[:3], arguments[3:]
    client = Client((host, int(port)), (host, int(http_port)), model, json.loads(Path(cases).read_text()), int(seed))
    try:
        client.run(float(until))
    except OSError as error:
        client.fail(f"lost: {error}")
    except KeyboardInterrupt:  # which is everybody's: who started it says so
        os._exit(130)
    print(json.dumps({"counts": client.counts, "ttft": client.ttft, "itl": client.itl}))


def answers_alone(service, seed):
    """Returns [{request, output}], each answered while nothing else runs."""
    cases = []
    with Lines(service.address) as connection:
        for number, request in enumerate(catalogue(seed)):
            answer = connection.ask({"id": number, **request})
            if answer is None or answer.get("finish_reason") not in FINISHED:
                sys.exit(f"alone: {answer}")
            cases.append({"request": request, "output": output(answer)})
    return cases


def fill_slots(service, slots):
    """Writes every slot's whole cache once. Its pages come into memory when they are first written, however late that
    is.
    """
    with Lines(service.address) as connection:
        prompt = "x" * (CONTEXT - 1)
        connection.send(*({"id": number, "prompt": prompt, "max_new_tokens": 1} for number in range(slots)))
        answers = [connection.receive() for _ in range(slots)]
    if not all(answer and answer.get("finish_reason") in FINISHED for answer in answers):
        sys.exit(f"filling the slots: {answers}")


class Memory:
    """Keeps the MiB of the service's memory over time: resident, and on a device where there is one."""

    def __init__(self, service):
        self.service, self.samples = service, []

    def sample(self):
        metrics = self.service.metrics()
        device = metrics.get('colibri_device_bytes{use="used"}', 0) / 2**20
        self.samples.append((time.monotonic(), self.service.status("VmRSS"), device))

    def figures(self):
        """Returns {"resident": (after the warm-up, at the end, growth), ...}: medians of a tenth of the samples each.
        """
        if not self.samples:
            return {}
        start, end = self.samples[0][0], self.samples[-1][0]
        warm = [sample for sample in self.samples if sample[0] >= start + WARM_UP * (end - start)]
        tenth = max(1, len(warm) // 10)
        figures = {}
        for index, name in enumerate(("resident", "device"), 1):
            before, after = (float(np.median([sample[index] for sample in part]))
                             for part in (warm[:tenth], warm[-tenth:]))
            figures[name] = {"warm_mib": before, "end_mib": after, "growth": after / before - 1 if before else 0.0}
        return figures


def soak(options, service, folder):
    """Runs the clients. Returns (their reports, memory's figures, how often one was stopped)."""
    cases, source = folder / "cases.json", random.Random(options.seed)
    fill_slots(service, options.slots)
    cases.write_text(json.dumps(answers_alone(service, options.seed)))
    until = time.time() + 60 * options.soak
    command = [sys.executable, "-m", "bench.soak", "--client", service.address[0], str(service.address[1]),
               str(service.http[1]), Path(options.model).name, str(cases)]
    clients = [subprocess.Popen([*command, str(1000 * options.seed + number), str(until)], cwd=ROOT,
                                stdout=subprocess.PIPE, text=True) for number in range(options.clients)]
    memory, stops, clock = Memory(service), 0, Seconds(until - time.time(), "soak")
    try:
        with contextlib.suppress(OSError):  # where the service has ended, its clients say so
            while clock.left() and all(client.poll() in (None, 0) for client in clients):
                chosen = source.choice(clients)
                chosen.send_signal(signal.SIGSTOP)
                stops += 1
                time.sleep(min(source.uniform(*STOPPED_SECONDS), max(0.1, 30 * options.soak)))
                chosen.send_signal(signal.SIGCONT)
                memory.sample()
        if clock.left():  # one has failed: the others need not go on
            time.sleep(FAIL_SECONDS)
            for client in [client for client in clients if client.poll() is None]:
                client.terminate()
        reports = [(client, client.communicate(timeout=120)[0]) for client in clients]
    finally:
        for client in clients:
            if client.poll() is None:
                client.send_signal(signal.SIGCONT)
                client.kill()
            client.wait()
    return [json.loads(report.splitlines()[-1]) if report else {"failure": "client: ended without a report"}
            for client, report in reports if client.returncode not in TERMINATED], memory.figures(), stops


def free_slots(service):
    """Returns (free, total) KV slots, when nothing runs any more."""
    end = time.monotonic() + IDLE_SECONDS
    while True:
        metrics = service.metrics()
        free, total = metrics["colibri_kv_slots_free"], metrics["colibri_kv_slots"]
        if free == total or time.monotonic() > end:
            return int(free), int(total)
        time.sleep(0.1)


def check(reports, memory, slots, status, log):
    """Returns the sentences that say why the soak failed."""
    failures = [report["failure"] for report in reports if "failure" in report]
    for name, figures in memory.items():
        if figures["growth"] > GROWTH:
            failures.append(f"memory: {name} grew from {figures['warm_mib']:.1f} to {figures['end_mib']:.1f} MiB, "
                            f"expected at most {GROWTH:.0%}")
    if slots[0] != slots[1]:
        failures.append(f"slots: {slots[0]} free at the end, expected all {slots[1]}")
    if status:
        failures.append(f"service: ended with {status}, expected 0")
    failures += [f"log: {line!r} is no line of one request" for line in log
                 if not LOG_LINE.fullmatch(line) and not line.startswith("stopping: ")][:1]
    failures += [f"log: {line.strip()}" for line in log if re.search(r"Z (connection|fault) ", line)][:5]
    return failures


def summary(options, reports, memory, slots, stops):
    """Returns the figures, {name: value}."""
    counts, ttft, itl = Counter(), [], []
    for report in reports:
        counts.update(report.get("counts", {}))
        ttft += report.get("ttft", [])
        itl += report.get("itl", [])
    figures = {"minutes": options.soak, "clients": options.clients, "seed": options.seed,
               **dict(sorted(counts.items())), **{word: sum(f": {word}" in report.get("failure", "")
                                                            for report in reports)
                  for word in ("lost", "duplicated", "wrong")},
               "stopped clients": stops, "requests/s": round(counts["requests"] / (60 * options.soak), 1),
               "tokens/s": round(counts["tokens"] / (60 * options.soak), 1)}
    if ttft:
        figures |= {f"TTFT P{part} ms": round(float(np.percentile(ttft, part)), 1) for part in (50, 99)}
    if itl:
        typical, slow = np.array(itl).T
        figures |= {"ITL P50 ms, median": round(float(np.median(typical)), 2),
                    "ITL P99 ms, median": round(float(np.median(slow)), 2)}
    for name, values in memory.items():
        if values["end_mib"]:
            figures[f"{name} MiB"] = f"{values['warm_mib']:.1f} warm, {values['end_mib']:.1f} at the end"
            figures[f"{name} growth"] = f"{values['growth']:+.2%}"
    return {**figures, "free slots": f"{slots[0]} of {slots[1]}"}


def main(arguments=None):
    parser = make_parser("soak", __doc__)
    parser.add_argument("--soak", type=amount, default=20, metavar="MINUTES",
                        help="how long (default 20); in less than 3 what the allocator keeps can look like growth")
    parser.add_argument("--clients", type=count, default=16, metavar="N", help="at once (default 16)")
    parser.add_argument("--model", default="moe-32.bin")
    parser.add_argument("--seed", type=integer(0), default=1)
    parser.add_argument("--json", action="store_true", help="the figures as JSON")
    parser.add_argument("--slots", type=count, default=16, help="the service's --batch-size (default 16)")
    parser.add_argument("--client", nargs=7, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.client:
        return client_main(options.client)
    model = example_model(options.model)
    with tempfile.TemporaryDirectory() as folder, Service(model, "--batch-size", options.slots) as service:
        reports, memory, stops = soak(options, service, Path(folder))
        try:
            slots = free_slots(service)
        except OSError:  # it has ended
            slots = 0, options.slots
        status, log = service.stop()
    failures = check(reports, memory, slots, status, log)
    figures = summary(options, reports, memory, slots, stops)
    if options.json:
        print(json.dumps({**figures, "failures": failures}))
    else:
        print("\n".join(f"{name:20} {value}" for name, value in figures.items()))
    for failure in failures:
        print(failure, file=sys.stderr)
    return int(bool(failures))


if __name__ == "__main__":
    run(main)
