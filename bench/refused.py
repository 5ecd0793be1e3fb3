"""Measures what refused, far too long requests do to streams, as CSV on stdout: python -m bench.refused

A model with a tokenizer.json and a context of 32768 serves 4 streams. A prompt of each kind comes once a second, and is
refused: by its number of tokens, its bytes, the bytes of its line, or the bytes of its token numbers. Each row says how
long the longest gap between two tokens of a stream was, with such prompts and without them. It is that of the round
where the gap was least, since other processes only add to it.
"""

import csv
import json
import queue
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np

from bench.latency import plain
from bench.program import ROOT, amount, count, make_parser, run
from bench.serve import load
from bench.service import Lines, Service
from colibri.errors import ColibriError

CONTEXT, HIDDEN, STREAMS = 32768, 512, 4
BLANKS = 128   # of the longest token, as tokenizers for programs have it
TEXT = 1_800_000
COLUMNS = ["prompts", "rounds", "longest_gap_ms", "alone_ms", "more_ms", "itl_p50_ms", "command"]


def tokenizer():
    """Makes a byte-level BPE of the held-out text, with a token for a long indentation."""
    try:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    except ImportError:
        raise ColibriError("tokenizers", "not installed", "it for this benchmark",
                           "run pip install tokenizers") from None
    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    made.train([str(ROOT / "tests" / "data" / "heldout.txt")], trainers.BpeTrainer(
        vocab_size=1000, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
    made.add_tokens([" " * BLANKS])
    return made


def write_model(folder, made):
    """Writes a random Mixtral of one layer into a folder, and converts it."""
    vocab, random = made.get_vocab_size(), np.random.default_rng(0)
    shapes = {"model.embed_tokens.weight": (vocab, HIDDEN), "lm_head.weight": (vocab, HIDDEN)}
    layer = {"block_sparse_moe.gate": (2, HIDDEN), **{f"self_attn.{name}_proj": (HIDDEN, HIDDEN) for name in "qkvo"}}
    for expert in range(2):
        layer |= {f"block_sparse_moe.experts.{expert}.w{number}": (HIDDEN, HIDDEN) for number in (1, 2, 3)}
    shapes |= {f"model.layers.0.{name}.weight": shape for name, shape in layer.items()}
    arrays = {name: random.standard_normal(shape, np.float32) / HIDDEN for name, shape in shapes.items()}
    arrays |= {name: np.ones(HIDDEN, np.float32) for name in ("model.norm.weight", *(
        f"model.layers.0.{name}_layernorm.weight" for name in ("input", "post_attention")))}
    config = {"model_type": "mixtral", "num_local_experts": 2, "num_experts_per_tok": 1, "hidden_size": HIDDEN,
              "intermediate_size": HIDDEN, "num_hidden_layers": 1, "num_attention_heads": 8, "num_key_value_heads": 8,
              "head_dim": 64, "vocab_size": vocab, "max_position_embeddings": CONTEXT, "rms_norm_eps": 1e-5,
              "rope_theta": 10000.0, "tie_word_embeddings": False, "hidden_act": "silu", "sliding_window": None}
    source = folder / "model"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(config))
    made.save(str(source / "tokenizer.json"))
    head, end = {}, 0
    for name, array in arrays.items():
        head[name] = {"dtype": "F32", "shape": array.shape, "data_offsets": [end, end := end + array.nbytes]}
    text = json.dumps(head).encode()
    (source / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text
                                               + b"".join(array.tobytes() for array in arrays.values()))
    subprocess.run([sys.executable, "-m", "converter", source, folder / "model.bin", "--dtype", "f16"], cwd=ROOT,
                   check=True, stdout=sys.stderr)
    return folder / "model.bin"


def kinds():
    """Returns {name: a line that is refused}, each for another reason."""
    words = (ROOT / "tests" / "data" / "heldout.txt").read_text()
    text = (words * (3 * TEXT // len(words) + 1))[:3 * TEXT]
    lines = {"1.8 MB of text, too many tokens": {"prompt": text[:TEXT]},
             "5.4 MB of text, too many bytes": {"prompt": text},
             "1.8 MB of token numbers": {"prompt_ids": [500] * (TEXT // 5)},
             "36 MB of a line": {"prompt": "x" * 20 * TEXT}}
    return {name: json.dumps({"id": 1, **fields}).encode() + b"\n" for name, fields in lines.items()}


def gaps(service, line, seconds):
    """Returns (the longest, the median) gap of a token in ms, while a line is sent each second, or none for None."""
    with Lines(service.address) as connection:
        ticks, answers = queue.SimpleQueue(), []

        def send():  # on a thread of its own, which holds the streams' clients up no more than another process
            while ticks.get():
                connection.send_bytes(line)
                answers.append(connection.receive())
        sender = threading.Thread(target=send)
        sender.start()
        clients, _ = load(service.address, STREAMS, CONTEXT - 64, True, seconds,
                          lambda: ticks.put(1) if line is not None else None)
        end = time.perf_counter()  # until which the last token of each has been followed by none
        ticks.put(None)
        sender.join()
    for answer in answers:
        if answer.get("error", {}).get("code") != "too_long":
            raise ColibriError("service", str(answer)[:200], "too_long", "look at its log")
    found = [gap for client in clients for gap in client.gaps if gap]  # 0: it came with the token before
    found += [1e3 * (end - client.last) for client in clients if client.last]
    return max(found), statistics.median(found)


def main():
    parser = make_parser("refused", __doc__)
    parser.add_argument("--rounds", type=count, default=5, metavar="N", help="of each kind (default 5)")
    parser.add_argument("--seconds", type=amount, default=4, metavar="N", help="of a round (default 4)")
    options = parser.parse_args()
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(COLUMNS)
    command = " ".join(["python -m bench.refused", *sys.argv[1:]])
    with tempfile.TemporaryDirectory() as folder, \
            Service(write_model(Path(folder), tokenizer()), "--backend", "host", "--batch-size", 8) as service:
        load(service.address, STREAMS, 200, True, 1)
        for name, line in kinds().items():
            pairs = [(gaps(service, None, options.seconds), gaps(service, line, options.seconds))
                     for _ in range(options.rounds)]
            alone, beside = (min(pair[index][0] for pair in pairs) for index in (0, 1))
            typical = min(pair[1][1] for pair in pairs)
            writer.writerow([name, options.rounds, *map(plain, (beside, alone, beside - alone, typical)), command])
            sys.stdout.flush()


if __name__ == "__main__":
    run(main)
