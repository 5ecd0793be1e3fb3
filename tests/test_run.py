"""The command line's three kinds of run, their figures, and how they end."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import types

import numpy as np
import pytest
import tokenizers
from conftest import ROOT, program
from synthetic import STACK, write_model

from bench.latency import plain
from colibri import report, run, weights
from colibri.engine import Engine

PROMPT = "It was the custom of "


def figures(*arguments, **options):
    run = program("colibri.run", "--json", *arguments, **options)
    assert run.returncode == 0, run.stderr.decode()
    return json.loads(run.stdout)


@pytest.fixture(scope="module")
def stack(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("stack") / "stack.bin", STACK)


def greedy(engine, prompt, count):
    with engine.session() as session:
        return bytes(session.generate(prompt.encode(), count))


def test_text_then_table(moe_32, engine):
    run = program("colibri.run", "--model", moe_32, "--prompt", PROMPT, "--max-new-tokens", 80)
    assert run.returncode == 0 and run.stderr == b""
    text, table = run.stdout.split(b"\n\nbackend ")
    assert text == greedy(engine, PROMPT, 80)
    lines = table.decode().splitlines()
    labels = [label for line in lines[1:-1] if (label := line.split("  ")[0].strip())]
    assert labels == ["library", "context", "cold start", "TTFT", "ITL", "tokens/s", "memory", "weights", "routing"]
    assert re.fullmatch(r"P99 latency: \d+\.\d{3} ms a token", lines[-1])
    for name in ("process", "library", "map", "first token"):
        assert re.search(rf"^cold start .*{name} \d", table.decode(), re.MULTILINE)
    assert max(len(line) for line in lines if not line.startswith("library")) <= 80  # a path stays whole


@pytest.mark.parametrize("how", ["text", "file", "stdin"])
def test_prompt_from_anywhere(moe_32, engine, tmp_path, how):
    (tmp_path / "prompt.txt").write_text(PROMPT)
    prompt = {"text": PROMPT, "file": f"@{tmp_path / 'prompt.txt'}", "stdin": "-"}[how]
    run = figures("--model", moe_32, "--prompt", prompt, "--max-new-tokens", 20, input=PROMPT.encode())
    assert run["text"].encode() == greedy(engine, PROMPT, 20)


def test_sampled_text_depends_on_the_seed(moe_32):
    def text(seed):
        return figures("--model", moe_32, "--prompt", PROMPT, "--temperature", 1, "--top-k", 40, "--top-p", 0.95,
                       "--seed", seed, "--max-new-tokens", 60)["text"]
    assert text(1) == text(1) != text(2)


def test_json_says_what_was_run(moe_32):
    run = figures("--model", moe_32, "--prompt", PROMPT, "--temperature", 0.5, "--top-k", 40, "--top-p", 0.95,
                  "--seed", 7, "--max-new-tokens", 3)
    assert {name: run[name] for name in ("temperature", "top_k", "top_p", "seed", "prompt_tokens", "new_tokens")} == {
        "temperature": 0.5, "top_k": 40, "top_p": 0.95, "seed": 7, "prompt_tokens": len(PROMPT), "new_tokens": 3}
    assert run["cold_start_ms"]["first_token"] == run["ttft_ms"]["p50"]
    assert run["p99_latency_ms"] == run["itl_ms"]["p99"]
    assert all(" " not in name for name in [*run, *run["cold_start_ms"]])


def test_text_fills_the_context_and_stops(moe_32):
    run = figures("--model", moe_32, "--prompt", "x" * 500)
    assert len(run["text"]) == 13 and run["itl_ms"]["count"] == 12


def test_latency_figures(moe_32):
    run = figures("--model", moe_32, "--batch-size", 3, "--seq-len", 20, "--max-new-tokens", 5, "--warmup", 2,
                  "--repeat", 4, "--threads", 1, "--num-experts", 32, "--k", 2)
    assert run["threads"] == 1 and run["backend"] in ("host avx2", "host portable")
    assert run["ttft_ms"]["count"] == 4 and run["itl_ms"]["count"] == 4 * 4
    assert run["ttft_ms"]["p50"] <= run["ttft_ms"]["p90"] <= run["ttft_ms"]["p99"] <= run["ttft_ms"]["max"]
    routed = run["routed_tokens_per_expert"]
    # four rounds of three sequences, 15 + 4 tokens fed, two experts, six layers: spread over 6 * 32
    assert routed["min"] <= 4 * 3 * 19 * 2 / 32 <= routed["max"]
    assert run["resident_mib"] > 10 and run["seed"] == 0
    assert "fraction_of_read_bandwidth" not in run  # 16 steps are too few for a rate
    assert sum(run["cold_start_ms"].values()) > 20


def test_memory_that_the_warm_up_touched_is_no_growth(moe_32):
    run = figures("--model", moe_32, "--batch-size", 32, "--seq-len", 450, "--repeat", 2)
    assert run["resident_growth_mib"] < 1


def test_bandwidth_is_measured_quickly(moe_32, engine):
    run = figures("--model", moe_32, "--seq-len", 70, "--max-new-tokens", 60, "--repeat", 1)
    assert run["itl_ms"]["count"] == 59 and 0 < (run["fraction_of_read_bandwidth"] or 1) <= 1
    assert engine.memory.read_bandwidth(engine.checkpoint, 1) > 0


def test_a_table_keeps_paths_whole_and_leaves_a_share_above_one_out(engine, monkeypatch):
    meter = report.Meter(engine, 0.1)
    meter.ttft, meter.prefilled, meter.itl, meter.decoded = [0.01], 5, [1e-4] * 60, 60
    path = f"/a folder/{'with blanks ' * 20}/libcolibri.so"
    disturbed = "GB/s, above the 0.0 GB/s measured of this machine: other processes disturbed that measurement"
    for bandwidth, line in ((1.0, disturbed), (1e15, "GB/s: 0.00 of this machine's 1000000.0 GB/s")):
        monkeypatch.setattr(engine.memory, "read_bandwidth", lambda *_, bandwidth=bandwidth: bandwidth)
        made = {**meter.figures(), "library": path}
        table = report.table(made)
        assert f"\nlibrary     {path}\n" in table and line in " ".join(table.split())
        assert (made["fraction_of_read_bandwidth"] is None) == (bandwidth == 1.0)


@pytest.mark.parametrize("pass_seconds, passes", [(1e-3, 6), (0.3 * weights.PROBE_SECONDS, 4), (9.0, 2)])
def test_bandwidth_takes_no_longer_than_it_may(engine, monkeypatch, pass_seconds, passes):
    """A slow memory is read twice: pages come in, and one pass counts."""
    now, sizes = [0.0], []

    def read_sum(start, size, threads):
        sizes.append(size)
        now[0] += pass_seconds
    monkeypatch.setattr(weights, "time", types.SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(engine.memory, "_library", types.SimpleNamespace(read_sum=read_sum))
    assert engine.memory.read_bandwidth(engine.checkpoint, 1) == pytest.approx(sizes[0] / pass_seconds)
    assert len(sizes) == passes and max(sizes) <= weights.PROBE_BYTES[1]


def test_few_steps_give_no_rate(moe_32):
    run = program("colibri.run", "--model", moe_32, "--prompt", PROMPT, "--max-new-tokens", 9)
    assert re.search(rb"\nweights     \d\.\d\d MiB a token, no rate: 8 steps decoded, fewer than 50\n", run.stdout)


def test_bytes_of_weights_touched(moe_32):
    """One sequence: every step reads the dense matrices, the routers, and two experts a layer."""
    run = figures("--model", moe_32, "--batch-size", 1, "--seq-len", 20)
    layer = 4 * 128 * 2 + 2 * 256 * 128 + 2 * 128 * 128 + 4 * 64 * 128 + 2 * 2 * 3 * 128 * 128 * 96 // 128
    assert run["weight_bytes_per_token"] == pytest.approx(6 * layer + 4 * 128 + 2 * 256 * 128, rel=0.001)


def test_latency_of_a_stack(stack):
    run = figures("--model", stack, "--batch-size", 2, "--seq-len", 20, "--repeat", 3)
    assert run["ttft_ms"]["count"] == 3 and run["itl_ms"]["count"] == 3 * 15


@pytest.mark.parametrize("dtype, rows", [(np.float32, 1), (np.float32, 1300), (np.float16, 77)])
def test_hidden_states_in_and_out(stack, tmp_path, dtype, rows):
    x = np.random.default_rng(rows).standard_normal((rows, 64)).astype(dtype)
    np.save(tmp_path / "x.npy", x)
    (tmp_path / "y.npy").write_bytes(b"something older")
    run = program("colibri.run", "--model", stack, "--input", tmp_path / "x.npy", "--output", tmp_path / "y.npy")
    assert run.returncode == 0 and re.search(rb"\nP99 latency: \d+\.\d{3} ms a step\n$", run.stdout)
    y = np.load(tmp_path / "y.npy")
    assert y.dtype == np.float32
    with Engine(stack, backend="host") as engine:
        np.testing.assert_array_equal(y, engine.stack(x))
    assert sorted(os.listdir(tmp_path)) == ["x.npy", "y.npy"]


def test_a_failed_write_leaves_the_older_output(stack, tmp_path):
    """A disk that is full, as a limit on the size of a file."""
    np.save(tmp_path / "x.npy", np.zeros((3000, 64), np.float32))
    (tmp_path / "y.npy").write_bytes(b"something older")
    command = ["bash", "-c", "trap '' XFSZ; ulimit -f 100; exec \"$@\"", "bash", sys.executable, "-m", "colibri.run"]
    run = subprocess.run([*command, "--model", stack, "--input", tmp_path / "x.npy", "--output", tmp_path / "y.npy"],
                         cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 2
    assert run.stderr == (f"{tmp_path}/y.npy: File too large, expected to write 768000 bytes there; choose another "
                          "--output\n")
    assert sorted(os.listdir(tmp_path)) == ["x.npy", "y.npy"]
    assert (tmp_path / "y.npy").read_bytes() == b"something older"


def start(*arguments):
    return subprocess.Popen([sys.executable, "-m", "colibri.run", *map(str, arguments)], cwd=ROOT,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def test_ctrl_c(moe_32):
    process = start("--model", moe_32, "--batch-size", 8, "--repeat", 1_000_000)
    time.sleep(1)
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=20)
    assert (process.returncode, output, errors) == (130, b"", b"interrupted\n")


def test_sigterm_leaves_no_half_of_an_output(tmp_path):
    """It comes while numpy.save writes."""
    script = ("import os, signal, sys, time\nimport numpy as np\nfrom colibri import run\n"
              "def main():\n    run.write_array('y.npy', np.zeros(3))\n"
              "def save(file, array):\n    os.kill(os.getpid(), signal.SIGTERM)\n    time.sleep(5)\n"
              "run.main, np.save = main, save\nsys.exit(run.command())")
    ended = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, check=False,
                           env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert (ended.returncode, ended.stderr, os.listdir(tmp_path)) == (143, b"terminated\n", [])


@pytest.mark.parametrize("line", ["raise KeyboardInterrupt('terminated')", "raise ColibriError('no')", "pass"])
def test_sigterm_while_it_ends(line):
    """It comes with the last line, or after it."""
    script = ("import os, signal, sys\nfrom colibri import run\nfrom colibri.errors import ColibriError\n"
              f"def main():\n    {line}\n"
              "run.main, os.write = main, lambda *_: os.kill(os.getpid(), signal.SIGTERM)\n"
              "run.command()\nos.kill(os.getpid(), signal.SIGTERM)")
    ended = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (143, b"", b"")


def test_little_memory(moe_32):
    """Too little for the buffer of the bandwidth's measurement: the run is whole, without that figure."""
    script = ("import sys, numpy as np\nfrom colibri import run\n"
              "def ones(*_):\n    raise MemoryError\nnp.ones = ones\nsys.exit(run.command())")
    run = subprocess.run([sys.executable, "-c", script, "--model", str(moe_32), "--prompt", PROMPT], cwd=ROOT,
                         capture_output=True, check=False)
    assert run.returncode == 0 and b"MiB a token, no rate: too little memory to measure" in run.stdout


