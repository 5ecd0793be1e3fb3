"""python -m colibri.run --doctor: what this machine has and lacks, a line each: ok, or what to do about it."""

import glob
import os
import re
import shutil
import subprocess
import textwrap

from colibri import build, engine, native
from colibri.checkpoint import Checkpoint
from colibri.errors import ColibriError
from colibri.weights import usable_processors

CPU_FLAGS = ("avx2", "fma", "f16c")
COLUMNS = 80
NVCC_SECONDS = 20


def report(path=None):
    """The lines, as one text. path: of the model that they are about, in place of those in the current folder.

    Raises ColibriError where that is no model.
    """
    models = sorted(glob.glob("*.bin")) if path is None else [Checkpoint(path).path]
    checks = [("host", host), ("host memory", host_memory), ("gcc and make", host_tools), ("GPU driver", gpu_driver),
              ("GPU", gpu), ("GPU memory", gpu_memory), ("nvcc", nvcc)]
    lines = [(label, attempt(check)) for label, check in checks]
    used = set()
    lines += [(os.path.basename(name), attempt(lambda name=name: model(name, used)).removeprefix(f"{name}: "))
              for name in models]
    others = len({*glob.glob(str(build.ROOT / "build" / "*" / "libcolibri.so"))} - used)
    if path is None and others:
        lines.append(("libraries", f"{others} more in build/, of other models, options or sources; make clean removes all there"))
    lines.append(("to build", attempt(make_command)))
    width = min(max(len(label) for label, _ in lines), 24) + 2
    fill = textwrap.TextWrapper(COLUMNS, subsequent_indent=" " * width, break_on_hyphens=False, break_long_words=False)
    return "\n".join(fill.fill(f"{label:<{width - 2}}  {text}") for label, text in lines)


def attempt(check):
    try:
        return check()
    except ColibriError as error:
        return str(error)


def host():
    with open("/proc/cpuinfo") as file:
        flags = re.search(r"^flags\s*: (.*)$", file.read(), re.MULTILINE)
    present = set(flags[1].split()) if flags else set()
    missing = [flag for flag in CPU_FLAGS if flag not in present]
    if missing:
        return f"runs the portable C path, which is slower: this processor has no {', '.join(missing)}"
    return f"ok: AVX2, FMA and F16C, {usable_processors()} processors"


def host_memory():
    with open("/proc/meminfo") as file:
        kib = {name: int(value) for name, value in re.findall(r"^(\w+): +(\d+) kB", file.read(), re.MULTILINE)}
    return f"ok: {kib['MemAvailable'] / 2**20:.1f} of {kib['MemTotal'] / 2**20:.1f} GiB available"


def host_tools():
    missing = [tool for tool in ("gcc", "make") if not shutil.which(tool)]
    return f"{' and '.join(missing)} missing; install them with apt install gcc make" if missing else "ok"


def driver():
    """colibri.gpu, where there is a GPU to ask about."""
    if not any(map(os.path.exists, engine.GPU_NODES)):
        raise ColibriError("none on this machine: models run on the host")
    from colibri import gpu
    return gpu


def gpu_driver():
    version = driver().properties().driver_version
    return f"ok: CUDA {version // 1000}.{version // 10 % 100}"


def gpu():
    found = driver().properties()
    return f"ok: {found.name}, compute capability {found.capability[0]}.{found.capability[1]}, {driver().arch()}"


def gpu_memory():
    free, total = driver().memory_info()
    return f"ok: {free / 2**30:.1f} of {total / 2**30:.1f} GiB free"


def nvcc():
    path = shutil.which("nvcc")
    if not path:
        return "not on PATH; install the CUDA toolkit and add its bin folder to PATH to build for a GPU"
    try:
        made = subprocess.run([path, "--version"], check=False, capture_output=True, timeout=NVCC_SECONDS)
        said = f"status {made.returncode}, without a version"
        version = re.search(rb"release ([\d.]+)", made.stdout)
    except OSError as error:
        said, version = error.strerror, None
    except subprocess.TimeoutExpired:
        said, version = f"silent for {NVCC_SECONDS} s", None
    if not version:
        return f"{path} --version: {said}, expected CUDA's compiler; install the CUDA toolkit again, or take it off PATH"
    return f"ok: {path}, CUDA {version[1].decode()}"


def model(path, used):
    """The libraries that a model needs here, whether they are built, and what builds them. Adds them to `used`."""
    checkpoint = Checkpoint(path)
    return "; ".join(attempt(lambda arch=arch: library(checkpoint, arch, used)) for arch in archs())


def library(checkpoint, arch, used):
    if arch != "host":
        driver().check_weights(checkpoint)
    if chosen := os.environ.get("COLIBRI_LIBRARY"):
        path, text = build.library_path(checkpoint), f"ok: COLIBRI_LIBRARY={chosen}"
    else:
        path, lacks, command = build.place(checkpoint, arch)
        text = f"ok: {build.short(path)}, by {' '.join(command)}"
        if lacks:
            return f"{build.short(path)}: {lacks}; colibri.run builds it when it is needed, as {' '.join(command)} does"
    used.add(str(path))
    opened = native.Library(path)
    build.compare(opened, checkpoint)
    if arch != "host":
        driver().check_library(opened)
    return text


def archs():
    """What models can be built for to run on this machine."""
    try:
        return ["host", driver().arch()]
    except ColibriError:
        return ["host"]


def make_command():
    arch = archs()[-1]
    command = "make MODEL=model.bin" if arch == "host" else f"make ARCH={arch} MODEL=model.bin"
    return f"{command}, as colibri.run does"
