"""python -m colibri.run --doctor: what this machine has and lacks, a line each: ok, or what to do about it.

What a run on the host cannot do without is "needed", everything else "optional". With --model, so is the
package tokenizers where that model has a tokenizer.json.
"""

import glob
import importlib.metadata
import os
import re
import shutil
import subprocess
import textwrap

from colibri import build, native, places
from colibri import library as libraries
from colibri.checkpoint import Checkpoint
from colibri.errors import ColibriError, sentence
from colibri.weights import usable_processors

CPU_FLAGS = ("avx2", "fma", "f16c")
COLUMNS = 80
NVCC_SECONDS = 20
EXTRAS = {"tokenizers": "text, where a model has a tokenizer.json",
          "jinja2": "chats, where a model has a template of them", "h11": "--http",
          "llguidance": "answers that follow a JSON schema or a grammar",
          "huggingface_hub": "checkpoints by their ids on the Hugging Face Hub"}


def report(path=None):
    """Returns the lines, as one text, and whether everything that is needed is there.

    path: of the model that they are about, in place of those in the current folder. Raises ColibriError where that is
    no model.
    """
    named = None if path is None else Checkpoint(path)
    models = sorted(glob.glob("*.bin")) if path is None else [named.path]
    of_text = "needed" if named and named.tokenizer else "optional"
    tools = "optional" if "COLIBRI_LIBRARY" in os.environ else "needed"
    checks = [("host", host, "needed"), ("host memory", host_memory, "needed"), ("gcc and make", host_tools, tools),
              ("GPU driver", gpu_driver, "optional"), ("GPU", gpu, "optional"), ("GPU memory", gpu_memory, "optional"),
              ("nvcc", nvcc, "optional"),
              *((name, lambda name=name: extra(name), of_text if name == "tokenizers" else "optional")
                for name in EXTRAS)]
    lines = [(label, attempt(check, need)) for label, check, need in checks]
    used = set()
    lines += model_lines(models, used)
    others = len({*glob.glob(str(places.builds() / "*" / "libcolibri.so"))} - used)
    if path is None and others:
        where, fix = ("build/", "make clean") if places.IS_CLONE else (str(places.builds()), "rm -r")
        text = f"{others} more in {where}, of other models, options or sources; {fix} removes all there"
        lines.append(("libraries", text))
    lines.append(("to build", make_command()))
    width = min(max(len(label) for label, _ in lines), 24) + 2
    fill = textwrap.TextWrapper(COLUMNS, subsequent_indent=" " * width, break_on_hyphens=False, break_long_words=False)
    text = "\n".join(fill.fill(f"{label:<{width - 2}}  {text}") for label, text in lines)
    return text, not any(text.startswith("needed: ") for _, text in lines)


def attempt(check, need):
    """Returns what a check says; where it fails, what is lacking, after the word for how much that matters."""
    try:
        return check()
    except ColibriError as error:
        return f"{need}: {error}"


def model_lines(paths, used):
    """Returns a line for each model. One that cannot be read is needed where there is no other."""
    if not paths:
        make = "python -m converter checkpoint.pt model.bin"
        return [("models", f"optional: no .bin in this folder; make one with {make}")]
    lines, readable = [], False
    for path in paths:
        try:
            text, readable = model(Checkpoint(path), used), True
        except ColibriError as error:
            text = sentence(None, *error.parts[1:]) if error.where == path else str(error)
        lines.append((os.path.basename(path), text))
    return lines if readable else [(label, f"needed: {text}") for label, text in lines]


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
    build.check_tools()
    build.check_compiler()
    return "ok"


def extra(name):
    """Returns the version of a package that is not the engine's own."""
    try:
        return f"ok: {importlib.metadata.version(name)}"
    except importlib.metadata.PackageNotFoundError:
        raise ColibriError(None, "not installed", fix=f"pip install {name}, for {EXTRAS[name]}") from None


def driver():
    """Returns colibri.gpu, where there is a GPU to ask about."""
    if not any(map(os.path.exists, libraries.GPU_NODES)):
        raise ColibriError(None, "none on this machine: models run on the host")
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
        raise ColibriError(None, "not on PATH",
                           fix="install the CUDA toolkit and add its bin folder to PATH to build for a GPU")
    try:
        made = subprocess.run([path, "--version"], check=False, capture_output=True, timeout=NVCC_SECONDS)
        said = f"status {made.returncode}, without a version"
        version = re.search(rb"release ([\d.]+)", made.stdout)
    except OSError as error:
        said, version = error.strerror, None
    except subprocess.TimeoutExpired:
        said, version = f"silent for {NVCC_SECONDS} s", None
    if not version:
        raise ColibriError(f"{path} --version", said, "CUDA's compiler",
                           "install the CUDA toolkit again, or take it off PATH")
    return f"ok: {path}, CUDA {version[1].decode()}"


def model(checkpoint, used):
    """Returns the libraries that a model needs here, whether they are built, and by what. Adds them to `used`."""
    needs = {"host": "needed"}
    return "; ".join(attempt(lambda arch=arch: library(checkpoint, arch, used), needs.get(arch, "optional"))
                     for arch in archs())


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
    """Returns what models can be built for to run on this machine."""
    try:
        return ["host", driver().arch()]
    except ColibriError:
        return ["host"]


def make_command():
    arch = archs()[-1]
    options = "MODEL=model.bin" if arch == "host" else f"ARCH={arch} MODEL=model.bin"
    return f"{places.BUILD_COMMAND} {options}, as colibri.run does"
