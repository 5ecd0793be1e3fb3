"""Writes a .bin: plans it to the byte, streams it once into a temporary file, then puts it in its place all at once."""

import contextlib
import fcntl
import os
import re
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from colibri import headers
from colibri.errors import ColibriError
from converter.mapped import check_sizes

MAGIC = b"COLI"
ALIGNMENT = headers.default().constants["DATA_ALIGNMENT"]
BATCH_BYTES = 4 << 20
BIN_HEADER, BIN_TENSOR = (headers.default().structs[name] for name in ("BinHeader", "BinTensor"))


def plan(fields, tokenizer=b"", settings=b""):
    """Returns (header, directory) of a version 2 file, complete but for the checksums.

    fields: BinHeader's fields that describe the model and how it is stored; sets of layers are lists. tokenizer: a
    tokenizer.json's bytes. settings: JSON.
    """
    header = np.zeros((), BIN_HEADER)
    for name in BIN_HEADER.names:
        header[name] = headers.mask(fields[name]) if name in ("window_layers", "dense_layers") else fields[name]
    tensors = headers.default().tensors(header)
    directory = np.zeros(len(tensors), BIN_TENSOR)
    offset = _aligned(BIN_HEADER.itemsize + directory.nbytes)
    for entry, tensor in zip(directory, tensors):
        entry["name"], entry["rank"] = tensor.name.encode(), len(tensor.shape)
        entry["dtype"] = headers.form_of(tensor.type, header).dtype
        entry["shape"][:len(tensor.shape)] = tensor.shape
        size = headers.stored_bytes(tensor, header)
        entry["offset"], entry["bytes"] = offset, size
        offset = _aligned(offset + size)
    for name, data in (("tokenizer", tokenizer), ("settings", settings)):
        if data:
            header[f"{name}_offset"], header[f"{name}_bytes"] = offset, len(data)
            header[f"{name}_crc32"] = zlib.crc32(data)
            offset = _aligned(offset + len(data))
    header["magic"], header["version"] = MAGIC, headers.default().constants["FORMAT_VERSION"]
    header["header_bytes"], header["directory_offset"] = BIN_HEADER.itemsize, BIN_HEADER.itemsize
    header["num_tensors"], header["file_bytes"] = len(directory), offset
    return header, directory


def write(file, header, directory, contents, progress, sections=()):
    """Streams a planned file.

    contents(name): returns (the tensor's scale or 0, its arrays in order). progress(bytes): called for each. sections:
    the bytes of tokenizer and settings, as plan() had them.
    """
    write_all(file, bytes(int(directory["offset"][0])))
    for entry in directory:
        crc32, left = 0, int(entry["bytes"])
        entry["scale"], arrays = contents(entry["name"].decode())
        for piece in _ahead(arrays):
            crc32, left = zlib.crc32(piece, crc32), left - len(piece)
            write_all(file, piece)
            progress(len(piece))
        assert left == 0, entry["name"]
        entry["crc32"] = crc32
        write_all(file, bytes(-int(entry["bytes"]) % ALIGNMENT))
    for data in sections:
        write_all(file, data + bytes(-len(data) % ALIGNMENT))
    header["header_crc32"] = 0
    header["header_crc32"] = zlib.crc32(header.tobytes() + directory.tobytes())
    file.seek(0)
    write_all(file, header.tobytes() + directory.tobytes())


def _ahead(arrays):
    """Yields the arrays' bytes. Another thread makes the next few MiB while these are written."""
    arrays = iter(arrays)

    def batch():
        made, num_bytes = [], 0
        for array in arrays:
            made.append(memoryview(array).cast("B"))
            num_bytes += len(made[-1])
            if num_bytes >= BATCH_BYTES:
                break
        return made
    with ThreadPoolExecutor(1) as other:
        pending = other.submit(batch)
        while made := pending.result():
            pending = other.submit(batch)
            yield from made


@contextlib.contextmanager
def replacing(path, num_bytes, force):
    """Opens a binary file that becomes `path` when the block ends, and leaves nothing behind when the block raises.

    num_bytes: how much will be written; there must be room for it. force: an existing file may be replaced.
    """
    path = Path(path)
    check_output(path, force)
    directory = path.parent
    _remove_leftovers(path)
    temporary = directory / f".{path.name}.{os.getpid()}.tmp"
    try:
        free = os.statvfs(directory).f_bavail * os.statvfs(directory).f_frsize
        if free < num_bytes:
            raise ColibriError(path, f"{free} bytes free", num_bytes, "free some space or write elsewhere")
        with open(temporary, "xb", buffering=0) as file:
            _lock(file)
            yield file
            check_sizes()
            os.fsync(file.fileno())
            _place(temporary, path, force)
        _sync(directory)
    except OSError as error:
        raise ColibriError(path, error.strerror, f"to write {num_bytes} bytes",
                           "check the directory and its space") from None
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def _place(temporary, path, force):
    """Gives a finished file its name. Without `force`, a file that has taken the name meanwhile stays."""
    if force:
        return os.replace(temporary, path)
    try:
        os.link(temporary, path)
    except FileExistsError:
        check_output(path, force)
        raise
    except OSError:  # of a file system without hard links
        check_output(path, force)
        os.replace(temporary, path)


def _sync(directory):
    """Makes a new name durable, where the directory may be read and its file system can do so."""
    with contextlib.suppress(OSError):
        folder = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _lock(file):
    """Locks a temporary file while it is written. Returns whether it could. The lock ends with the process."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _remove_leftovers(path):
    """Removes the temporary files of conversions to `path` that were killed."""
    name = re.compile(re.escape(f".{path.name}.") + r"\d+\.tmp")
    with contextlib.suppress(OSError):
        for leftover in path.parent.iterdir():
            if name.fullmatch(leftover.name) and leftover.is_file() and not leftover.is_symlink():
                with open(leftover, "rb") as file:
                    if _lock(file):
                        leftover.unlink()


def check_output(path, force):
    """Refuses an output that must not be written, before any work."""
    if (path.exists() or path.is_symlink()) and not path.is_file():
        raise ColibriError(path, "not a regular file", "a .bin to write", "choose another output")
    if path.exists() and not force:
        raise ColibriError(path, "exists already", fix="give --force to replace it")


def write_all(file, piece):
    view = memoryview(piece)
    while len(view):
        view = view[file.write(view):]


def _aligned(offset):
    return -(-offset // ALIGNMENT) * ALIGNMENT
