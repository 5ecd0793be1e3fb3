"""The one exception that users see: a single sentence `where: name=got, expected rule; fix`."""

from numbers import Integral


class ColibriError(Exception):
    """A mistake in the input, the options or the machine; the command line prints its text alone and exits with 2.

    The text is `where: got, expected <expected>; <fix>`, without the parts that are None. where: a file, an option or
    a field; None where the label of a table says it; the whole text where C or argparse has made it.
    """

    def __init__(self, where, got=None, expected=None, fix=None):
        super().__init__(sentence(where, got, expected, fix))
        self.where, self.got, self.expected, self.fix = where, got, expected, fix

    @property
    def parts(self):
        return self.where, self.got, self.expected, self.fix


def sentence(where, got=None, expected=None, fix=None):
    """Returns the text of the parts of an error."""
    found = [] if got is None else [str(got)]
    if expected is not None:
        found.append(f"expected {expected}")
    begin = ([] if where is None else [str(where)]) + ([", ".join(found)] if found else [])
    return ": ".join(begin) + ("" if fix is None else f"; {fix}")


def printable(line):
    """Returns a line without control characters, which a terminal would obey, and without surrogates."""
    return line if line.isprintable() else line.encode("unicode_escape").decode()


def between(name, value, default, low, high):
    """Returns the value, or the default for None. Checks that it is an integer from low to high."""
    if value is None:
        return default
    if not isinstance(value, Integral):
        raise ColibriError(name, repr(value), f"an integer, {low} to {high}")
    if not low <= value <= high:
        raise ColibriError(name, value, f"{low} to {high}")
    return value
