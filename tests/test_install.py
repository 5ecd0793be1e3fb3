"""deploy/install.py: what a machine lacks for the virtual environment, in one line."""

import importlib.util
import os
import shutil
import subprocess
import sys

import pytest
from conftest import ROOT

spec = importlib.util.spec_from_file_location("install", ROOT / "deploy" / "install.py")
install = importlib.util.module_from_spec(spec)
spec.loader.exec_module(install)


def line_of(capsys, function, *arguments):
    with pytest.raises(SystemExit) as end:
        function(*arguments)
    out, err = capsys.readouterr()
    assert end.value.code == 2 and out == "" and err.count("\n") == 1
    return err.strip()


def test_an_old_python(capsys):
    assert line_of(capsys, install.check_python, (3, 9), "3.10") == (
        "python3: version=3.9, expected 3.10 or newer; install one, first on PATH")
    install.check_python((3, 10), "3.10")
    install.check_python((4, 0), "3.10")


@pytest.mark.parametrize("module", ["venv", "ensurepip"])
def test_a_python_without_venv(capsys, monkeypatch, module):
    """As Debian's python3 is, without python3-venv."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == module else name)
    assert line_of(capsys, install.check_python, (3, 11), "3.10") == (
        "python3: no module ensurepip, expected it to make .venv; install it with apt install python3-venv")


@pytest.mark.parametrize("output, cause", [
    ("WARNING: Retrying\\n  x\\nERROR: no versions\\nERROR: others", ("ERROR: no "
                                                                     "versions")), ("\\n  two\\nlines\\n", "two lines"),
    ("", "status=3")])
def test_a_command_that_fails(capsys, output, cause):
    command = (sys.executable, "-c", f"import sys; print('{output}'); sys.exit(3)")
    assert line_of(capsys, install.run, "do "
                                        "this", *command) == f"{' '.join(command)}: {cause}, expected success; do this"


def test_no_package_index(tmp_path):
    """In a folder with blanks and quotes; nothing counts as installed."""
    place = tmp_path / "an 'odd' \"place\""
    for name in ("colibri", "deploy", "native"):
        shutil.copytree(ROOT / name, place / name)
    for name in ("Makefile", "setup.cfg", "pyproject.toml"):
        shutil.copy(ROOT / name, place)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "MAKE", "MFLAGS"))}
    made = subprocess.run(["make", "test"], cwd=place, capture_output=True, text=True, check=False,
                          env={**environment, "PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull})
    first, second = made.stderr.splitlines()
    assert first.startswith(".venv/bin/python -m pip install -q -e .[test,serve,text]: ERROR: ")
    assert first.endswith(", expected success; see to a package index that pip reaches")
    assert second.startswith("make: *** [Makefile:") and made.returncode == 2
    assert not (place / ".venv" / "installed").exists()
