"""The one exception that users see: a single sentence `where: name=got, expected rule; fix`."""


class ColibriError(Exception):
    """A mistake in the input, the options or the machine; the command line prints its text alone and exits with 2."""


def printable(line):
    """Returns a line without control characters, which a terminal would obey, and without surrogates."""
    return line if line.isprintable() else line.encode("unicode_escape").decode()
