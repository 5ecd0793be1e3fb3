"""From a model to its library: defines, key, make, cache, and the comparison with what was baked in."""

import errno
import hashlib
import os
import re
import shutil
import subprocess
import sys

import pytest
from conftest import PYTHON, ROOT, program
from synthetic import DENSE, STACK, write_model

from colibri import build, native, places
from colibri.checkpoint import Checkpoint
from colibri.errors import ColibriError


def make_prints(*arguments):
    """What make would build, without building it."""
    printed = subprocess.run(["make", "-n", "-B", *arguments, PYTHON], cwd=ROOT,
                             capture_output=True, text=True, check=True).stdout
    return re.search(r"build/\S+/libcolibri\.so", printed)[0]


def test_defaults_need_no_defines(moe_32):
    """The example model and a plain `make` share one library."""
    assert build.defines(Checkpoint(moe_32).header) == []
    assert program("colibri.build", "--make", f"MODEL={moe_32}").stdout == b"\n"
    assert build.library_path(Checkpoint(moe_32)) == str(ROOT / make_prints())


def test_defines_name_what_differs(tmp_path):
    path = write_model(tmp_path / "model.bin", weight_dtype=2, activation=1)
    assert build.defines(Checkpoint(path).header) == [
        "-DNUM_EXPERTS=8", "-DHIDDEN=64", "-DFFN=40", "-DNUM_HEADS=4", "-DNUM_KV_HEADS=2", "-DWEIGHT_DTYPE=2",
        "-DACTIVATION=1"]


def test_make_and_python_agree_on_the_library(tmp_path, monkeypatch):
    path = write_model(tmp_path / "model.bin", STACK)
    expected = make_prints(f"MODEL={path}")
    assert build.library_path(Checkpoint(path)) == str(ROOT / expected)
    monkeypatch.setenv("DEFINES", " -DMAX_BATCH=4   -DWINDOW_PIECE=32 ")
    library = build.library_path(Checkpoint(path))
    assert library == str(ROOT / make_prints(f"MODEL={path}", "DEFINES=-DMAX_BATCH=4 -DWINDOW_PIECE=32"))
    assert native.Library(library).baked["max_batch"] == 4
    key = hashlib.sha256(build.config_string(Checkpoint(path).header).encode()).hexdigest()[:12]
    assert f"host-{key}" in library


def test_a_model_in_the_environment_is_not_makes(tmp_path, monkeypatch):
    """As of a service, whose settings name it."""
    path = write_model(tmp_path / "model.bin", ffn=3000 + os.getpid() % 1000)
    monkeypatch.setenv("MODEL", "none.bin")
    assert make_prints() == make_prints("MODEL=")
    assert build.library_path(Checkpoint(path)).endswith("/libcolibri.so")


def test_make_stops_at_a_model_that_it_cannot_read():
    made = subprocess.run(["make", "MODEL=none.bin", PYTHON], cwd=ROOT, capture_output=True,
                          text=True, check=False)
    assert made.returncode == 2 and "none.bin: not found" in made.stderr and "gcc" not in made.stdout


def test_built_once_and_said_once(tmp_path):
    """Two processes at once: one of them builds, both run."""
    path = write_model(tmp_path / "model.bin", ffn=24 + os.getpid() % 1000)
    library = ROOT / "build" / f"host-{key_of(path)}"
    shutil.rmtree(library, ignore_errors=True)
    command = [sys.executable, "-m", "colibri.run", "--model", str(path), "--prompt", "x", "--max-new-tokens", "1",
               "--json"]
    both = [subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, stdout=subprocess.PIPE) for _ in range(2)]
    results = [process.communicate() for process in both]
    assert [process.returncode for process in both] == [0, 0], results
    assert sum(errors.count(b"building build/") for _, errors in results) == 1
    assert program("colibri.run", *command[3:]).stderr == b""
    shutil.rmtree(library)


def test_a_build_that_was_killed(tmp_path, monkeypatch):
    """What its compiler had written by half is no object of the next build."""
    path = write_model(tmp_path / "model.bin", ffn=1024 + os.getpid() % 1000)
    killed = tmp_path / "gcc"
    killed.write_text('#!/bin/bash\nuntil [ "$1" = -o ]; do shift; done\ntrue > "$2"\nkill -9 $PPID\n')
    killed.chmod(0o755)
    with monkeypatch.context() as patch, pytest.raises(ColibriError):
        patch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
        build.library_path(Checkpoint(path))
    library = build.library_path(Checkpoint(path))
    assert native.Library(library).baked["ffn"] == 1024 + os.getpid() % 1000
    shutil.rmtree(os.path.dirname(library))


def test_a_file_where_the_libraries_go(moe_32, tmp_path, monkeypatch):
    (tmp_path / "build").write_text("")
    monkeypatch.setattr(places, "builds", lambda: tmp_path / "build")
    with pytest.raises(ColibriError, match=r"build/host-\w+: Not a directory, expected to write a library there"):
        build.library_path(Checkpoint(moe_32))


def test_a_folder_that_was_removed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tmp_path.rmdir()
    assert build.short(ROOT / "build") == str(ROOT / "build")


def test_a_full_disk_is_named(moe_32, tmp_path, monkeypatch):
    """An error without a file's name, as writing raises it."""
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    monkeypatch.setattr(places, "builds", lambda: tmp_path / "build")
    monkeypatch.setattr(build, "_make", full)
    with pytest.raises(ColibriError, match=r"build/host-\w+: No space left on device, expected to write a library"):
        build.library_path(Checkpoint(moe_32))


def key_of(path):
    return hashlib.sha256(build.config_string(Checkpoint(path).header).encode()).hexdigest()[:12]


def test_a_changed_source_is_built_again(moe_32, monkeypatch):
    library = build.library_path(Checkpoint(moe_32))
    os.utime(library, (1, 1))
    with pytest.raises(ColibriError, match="older than its sources"):
        build.library_path(Checkpoint(moe_32), build=False)
    build.library_path(Checkpoint(moe_32))
    assert os.stat(library).st_mtime > 1


@pytest.mark.parametrize("field, value", [("num_experts", 16), ("k", 3), ("hidden", 32), ("gated", 0),
                                          ("router_kind", 1), ("weight_dtype", 0)])
def test_every_field_of_the_shape_is_compared(tmp_path, field, value):
    right = Checkpoint(write_model(tmp_path / "right.bin"))
    wrong = Checkpoint(write_model(tmp_path / "wrong.bin", **{field: value}))
    library = native.Library(build.library_path(right))
    build.compare(library, right)
    with pytest.raises(ColibriError) as error:
        build.compare(library, wrong)
    assert str(error.value) == (f"{library.file}: {field}={DENSE[field]}, expected {value} from {wrong.path}; build "
                                f"its library with make MODEL={wrong.path}")
