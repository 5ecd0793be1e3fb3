"""The catalogue of errors: what causes each, and its exact line. Each exits with 2, without a traceback or output."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys

import numpy as np
import pytest
import text_models
import tokenizers
from conftest import ROOT, program
from refusals import PROMPT, line_of, write

from colibri.checkpoint import Checkpoint
from colibri.weights import most_threads

# A cause and the options that bring it about, then the line they end with.
CATALOGUE = """
missing model: --model none.bin --prompt hello
    none.bin: not found, expected a model file; make one with python -m converter checkpoint.pt none.bin
directory: --model folder.bin --prompt hello
    folder.bin: a directory, expected a model file; name a .bin that python -m converter wrote
empty: --model empty.bin --prompt hello
    empty.bin: size=0, expected a model; the file is empty, convert again
short: --model short.bin --prompt hello
    short.bin: size=100, expected at least 512 bytes; the file is cut off, convert again
score of a file that is missing: --model moe.bin --score none.txt
    --score: none.txt: No such file or directory, expected a file of text
score of a folder: --model moe.bin --score folder.bin
    --score: folder.bin: a directory, expected a file of text, or --score - for what comes through a pipe
score of nothing: --model moe.bin --score empty.bin
    --score: 0 bytes, expected at least 1; the model needs something to continue
score of one byte: --model moe.bin --score one.txt
    --score: 1 byte, expected at least 2, since the first has none before it; take a longer text
score of a stack: --model stack.bin --score 500.txt
    stack.bin: vocab_size=0, expected tokens for a prompt; this is a bare stack of MoE layers, use --input, or a latency
    run
score and prompt: --model moe.bin --score 500.txt --prompt hello
    --prompt: given, expected only without --score; leave it out
score and temperature: --model moe.bin --score 500.txt --temperature 1
    --temperature: given, expected only without --score; leave it out
truncated: --model cut.bin --prompt hello
    cut.bin: size=9000000, expected 15138816 bytes from the header; the file is cut off or has grown, convert again
foreign: --model foreign.bin --prompt hello
    foreign.bin: magic='\\x89PNG', expected 'COLI'; not a Colibri model, make one with python -m converter
version 1: --model v1.bin --prompt hello
    v1.bin: version=1, expected 2; it has no dimensions in it, so upgrade it with python -m converter v1.bin new.bin
    --hidden H --ffn F --activation NAME --renormalize (or --no-renormalize)
version 3: --model v3.bin --prompt hello
    v3.bin: version=3, this build reads 1 and 2; convert again with this converter
out of bounds: --model outside.bin --prompt hello
    outside.bin: layers.0.qkv: offset=8589934592, expected at most 15073280 for 65536 bytes in a file of 15138816;
    the file is damaged, convert again
overlap: --model overlap.bin --prompt hello
    overlap.bin: layers.0.qkv begins at byte 8192, expected at or after byte 73728, where embed ends; the file is
    damaged, convert again
other num_experts: --model moe.bin --num-experts 8 --prompt hello
    --num-experts: 8, expected 32 as in moe.bin; the model decides, leave the option out
other k: --model moe.bin --k 4 --prompt hello
    --k: 4, expected 2 as in moe.bin; the model decides, leave the option out
k too large: --model moe.bin --k 33 --prompt hello
    --k: 33, expected 2 as in moe.bin; the model decides, leave the option out
sequence too long: --model moe.bin --seq-len 513
    --seq-len: 513, expected at most 512, the model's own positions (max_positions of moe.bin); use fewer
sequence too long for the context: --model long.bin --seq-len 513 --context 512
    --seq-len: 513, expected at most 512, the context of this run (the model has 2048 positions); use fewer, or raise it with
    --context 513
sequence too long for both: --model long.bin --seq-len 5000 --context 512
    --seq-len: 5000, expected at most 512, the context of this run (the model has 2048 positions); use fewer, or raise it with
    --context 2048
sequence too long for the default: --model endless.bin --seq-len 5000
    --seq-len: 5000, expected at most 4096, the context of this run (the model has no limit); use fewer, or raise it with
    --context 5000
