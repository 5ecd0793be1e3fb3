"""Damages input from outside, and checks that each piece is taken, or refused in one sentence, and in time.

    python -m bench.fuzz                                  # five minutes: files, then steps, then requests
    python -m bench.fuzz bin --seconds 20 --seed 7 --first 1234
    bin    the reader of .bin files: headers, directories and sizes changed, mostly under a right checksum
    step   a model whose header and weights are changed where no check looks: a step gives finite logits or an error
    request    lines of the service: fields, values, nesting, encoding and bytes of requests changed

A case depends on the seed and its number alone, and --first repeats one. A case fails that raises anything but a
ColibriError of one line, takes 20 seconds or ends the process. Its number is then printed, and the status is 1.
"""

import contextlib
import faulthandler
import functools
import json
import os
import subprocess
import sys
import tempfile
import zlib
from collections import Counter
from pathlib import Path

import numpy as np

from bench.program import ROOT, Seconds, amount, make_parser, run
from colibri import build, headers, refused, requests
from colibri.checkpoint import FLAGS, FLOATS, Checkpoint
from colibri.engine import Engine
from colibri.errors import ColibriError
from colibri.program import integer
from colibri.sampling import Sampler
from converter import bin_writer

SECONDS = 300
CASE_SECONDS = 20
MAX_FILE_BYTES = 1 << 40  # sparse, but for its first bytes
INTEGERS = (0, 1, 2, 3, 7, 63, 64, 65, 127, 128, 255, 256, 257, 511, 512, 4095, 4096, 65535, 1 << 16, 1 << 31,
            (1 << 31) - 1,
            (1 << 32) - 1, 1 << 32, 1 << 62, 1 << 63, (1 << 64) - 4096, (1 << 64) - 1)
NUMBERS = (0.0, -0.0, 1.0, -1.0, 1e-45, 1e-5, 0.5, 3e38, -3e38, float("inf"), float("-inf"), float("nan"))
TEXTS = ("", "a", "id", "prompt", "\u20ac", "\U0001f426", "\ud83d", "\0", "\n", "\x7f", "\u2028", "\x1b[31m", "../x",
         "e" * 129)
with np.errstate(over="ignore"):
    HALVES = np.array(NUMBERS).astype(np.float16)
COMPILED_EVERY = 20  # of the files that are taken: what config.h thinks of their shape
HEADER, TENSOR = (headers.default().structs[name] for name in ("BinHeader", "BinTensor"))
FORMS = [(0, 0, 0)] * 8 + [(1, 0, 0), (4, 32, 0), (4, 128, 1), (5, 64, 0), (5, 32, 1), (6, 128, 0), (7, 32, 0)]
CODES = {"activation": 4, "router_kind": 4, "norm_kind": 3, "rope_kind": 4, "attention_kind": 3, "qk_norm": 3}
# That C reads, and no build bakes in.
STEP_FIELDS = (*FLOATS, "rope_original_positions", "window", "window_layers", "num_eos", "max_positions")


class Failure(Exception):
    """Reports a case that was neither taken nor refused as it should be."""


def model_fields(random):
    """Returns the header's fields of a small model of a random kind. Not every combination makes sense."""
    pick = random.integers
    heads, bare = int(pick(1, 5)), pick(8) == 0
    fields = {**dict.fromkeys(HEADER.names, 0), "window_layers": [], "dense_layers": [], "eos_ids": [0] * 8,
              "reserved": [0] * HEADER["reserved"].shape[0]}
    fields |= {"num_experts": int(pick(2, 9)), "k": int(pick(1, 3)), "num_layers": int(pick(1, 4)),
               "hidden": int(pick(1, 70)), "ffn": int(pick(1, 70)), "num_groups": 1, "topk_groups": 1,
               "interleave_rows": 64, "max_positions": 128}
    fields |= {name: int(pick(2)) for name in FLAGS} | {name: int(pick(count)) for name, count in CODES.items()}
    fields |= {name: float(random.random()) for name in FLOATS}
    fields |= {"rope_original_positions": int(pick(1, 200)), "rope_dynamic_factor": 1 + float(random.random())}
    if not bare:
        fields |= {"num_heads": heads, "num_kv_heads": heads, "head_dim": 8, "v_head_dim": 8,
                   "vocab_size": int(pick(1, 300)), "rotary_dim": int(pick(4)) * 2}
    for name in ("expert", "dense", "embed"):
        values = FORMS[pick(len(FORMS))]
        fields |= {f"{name}_{field}": value for field, value in zip(("dtype", "group", "zero_points"), values)}
        fields["compute_dtype"] = 2 if values[0] > 3 else fields["compute_dtype"]
    if fields["attention_kind"] == headers.default().constants["ATTENTION_LATENT"]:
        fields |= {"kv_lora_rank": int(pick(1, 20)), "q_lora_rank": int(pick(20))}
    if pick(2):
        fields |= {"gated": 1, "shared_ffn": int(pick(40)), "dense_ffn": int(pick(1, 40)), "dense_layers": [0]}
    return fields


