"""Hidden states in .npy files: read with everything checked, written whole or not at all."""

import contextlib
import os
import stat
import tempfile
import threading
import tokenize
import warnings

import numpy as np

from colibri.errors import ColibriError

NPY_ERRORS = (OSError, EOFError, ArithmeticError, AttributeError, LookupError, MemoryError, RecursionError, SyntaxError,
              TypeError, ValueError, tokenize.TokenError)  # of numpy.load, which evaluates a header's text
ABANDON_SECONDS = 1  # that abandon() waits for a disk on which a file is just made

_unfinished, _making = set(), threading.Lock()  # names of the temporary files of Rows, and who may make one


def check_regular(path, where, what):
    """Checks that a file is there and is no folder, pipe or device, which could keep a reader for ever."""
    kind = os.stat(path).st_mode
    if not stat.S_ISREG(kind):
        got = "directory" if stat.S_ISDIR(kind) else "special file"
        raise ColibriError(where, f"a {got}", f"a file {what}")


def check_output(path, where):
    if os.path.exists(path) and stat.S_ISFIFO(os.stat(path).st_mode):
        raise ColibriError(where, f"{path}, a pipe", "a file", "choose another name")


def check_replaceable(path, where):
    """Checks that nothing is there, or a file: a rename would put a file in the place of a device or a socket."""
    with contextlib.suppress(FileNotFoundError):
        check_regular(path, where, "or a new name")


def read_array(path, checkpoint):
    """Returns the checked hidden states of a file, mapped."""
    hidden, vocab_size = (checkpoint.header[name] for name in ("hidden", "vocab_size"))
    if vocab_size:
        raise ColibriError(checkpoint.path, f"vocab_size={vocab_size}", "0 for --input, a bare stack of MoE layers",
                           "give this model a --prompt")
    try:
        check_regular(path, path, "that numpy.save wrote")
        x = _map_array(path)
    except NPY_ERRORS as error:  # numpy's own messages speak of pickles
        reason = getattr(error, "strerror", None) or "not an array of numbers"
        raise ColibriError(path, reason, "an .npy file of numbers", "write it with numpy.save") from None
    if not isinstance(x, np.ndarray) or x.dtype not in (np.float32, np.float16):
        raise ColibriError(path, f"dtype={getattr(x, 'dtype', 'an archive')}", "float32 or float16",
                           "convert it with numpy.astype")
    if x.ndim != 2 or x.shape[1] != hidden or len(x) == 0:
        raise ColibriError(path, f"shape={x.shape}", f"(tokens, {hidden}) from hidden={hidden} of {checkpoint.path}",
                           "give it rows of that size")
    return x


def _map_array(path):
    """Maps an .npy with numpy.load, and nothing else that it reads."""
    with open(path, "rb") as file:
        if file.read(6) != b"\x93NUMPY":
            raise ValueError
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return np.load(path, mmap_mode="r", allow_pickle=False)


def check_rows(path, rows, first):
    """Checks that rows, of which the first is number `first` of the file, are finite."""
    finite = np.isfinite(rows)
    if not finite.all():
        row = first + int(np.argmin(finite.all(axis=1)))
        raise ColibriError(path, f"row {row} holds NaN or inf", "finite numbers", "look at what made it")


def write_array(path, array):
    """Writes an .npy whole or not at all: a temporary file beside it, then a rename."""
    try:
        if os.path.exists(path) and not stat.S_ISREG(os.stat(path).st_mode):  # never rename over a device or a pipe
            with open(path, "wb") as file:
                np.save(file, array)
            return
        with tempfile.NamedTemporaryFile(**_beside(path)) as file:
            try:
                np.save(file, array)
                file.flush()
                _put(file, path)
            except BaseException:
                os.unlink(file.name)
                raise
    except OSError as error:
        raise _unwritten(path, error, array.nbytes) from None


def _beside(path):
    return {"dir": os.path.dirname(path) or ".", "prefix": os.path.basename(path) + ".", "delete": False}


def _put(file, path):
    os.fsync(file.fileno())
    os.chmod(file.name, 0o666 & ~_umask())
    os.replace(file.name, path)


def _unwritten(path, error, num_bytes):
    return ColibriError(path, error.strerror or error, f"to write {num_bytes} bytes there", "choose another --output")


def _umask():
    mask = os.umask(0)
    os.umask(mask)
    return mask


class Rows:
    """Hidden states on their way from one .npy to another, some rows at a time.

    They are read, not mapped: a file that is cut off meanwhile is an error, and not the end of the process. Nothing
    is opened before begin(); the output is there whole after end(), or not at all after close().
    """

    def __init__(self, path, output, checkpoint):
        x = read_array(path, checkpoint)
        if not x.flags.c_contiguous:
            raise ColibriError(path, "fortran_order=True", "rows one after another",
                               "write it with numpy.save(path, numpy.ascontiguousarray(x))")
        self.path, self.output, self.shape = path, output, x.shape
        self._dtype, self._offset = x.dtype, x.offset
        self._input = self._temporary = None

    def __len__(self):
        return self.shape[0]

    def begin(self):
        try:
            self._input = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe that has taken its place would wait
            check_regular(self._input, self.path, "that numpy.save wrote")
        except OSError as error:
            raise ColibriError(self.path, error.strerror, "an .npy file of numbers") from None
        try:
            check_replaceable(self.output, self.output)
            with _making:
                self._temporary = tempfile.NamedTemporaryFile(**_beside(self.output))  # noqa: SIM115 - end() closes it
                _unfinished.add(self._temporary.name)
            np.lib.format.write_array_header_1_0(
                self._temporary, {"descr": "<f4", "fortran_order": False, "shape": self.shape})
        except OSError as error:
            raise self._full(error) from None

    def read(self, start, count):
        """Returns rows [start, start + count), as many as there are."""
        count = min(count, len(self) - start)
        row_bytes = self.shape[1] * self._dtype.itemsize
        try:
            data = os.pread(self._input, count * row_bytes, self._offset + start * row_bytes)
        except OSError as error:
            raise ColibriError(self.path, error.strerror, "to read rows there") from None
        if len(data) < count * row_bytes:
            raise ColibriError(self.path, f"ends within row {start + len(data) // row_bytes}", f"{len(self)} rows",
                               "it was cut off while it was read")
        rows = np.frombuffer(data, self._dtype).reshape(count, -1)
        check_rows(self.path, rows, start)
        return rows

    def write(self, rows):
        try:
            self._temporary.write(rows.data)
        except OSError as error:
            raise self._full(error) from None

    def end(self):
        try:
            check_replaceable(self.output, self.output)
            self._temporary.flush()
            _put(self._temporary, self.output)
        except OSError as error:
            raise self._full(error) from None
        _unfinished.discard(self._temporary.name)
        self._temporary.close()
        self._temporary = None
        self.close()

    def close(self):
        """Removes what end() did not finish. Harmless twice."""
        if self._input is not None:
            os.close(self._input)
        if self._temporary:
            with contextlib.suppress(OSError):  # its folder may be gone
                os.unlink(self._temporary.name)
            _unfinished.discard(self._temporary.name)
            with contextlib.suppress(OSError):  # of a full disk: what it still wanted to write is not wanted
                self._temporary.close()
        self._input = self._temporary = None

    def _full(self, error):
        return _unwritten(self.output, error, 4 * self.shape[0] * self.shape[1])


def abandon():
    """Removes what any Rows has half written, before the process ends in the midst of its work. No other can begin."""
    _making.acquire(timeout=ABANDON_SECONDS)
    for name in list(_unfinished):
        with contextlib.suppress(OSError):
            os.unlink(name)
