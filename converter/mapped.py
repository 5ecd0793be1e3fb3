"""Maps a checkpoint's files. A file that is cut off while it is read is an error; SIGBUS does not end the process."""

import ctypes
import mmap
import os
import signal
import weakref

import numpy as np

from colibri.errors import ColibriError

PROT_READ, MAP_FIXED = 1, 16  # Python's mmap lacks these; Linux has the same values on all machines
LIBC = ctypes.PyDLL(None)
LIBC.mmap.restype = ctypes.c_void_p
LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]


class Mapped:
    """Keeps a mapped file's name, its address, and how many bytes from there are not filled with zeros."""

    def __init__(self, path, data):
        self.path, self.address, self.present = path, np.frombuffer(data, np.uint8).ctypes.data, len(data)

    def fill(self, data):
        """Puts pages of zeros where the file no longer is. Returns whether there was such a place."""
        start = -(-data.size() // mmap.PAGESIZE) * mmap.PAGESIZE
        if start >= self.present:
            return False
        LIBC.mmap(self.address + start, len(data) - start, PROT_READ,
                  mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_FIXED, -1, 0)
        self.present = start
        return True


_mapped = weakref.WeakKeyDictionary()


@ctypes.CFUNCTYPE(None, ctypes.c_int)
def _on_fault(_):
    """Runs in the middle of the access that failed, which reads zeros afterwards. The next check tells why."""
    if not any(mapped.fill(data) for data, mapped in _mapped.items()):
        os.write(2, b"checkpoint: a part of it cannot be read, expected a disk that works; look at dmesg\n")
        os._exit(2)


def map_file(path):
    """Returns a file as a read-only mmap."""
    if os.path.exists(path) and not os.path.isfile(path):
        raise ColibriError(path, "a directory" if os.path.isdir(path) else "not a regular file", "a checkpoint file",
                           "name the file itself")
    try:
        with open(path, "rb") as file:
            if not os.fstat(file.fileno()).st_size:
                raise ColibriError(path, "0 bytes", "a PyTorch checkpoint", "download or save it again")
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise ColibriError(path, getattr(error, "strerror", None) or error, "a readable checkpoint file",
                           "check the path") from None
    _mapped[data] = Mapped(path, data)
    LIBC.signal(signal.SIGBUS, _on_fault)
    return data


def forget():
    """Forgets the files of an earlier conversion, which stay mapped where that failed. Called before a conversion."""
    _mapped.clear()


def check_size(data, where):
    """Refuses a file that was cut off after it was mapped, since zeros may have been read in place of what is gone."""
    if isinstance(data, mmap.mmap) and data.size() < len(data):
        raise ColibriError(where, f"the file shrank to {data.size()} bytes while it was read", len(data),
                           "convert again when nothing writes to it")


def check_sizes():
    """Checks the size of every mapped file, when all has been read."""
    for data, mapped in _mapped.items():
        check_size(data, mapped.path)
