"""Hidden states of a bare stack as requests."""

import os
import shutil
import socket
import time

import numpy as np
import pytest
from scheduling import CHUNK, finish, submit, turn
from synthetic import STACK, write_model

from colibri.arrays import Rows
from colibri.engine import Engine
from colibri.requests import Request
from colibri.scheduler import Scheduler


def stack_request(checkpoint, x, folder, name="x"):
    np.save(folder / f"{name}.npy", x)
    return Request(name, rows=Rows(str(folder / f"{name}.npy"), str(folder / f"{name}-y.npy"), checkpoint))


@pytest.mark.parametrize("place, message", [
    ("folder", ": a directory, expected a file that numpy.save wrote"),
    ("pipe", ": a special file, expected a file that numpy.save wrote"),
    ("output is a socket", ": a special file, expected a file or a new name"),
    ("output's folder is gone",
     ": No such file or directory, expected to write 332800 bytes there; choose another --output"),
    ("output's folder is a file",
     ": Not a directory, expected to write 332800 bytes there; choose another --output")])
def test_files_of_a_stack_that_change_while_it_waits(tmp_path, place, message):
    """An error of that request alone, whatever has come in a file's place."""
    (tmp_path / "out").mkdir()
    x = np.ones((1300, 64), np.float32)
    with Engine(write_model(tmp_path / "stack.bin", STACK), backend="host", num_slots=1) as engine, \
            socket.socket(socket.AF_UNIX) as listener:
        scheduler = Scheduler(engine, 3, CHUNK, lambda: None)
        first, victim, last = (stack_request(engine.checkpoint, x, tmp_path, name)
                               for name in ("first", "victim", "last"))
        for item in (first, victim, last):
            submit(scheduler, item)
        turn(scheduler)
        if place.startswith("output's"):
            victim.rows.output = first.rows.output = str(tmp_path / "out" / "y.npy")
            shutil.rmtree(tmp_path / "out")
            if place.endswith("file"):
                (tmp_path / "out").touch()
        elif place.startswith("output"):
            listener.bind(victim.rows.output)
        else:
            os.unlink(victim.rows.path)
            (os.mkdir if place == "folder" else os.mkfifo)(victim.rows.path)
        finish(scheduler, first, victim, last)
        assert victim.finish == "error" and str(victim.error).endswith(message)
        assert last.finish == "stop" and (first.finish == "error") == place.startswith("output's")
        assert not list(tmp_path.glob("*y.npy.*"))


def test_a_temporary_file_that_is_gone(tmp_path):
    with Engine(write_model(tmp_path / "stack.bin", STACK), backend="host", num_slots=1) as engine:
        scheduler = Scheduler(engine, 3, CHUNK, lambda: None)
        submit(scheduler, item := stack_request(engine.checkpoint, np.ones((1300, 64), np.float32), tmp_path, "x"))
        turn(scheduler)
        os.unlink(item.rows._temporary.name)
        finish(scheduler, item)
        assert item.finish == "error" and "No such file or directory" in str(item.error)


def test_hidden_states_of_a_stack(tmp_path, monkeypatch):
    with Engine(write_model(tmp_path / "stack.bin", STACK), backend="host", num_slots=2) as engine:
        scheduler = Scheduler(engine, 3, CHUNK, lambda: None)
        generator = np.random.default_rng(0)
        inputs = [generator.standard_normal((rows, 64)).astype(dtype)
                  for rows, dtype in ((1300, np.float32), (3, np.float16), (513, np.float32))]
        items = [stack_request(engine.checkpoint, x, tmp_path, str(index)) for index, x in enumerate(inputs)]
        spoiled = inputs[0].copy()
        spoiled[700, 3] = np.nan
        items.append(stack_request(engine.checkpoint, spoiled, tmp_path, "nan"))
        began, stack = [], engine.stack
        monkeypatch.setattr(engine, "stack", lambda x: began.append(scheduler.step_began) or stack(x))
        for item in items:
            submit(scheduler, item)
        finish(scheduler, *items)
        for item, x in zip(items, inputs):
            assert item.finish == "stop"
            np.testing.assert_array_equal(np.load(item.rows.output), engine.stack(x))
        assert scheduler.step_began is None and len(began) > 6  # what tells a step that hangs
        assert time.monotonic() - 60 < min(began[:6]) and began[:6] == sorted(began[:6])
        assert str(items[3].error) == (f"{tmp_path}/nan.npy: row 700 holds NaN or inf, expected finite numbers; look "
                                       "at what made it")
        cut = stack_request(engine.checkpoint, inputs[0], tmp_path, "cut")
        submit(scheduler, cut)
        turn(scheduler)
        with open(tmp_path / "cut.npy", "r+b") as file:
            file.truncate(128 + 600 * 256)
        finish(scheduler, cut)
        assert str(cut.error) == (f"{tmp_path}/cut.npy: ends within row 600, expected 1300 rows; it was cut off while "
                                  "it was read")
        assert sorted(path.name for path in tmp_path.glob("*-y.npy*")) == ["0-y.npy", "1-y.npy", "2-y.npy"]


def test_stopped_within_a_stack(tmp_path):
    """What it has written so far is removed."""
    with Engine(write_model(tmp_path / "stack.bin", STACK), backend="host") as engine:
        scheduler = Scheduler(engine, 0, CHUNK, lambda: None)
        submit(scheduler, item := stack_request(engine.checkpoint, np.ones((1300, 64), np.float32), tmp_path))
        turn(scheduler)
        assert list(tmp_path.glob("x-y.npy.*"))
        scheduler._stopping = True
        scheduler.start()
        assert scheduler.stop(10) and item.finish is None and not list(tmp_path.glob("x-y.npy*"))