@pytest.mark.parametrize("module, line", [("colibri.run", b"interrupted\n"),
                                          ("converter", b"interrupted; nothing was written\n")])
def test_ctrl_c_while_starting(tmp_path, module, line):
    """A numpy that takes its time to be imported."""
    (tmp_path / "numpy.py").write_text("import time\nprint(end='.', flush=True)\ntime.sleep(20)")
    process = subprocess.Popen([sys.executable, "-m", module, "--help"], cwd=ROOT, stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(tmp_path)})
    process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=20) == (b"", line) and process.returncode == 130


def test_reader_that_goes_away(moe_32):
    process = start("--model", moe_32, "--prompt", PROMPT, "--max-new-tokens", 490)
    process.stdout.read(3)
    process.stdout.close()
    assert process.stderr.read() == b"" and process.wait(timeout=20) == -signal.SIGPIPE
    process.stderr.close()


def test_each_byte_before_the_next_step(moe_32, monkeypatch, capfdbinary):
    """A token's text is out before the next token is worked on, the prompt's before the second one."""
    written, step = [], Engine.step

    def watched(*arguments, **options):
        written.append(capfdbinary.readouterr().out)
        return step(*arguments, **options)
    monkeypatch.setattr(Engine, "step", watched)
    run.main(["--model", str(moe_32), "--backend", "host", "--prompt", PROMPT, "--max-new-tokens", "5"])
    assert list(map(len, written)) == [0, 1, 1, 1, 1]


