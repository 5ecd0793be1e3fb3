"""Where the library's sources lie, the Makefile and native/, and where what is built from them goes."""

import functools
import hashlib
import os
from pathlib import Path

from colibri import __version__
from colibri.errors import ColibriError

PACKAGES = Path(__file__).resolve().parent.parent  # the clone, or the site-packages of a wheel


def _sources():
    """Returns the folder of Makefile and native/: the clone itself, or share/colibri, where pip puts a wheel's data."""
    prefix = PACKAGES.parents[min(2, len(PACKAGES.parents) - 1)]  # of lib/python3.11/site-packages
    for folder in (PACKAGES, prefix / "share" / "colibri"):
        if (folder / "native" / "format.h").is_file():
            return folder
    return PACKAGES / "share" / "colibri"  # of pip install --target


SOURCES = _sources()
NATIVE = SOURCES / "native"
IS_CLONE = SOURCES == PACKAGES
BUILD_COMMAND = "make" if IS_CLONE else "python -m colibri.build"


@functools.cache
def builds():
    """Returns the folder of the libraries: build/ in a clone; else one of the user's cache for this version."""
    if IS_CLONE:
        return SOURCES / "build"
    cache = os.environ.get("XDG_CACHE_HOME", "")
    cache = cache if os.path.isabs(cache) else os.path.expanduser("~/.cache")
    if not os.path.isabs(cache):
        raise ColibriError("XDG_CACHE_HOME", "not set and no home folder", "a place for libraries",
                           "set it to a folder, or COLIBRI_LIBRARY to a library built elsewhere")
    sources = sorted(path for path in NATIVE.rglob("*") if path.is_file())
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in [SOURCES / "Makefile", *sources])).hexdigest()[:12]
    return Path(cache) / "colibri" / "build" / f"{__version__}-{digest}"
