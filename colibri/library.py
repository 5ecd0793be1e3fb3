"""The library that runs a model, and where: on a GPU or on the host."""

import functools
import os

from colibri import build, native
from colibri.errors import ColibriError
from colibri.weights import HostMemory, needs_gpu

BACKENDS = ("auto", "host", "cuda")
DISPATCH = ("device", "combo", "dynamic")  # colibri.launch knows what they are
GPU_NODES = ("/dev/nvidiactl", "/dev/dxg")  # without one of them, not even asking the driver can succeed


def load_library(checkpoint, backend, build_missing, dispatch):
    """(Library, what makes its memory of it, why auto chose the host or "") for a model; nothing is allocated yet."""
    if backend not in BACKENDS:
        raise ColibriError("backend", str(backend), f"one of {', '.join(BACKENDS)}")
    why_host = ""
    if backend == "auto" and not any(map(os.path.exists, GPU_NODES)):
        backend, why_host = "host", "no NVIDIA GPU on this machine"
    if backend != "host":
        from colibri import device, gpu  # imports cuda.bindings: not on the host's way
        try:
            gpu.check_weights(checkpoint)
            arch = gpu.arch()
            return *_load_with_context(device, gpu, checkpoint, arch, build_missing, dispatch), ""
        except ColibriError as error:
            if backend == "cuda":
                raise
            why_host = str(error)
    if dispatch:
        needs_gpu("--dispatch", dispatch, why_host or "--backend host")
    return open_library(checkpoint, "host", build_missing), HostMemory, why_host


def _load_with_context(device, gpu, checkpoint, arch, build_missing, dispatch):
    """Returns the library, loaded while the GPU's context opens, and how its DeviceMemory is made."""
    opening = gpu.Opening()
    try:
        library = open_library(checkpoint, arch, build_missing)
        gpu.check_library(library)
    except BaseException:
        opening.close()
        raise
    return library, functools.partial(device.DeviceMemory, opening=opening, dispatch=dispatch)


def open_library(checkpoint, arch, build_missing):
    library = native.Library(build.library_path(checkpoint, arch, build_missing))
    build.compare(library, checkpoint)
    return library
