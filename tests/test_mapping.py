"""Mapped files that change under a running program: cut off, they are one line and status 2; replaced, nothing."""

import os
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest
from conftest import ROOT
from converter_files import write_pt
from synthetic import STACK, write_model

from colibri import build
from colibri.checkpoint import Checkpoint

STEPS = """
import mmap, os, sys
import numpy as np
from colibri.engine import Engine
{before}
engine = Engine(sys.argv[1], backend="host")
session = engine.session()
session.prefill(b"It was ")
print("ready", flush=True)
sys.stdin.readline()
{then}
print(bytes(session.generate(b"the custom of", 20)).decode(), flush=True)
"""


@pytest.fixture
def model(moe_32, tmp_path):
    build.library_path(Checkpoint(moe_32))
    return shutil.copy(moe_32, tmp_path / "model.bin")


def while_mapped(model, change, then="", before=""):
    """(status, stdout, stderr) of a program that has a session in the model when change() is called, then goes on."""
    script = STEPS.format(then=then, before=before)
    process = subprocess.Popen([sys.executable, "-c", script, str(model)], cwd=ROOT, text=True, stdin=subprocess.PIPE,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout.readline() == "ready\n", process.stderr.read()
    change()
    out, err = process.communicate("\n", timeout=60)
    return process.returncode, out, err


@pytest.mark.parametrize("size", [0, 4096, 5_000_000])
def test_a_model_that_is_cut_off_while_it_runs(model, size):
    whole = os.path.getsize(model)
    assert while_mapped(model, lambda: os.truncate(model, size)) == (2, "", (
        f"{model}: a part of it can no longer be read, expected its {whole} bytes to stay while it is in use; it was "
        "cut off, or its disk fails: write a new file beside it and rename that over it\n"))


def test_engines_that_were_closed_watch_nothing(model):
    """More than can be watched at once, over one checkpoint that stays."""
    before = ("from colibri.checkpoint import Checkpoint\nkept = Checkpoint(sys.argv[1])\n"
              "for _ in range(70):\n    Engine(kept, backend='host').close()")
    status, out, err = while_mapped(model, lambda: os.truncate(model, 4096), before=before)
    assert (status, out) == (2, "") and err.startswith(f"{model}: a part of it can no longer be read")


def test_a_model_that_is_replaced_while_it_runs(model, tmp_path):
    expected = while_mapped(model, lambda: None)

    def replace():
        (tmp_path / "new.bin").write_bytes(b"another model")
        os.replace(tmp_path / "new.bin", model)
    assert while_mapped(model, replace) == expected == (0, expected[1], "")
    assert len(expected[1]) == 21


@pytest.mark.parametrize("then, ended", [
    ("""with open(sys.argv[1] + ".other", "w+b") as file:
    file.truncate(8192)
    other = mmap.mmap(file.fileno(), 8192)
    file.truncate(0)
other[5000]""", -signal.SIGBUS),
    ("os.kill(os.getpid(), 7)", -signal.SIGBUS),
    ("other = np.array(engine.checkpoint.data)\nengine.close(); del engine, session; os.kill(os.getpid(), 7)",
     -signal.SIGBUS),
], ids=["of another file", "sent", "after the engine"])
def test_other_faults_are_what_they_were(model, then, ended):
    assert while_mapped(model, lambda: None, then) == (ended, "", "")


def test_an_engine_stays_guarded_when_another_of_its_model_is_closed(model):
    then = "Engine(engine.checkpoint, backend='host').close(); os.truncate(sys.argv[1], 0)"
    status, out, err = while_mapped(model, lambda: None, then)
    assert (status, out) == (2, "") and err.startswith(f"{model}: a part of it can no longer be read")


def test_an_input_that_is_cut_off_while_it_is_read(tmp_path):
    """The array's own file, when it is cut off between its checks and its use: here, by the build of the library."""
    build.library_path(Checkpoint(write_model(tmp_path / "stack.bin", STACK)))
    np.save(tmp_path / "x.npy", np.zeros((4000, 64), np.float32))
    script = ("import os, sys\nfrom colibri import run\nprepare = run.prepare\n"
              "def cut(*arguments):\n    prepared = prepare(*arguments)\n    os.truncate('x.npy', 4096)\n"
              "    return prepared\nrun.prepare = cut\nsys.exit(run.command())")
    done = subprocess.run([sys.executable, "-c", script, "--model", "stack.bin", "--input", "x.npy",
                           "--output", "y.npy"], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)},
                          capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("x.npy: a part of it can no longer be read, expected its 1024000")
    assert done.stderr.count("\n") == 1 and not (tmp_path / "y.npy").exists()


def test_a_checkpoint_that_is_cut_off_under_a_view_of_it(tmp_path):
    """What is gone reads as zeros, which the check at the end refuses."""
    script = ("import os, sys\nfrom converter.mapped import check_sizes\n"
              "from converter.pt_reader import read_checkpoint\n"
              "rows = read_checkpoint(sys.argv[1])['w'].array()\nos.truncate(sys.argv[1], 100_000)\n"
              "print((rows[0] != 0).all(), (rows[-1] == 0).all())\ncheck_sizes()")
    path = write_pt(tmp_path / "a.pt", {"w": np.random.default_rng(0).standard_normal((1000, 300))})
    size = path.stat().st_size
    done = subprocess.run([sys.executable, "-c", script, path], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout == "True True\n" and done.returncode == 1
    assert done.stderr.endswith(f"ColibriError: {path}: the file shrank to 100000 bytes while it was read, expected "
                                f"{size}; convert again when nothing writes to it\n")


def test_a_checkpoint_that_is_cut_off_at_the_end_of_a_conversion(tmp_path):
    path = shutil.copy(ROOT / "models" / "moe-32.pt", tmp_path / "a.pt")
    shutil.copy(ROOT / "models" / "moe-32.json", tmp_path / "a.json")
    script = ("import os, sys\nfrom converter import __main__, bin_writer\nwrite = bin_writer.write\n"
              "def cut(*arguments):\n    write(*arguments)\n    os.truncate(sys.argv[1], 8192)\n"
              "bin_writer.write = cut\nsys.exit(__main__.main(sys.argv[1:]))")
    done = subprocess.run([sys.executable, "-c", script, path, tmp_path / "a.bin"], cwd=ROOT, capture_output=True,
                          text=True, check=False)
    assert done.returncode == 2 and sorted(os.listdir(tmp_path)) == ["a.json", "a.pt"]
    assert done.stderr.startswith(f"{path}: the file shrank to 8192 bytes") and done.stderr.count("\n") == 1
