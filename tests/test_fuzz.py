"""Some seconds of bench/fuzz.py, and that it finds what is wrong."""

import subprocess
import sys

import numpy as np
import pytest
from conftest import ROOT

from bench import fuzz
from colibri.checkpoint import Checkpoint
from colibri.errors import ColibriError


def test_fuzz():
    """All targets at once, on two processors: what each finds is in its output."""
    commands = [["bin", "--seconds", "12"], ["step", "--seconds", "8"], ["request", "--seconds", "20"]]
    runs = [subprocess.Popen([sys.executable, "-m", "bench.fuzz", *command], cwd=ROOT, text=True,
                             stdout=subprocess.PIPE, stderr=subprocess.STDOUT) for command in commands]
    outputs = [run.communicate(timeout=300)[0] for run in runs]
    assert [run.returncode for run in runs] == [0, 0, 0], "\n".join(outputs)
    for output in outputs:
        assert " taken, " in output.splitlines()[-1]


@pytest.mark.parametrize("error, line", [
    (KeyError("x"), "python -m bench.fuzz bin --seed 3 --first 0: KeyError: 'x'"),
    (ColibriError("two\nlines"), "python -m bench.fuzz bin --seed 3 --first 0: Failure: not one sentence: two\nlines"),
])
def test_what_is_not_refused_in_one_sentence_is_found(monkeypatch, capsys, tmp_path, error, line):
    def refuse(self):
        raise error
    monkeypatch.setattr(Checkpoint, "_read_header", refuse)
    if isinstance(error, KeyError):
        with pytest.raises(KeyError):
            fuzz.fuzz("bin", 5, 3, 0, tmp_path)
    else:
        assert not fuzz.fuzz("bin", 5, 3, 0, tmp_path)
    assert capsys.readouterr().out.strip() == line


def test_the_same_case_again():
    cases = [fuzz.bin_case(np.random.default_rng([1, number])) for number in (5, 6, 5)]
    assert cases[0] == cases[2] != cases[1]
