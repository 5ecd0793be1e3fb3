"""What the tests of errors share: a folder with good and damaged files, and the line that a command prints."""

import os
import shutil

import numpy as np
import pytest
from synthetic import STACK, seal, write_model

from colibri import headers

PROMPT = ("--prompt", "hello")


@pytest.fixture
def place(tmp_path, moe_32, monkeypatch):
    """A folder with good and damaged files, in which the commands run."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(moe_32, "moe.bin")
    good = (tmp_path / "moe.bin").read_bytes()
    write_model("stack.bin", STACK)
    write_model("words.bin", vocab_size=500)
    write_model("long.bin", max_positions=2048)
    write_model("endless.bin", max_positions=0)
    write_model("nan.bin", STACK)
    write("empty.bin", b"")
    write("short.bin", good[:100])
    write("cut.bin", good[:9_000_000])
    write("foreign.bin", b"\x89PNG\r\n\x1a\n" * 100)
    write("v1.bin", b"COLI" + bytes([1, 0, 0, 0, 32, 0, 0, 0, 2, 0, 0, 0]) + bytes(1000))
    write("v3.bin", good[:4] + b"\3" + good[5:])
    write("flipped.bin", good[:300] + bytes([good[300] ^ 4]) + good[301:])
    write("outside.bin", moved(good, 1 << 33))
    write("overlap.bin", moved(good, 8192))
    os.mkdir("folder.bin")
    write("one.txt", b"x")
    write("600.txt", b"x" * 600)
    write("500.txt", b"x" * 500)
    np.save("x.npy", np.zeros((3, 64), np.float32))
    np.save("narrow.npy", np.zeros((3, 65), np.float32))
    np.save("ints.npy", np.zeros((3, 64), np.int64))
    np.save("objects.npy", np.array([{}]), allow_pickle=True)
    np.save("nan.npy", np.full((3, 64), [[0], [np.nan], [0]], np.float32))
    write("text.npy", b"not an array")
    write("zip.npy", b"PK\3\4" + bytes(100))
    for name, header in (("shape", "{'descr':'<f4','fortran_order':False,'shape':(99999999999999999999,64),}"),
                         ("negative", "{'descr':'<f4','fortran_order':False,'shape':(-1,64),}"), ("header", "{")):
        write(f"{name}.npy", b"\x93NUMPY\1\0" + len(header).to_bytes(2, "little") + header.encode() + bytes(768))
    os.mkfifo("pipe")
    return tmp_path


def write(name, data):
    with open(name, "wb") as file:
        file.write(data)


def moved(data, offset):
    """The model with its sixth tensor's offset changed, under a right checksum."""
    structs = headers.default().structs
    data, start = bytearray(data), structs["BinHeader"].itemsize
    count = int(np.frombuffer(data, structs["BinHeader"], 1)["num_tensors"][0])
    directory = np.frombuffer(data, structs["BinTensor"], count, start)
    directory["offset"][5] = offset
    end = start + directory.nbytes
    return seal(bytes(data[:end])) + data[end:]


def line_of(result):
    """The one line on stderr of a command that failed as it should, or building's line before it."""
    lines = [line for line in result.stderr.decode().splitlines() if not line.startswith("building ")]
    assert len(lines) == 1, result.stderr.decode()
    assert result.returncode == 2 and result.stdout == b""
    return lines[0]