@pytest.mark.parametrize("module", ["colibri.run", "converter"])
def test_help_fits_a_terminal(module):
    text = program(module, "--help", environment={"COLUMNS": "80"}).stdout.decode()
    assert "examples:" in text and max(map(len, text.splitlines())) <= 80


def test_help_teaches():
    text = program("colibri.run", "--help").stdout.decode()
    assert "--prompt TEXT" in text and "default 128" in text
    assert text.startswith("usage: python -m colibri.run --model FILE [options]\n"
                           "       python -m colibri.run --doctor [--model FILE]\n")


def test_numbers_of_a_csv_are_plain():
    assert [plain(value) for value in (12345.6, 0.0123456, 1e-5, 3.0, 0.0)] == ["12350", "0.01235", "0.00001", "3", "0"]


def test_percentiles_are_values_that_were_measured():
    assert [report.percentile(range(1, 101), percent) for percent in (1, 50, 90, 99, 100)] == [1, 50, 90, 99, 100]
    assert report.percentile([3.0], 50) == 3.0 and report.percentile([1, 2], 50) == 1


def test_readme_example(moe_32, tmp_path):
    """The README's Python example, run as it stands beside a moe-32.bin."""
    code = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[1]
    assert len(code.splitlines()) == 6
    os.symlink(moe_32, tmp_path / "moe-32.bin")
    run = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, check=False,
                         env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert run.returncode == 0, run.stderr.decode()
    assert run.stdout.decode().strip()