sequence too long for a stack: --model stack.bin --seq-len 5000
    --seq-len: 5000, expected at most 4096 of a bare stack of MoE layers; use fewer
context above the model's: --model moe.bin --prompt hello --context 513
    --context: 513, expected at most 512, the model's own positions (max_positions of moe.bin); use fewer
no context: --model moe.bin --prompt hello --context 0
    --context: 0, expected 1 to 1073741824
context of a stack: --model stack.bin --input x.npy --output y.npy --context 100
    --context: 100, expected only for a model with attention; stack.bin is a bare stack of MoE layers, leave it out
no keys: --model moe.bin --http :0 --api-key-file empty.bin
    --api-key-file: empty.bin: no key, expected at least one, a line each; write one, or leave the option out
a blank in a key: --model moe.bin --http :0 --api-key-file text.npy
    --api-key-file: text.npy: a blank or another character than ASCII's in line 1, expected one key a line, of visible
    ASCII characters; correct it
keys of lines: --model moe.bin --serve - --api-key-file x.npy
    --api-key-file: given, expected only with --http; leave it out
tools of a model that has no template: --model moe.bin --http :0 --tool-format hermes
    --tool-format: hermes, expected a model that has a chat template; leave it out
tools of a conversation without a template: --model moe.bin --chat --tool-format glm
    --tool-format: glm, expected a model that has a chat template; leave it out
tools of lines: --model moe.bin --serve - --tool-format glm
    --tool-format: given, expected only with --http; leave it out
tools of a text run: --model moe.bin --prompt hello --tool-format glm
    --tool-format: given, expected only with --chat or --http; leave it out
unknown tool format: --model moe.bin --http :0 --tool-format xml
    --tool-format: xml, expected one of harmony, deepseek, deepseek-v3.1, glm, qwen-xml, mistral-args, mistral, hermes,
    llama
origin with a path: --model moe.bin --http :0 --cors http://localhost:3000/
    --cors: http://localhost:3000/, expected * or an origin such as http://localhost:3000, without a path; correct it
context of a server: --model moe.bin --serve - --context 513
    --context: 513, expected at most 512, the model's own positions (max_positions of moe.bin); use fewer
batch too large for a step: --model moe.bin --batch-size 600
    --batch-size: 600, expected at most 32, MAX_BATCH of the library; use fewer, or raise it with
    DEFINES='-DMAX_BATCH=600 -DMAX_STEP_TOKENS=600' in the environment
batch too large: --model moe.bin --batch-size 33
    --batch-size: 33, expected at most 32, MAX_BATCH of the library; use fewer, or raise it with
    DEFINES=-DMAX_BATCH=33 in the environment
more new than all: --model moe.bin --seq-len 8 --max-new-tokens 8
    --max-new-tokens: 8, expected fewer than --seq-len 8, which counts them; lower it
long prompt: --model moe.bin --prompt @600.txt
    --prompt: 600 bytes, expected at most 512, the model's own positions (max_positions of moe.bin); use fewer
long prompt for the context: --model long.bin --prompt @600.txt --context 512
    --prompt: 600 bytes, expected at most 512, the context of this run (the model has 2048 positions); use fewer, or raise it with
    --context 600
too many new: --model moe.bin --prompt @500.txt --max-new-tokens 14
    --max-new-tokens: 14, expected at most 13 after a prompt of 500 bytes in a context of 512, the
    model's own positions (max_positions of moe.bin); use fewer
too many new for the context: --model long.bin --prompt @500.txt --max-new-tokens 14 --context 512
    --max-new-tokens: 14, expected at most 13 after a prompt of 500 bytes in a context of 512, the context of this run
    (the model has 2048 positions); use fewer, or raise it with --context 513
empty prompt: --model moe.bin --prompt ''
    --prompt: 0 bytes, expected at least 1; the model needs something to continue
no prompt file: --model moe.bin --prompt @none.txt
    --prompt: @none.txt: No such file or directory, expected a file of text
