"""Model + machine -> make command -> the right libcolibri.so, cached under places.builds().

`python -m colibri.build MODEL=model.bin` builds a model's library, where there is no clone to run make in; ARCH=sm_90
and DEFINES=... as for make. With --make before them it prints the -D options of that build, for the Makefile. They
name only what differs from native/config.h's defaults, so `make` and the model that the defaults describe share one
library. The environment variable DEFINES adds to them, as it does for make: DEFINES=-DMAX_BATCH=64.
"""

from colibri.errors import ColibriError
from colibri.program import guard_imports, run

if __name__ == "__main__":
    guard_imports("python -m colibri.build")

import contextlib
import fcntl
import functools
import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from colibri import headers, places
from colibri.checkpoint import Checkpoint

ARCHS = ("host", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
DERIVED = ("v_head_dim", "rotary_dim")
APT = "gcc libc6-dev make"  # Debian's and Ubuntu's packages
PROBE = ("gcc", "-shared", "-fPIC", "-fopenmp", *(f"-include{name}.h" for name in ("stdint", "omp", "stdio", "math")),
         "-x", "c", os.devnull, "-o", os.devnull, "-lgomp", "-lm")
DEFINE = re.compile(r"-D[A-Za-z_][A-Za-z0-9_]*=[A-Za-z0-9_.+-]+")
NUMBER = re.compile("0|[1-9][0-9]{0,7}")
MOST = 99999999  # that it matches


def library_path(checkpoint, arch="host", build=True):
    """Returns the libcolibri.so for this model: COLIBRI_LIBRARY or that of <arch>-<key>/ in places.builds().

    arch: "host", or "sm_90" for a CUDA build. build=False: a library that would have to be made is an error.
    """
    if chosen := os.environ.get("COLIBRI_LIBRARY"):
        if not os.path.isfile(chosen):
            raise ColibriError(f"COLIBRI_LIBRARY={chosen}", "not found", "a libcolibri.so", "unset it to build one")
        return chosen
    library, lacks, command = place(checkpoint, arch)
    if not lacks:
        return str(library)
    if not build:
        raise ColibriError(short(library), lacks, "ready for --no-build", f"run {' '.join(command)}")
    try:
        library.parent.mkdir(parents=True, exist_ok=True)
        with open(library.parent / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # a second process that wants this library waits for the first one's
            if not _is_current(library):
                _make(library, command, config_string(checkpoint.header))
    except OSError as error:
        raise ColibriError(error.filename or library.parent, error.strerror, "to write a library there",
                           "set COLIBRI_LIBRARY to a library built elsewhere") from None
    return str(library)


def place(checkpoint, arch):
    """(the model's library, what it lacks or None, the command that makes it)"""
    check_defines(checkpoint)
    key = hashlib.sha256(config_string(checkpoint.header).encode()).hexdigest()[:12]  # the Makefile's rule
    library = places.builds() / f"{arch}-{key}" / "libcolibri.so"
    lacks = None if _is_current(library) else "older than its sources" if library.exists() else "not built"
    return library, lacks, make_command(checkpoint, arch)


def defines(header):
    """["-DHIDDEN=64", ...] for a file header, in config.h's order, leaving out what equals its default."""
    baked = headers.default().structs["Config"].names
    shape = baked[:baked.index("interleave_rows")]
    own = {name: header[name] for name in shape if name not in DERIVED}  # whose defaults are other macros
    macros, plain = headers.default().macros, headers.default().constants
    constants = {**_constants(tuple(own.items())), **{macros[name]: plain[macros[name]] for name in own}}
    return [f"-D{macros[name]}={header[name]}" for name in shape if header[name] != constants[macros[name]]]


@functools.cache
def _constants(config):
    """Returns the headers' constants under a configuration, ((name, value), ...)."""
    return headers.Headers(dict(config)).constants


def given_options():
    """Returns the -D options in DEFINES of the environment."""
    return os.environ.get("DEFINES", "").split()


def config_string(header):
    """All -D options of a build, one space between two."""
    return " ".join(defines(header) + given_options())


def check_defines(checkpoint=None):
    """Checks that DEFINES holds names of config.h, each once and a number, and nothing that contradicts the model."""
    names = set()
    for option in given_options():
        name, _, value = option.removeprefix("-D").partition("=")
        if not DEFINE.fullmatch(option):  # make would expand $(...) in it
            fix = f"write DEFINES=-D{option}" if DEFINE.fullmatch(f"-D{option}") else "leave it out"
            raise ColibriError("DEFINES", option, "-DNAME=VALUE", fix)
        if name not in headers.default().options:
            raise ColibriError("DEFINES", option, f"-DNAME=VALUE with a NAME of {' '.join(headers.default().options)}",
                               "correct it")
        if name in names:
            raise ColibriError("DEFINES", option, f"{name} once", "leave one of them out")
        names.add(name)
        field = {macro: field for field, macro in headers.default().macros.items()}[name]
        shape = field in headers.default().structs["BinHeader"].names
        least = 0 if shape else 1
        if not NUMBER.fullmatch(value) or int(value) < least:  # C takes 32+1 apart where it multiplies, and 064 as 52
            raise ColibriError("DEFINES", option,
                               f"a number of {least} to 99999999, in digits without a 0 before them", "correct it")
        if shape and checkpoint is not None and value != str(checkpoint.header[field]):
            raise ColibriError("DEFINES", option, f"{checkpoint.header[field]} as in {checkpoint.path}",
                               "the model decides, leave it out")


def raise_limit(macro, value, step_tokens=MOST):
    """Says what to do where a library was built for less than `value`. step_tokens: MAX_STEP_TOKENS, a limit to it."""
    unset = "unset COLIBRI_LIBRARY and " if "COLIBRI_LIBRARY" in os.environ else ""
    value = min(value, MOST)
    options = f"-D{macro}={value}"
    options = options if value <= step_tokens else f"'{options} -DMAX_STEP_TOKENS={value}'"
    return f"{macro} of the library; use fewer, or {unset}raise it with DEFINES={options} in the environment"


def make_command(checkpoint, arch="host"):
    """Returns the command that a user would type for this model."""
    command = [places.BUILD_COMMAND] + ([] if arch == "host" else [f"ARCH={arch}"])
    needed = defines(checkpoint.header) or not places.IS_CLONE
    command += [f"MODEL={shlex.quote(str(checkpoint.path))}"] if needed and checkpoint.path else []
    options = given_options()
    return command + ([f"DEFINES={shlex.quote(' '.join(options))}"] if options else [])


def compare(library, checkpoint):
    """Raises the first field in which the library differs from the file."""
    arch = f"sm_{library.baked['cuda_arch']}" if library.baked["cuda_arch"] else "host"
    for name, value in library.baked.items():
        if name in checkpoint.header and value != checkpoint.header[name]:
            fix = "unset COLIBRI_LIBRARY, or " if "COLIBRI_LIBRARY" in os.environ else ""
            fix += f"build its library with {' '.join(make_command(checkpoint, arch))}"
            raise ColibriError(library.file, f"{name}={value}", f"{checkpoint.header[name]} from {checkpoint.path}",
                               fix)


def _is_current(library):
    """Returns whether the library is there and no source is newer."""
    folders = ("", "host") if library.parent.name.startswith("host-") else ("", "host", "cuda")
    sources = [entry for folder in folders for entry in os.scandir(headers.NATIVE / folder)
               if entry.name.endswith((".c", ".h", ".cu", ".cuh"))]
    try:
        return max(entry.stat().st_mtime for entry in sources) <= library.stat().st_mtime
    except (FileNotFoundError, NotADirectoryError):
        return False


def check_tools(arch="host"):
    """Raises the first thing that building needs and this machine lacks."""
    for tool in ("make", "gcc", "nvcc")[:2 if arch == "host" else 3]:
        if not shutil.which(tool):
            how = "the CUDA toolkit" if tool == "nvcc" else f"it with apt install {APT}"
            raise ColibriError(tool, "not on PATH", "it to build libraries",
                               f"install {how}, or set COLIBRI_LIBRARY to a library built elsewhere")


def check_compiler():
    """Raises what gcc itself lacks: the C library's headers, OpenMP."""
    made = subprocess.run(PROBE, env={**os.environ, "LC_ALL": "C"}, check=False, capture_output=True, text=True)
    if made.returncode:
        raise ColibriError("gcc", _cause(made.stderr), "the C library's headers and OpenMP",
                           f"install them with apt install {APT}")


def _cause(output):
    """Returns the line of a compiler's output that says what is wrong."""
    causes = re.findall(r"^.*(?:error:|Error \d|fatal|cannot find).*$", output, re.MULTILINE)
    return causes[0].strip() if causes else "it failed without a word"


def _make(library, command, config):
    host = library.parent.name.startswith("host-")
    check_tools("host" if host else library.parent.name.rpartition("-")[0])
    once = "once for this model" if config else "once"
    print(f"building {short(library)}, {once}: {' '.join(command)}", file=sys.stderr, flush=True)
    # CONFIG goes in ready-made, or make would start a second Python to ask for it.
    options = [part for part in command if part.startswith("ARCH=")] + [f"CONFIG={config}"]
    if not places.IS_CLONE:  # where make runs, its paths have no blanks
        options += ["-f", places.SOURCES / "Makefile", f"BUILD={library.parent.name}"]
        _link(places.NATIVE, places.builds() / "native")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    made = subprocess.run(["make", f"-j{os.cpu_count()}", *options], env={**environment, "LC_ALL": "C"}, check=False,
                          cwd=places.SOURCES if places.IS_CLONE else places.builds(), text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if made.returncode or not library.exists():
        log = library.parent / "make.log"
        log.write_text(made.stdout)
        if re.search("No such file|cannot find", made.stdout):
            check_compiler()
        raise ColibriError(" ".join(command), _cause(made.stdout), fix=f"the whole output is in {short(log)}")
    os.utime(library)  # newer than every source, also than one that this build does not use


def _link(target, link):
    """Makes a link to a folder, or renews one that names another."""
    if os.path.realpath(link) != str(target):
        new = link.with_name(f"{link.name}.{os.getpid()}")
        os.symlink(target, new)
        os.replace(new, link)


def short(path):
    """Returns the path as seen from where the user stands, when it is below."""
    with contextlib.suppress(FileNotFoundError):  # of a folder that was removed
        if Path.cwd() in Path(path).parents:
            return os.path.relpath(path)
    return str(path)


def main(arguments):
    """Builds the library of MODEL=, or prints for --make what goes into it, its options checked."""
    given = dict(word.split("=", 1) for word in arguments if re.match("(ARCH|MODEL|DEFINES)=", word))
    is_make = arguments[:1] == ["--make"]
    if len(given) + is_make != len(arguments) or not (is_make or given.get("MODEL")):
        raise ColibriError("python -m colibri.build", f"{' '.join(arguments)!r}",
                           "MODEL=model.bin, and ARCH=sm_90 or DEFINES=-DNAME=VALUE where needed")
    arch = given.get("ARCH", "host")
    if arch not in ARCHS:
        raise ColibriError(f"ARCH={arch}", expected=f"one of {' '.join(ARCHS)}")
    if "DEFINES" in given:
        os.environ["DEFINES"] = given["DEFINES"]
    checkpoint = Checkpoint(given["MODEL"]) if given.get("MODEL") else None
    if is_make:
        check_defines(checkpoint)
        print(config_string(checkpoint.header) if checkpoint else " ".join(given_options()))
    else:
        print(library_path(checkpoint, arch))


if __name__ == "__main__":
    sys.exit(run(lambda: main(sys.argv[1:])))
