"""python -m colibri.run --doctor: what this machine has and lacks, a line each: ok, or what to do about it."""

import glob
import os
import re
import shutil
import subprocess

from colibri import build, engine, native
from colibri.checkpoint import Checkpoint
from colibri.errors import ColibriError

CPU_FLAGS = ("avx2", "fma", "f16c")


def report():
    """The lines, as one text."""
    checks = [("host", host), ("host memory", host_memory), ("gcc and make", host_tools), ("GPU driver", gpu_driver),
              ("GPU", gpu), ("GPU memory", gpu_memory), ("nvcc", nvcc)]
    lines = [(label, attempt(check)) for label, check in checks]
    lines += [(name, attempt(lambda name=name: library(name))) for name in libraries()]
    lines += [(name, attempt(lambda name=name: model(name))) for name in sorted(glob.glob("*.bin"))]
    lines.append(("to build", attempt(make_command)))
    width = max(len(label) for label, _ in lines) + 2
    return "\n".join(f"{label:<{width}}{text}" for label, text in lines)


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
    return f"ok: AVX2, FMA and F16C, {engine.usable_processors()} processors"


def host_memory():
    with open("/proc/meminfo") as file:
        kib = {name: int(value) for name, value in re.findall(r"^(\w+): +(\d+) kB", file.read(), re.MULTILINE)}
    return f"ok: {kib['MemAvailable'] / 2**20:.1f} of {kib['MemTotal'] / 2**20:.1f} GiB available"


def host_tools():
    missing = [tool for tool in ("gcc", "make") if not shutil.which(tool)]
    return f"{' and '.join(missing)} missing; install them with apt install gcc make" if missing else "ok"


def device():
    """colibri.device, where there is a GPU to ask about."""
    if not any(map(os.path.exists, engine.GPU_NODES)):
        raise ColibriError("none on this machine: models run on the host")
    from colibri import device
    return device


def gpu_driver():
    version = device().gpu().driver_version
    return f"ok: CUDA {version // 1000}.{version // 10 % 100}"


def gpu():
    found = device().gpu()
    return f"ok: {found.name}, compute capability {found.capability[0]}.{found.capability[1]}, {device().arch()}"


def gpu_memory():
    free, total = device().memory_info()
    return f"ok: {free / 2**30:.1f} of {total / 2**30:.1f} GiB free"


def nvcc():
    path = shutil.which("nvcc")
    if not path:
        return "not on PATH; install the CUDA toolkit and add its bin folder to PATH to build for a GPU"
    printed = subprocess.run([path, "--version"], check=False, capture_output=True, text=True).stdout
    version = re.search(r"release ([\d.]+)", printed)
    return f"ok: {path}, CUDA {version[1] if version else 'of an unknown version'}"


def libraries():
    return sorted(os.path.relpath(path) for path in glob.glob(str(build.ROOT / "build" / "*" / "libcolibri.so")))


def library(path):
    try:
        loaded = native.Library(path)
    except ColibriError as error:
        return str(error).removeprefix(f"{path}: ")
    baked, constants = loaded.baked, loaded.headers.constants
    backends = [constants["COLIBRI_HOST"]] + ([constants["COLIBRI_CUDA"]] if baked["cuda_arch"] else [])
    names = " and ".join(loaded.path(backend).decode() for backend in backends)
    shape = ", ".join(f"{name} {baked[name]}" for name in ("num_experts", "k", "hidden", "ffn", "max_batch", "max_seq_len"))
    return f"ok: {names}; {shape}"


def model(path):
    checkpoint = Checkpoint(path)
    fitting = [name for name in libraries() if fits(name, checkpoint)]
    if fitting:
        return f"ok: runs with {', '.join(fitting)}"
    return f"no library yet: colibri.run builds it, or {' '.join(build.make_command(checkpoint))}"


def fits(path, checkpoint):
    try:
        build.compare(native.Library(path), checkpoint)
        return True
    except ColibriError:
        return False


def make_command():
    try:
        return f"make ARCH={device().arch()} MODEL=model.bin"
    except ColibriError:
        return "make MODEL=model.bin"