prompt for words: --model words.bin --prompt hello
    words.bin: vocab_size=500 and no tokenizer, expected 256 for --prompt, where a token is a byte; give --prompt-ids,
    or convert a folder that has tokenizer.json
prompt for a stack: --model stack.bin --prompt hello
    stack.bin: vocab_size=0, expected tokens for a prompt; this is a bare stack of MoE layers, use --input, or a
    latency run
not a token number: --model words.bin --prompt-ids 1,x
    --prompt-ids: 'x', expected token numbers such as 17,4,25
two prompts: --model words.bin --prompt-ids 1 --prompt hello
    --prompt-ids: given, expected only without --prompt; leave one of them out
token out of range: --model words.bin --prompt-ids 1,500
    --prompt-ids: 500, expected 0 to 499
unknown backend: --model moe.bin --backend tpu
    --backend: tpu, expected one of auto, host, cuda
not a number: --model moe.bin --threads two
    --threads: two, expected an integer, 1 to MOST_THREADS
no thread: --model moe.bin --threads 0
    --threads: 0, expected 1 to MOST_THREADS
temperature: --model moe.bin --prompt hello --temperature -1
    --temperature: -1.0, expected 0 (greedy) to 1e30
not a plain number: --model moe.bin --prompt hello --temperature 1_0
    --temperature: 1_0, expected a number
huge temperature: --model moe.bin --prompt hello --temperature 1e300
    --temperature: 1e+300, expected 0 (greedy) to 1e30
huge top-k: --model moe.bin --prompt hello --temperature 1 --top-k 2147483648
    --top-k: 2147483648, expected 0 or -1 (all) to 2^31 - 1
underscore: --model moe.bin --batch-size 1_0
    --batch-size: 1_0, expected an integer, 1 to 65536
blank: --model moe.bin --seq-len '30 '
    --seq-len: 30 , expected an integer, 2 or more
huge batch: --model moe.bin --batch-size 99999999
    --batch-size: 99999999, expected 1 to 65536
prompt of a pipe: --model moe.bin --prompt @pipe
    --prompt: @pipe: a special file, expected a file of text, or --prompt - for what comes through a pipe
prompt without end: --model moe.bin --prompt @/dev/zero
    --prompt: @/dev/zero: a special file, expected a file of text, or --prompt - for what comes through a pipe
input of a pipe: --model stack.bin --input pipe --output y.npy
    pipe: a special file, expected a file that numpy.save wrote
output of a pipe: --model stack.bin --input x.npy --output pipe
    --output: pipe, a pipe, expected a file; choose another name
empty names: --model stack.bin --input '' --output ''
    --input: missing, expected with --output; hidden states go from --input to --output
zip as input: --model stack.bin --input zip.npy --output y.npy
    zip.npy: not an array of numbers, expected an .npy file of numbers; write it with numpy.save
huge shape: --model stack.bin --input shape.npy --output y.npy
    shape.npy: not an array of numbers, expected an .npy file of numbers; write it with numpy.save
negative shape: --model stack.bin --input negative.npy --output y.npy
    negative.npy: not an array of numbers, expected an .npy file of numbers; write it with numpy.save
broken header: --model stack.bin --input header.npy --output y.npy
    header.npy: not an array of numbers, expected an .npy file of numbers; write it with numpy.save
top-p: --model moe.bin --prompt hello --temperature 1 --top-p 0
    --top-p: 0.0, expected more than 0 and at most 1
top-k of greedy: --model moe.bin --prompt hello --top-k 5
    --top-k: given, expected only with --temperature above 0, without which the likeliest token is taken; give
    --temperature 1, or leave it out
top-p of greedy: --model moe.bin --prompt hello --top-p 0.9 --temperature 0
    --top-p: given, expected only with --temperature above 0, without which the likeliest token is taken; give
    --temperature 1, or leave it out
dispatch on the host: --model moe.bin --prompt hello --backend host --dispatch combo
    --dispatch: combo, expected only on a GPU, and this runs on the host (--backend host); leave it out, or see
    python -m colibri.run --doctor
