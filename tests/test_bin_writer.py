"""converter/bin_writer.py: the file's layout to the byte, and an output that appears complete or not at all."""

import fcntl
import os
import resource
import subprocess
import sys

import numpy as np
import pytest
from converter_files import read_bin

from colibri import headers
from colibri.errors import ColibriError
from converter import bin_writer

FIELDS = {**dict.fromkeys(headers.default().structs["BinHeader"].names, 0), "num_layers": 2, "num_experts": 3, "k": 2,
          "hidden": 10, "ffn": 6, "num_groups": 1, "topk_groups": 1, "routed_scaling": 1.0, "interleave_rows": 64,
          "window_layers": [], "dense_layers": []}


def contents(directory):
    """Random stored bytes for each tensor, in two pieces."""
    generator = np.random.default_rng(0)
    sizes = {entry["name"].decode(): int(entry["bytes"]) for entry in directory}
    return {name: (0, [generator.bytes(size // 2) for _ in range(2)]) for name, size in sizes.items()}


def test_a_planned_file_is_written_to_the_byte(tmp_path):
    header, directory = bin_writer.plan({**FIELDS, "weight_dtype": 1})
    data, told = contents(directory), []
    with bin_writer.replacing(tmp_path / "a.bin", int(header["file_bytes"]), False) as file:
        bin_writer.write(file, header, directory, data.__getitem__, told.append)
    content = (tmp_path / "a.bin").read_bytes()
    assert len(content) == header["file_bytes"] and sum(told) == directory["bytes"].sum()
    for entry in directory:
        offset = int(entry["offset"])
        assert content[offset:offset + int(entry["bytes"])] == b"".join(data[entry["name"].decode()][1])
    assert list(tmp_path.iterdir()) == [tmp_path / "a.bin"]


@pytest.mark.parametrize("dtype, size", [("f16", 2), ("bf16", 2), ("f32", 4)])
def test_sizes_and_codes(tmp_path, dtype, size):
    header, directory = bin_writer.plan({**FIELDS, "gated": 1, "weight_dtype": headers.default().codes("DTYPE")[dtype]})
    entries = {entry["name"].decode(): entry for entry in directory}
    up, router = entries["layers.1.experts_up"], entries["layers.1.router"]
    assert list(up["shape"]) == [3, 12, 10] and up["bytes"] == 3 * 64 * 10 * size
    assert list(router["shape"]) == [3, 10, 0] and router["bytes"] == 64 * 10 * 4 and router["dtype"] == 0
    assert up["dtype"] == header["weight_dtype"] == headers.default().codes("DTYPE")[dtype]
    with open(tmp_path / "a.bin", "wb", buffering=0) as file:
        bin_writer.write(file, header, directory, lambda name: (0, [bytes(int(entries[name]["bytes"]))]),
                         lambda size: None)
    assert set(read_bin(tmp_path / "a.bin")[1]) == set(entries)


@pytest.mark.parametrize("error, expected", [(KeyboardInterrupt, KeyboardInterrupt), (ValueError, ValueError),
                                             (OSError(28, "No space left on device"), ColibriError)])
def test_an_interrupted_write_leaves_the_old_file_alone(tmp_path, error, expected):
    path = tmp_path / "a.bin"
    path.write_bytes(b"old")
    with pytest.raises(expected), bin_writer.replacing(path, 4, True) as file:
        file.write(b"new")
        raise error
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]


def test_only_what_a_killed_conversion_left_is_removed(tmp_path):
    """A temporary file that its writer still holds stays, as does whatever is not of this output."""
    for name in (".a.bin.1.tmp", f".a.bin.{os.getpid()}.tmp", ".b.bin.1.tmp", ".a.bin.x.tmp"):
        (tmp_path / name).write_bytes(b"part")
    (tmp_path / ".a.bin.2.tmp").symlink_to("b.bin")
    with open(tmp_path / ".a.bin.3.tmp", "wb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with bin_writer.replacing(tmp_path / "a.bin", 4, False) as file:
            file.write(b"new")
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        ".a.bin.2.tmp", ".a.bin.3.tmp", ".a.bin.x.tmp", ".b.bin.1.tmp", "a.bin"]


def test_a_file_that_is_written_is_held(tmp_path):
    with (bin_writer.replacing(tmp_path / "a.bin", 4, False), open(next(tmp_path.iterdir()), "rb") as file,
          pytest.raises(BlockingIOError)):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def refusal(path, num_bytes=4, force=False):
    with pytest.raises(ColibriError) as caught, bin_writer.replacing(path, num_bytes, force) as file:
        file.write(b"data")
    return str(caught.value)


def test_outputs_that_cannot_be(tmp_path):
    (tmp_path / "there.bin").write_bytes(b"old")
    assert "there.bin: exists already; give --force" in refusal(tmp_path / "there.bin")
    assert "not a regular file" in refusal("/dev/null", force=True)
    assert "not a regular file" in refusal(tmp_path, force=True)
    assert "No such file or directory" in refusal(tmp_path / "none" / "a.bin")
    assert "bytes free, expected" in refusal(tmp_path / "a.bin", 1 << 62)
    assert "Not a directory" in refusal(tmp_path / "there.bin" / "a.bin")
    (tmp_path / "link.bin").symlink_to(tmp_path / "none.bin")
    for force in (False, True):
        assert "not a regular file" in refusal(tmp_path / "link.bin", force=force)
    assert {path.name for path in tmp_path.iterdir()} == {"there.bin", "link.bin"}


@pytest.mark.parametrize("links", [True, False])
def test_a_file_that_another_conversion_has_made_meanwhile(tmp_path, monkeypatch, links):
    """Only force replaces it, also where a file system has no hard links."""
    if not links:
        monkeypatch.setattr(bin_writer.os, "link", lambda *_: (_ for _ in ()).throw(PermissionError(1, "no links")))
    path = tmp_path / "a.bin"
    with (pytest.raises(ColibriError, match="a.bin: exists already; give --force"),
          bin_writer.replacing(path, 4, False) as file):
        file.write(b"mine")
        path.write_bytes(b"others")
    assert path.read_bytes() == b"others" and list(tmp_path.iterdir()) == [path]
    with bin_writer.replacing(path, 4, True) as file:
        file.write(b"mine")
    assert path.read_bytes() == b"mine"
    path.unlink()
    with bin_writer.replacing(path, 4, False) as file:
        file.write(b"mine")
    assert path.read_bytes() == b"mine" and list(tmp_path.iterdir()) == [path]


def test_a_directory_that_cannot_be_synced(tmp_path, monkeypatch):
    """The output is there: it is no error that its directory may only be written."""
    monkeypatch.setattr(bin_writer.os, "open", lambda *_: (_ for _ in ()).throw(PermissionError(13, "denied")))
    with bin_writer.replacing(tmp_path / "a.bin", 4, False) as file:
        file.write(b"data")
    assert (tmp_path / "a.bin").read_bytes() == b"data"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_an_unwritable_directory(tmp_path):
    tmp_path.chmod(0o500)
    assert "Permission denied" in refusal(tmp_path / "a.bin")


def test_a_disk_that_fills_up(tmp_path):
    """A process that may not write more than 1 MiB of a file meets what a full disk gives it."""
    script = ("import sys; from converter import bin_writer\n"
              "from colibri.errors import ColibriError\n"
              "try:\n"
              "    with bin_writer.replacing(sys.argv[1], 1 << 21, False) as file:\n"
              "        bin_writer.write_all(file, bytes(1 << 21))\n"
              "except ColibriError as error: print(error)\n")
    limit = (1 << 20, 1 << 20)
    command = [sys.executable, "-c", script, tmp_path / "a.bin"]
    done = subprocess.run(command, capture_output=True, text=True, check=False,
                          preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limit))
    assert "a.bin: File too large, expected to write 2097152 bytes" in done.stdout and not done.stderr
    assert not list(tmp_path.iterdir())