def planned(fields, dtype, *sections):
    """Returns the (header, directory) of a file whose tensors in int8 and int4 have some scale."""
    fields = {**fields, "weight_dtype": headers.default().codes("DTYPE")[dtype]}
    header, directory = bin_writer.plan(fields, *sections)
    directory["scale"] = [headers.has_scale(code) for code in directory["dtype"]]
    return header, directory


def bin_case(random):
    """Returns (the first bytes, the size) of a damaged file."""
    fields, dtype = model_fields(random), str(random.choice(["f32", "f16", "bf16"]))
    sections = [bytes(int(random.integers(1, 100))) if random.integers(4) == 0 else b"" for _ in range(2)]
    header, directory = planned(fields, dtype, *sections)
    for _ in range(random.integers(0, 4)):
        damage_header(random, header)
    if random.integers(2) and header["num_layers"] < 100:  # a directory that agrees with the damaged header
        with np.errstate(all="ignore"), contextlib.suppress(OverflowError, ZeroDivisionError):  # groups of 0 columns
            changed = {name: header[name].tolist() for name in HEADER.names}
            changed |= {name: [layer for layer in range(128) if headers.in_mask(header[name], layer)]
                        for name in ("window_layers", "dense_layers")}
            agreeing, directory = planned(changed, dtype, *sections)
            for name in ("file_bytes", "num_tensors", "tokenizer_offset", "settings_offset"):
                header[name] = agreeing[name]
    size = min(int(header["file_bytes"]), MAX_FILE_BYTES)
    for _ in range(random.integers(0, 3)):
        directory = damage_directory(random, directory)
    if random.integers(8):
        header["num_tensors"] = len(directory)
    size = damage_size(random, header, size)
    start = seal(header, directory)
    if random.integers(6) == 0:
        start = bytearray(start)
        for position in random.integers(0, len(start), random.integers(1, 6)):
            start[position] = random.integers(256)
        if random.integers(2):
            header, directory = np.frombuffer(start, HEADER, 1)[0], np.frombuffer(start, TENSOR, offset=HEADER.itemsize)
            start = seal(header, directory)
    return bytes(start), size


def any_integer(random, now, dtype):
    """Returns a value for an integer field: a neighbour of what is there, a value at some edge, or anything."""
    edge = int(random.choice(np.array(INTEGERS, np.uint64)))
    value = [now + int(random.integers(-2, 3)), now ^ 1 << int(random.integers(64)), edge, edge + int(now),
             int(random.integers(0, 300))][random.integers(5)]
    return value % (1 << 8 * dtype.itemsize)


def any_value(random, record, name):
    dtype = record.dtype[name].base
    if dtype.kind == "f":
        return random.choice(NUMBERS)
    if dtype.kind == "S":
        return random.choice([b"", b"embed", b"layers.0.router", b"layers.-1.router", b"\xff" * dtype.itemsize,
                              b"COLI"])
    return any_integer(random, int(np.ravel(record[name])[0]), dtype)