precapture on the host: --model moe.bin --prompt hello --backend host --precapture
    --precapture: given, expected only on a GPU, and this runs on the host; leave it out, or see python -m
    colibri.run --doctor
value missing: --model moe.bin --prompt
    --prompt: expected one argument; see python -m colibri.run --help
no model: --prompt hello
    the following arguments are required: --model; see python -m colibri.run --help
option of another run: --model moe.bin --prompt hello --repeat 3
    --repeat: given, expected only without --prompt; leave it out
sampling without prompt: --model moe.bin --top-k 3
    --top-k: given, expected only with --prompt or --chat; leave it out
system without chat: --model moe.bin --prompt x --system y
    --system: given, expected only with --chat; leave it out
prompt with chat: --model moe.bin --chat --prompt x
    --prompt: given, expected only without --chat; leave it out
chat with a stack: --model stack.bin --chat
    stack.bin: vocab_size=0, expected tokens for a prompt; this is a bare stack of MoE layers, use --input, or a latency
    run
input alone: --model stack.bin --input x.npy
    --output: missing, expected with --input; hidden states go from --input to --output
output over input: --model stack.bin --input x.npy --output ./x.npy
    --output: ./x.npy, expected another file than --input; choose another name
input for tokens: --model moe.bin --input x.npy --output y.npy
    moe.bin: vocab_size=256, expected 0 for --input, a bare stack of MoE layers; give this model a --prompt
no input: --model stack.bin --input none.npy --output y.npy
    none.npy: No such file or directory, expected an .npy file of numbers; write it with numpy.save
input not npy: --model stack.bin --input text.npy --output y.npy
    text.npy: not an array of numbers, expected an .npy file of numbers; write it with numpy.save
input of objects: --model stack.bin --input objects.npy --output y.npy
    objects.npy: not an array of numbers, expected an .npy file of numbers; write it with numpy.save
input of ints: --model stack.bin --input ints.npy --output y.npy
    ints.npy: dtype=int64, expected float32 or float16; convert it with numpy.astype
narrow input: --model stack.bin --input narrow.npy --output y.npy
    narrow.npy: shape=(3, 65), expected (tokens, 64) from hidden=64 of stack.bin; give it rows of that size
NaN in input: --model stack.bin --input nan.npy --output y.npy
    nan.npy: row 1 holds NaN or inf, expected finite numbers; look at what made it
output folder: --model stack.bin --input x.npy --output none/y.npy
    none/y.npy: No such file or directory, expected to write 768 bytes there; choose another --output
output disk full: --model stack.bin --input x.npy --output /dev/full
    /dev/full: No space left on device, expected to write 768 bytes there; choose another --output
"""


def catalogue():
    """[(cause, options, line)] of the text above."""
    text = CATALOGUE.replace("MOST_THREADS", str(most_threads()))
    entries = re.findall(r"^(\S.*?): (.*)\n((?:    .*\n)+)", text, re.MULTILINE)
    return [(cause, shlex.split(options), " ".join(line.split())) for cause, options, line in entries]


@pytest.mark.parametrize("options, line", [pytest.param(*entry[1:], id=entry[0]) for entry in catalogue()])
def test_catalogue(place, options, line):
    assert line_of(program("colibri.run", *options, cwd=place)) == line
    assert not [name for name in os.listdir() if name.startswith("y.npy")]


def test_unknown_option(place):
    line = line_of(program("colibri.run", "--model", "moe.bin", "--bach-size", 3, cwd=place))
    assert line == "--bach-size: unknown option, expected one that --help lists; did you mean --batch-size?"
    line = line_of(program("colibri.run", "--model", "moe.bin", "zzz", cwd=place))
    assert line == "zzz: unknown option, expected one that --help lists"


def test_flipped_byte(place):
    line = line_of(program("colibri.run", "--model", "flipped.bin", *PROMPT, cwd=place))
    assert line.startswith("flipped.bin: header_crc32=0x")
    assert line.endswith("; header or directory is damaged, convert again")


def test_nan_in_the_weights(place):
    """A NaN in a router's weights shows in the first step, with its layer and token."""
    checkpoint = Checkpoint("nan.bin")
    offset = checkpoint.tensors["layers.1.router"].ctypes.data - checkpoint.data.ctypes.data
    with open("nan.bin", "r+b") as file:
        file.seek(offset)
        file.write(np.float32(np.nan).tobytes())
    line = line_of(program("colibri.run", "--model", "nan.bin", "--input", "x.npy", "--output", "y.npy", cwd=place))
    assert line == ("layers.1.router: logits of token 0 are NaN, +inf or fewer than k=2 finite, expected finite; the "
                    "weights or the input hold NaN or inf")


