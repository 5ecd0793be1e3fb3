"""Errors of building: compilers, headers, DEFINES and libraries that do not fit."""

import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from conftest import PYTHON, ROOT, program
from refusals import PROMPT, line_of, write
from synthetic import write_model

from colibri import build, headers
from colibri.checkpoint import Checkpoint

CONFIG = (ROOT / "native" / "config.h").read_text()
NAMES = " ".join(re.findall(r"^#ifndef (?!COLIBRI|CUDA)(\w+)", CONFIG, re.MULTILINE))
NO_NUMBERS = ("32+1", "064", "0x21", "33u", "1.5", "-1", "K")  # of DEFINES


def test_no_compiler(place):
    """Neither make nor gcc on PATH, for a model whose library is not built."""
    write_model("new.bin", ffn=1000 + os.getpid() % 1000)
    environment = {"PATH": "/nonexistent"}
    line = line_of(program("colibri.run", "--model", "new.bin", *PROMPT, cwd=place, environment=environment))
    assert line == ("make: not on PATH, expected it to build libraries; install it with apt install gcc libc6-dev "
                    "make, or set COLIBRI_LIBRARY to a library built elsewhere")
    os.mkdir("bin")
    os.symlink(shutil.which("make"), "bin/make")
    line = line_of(program("colibri.run", "--model", "new.bin", *PROMPT, cwd=place,
                           environment={"PATH": str(place / "bin")}))
    assert line.startswith("gcc: not on PATH, expected it to build libraries; ")


@pytest.mark.parametrize("said", ["/usr/include/stdint.h:9:16: fatal error: stdint.h: No such file or directory",
                                  "/usr/bin/ld: cannot find crti.o: No such file or directory"])
def test_no_headers_of_the_c_library(place, said):
    """The compiler alone: a line that names the package, and --doctor ends with 2."""
    write_model("new.bin", ffn=1000 + os.getpid() % 1000)
    os.mkdir("bin")
    write("bin/gcc", f"#!/bin/sh\necho 'compilation begins' >&2\necho '{said}' >&2\nexit 1\n".encode())
    os.chmod("bin/gcc", 0o755)
    environment = {"PATH": f"{place}/bin:{os.environ['PATH']}"}
    run = program("colibri.run", "--model", "new.bin", *PROMPT, cwd=place, environment=environment)
    expected = (f"gcc: {said}, expected the C library's headers and OpenMP; install them with apt install gcc "
                "libc6-dev make")
    assert run.stderr.decode().splitlines()[1:] == [expected] and run.returncode == 2
    run = program("colibri.run", "--doctor", cwd=place, environment=environment)
    assert run.returncode == 2 and f"gcc and make needed: {expected} " in " ".join(run.stdout.decode().split())


def test_no_build(place):
    write_model("new.bin", ffn=1000 + os.getpid() % 1000)
    line = line_of(program("colibri.run", "--model", "new.bin", "--no-build", *PROMPT, cwd=place))
    assert line.endswith("/libcolibri.so: not built, expected ready for --no-build; run make MODEL=new.bin")


def test_library_of_another_model(place, moe_32):
    library = build.library_path(Checkpoint("stack.bin"))
    run = program("colibri.run", "--model", "moe.bin", *PROMPT, cwd=place, environment={"COLIBRI_LIBRARY": library})
    assert line_of(run) == (f"{library}: num_experts=8, expected 32 from moe.bin; unset COLIBRI_LIBRARY, or "
                            "build its library with make")
    run = program("colibri.run", "--model", "moe.bin", "--batch-size", 33, cwd=place,
                  environment={"COLIBRI_LIBRARY": build.library_path(Checkpoint("moe.bin"))})
    assert line_of(run).endswith("; use fewer, or unset COLIBRI_LIBRARY and raise it with DEFINES=-DMAX_BATCH=33 in "
                                 "the environment")
    run = program("colibri.run", "--model", "moe.bin", *PROMPT, cwd=place, environment={"COLIBRI_LIBRARY": "none.so"})
    assert line_of(run) == "COLIBRI_LIBRARY=none.so: not found, expected a libcolibri.so; unset it to build one"
    run = program("colibri.run", "--model", "moe.bin", *PROMPT, cwd=place, environment={"COLIBRI_LIBRARY": "x.npy"})
    assert line_of(run) == "x.npy: invalid ELF header, expected a libcolibri.so; build it with make"


def test_wrong_defines(place):
    """Before anything is built with them."""
    for defines, line in (("-DEXPERTS_PER_TOKEN=4",
                           "-DEXPERTS_PER_TOKEN=4, expected 2 as in moe.bin; the model decides, leave it out"),
                          ("MAX_BATCH=64", "MAX_BATCH=64, expected -DNAME=VALUE; write DEFINES=-DMAX_BATCH=64"),
                          ("-DMAX_BATHC=64",
                           f"-DMAX_BATHC=64, expected -DNAME=VALUE with a NAME of {NAMES}; correct it"),
                          *((f"-DWINDOW_PIECE={value}", (f"-DWINDOW_PIECE={value}, expected a number of 1 to "
                                                         f"99999999, in "
                                                         "digits without a 0 before them; correct it"))
                            for value in (*NO_NUMBERS, 0, 10**8)),
                          ("-DMAX_BATCH=4 -DMAX_BATCH=5",
                           "-DMAX_BATCH=5, expected MAX_BATCH once; leave one of them out")):
        run = program("colibri.run", "--model", "moe.bin", *PROMPT, cwd=place, environment={"DEFINES": defines})
        assert line_of(run) == f"DEFINES: {line}" and b"building" not in run.stderr


