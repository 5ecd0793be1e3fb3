"""Measures what answers that follow grammars cost, as CSV on stdout: python -m bench.grammars

`mask` rows: the CPU time in which the mask of a token is computed, beside the step, for a vocabulary of random words,
of which those allowed are drawn evenly. `beside` rows: the time between two tokens of 4 streams, as their clients see
it, beside 8 requests with a schema, and beside 8 that ask for nothing; the medians of several rounds.
"""

import csv
import random
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np

from bench.latency import plain
from bench.program import amount, count, make_parser, run
from bench.refused import write_model
from bench.serve import load
from bench.service import Lines, Service
from colibri.constraints import constraint_of
from colibri.grammars import Grammars
from colibri.report import percentile
from colibri.text import ALPHABET, Tokenizer

STREAMS, OTHERS = 4, 8
COLUMNS = ["kind", "of", "vocab_size", "mean_ms", "p50_ms", "p99_ms", "longest_ms", "tokens", "command"]
LETTERS = "etaoinshrdlucmfwygpbvk" * 2 + "ETAOINS0123456789 ,.{}[]\":\\-_\n"


def schema(value):
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": value}}}


PERSON = {"type": "object", "additionalProperties": False, "required": ["name", "age", "tags", "kind", "born"],
          "properties": {"name": {"type": "string", "maxLength": 30}, "age": {"type": "integer", "maximum": 150},
                         "tags": {"type": "array", "items": {"type": "string", "maxLength": 20}, "maxItems": 5},
                         "kind": {"enum": ["captain", "cook", "boy"]}, "born": {"type": "string", "format": "date"}}}
ASKED = {"a schema": schema(PERSON), "a list of it": schema({"type": "array", "items": PERSON, "maxItems": 20}),
         "any JSON object": {"response_format": {"type": "json_object"}},
         "a regular expression": {"grammar": {"syntax": "regex", "definition": r"\w+(, \w+)*\."}}}


def tokenizer(size):
    """Makes a byte-level tokenizer of random words."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    source, words = random.Random(0), dict.fromkeys(ALPHABET)
    while len(words) < size:
        text = " " * source.randrange(2) + "".join(source.choices(LETTERS, k=source.choice([2, 3, 4, 5, 6, 8])))
        words["".join(ALPHABET[byte] for byte in text.encode())] = None
    made = Tokenizer(models.BPE({word: number for number, word in enumerate(words)}, []))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return made


def mask_times(grammars, asked, num_answers, size):
    """Returns the ms of each mask of answers whose tokens are drawn evenly from those allowed."""
    grammar, source, found = grammars.compile(constraint_of(asked)), np.random.default_rng(0), []
    for _ in range(num_answers):
        guide = grammar.guide(())
        for _ in range(60):
            bits = np.unpackbits(guide.allowed().view(np.uint8), bitorder="little")[:size]
            token, start = int(source.choice(np.flatnonzero(bits))), time.process_time()
            guide.add(token)
            if guide.is_complete:
                break
            guide.allowed()
            found.append(1e3 * (time.process_time() - start))
    return found


def gaps(service, asked, seconds):
    """Returns the ms between tokens of the streams, beside others that ask for something, or beside none for None."""
    is_over = threading.Event()

    def ask(number):
        with Lines(service.address) as lines:
            while not is_over.is_set():
                lines.send({"id": number, "prompt": "It was ", "max_new_tokens": 60, "temperature": 1.0, **asked})
                lines.receive()
    others = [threading.Thread(target=ask, args=(number,)) for number in range(OTHERS if asked is not None else 0)]
    for other in others:
        other.start()
    clients, _ = load(service.address, STREAMS, 1000, True, seconds)
    is_over.set()
    for other in others:
        other.join()
    return [gap for client in clients for gap in client.gaps if gap]


def main():
    parser = make_parser("grammars", __doc__)
    parser.add_argument("--vocabulary", type=count, default=150_000, metavar="N", help="tokens (default 150000)")
    parser.add_argument("--rounds", type=count, default=3, metavar="N", help="of each kind (default 3)")
    parser.add_argument("--seconds", type=amount, default=4, metavar="N", help="of a round (default 4)")
    parser.add_argument("--backend", default="host", help="of the service (default host)")
    options = parser.parse_args()
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(COLUMNS)

    def write(kind, of, rounds):
        figures = [[statistics.fmean(each), *(percentile(sorted(each), part) for part in (50, 99, 100))]
                   for each in rounds]
        writer.writerow([kind, of, options.vocabulary, *(plain(statistics.median(each)) for each in zip(*figures)),
                         sum(map(len, rounds)), " ".join(["python -m bench.grammars", *sys.argv[1:]])])
        sys.stdout.flush()
    made = tokenizer(options.vocabulary)
    grammars = Grammars(Tokenizer(made.to_str().encode(), "tokenizer.json"), options.vocabulary, ())
    for name, asked in ASKED.items():
        write("mask", name, [mask_times(grammars, asked, 40, options.vocabulary)])
    grammars.close()
    with tempfile.TemporaryDirectory() as folder, Service(
            write_model(Path(folder), made), "--backend", options.backend, "--batch-size", 16) as service:
        for name, asked in {"nothing": None, "8 of no form": {}, "8 of a schema": schema(PERSON)}.items():
            gaps(service, asked, 1)
            write("beside", name, [gaps(service, asked, options.seconds) for _ in range(options.rounds)])


if __name__ == "__main__":
    run(main)
