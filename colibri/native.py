"""The only loader of libcolibri.so: signatures out of native/colibri.h and one check for every call."""

import ctypes
import os
import shlex
import weakref

import numpy as np

from colibri import headers, places
from colibri.errors import ColibriError

_process = None  # the id of the one that loaded a library first


class Library:
    """A loaded libcolibri.so; its exported functions without their prefix are attributes: library.forward(...).

    file:    its path
    baked:   struct Config as the library was built, {"hidden": 128, ..., "max_batch": 32, ...}
    headers: the structs and tables under that configuration
    A function that fails raises ColibriError with the library's message.
    """

    def __init__(self, path):
        self.file = os.fspath(path)
        path = os.path.abspath(path)  # a bare name would be looked for in the system's folders
        check_process()
        _check_whole(path, self.file)
        functions = headers.default().functions
        try:
            library = ctypes.CDLL(path)
            for name, (restype, argtypes) in functions.items():
                function = getattr(library, name)
                function.restype, function.argtypes = restype, argtypes
                if name != "colibri_error" and restype is not ctypes.c_double:
                    function.errcheck = self._check
                setattr(self, name.removeprefix("colibri_"), function)
        except (OSError, AttributeError) as error:
            reason = str(error).removeprefix(f"{path}: ")  # in the words of the C library
            raise ColibriError(self.file, reason, "a libcolibri.so", _fix(path)) from None
        digest = self.digest().decode()
        if digest != headers.digest():
            raise ColibriError(self.file, f"of headers {digest}", f"{headers.digest()}, which are in native/",
                               _fix(path))
        config = np.zeros((), headers.default().structs["Config"])
        self.config(config.ctypes.data)
        self.baked = {name: config[name].item() for name in config.dtype.names}
        self.headers = headers.Headers(self.baked)

    def watch(self, path, array):
        """Gives words to a fault in a mapped file, until the array over it dies, or what this returns is called."""
        line = (f"{path}: a part of it can no longer be read, expected its {array.nbytes} bytes to stay while it is in "
                "use; it was cut off, or its disk fails: write a new file beside it and rename that over it\n")
        address = array.ctypes.data
        self.guard(address, array.nbytes, os.fsencode(line))
        return weakref.finalize(array, self.unguard, address)

    def _check(self, result, function, arguments):
        good = result == 0 if function.restype is ctypes.c_int else bool(result)
        if not good:
            raise ColibriError(self.error().decode())
        return result


def check_process():
    """Checks that this process did not inherit the library: a fork copies no threads, and would wait for them."""
    global _process
    _process = _process or os.getpid()
    if is_forked():
        raise ColibriError("engine", "in a forked process", "the one that loaded the library",
                           "start others with multiprocessing.get_context('spawn')")


def is_forked():
    """Returns whether this process is a fork of one that loaded a library."""
    return _process not in (None, os.getpid())


def _check_whole(path, name):
    """Checks that the file is as long as its ELF header says: touching the mapping of one cut short is fatal."""
    try:
        with open(path, "rb") as file:
            start, size = file.read(64), os.fstat(file.fileno()).st_size
    except OSError as error:
        raise ColibriError(name, error.strerror, "a libcolibri.so", _fix(path)) from None
    if start[:4] != b"\x7fELF" or start[4:5] != b"\2":
        return  # the loader tells what it is
    sections = int.from_bytes(start[40:48], "little")  # their table is the last thing in the file
    end = sections + int.from_bytes(start[58:60], "little") * int.from_bytes(start[60:62], "little")
    if size < max(end, 64):
        raise ColibriError(name, f"size={size}", f"{max(end, 64)} bytes", f"the file is cut off, {_fix(path)}")


def _fix(path):
    """Returns what to do about a damaged library: make takes one that is newer than its sources for good."""
    folder = os.path.dirname(path)
    if os.path.dirname(folder) != str(places.builds()):
        return f"build it with {places.BUILD_COMMAND}"
    return f"remove its folder, and what needs it builds it again: rm -r {shlex.quote(folder)}"
