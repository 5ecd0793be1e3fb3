"""What --doctor says of a machine and its models."""

import os
import re
import shutil
from pathlib import Path

import pytest
from conftest import ROOT, program
from made_up_gpu import Driver, library
from synthetic import STACK, write_model

from colibri import build, doctor
from colibri import library as libraries
from colibri.checkpoint import Checkpoint
from colibri.errors import ColibriError


def test_doctor_needs_nothing(tmp_path):
    run = program("colibri.run", "--doctor", cwd=tmp_path)
    lines = dict(line.split("  ", 1) for line in run.stdout.decode().splitlines())
    assert run.returncode == 0 and run.stderr == b""
    assert {"host", "host memory", "gcc and make", "GPU driver", "GPU", "GPU memory", "nvcc",
            "to build"} <= lines.keys()
    assert all(text.strip() for text in lines.values())


@pytest.mark.parametrize("script, said", [
    ("#!/bin/sh\nprintf '\\377\\376'", "status 0, without a version"), ("#!/bin/sh\nexit 3", ("status 3, without a "
                                                                                             "version")),
    ("#!/nonexistent", "No such file or directory"), ("garbage", "Exec format error"),
    ("#!/bin/sh\nexec sleep 1000", "silent for 0.2 s")])
def test_doctor_with_an_nvcc_that_is_none(tmp_path, monkeypatch, script, said):
    (tmp_path / "nvcc").write_text(script)
    (tmp_path / "nvcc").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(doctor, "NVCC_SECONDS", 0.2 if "sleep" in script else 20)
    with pytest.raises(ColibriError) as error:
        doctor.nvcc()
    assert str(error.value) == (f"{tmp_path / 'nvcc'} --version: {said}, expected CUDA's compiler; install the CUDA "
                                "toolkit again, or take it off PATH")


def test_doctor_asks_whether_the_driver_runs_a_library(use, monkeypatch, moe_32):
    use(Driver(version=12080))
    monkeypatch.setattr(libraries, "GPU_NODES", ("/",))
    monkeypatch.setattr(build, "place", lambda checkpoint, arch: (f"/{arch}.so", "", ["make"]))
    monkeypatch.setattr(build, "compare", lambda *_: None)
    monkeypatch.setattr(doctor.native, "Library", lambda path: library(90))
    host, cuda = doctor.model(Checkpoint(moe_32), set()).split("; ", 1)
    assert host == "ok: /host.so, by make"
    assert cuda.startswith("optional: NVIDIA driver: CUDA 12.8, expected 13.0 or newer for lib.so; ")


def test_doctor_says_which_models_have_their_library(tmp_path, moe_32):
    build.library_path(Checkpoint(moe_32))
    shutil.copy(moe_32, tmp_path / "ready.bin")
    write_model(tmp_path / "a-model-with-a-long-name.bin", ffn=1000 + os.getpid() % 1000)
    (tmp_path / "broken.bin").write_bytes(b"COLI" + bytes([1, 0, 0, 0]) * 100)
    lines = program("colibri.run", "--doctor", cwd=tmp_path).stdout.decode().splitlines()
    assert all(len(line) <= 80 or "/libcolibri.so" in line for line in lines) and lines[-1].startswith("to build")
    text = re.sub(r"\n +", " ", "\n".join(lines))
    ready, broken = r"^ready.bin +ok: .+/libcolibri.so, by make$", r"^broken.bin +version=1"
    new = (r"^a-model-with-a-long-name.bin +.+/libcolibri.so: not built; colibri.run builds it when it is needed, as "
           r"make MODEL=a-model-with-a-long-name.bin does$")
    assert all(re.search(line, text, re.MULTILINE) for line in (ready, broken, new))
    others = {*(ROOT / "build").glob("*/libcolibri.so")} - {Path(build.library_path(Checkpoint(moe_32)))}
    line = (rf"^libraries +{len(others)} more in build/, of other models, options or sources; "
            "make clean removes all there$")
    assert bool(re.search(line, text, re.MULTILINE)) == bool(others)


@pytest.mark.parametrize("named_first", [True, False])
def test_doctor_of_one_model(tmp_path, moe_32, named_first):
    """Wherever --model stands: the library that it needs, and no other model's."""
    library = build.library_path(Checkpoint(moe_32))
    shutil.copy(moe_32, tmp_path / "other.bin")
    options = ("--model", moe_32, "--doctor") if named_first else ("--doctor", "--model", moe_32)
    run = program("colibri.run", *options, cwd=tmp_path)
    text = " ".join(run.stdout.decode().split())
    assert run.returncode == 0 and f"{Path(moe_32).name} ok: {library}, by make to build" in text
    assert "other.bin" not in text
    run = program("colibri.run", *options, cwd=tmp_path, environment={"COLIBRI_LIBRARY": library})
    assert f"ok: COLIBRI_LIBRARY={library} to build" in " ".join(run.stdout.decode().split())


def test_doctor_ends_with_what_is_needed(tmp_path, moe_32):
    """A model that cannot be read is, unless there is another; so is a library that suits the model."""
    (tmp_path / "broken.bin").write_bytes(b"COLI" + bytes(1000))
    run = program("colibri.run", "--doctor", cwd=tmp_path)
    assert run.returncode == 2 and b"\nbroken.bin       needed: version=0, " in run.stdout
    shutil.copy(moe_32, tmp_path / "whole.bin")
    run = program("colibri.run", "--doctor", cwd=tmp_path)
    assert run.returncode == 0 and b"needed" not in run.stdout
    other = build.library_path(Checkpoint(write_model(tmp_path / "other.bin", STACK)))
    run = program("colibri.run", "--doctor", "--model", "whole.bin", cwd=tmp_path,
                  environment={"COLIBRI_LIBRARY": other})
    text = " ".join(run.stdout.decode().split())
    assert run.returncode == 2 and text.count("needed: ") == 1 and "whole.bin needed: " in text


@pytest.mark.parametrize("options, line", [
    (("--model", "a"), "a: not found, expected a model file; make one with python -m converter checkpoint.pt a"),
    (("--json",), "--json: given with --doctor, expected nothing but --doctor and --model; leave it out"),
    (("--prompt", "a"), "--prompt: given with --doctor, expected nothing but --doctor and --model; leave it out"),
])
def test_doctor_refuses(tmp_path, options, line):
    run = program("colibri.run", "--doctor", *options, cwd=tmp_path)
    assert (run.returncode, run.stdout, run.stderr.decode()) == (2, b"", line + "\n")