@pytest.mark.parametrize("defines", ["$(shell touch hit)", "-DA=$(shell)", "-DA", "-DMAX_BATCH=1;2", "-O0"])
def test_defines_of_another_form(place, defines):
    run = program("colibri.run", "--model", "moe.bin", *PROMPT, cwd=place, environment={"DEFINES": defines})
    assert line_of(run) == f"DEFINES: {defines.split()[0]}, expected -DNAME=VALUE; leave it out"
    assert not os.path.exists(ROOT / "hit")


def test_a_limit_of_the_build_says_so():
    form, unknown = "expected -DNAME=VALUE; leave it out", f"expected -DNAME=VALUE with a NAME of {NAMES}; correct it"
    number = "expected a number of 1 to 99999999, in digits without a 0 before them; correct it"
    archs = "expected one of host sm_80 sm_86 sm_89 sm_90 sm_100 sm_120"
    for arguments, line in ((["DEFINES=-DHIDDEN=0"], "native/config.h: expected hidden >= 1"),
                            (["DEFINES=-DMAX_BATCH=513"], ("native/config.h: expected 1 <= MAX_BATCH <= "
                                                          "MAX_STEP_TOKENS")),
                            *(([f"ARCH={arch}"], f"*** ARCH={arch}: {archs}.  Stop.\n")
                              for arch in ("sm_70", "", "sm_90 ", "host sm_90")),
                            *(([f"DEFINES=-DWINDOW_PIECE=100 {wrong}"], f"*** DEFINES: {wrong}, {rule}.  Stop.\n")
                              for wrong, rule in (
                                  ("MAX_BATCH=64", "expected -DNAME=VALUE; write DEFINES=-DMAX_BATCH=64"),
                                  ("-DMAX_BATHC=64", unknown), ("-DCUDA_ARCH=90", unknown), ("-DMAX_BATCH", form),
                                  ("-O0", form), ("-DMAX_BATCH=", form), ("-DMAX_BATCH='64'", form),
                                  ("$(shell)", form), ("$$HOME", form), ("-DMAX_BATCH=`id`", form),
                                  ("-DWINDOW_PIECE=100", "expected WINDOW_PIECE once; leave one of them out"),
                                  *((f"-DMAX_BATCH={value}", number) for value in (*NO_NUMBERS, 0))))):
        made = subprocess.run(["make", *arguments, PYTHON], cwd=ROOT, capture_output=True,
                              text=True, check=False)
        assert made.returncode == 2 and line in made.stderr, arguments
        assert made.stderr.count("\n") == 1 or "config.h" in line


def test_cut_library(place):
    with open(build.library_path(Checkpoint("moe.bin")), "rb") as file:
        data = file.read()
    for size in (30, 8000, len(data) - 1):
        write("cut.so", data[:size])
        run = program("colibri.run", "--model", "moe.bin", *PROMPT, cwd=place,
                      environment={"COLIBRI_LIBRARY": "cut.so"})
        assert line_of(run) == (f"cut.so: size={size}, expected {64 if size < 64 else len(data)} bytes; the file is "
                                "cut off, build it with make")


def test_library_of_other_headers(place):
    """Its structs may be others."""
    data = Path(build.library_path(Checkpoint("moe.bin"))).read_bytes()
    assert data.count(headers.digest().encode()) == 1
    write("old.so", data.replace(headers.digest().encode(), b"0123456789ab"))
    run = program("colibri.run", "--model", "moe.bin", *PROMPT, cwd=place, environment={"COLIBRI_LIBRARY": "old.so"})
    assert line_of(run) == (f"old.so: of headers 0123456789ab, expected {headers.digest()}, which are in native/; "
                            f"build it "
                            "with make")


def test_damaged_library_is_built_again(place):
    """What make takes for current: the line says how to get rid of it, and that helps."""
    model = write_model(place / "damaged.bin", ffn=2000 + os.getpid() % 1000)
    library = Path(build.library_path(Checkpoint(model)))
    whole = library.read_bytes()
    for data, reason in ((b"", "file too short, expected a libcolibri.so; "),
                         (whole[:5000], f"size=5000, expected {len(whole)} bytes; the file is cut off, ")):
        library.write_bytes(data)
        line = line_of(program("colibri.run", "--model", model, *PROMPT, cwd=place))
        assert line == (f"{library}: {reason}remove its folder, and what needs it builds it again: rm -r "
                        f"{shlex.quote(str(library.parent))}")
    subprocess.run(shlex.split(line.rpartition(": ")[2]), check=True)
    assert program("colibri.run", "--model", model, *PROMPT, cwd=place).returncode == 0


def test_model_with_a_space_in_its_name(place):
    model = write_model(place / "o' model.bin", ffn=2000 + os.getpid() % 1000)
    text = " ".join(program("colibri.run", "--doctor", "--model", "o' model.bin", cwd=place).stdout.decode().split())
    assert """ make MODEL='o'"'"' model.bin'""" in text
    made = subprocess.run(["make", "-nB", f"MODEL={model}", PYTHON], cwd=ROOT, capture_output=True, text=True,
                          check=False)
    assert made.returncode == 0 and f"-DFFN={2000 + os.getpid() % 1000} " in made.stdout
