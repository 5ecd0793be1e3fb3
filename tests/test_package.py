"""The wheel, made from the sdist: what is in it, and that it works outside a clone, where it builds into a cache."""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from conftest import ROOT, program

from colibri import __version__, places
from colibri.errors import ColibriError

PACKAGES, FILES = ("native", "colibri", "converter"), ("Makefile", "setup.cfg", "pyproject.toml", "README.md")
NAME = f"colibri-{__version__}"
DATA = f"{NAME}.data/data/share/colibri/"


def python(*arguments, cwd, **environment):
    run = subprocess.run([sys.executable, *map(str, arguments)], cwd=cwd, env={**os.environ, **environment}, text=True,
                         capture_output=True, check=False)
    assert run.returncode == 0, run.stderr
    return run.stdout


def files(folder):
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*")
            if path.is_file() and "__pycache__" not in path.parts}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    pytest.importorskip("setuptools", "70.1")  # older ones make wheels with another package's help
    folder = tmp_path_factory.mktemp("package")
    clone = folder / "clone"
    for name in PACKAGES:
        shutil.copytree(ROOT / name, clone / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in FILES:
        shutil.copy(ROOT / name, clone)
    python("-c", "from setuptools import build_meta; build_meta.build_sdist('..')", cwd=clone)
    with tarfile.open(folder / f"{NAME}.tar.gz") as archive:
        archive.extractall(folder, filter="data") if hasattr(tarfile, "data_filter") else archive.extractall(folder)
    python("-m", "pip", "wheel", "-q", "--no-build-isolation", "--no-deps", "--no-index", "-w", folder, folder / NAME,
           cwd=folder)
    return folder / f"{NAME}-py3-none-any.whl"


def install(wheel, *where):
    python("-m", "pip", "install", "-q", "--no-deps", "--no-index", *where, wheel, cwd=wheel.parent)


def test_what_is_in_it(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    data = {name.removeprefix(DATA) for name in names if name.startswith(DATA)}
    assert data == {"Makefile", *(f"native/{name}" for name in files(ROOT / "native"))}
    assert {name.split("/")[0] for name in names} == {"colibri", "converter", f"{NAME}.data", f"{NAME}.dist-info"}
    code = {f"{name}/{file}" for name in ("colibri", "converter") for file in files(ROOT / name)}
    assert {name for name in names if name.startswith(("colibri/", "converter/"))} == code


def test_it_works_outside_a_clone(wheel, tmp_path):
    """Converts, builds and runs; the library goes to the user's cache, nothing to where the package is."""
    place = tmp_path / "my 'odd' place"
    install(wheel, "--prefix", place)
    packages = next(place.rglob("headers.py")).parent.parent
    before, cache = files(place), tmp_path / "the \"user's\" cache"
    for name in ("moe-32.pt", "moe-32.json"):
        shutil.copy(ROOT / "models" / name, tmp_path)
    environment = {"PYTHONPATH": str(packages), "XDG_CACHE_HOME": str(cache), "DEFINES": "-DMAX_BATCH=2"}
    python("-m", "converter", "moe-32.pt", "a b.bin", cwd=tmp_path, **environment)
    built = python("-m", "colibri.build", "MODEL=a b.bin", cwd=tmp_path, **environment)
    assert Path(built.rstrip("\n")).is_relative_to(cache / "colibri" / "build")
    run = ("-m", "colibri.run", "--model", "a b.bin", "--prompt", "It was the custom of ", "--max-new-tokens", 20)
    text = python(*run, "--no-build", cwd=tmp_path, **environment).splitlines()[0]
    assert text == program("colibri.run", *run[2:], cwd=tmp_path).stdout.decode().splitlines()[0]
    assert files(place) == before
    lines = python("-m", "colibri.run", "--doctor", cwd=tmp_path, **environment)
    assert "python -m colibri.build MODEL=model.bin, as" in lines and " by python -m colibri.build" in lines


def test_its_sources_are_found_where_pip_puts_them(wheel, tmp_path):
    install(wheel, "--target", tmp_path / "packages")
    found = python("-c", "from colibri import headers; print(headers.NATIVE, headers.digest())", cwd=tmp_path,
                   PYTHONPATH=str(tmp_path / "packages"))
    assert found.split()[0] == str(tmp_path / "packages" / "share" / "colibri" / "native")


def test_a_clone_builds_where_it_is():
    assert places.IS_CLONE and places.builds() == ROOT / "build"


def test_no_place_for_a_cache(monkeypatch):
    """A path that is not absolute is none, and a user need not have a home."""
    monkeypatch.setattr(places, "IS_CLONE", False)
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    with pytest.raises(ColibriError, match="^XDG_CACHE_HOME: not set and no home folder, expected a place for lib"):
        places.builds.__wrapped__()


@pytest.mark.parametrize("module", ["colibri.run", "converter"])
def test_version(module):
    run = program(module, "--version")
    assert (run.returncode, run.stdout.decode(), run.stderr) == (0, f"colibri {__version__}\n", b"")