def damage_header(random, header):
    name = str(random.choice(HEADER.names))
    with np.errstate(over="ignore"):
        if header[name].ndim:
            header[name][random.integers(len(header[name]))] = any_value(random, header, name)
        else:
            header[name] = any_value(random, header, name)


def damage_directory(random, directory):
    """Changes an entry, or swaps, repeats or drops entries."""
    if not len(directory):
        return directory
    one, other = random.integers(0, len(directory), 2)
    how = random.integers(6)
    if how == 0:
        directory[[one, other]] = directory[[other, one]]
    elif how == 1:
        directory[one] = directory[other]
    elif how == 2:
        return np.delete(directory, one)
    else:
        name = str(random.choice(TENSOR.names))
        entry = directory[one:one + 1]
        if directory.dtype[name].subdtype:
            entry[name][0, random.integers(3)] = any_value(random, entry[0], name)
        else:
            entry[name] = any_value(random, entry[0], name)
    return directory


def damage_size(random, header, size):
    """Returns another size for the file. Mostly puts it into the header, too."""
    if random.integers(4) == 0:
        size += int(random.choice([-4096, -1, 1, 4095, 4096, 1 << 33]))
        size = int(random.integers(0, 700)) if random.integers(4) == 0 else max(0, size)
    if random.integers(8):
        header["file_bytes"] = size
    return size


def seal(header, directory):
    """Returns header and directory as bytes, under a right checksum where the directory is where the header says."""
    header["header_crc32"] = 0
    text = header.tobytes() + directory.tobytes()
    end = HEADER.itemsize + int(header["num_tensors"]) * TENSOR.itemsize
    header["header_crc32"] = zlib.crc32(text[:min(end, len(text))])
    return header.tobytes() + directory.tobytes()


def write_sparse(path, start, size):
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
    with open(path, "wb") as file:
        file.write(start[:size])
        file.truncate(size)


def fuzz_bin(random, folder, counts):
    path = folder / "case.bin"
    write_sparse(path, *bin_case(random))
    checkpoint = Checkpoint(path)
    counts["taken"] += 1
    for tensor in headers.default().tensors(checkpoint.header):
        expected = headers.stored_bytes(tensor, checkpoint.header)
        if checkpoint.tensors[tensor.name].nbytes != expected:
            raise Failure(f"{tensor.name}: {checkpoint.tensors[tensor.name].nbytes} bytes, expected {expected}")
    if counts["taken"] % COMPILED_EVERY == 0:
        compile_shape(checkpoint.header)


def compile_shape(header):
    """Checks that config.h takes a shape that the reader took."""
    command = ["gcc", "-fsyntax-only", "-std=gnu11", "-Inative", *build.defines(header), "-x", "c", "native/config.h"]
    made = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if made.returncode:
        raise Failure(f"{' '.join(command)}: {made.stderr.splitlines()[0]}")


