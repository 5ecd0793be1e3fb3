"""The one exception that users see: a single sentence `where: name=got, expected rule; fix`."""

from numbers import Integral


class ColibriError(Exception):
    """A mistake in the input, the options or the machine; the command line prints its text alone and exits with 2."""


def printable(line):
    """Returns a line without control characters, which a terminal would obey, and without surrogates."""
    return line if line.isprintable() else line.encode("unicode_escape").decode()


def between(name, value, default, low, high):
    """Returns the value, or the default for None. Checks that it is an integer from low to high."""
    if value is None:
        return default
    if not isinstance(value, Integral):
        raise ColibriError(f"{name}: {value!r}, expected an integer, {low} to {high}")
    if not low <= value <= high:
        raise ColibriError(f"{name}: {value}, expected {low} to {high}")
    return value