def test_a_prompt_through_the_models_tokenizer(tmp_path):
    """A vocabulary of words: what goes in and comes out is text, in pieces that add up to the whole."""
    words = tokenizers.models.WordLevel({f"w{number}": number for number in range(97)}, unk_token="w0")
    tokenizer = tokenizers.Tokenizer(words)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    folder = shutil.copytree(ROOT / "tests" / "data" / "families" / "mixtral", tmp_path / "model")
    tokenizer.save(str(folder / "tokenizer.json"))
    assert program("converter", folder, tmp_path / "a.bin").returncode == 0
    recorded = np.load(ROOT / "tests" / "data" / "families" / "mixtral.npz")
    prompt = recorded["ids"][0][:8]
    arguments = ("--model", tmp_path / "a.bin", "--max-new-tokens", 24, "--json")
    run = program("colibri.run", *arguments, "--prompt", " ".join(f"w{token}" for token in prompt))
    assert json.loads(run.stdout)["text"] == "".join(f" w{token}" for token in recorded["greedy"][0])


def test_a_prompt_of_numbers(tmp_path):
    recorded = np.load(ROOT / "tests" / "data" / "families" / "mixtral.npz")
    assert program("converter", ROOT / "tests" / "data" / "families" / "mixtral", tmp_path / "a.bin").returncode == 0
    run = program("colibri.run", "--model", tmp_path / "a.bin", "--max-new-tokens", 24, "--prompt-ids",
                  ",".join(map(str, recorded["ids"][0][:8])))
    assert run.stdout.decode().splitlines()[0] == " ".join(map(str, recorded["greedy"][0]))


def test_readme_commands(tmp_path):
    """The commands of its section on the command line and of DEFINES, as typed."""
    text = (ROOT / "README.md").read_text()
    section = text[text.index("## From the command line"):text.index("## On a GPU")]
    commands = re.findall(r"^    (\S.*)$", section, re.MULTILINE)
    assert len(commands) == 7
    for name in ("models", "tests"):
        os.symlink(ROOT / name, tmp_path / name)
    for command in commands:
        command = command.replace("python ", f"{shlex.quote(sys.executable)} ", 1)
        run = subprocess.run(["bash", "-c", command], cwd=tmp_path, check=False, capture_output=True, text=True,
                             env={**os.environ, "PYTHONPATH": str(ROOT)})
        assert run.returncode == 0, run.stderr
    assert np.load(tmp_path / "y.npy").shape == (100, 64)