def fuzz_step(random, folder, counts):
    """Changes some of the example model's header and weights, then runs steps."""
    path, model = folder / "case.bin", folder.parent / "moe-32.bin"
    data = bytearray(model.read_bytes())
    header = np.frombuffer(data, HEADER, 1)
    for _ in range(random.integers(0, 3)):
        name = str(random.choice(STEP_FIELDS))
        header[name] = any_value(random, header[0], name)
    end = HEADER.itemsize + int(header["num_tensors"][0]) * TENSOR.itemsize
    for position in random.integers(end // 4096 + 1, len(data) // 4096, random.integers(0, 3)):
        page = np.frombuffer(data, np.float16, 2048, int(position) * 4096)
        page[random.integers(0, 2048, random.integers(1, 50))] = random.choice(HALVES)
    directory = np.frombuffer(bytes(data[HEADER.itemsize:end]), TENSOR)
    data[:end] = seal(header[0], directory)
    path.unlink(missing_ok=True)
    path.write_bytes(data)
    with Engine(path, "host", num_slots=3) as engine, engine.session() as one, engine.session() as other:
        samplers = [Sampler(), Sampler(float(random.choice([0, 1e-30, 0.7, 1e30])), int(random.integers(3)), 0.9, 1)]
        vocab = engine.checkpoint.header["vocab_size"]
        work = [(one, random.integers(0, vocab, 40)), (other, random.integers(0, vocab, 3))]
        for _ in range(3):
            tokens = engine.step(work, samplers)
            if not all(0 <= token < vocab for token in tokens):
                raise Failure(f"sampled {tokens}")
            work = [(one, tokens[:1]), (other, tokens[1:])]
        logits = engine.step(work)
        if not np.isfinite(logits).all():
            raise Failure("logits that are not finite")
    counts["taken"] += 1


def prepare_step(folder):
    """Puts the example model beside the folder of cases, and builds its library."""
    model = folder.parent / "moe-32.bin"
    subprocess.run([sys.executable, "-m", "converter", ROOT / "models" / "moe-32.pt", model], cwd=ROOT, check=True)
    build.library_path(Checkpoint(model))


def any_json(random, depth=0):
    """Returns a value of any kind that a client might send."""
    kind = random.integers(9 if depth < 3 else 7)
    if kind == 0:
        return [None, True, False][random.integers(3)]
    if kind == 1:
        return int(random.choice(np.array(INTEGERS, np.uint64))) * int(random.choice([-1, 1, 1 << 40]))
    if kind == 2:
        return float(random.choice(NUMBERS))
    if kind == 3:
        return int(random.integers(-2, 600))
    if kind == 4:
        return 10 ** int(random.integers(1, 5000))
    if kind < 7:
        return str(random.choice(TEXTS)) * int(random.choice([1, 1, 2, 700]))
    values = [any_json(random, depth + 1) for _ in range(random.integers(0, 6))]
    return values if kind == 7 else {str(random.choice(TEXTS)): value for value in values}


def request_case(random, folder):
    """Returns the bytes of a line."""
    start = random.integers(12)
    if start == 0:
        return random.integers(0, 256, random.integers(0, 200)).astype(np.uint8).tobytes()
    if start == 1:
        count = int(random.choice([10, 900, 1100, 10_000, 30_000]))
        return (random.choice([b"[", b'{"a":', b'{"id":[']) * count + random.choice([b"", b"]" * count]))
    values = {"id": ["a", 7][random.integers(2)], "max_new_tokens": 3, "temperature": 0.5, "top_k": 2, "top_p": 0.9,
              "seed": 1, "stream": True, "deadline_ms": 1000}
    if random.integers(3):
        values |= [{"prompt": "It was"}, {"prompt_ids": [1, 2, 255]}][random.integers(2)]
    else:
        values = {"id": "a", "input": str(folder / "x.npy"), "output": str(folder / "y.npy")}
    for name in random.permutation(list(values))[:random.choice([0, 0, 0, 1, 5])]:
        values.pop(str(name))
    for _ in range(random.choice([0, 1, 1, 2])):
        values[str(random.choice([*requests.FIELDS, "cancel", *TEXTS]))] = any_json(random)
    with unlimited_digits():
        line = json.dumps(values, ensure_ascii=bool(random.integers(2))).encode(errors="surrogatepass")
    for _ in range(random.choice([0, 0, 0, 1, 3])):
        at = random.integers(0, len(line) + 1)
        piece = random.integers(0, 256, random.integers(0, 4)).astype(np.uint8).tobytes()
        line = line[:at] + piece + line[at + random.integers(0, 3):]
    return line[:random.integers(len(line) + 1)] if random.integers(12) == 0 else line


@contextlib.contextmanager
def unlimited_digits():
    """Lifts Python's limit on the digits of a number, until the block ends."""
    limit = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(0)
    yield
    sys.set_int_max_str_digits(limit)


@functools.cache
def readers(folder):
    """Returns the readers of requests to a model of text, and to a bare stack."""
    return [requests.Reader(Engine(folder.parent / name, "host")) for name in ("moe-32.bin", "stack.bin")]


def fuzz_request(random, folder, counts):
    line = request_case(random, folder)
    reader = readers(folder)[int(b'"input"' in line) ^ int(random.integers(8) == 0)]
    try:
        values = requests.parse(line)
        if requests.cancelled_id(values) is not None:
            return
        request = reader.request(values)
        if request.encode:
            request.prompt, request.max_new_tokens, _ = request.encode()
    except refused.Refused as error:
        text = str(error)
        if error.code not in refused.CODES or not text.isprintable() or len(text) > 2500:
            raise Failure(f"{error.code}: {text[:200]!r}") from error
        raise
    counts["taken"] += 1
    json.dumps(request.id)
    if request.rows is not None:
        request.rows.close()
        return
    if not 1 <= request.max_new_tokens <= reader._engine.room(len(request.prompt)):
        raise Failure(f"max_new_tokens={request.max_new_tokens} taken")
    if not all(0 <= token < 256 for token in request.prompt):
        raise Failure(f"prompt {request.prompt}")


def prepare_request(folder):
    prepare_step(folder)
    subprocess.run([sys.executable, "-m", "converter", ROOT / "tests" / "data" / "gpt-moe-32.pt",
                    folder.parent / "stack.bin", "--k", "2", "--activation", "gelu", "--renormalize"], cwd=ROOT,
                   check=True)
    build.library_path(Checkpoint(folder.parent / "stack.bin"))  # which may take longer than a case
    np.save(folder / "x.npy", np.zeros((3, 64), np.float32))


def one_case(target, seed, number, folder, counts):
    """Runs a case. Returns the error that it ended with, or None."""
    faulthandler.dump_traceback_later(CASE_SECONDS, exit=True, file=sys.__stderr__)
    try:
        target(np.random.default_rng([seed, number]), folder, counts)
        return None
    except ColibriError as error:
        text = str(error).replace(str(folder), "")
        if "\n" in text or "Error(" in text or len(text) > 2500:
            raise Failure(f"not one sentence: {text[:200]}") from error
        return text
    finally:
        faulthandler.cancel_dump_traceback_later()


def fuzz(name, seconds, seed, first, folder):
    """Runs cases for some seconds. Returns whether all were as they should be."""
    target, prepare = TARGETS[name]
    prepare(folder)
    counts, rules, number, clock = Counter(), Counter(), first, Seconds(seconds, name)
    while clock.left():
        (folder / "case").write_text(f"{name} --seed {seed} --first {number}\n")  # who dies can be repeated
        try:
            error = one_case(target, seed, number, folder, counts)
        except Exception as error:
            print(f"python -m bench.fuzz {name} --seed {seed} --first {number}: {type(error).__name__}: {error}")
            if not isinstance(error, Failure):
                raise
            return False
        if error:
            rules[error.split("=")[0].split(": ")[-1][:40]] += 1
        number += 1
    common = ", ".join(f"{rule} {count}" for rule, count in rules.most_common(5))
    print(f"{name}: {number - first} cases in {seconds:.0f} s, seed {seed}: {counts['taken']} taken, "
          f"{sum(rules.values())} refused by {len(rules)} rules; most often {common}")
    return True


TARGETS = {"bin": (fuzz_bin, lambda _: None), "step": (fuzz_step, prepare_step),
           "request": (fuzz_request, prepare_request)}


def main():
    parser = make_parser("fuzz", __doc__)
    parser.add_argument("targets", nargs="*", metavar="|".join(TARGETS), help="default: all")
    parser.add_argument("--seconds", type=amount, default=SECONDS, help=f"for all targets together (default {SECONDS})")
    parser.add_argument("--seed", type=integer(0), default=1)
    parser.add_argument("--first", type=integer(0), default=0, metavar="N", help="number of the first case")
    options = parser.parse_args()
    names = options.targets or list(TARGETS)
    if unknown := [name for name in names if name not in TARGETS]:
        parser.error(f"{unknown[0]}: unknown, expected one of {', '.join(TARGETS)}")
    faulthandler.enable()
    good = True
    for name in names:
        with tempfile.TemporaryDirectory() as parent:
            folder = Path(parent) / "cases"
            os.mkdir(folder)
            good &= fuzz(name, options.seconds / len(names), options.seed, options.first, folder)
    return int(not good)


if __name__ == "__main__":
    run(main)