@pytest.mark.parametrize("options, redirection, message", [
    ("--model moe.bin --prompt -", "<&-", "--prompt: -: stdin is closed, expected text there"),
    ("--model moe.bin --prompt x", ">&-", "stdout: closed, expected open for the results"),
    ("--model none.bin --prompt x", "2>&-", ""), ("--model none.bin --prompt x", "2>/dev/full", ""),
    ("--model none.bin --prompt x", ">&- 2>&-", ""),
    ("--help", ">/dev/full", "stdout: No space left on device, expected to write the results there; free some space"),
    ("--model moe.bin --prompt -", "</dev/zero",
     "--prompt: more than 16777216 bytes, expected what fits the context; use fewer")])
def test_closed_full_and_endless_streams(place, options, redirection, message):
    command = f"{shlex.quote(sys.executable)} -m colibri.run {options} {redirection}"
    run = subprocess.run(["bash", "-c", command], cwd=place, check=False, capture_output=True, text=True, timeout=60,
                         env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert (run.returncode, run.stdout, run.stderr) == (2, "", f"{message}\n" if message else "")


def test_prompts_that_the_models_tokenizer_does_not_take(place):
    """Before a library is built."""
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{number}": number for number in range(4)},
                                                             unk_token="?"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    text_models.chain(place / "words", {}, 3, tokenizer=words.to_str())
    assert program("converter", "words", "words.bin", "--force", cwd=place).returncode == 0
    for prompt, line in ((b"w1 w3", "--prompt: token 'w3' is 3, expected 0 to 2, which the model has; leave it out"),
                         (b"w1 x", ("--prompt: WordLevel error: Missing [UNK] token from the vocabulary, expected "
                                    "text that the model's tokenizer takes; change it")),
                         (b"w1 \xff", "--prompt: not UTF-8, expected text; convert it first")):
        write("prompt.txt", prompt)
        run = program("colibri.run", "--model", "words.bin", "--no-build", "--prompt", "@prompt.txt", cwd=place)
        assert line_of(run) == line


# A folder of tests/data/quantized, what is changed in its quantization_config, options, and the line that it ends with.
FEW_BITS = [
    ("gptq4", {"bits": 3}, [],
     ("gptq4/config.json: quantization_config.bits=3, expected 4 or 8; correct the config, or it asks for what "
      "Colibri does not compute")),
    ("gptq4", {"quant_method": "bitsandbytes"}, [],
     ('gptq4/config.json: quantization_config.quant_method="bitsandbytes", expected "fp8" or "mxfp4" or "gptq" or '
      '"awq" or "compressed-tensors"; correct the config, or it asks for what Colibri does not compute')),
    ("gptq4", {"group_size": 64}, [],
     ("gptq4: model.layers.0.block_sparse_moe.experts.0.w1.qweight: 2 groups for 64 columns, expected group_size=64; "
      "the checkpoint and its config disagree")),
    ("awq", {"version": "gemv"}, [],
     ('awq/config.json: quantization_config.version="gemv", expected "gemm" or "GEMM"; correct the config, or it '
      'asks for '
      "what Colibri does not compute")),
    ("awq", {}, ["--group", "64"],
     ("awq: model.layers.0.mlp.experts.0.gate_proj.qweight: int4 in groups of 32 columns, expected a multiple of 64, "
      "or a whole row; leave --group out")),
    ("fp8", {}, ["--group", "64", "--dtype", "f16"],
     "--group: 64, expected only with matrices in int4 or int8; drop it"),
    ("fp8", {}, ["--format", "v1", "--layer", "1", "--group", "64"],
     "--group: 64, expected none with --format v1, which is f16; drop it")]


@pytest.mark.parametrize(("name", "changes", "options", "line"), FEW_BITS)
def test_checkpoints_of_few_bits(tmp_path, name, changes, options, line):
    shutil.copytree(ROOT / "tests" / "data" / "quantized" / name, tmp_path / name)
    values = json.loads((tmp_path / name / "config.json").read_text())
    values["quantization_config"].update(changes)
    (tmp_path / name / "config.json").write_text(json.dumps(values))
    run = program("converter", name, "a.bin", *options, cwd=tmp_path)
    assert line_of(run) == line and not (tmp_path / "a.bin").exists()


def test_full_stdout(place):
    with open("/dev/full", "wb") as full:
        command = [sys.executable, "-m", "colibri.run", "--model", "moe.bin", *PROMPT]
        run = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, cwd=place, check=False,
                             env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert run.returncode == 2
    assert run.stderr == b"stdout: No space left on device, expected to write the results there; free some space\n"


PATCHED = """
import errno, os, sys
from PACKAGE import MODULE as patched
def fail(*arguments):
    raise OSError(errno.EIO, os.strerror(errno.EIO)ARGUMENT)
patched.NAME = fail
from colibri import run
from converter import __main__ as converter
sys.exit(COMMAND)
"""


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("package, module, name, command, options, where, rule", [
    ("colibri", "report", "process_age", "run.command()", ["--model", "moe.bin", *PROMPT], r"colibri/run.py:\d+",
     r"the system to allow it; check permissions, space and limits \(ulimit -a\)"),
    ("converter", "inputs", "is_input", "converter.main()", ["models/moe-32.pt", "moe.bin", "--force"],
     r"converter/__main__.py:\d+", r"the system to allow it; check permissions, space and limits \(ulimit -a\)")])
def test_an_error_of_the_system_is_not_one_of_stdout(place, named, package, module, name, command, options, where,
                                                     rule):
    script = PATCHED
    for what, value in (("PACKAGE", package), ("MODULE", module), ("NAME", name), ("COMMAND", command),
                        ("ARGUMENT", ", 'some/file'" if named else "")):
        script = script.replace(what, value)
    options = [str(ROOT / option) if option.startswith("models/") else option for option in options]
    run = subprocess.run([sys.executable, "-c", script, *options], cwd=place, check=False, capture_output=True,
                         text=True,
                         env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert (run.returncode, run.stdout) == (2, "")
    if named:
        where, rule = "some/file", ".*"
    assert re.fullmatch(f"{where}: Input/output error, expected {rule}\n", run.stderr), run.stderr


def test_too_few_open_files_for_a_service(place):
    """Its loop has none left."""
    script = ("import asyncio, errno, os, sys\nfrom colibri import run\n"
              "def fail():\n    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))\n"
              "asyncio.events.new_event_loop = fail\nsys.exit(run.command())")
    command = [sys.executable, "-c", script, "--backend", "host", "--model", "moe.bin", "--serve", "unix:socket"]
    for options, form in (((), "{}"), (("--log-format", "json"), r'.*"event": "fault", "error": "{}"\}')):
        run = subprocess.run([*command, *options], cwd=place, check=False, capture_output=True, text=True, timeout=60,
                             stdin=subprocess.DEVNULL, env={**os.environ, "PYTHONPATH": str(ROOT)})
        assert (run.returncode, run.stdout) == (2, "")
        assert re.fullmatch(form.replace("{}", r"colibri/serve.py:\d+: Too many open files, expected the system to "
                                               r"allow it; check permissions, space and limits \(ulimit -a\)") + "\n",
                            run.stderr), run.stderr
