"""A GPU that is made up: a driver whose calls succeed, and one whose memory is the host's."""

import ctypes
import enum
import threading
import types

import numpy as np
import pytest

from colibri import device, gpu, headers, launch
from colibri import library as libraries


class Status(enum.IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_NO_DEVICE = 100
    CUDA_ERROR_ILLEGAL_ADDRESS = 700
    CUDA_ERROR_SYSTEM_DRIVER_MISMATCH = 803


class Driver(types.SimpleNamespace):
    """A driver whose calls succeed with the given values; `capability` and `version` describe its GPU."""

    def __init__(self, capability=(9, 0), version=13000, **calls):
        attributes = types.SimpleNamespace(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR=0,
                                           CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR=1)
        ok = Status.CUDA_SUCCESS
        modes = types.SimpleNamespace(CU_STREAM_CAPTURE_MODE_THREAD_LOCAL=1)
        super().__init__(**{
            "CUresult": Status, "CUstreamCaptureMode": modes, "CUdevice_attribute": attributes,
            "cuInit": lambda _: (ok,), "cuDeviceGet": lambda _: (ok, 0), "cuDeviceTotalMem": lambda _: (ok, 8 << 30),
            "cuDeviceGetName": lambda *_: (ok, b"Made-up GPU\0"), "cuDriverGetVersion": lambda: (ok, version),
            "cuDeviceGetAttribute": lambda which, _: (ok, capability[which]), **calls})


@pytest.fixture
def use(monkeypatch):
    """A function that puts a driver in place; what was found out about the last one is forgotten."""
    def put(driver):
        gpu.properties.cache_clear()
        for module in (gpu, launch):
            monkeypatch.setattr(module, "driver", lambda: driver)
    yield put
    gpu.properties.cache_clear()


def library(cuda_arch):
    return types.SimpleNamespace(file="lib.so", baked={"cuda_arch": cuda_arch, "cuda_version": 13000}, path=print,
                                 headers=types.SimpleNamespace(constants={"COLIBRI_CUDA": 1}))


LIBRARY = types.SimpleNamespace(headers=headers.default(), forward_part=print, forward=print, forward_stack=print,
                                baked={"k": 2, "num_experts": 4, "vocab_size": 9})


def memory_of(driver, use):
    """A DeviceMemory without its context."""
    use(driver)
    opening = types.SimpleNamespace(chunks=None, elapsed=lambda: 0.0)
    memory = device.DeviceMemory(LIBRARY, opening)
    memory.gpu.open = memory.gpu.enter = lambda: None
    memory.gpu.stream, memory.launcher.num_steps = None, 12
    return memory


class HostGpu:
    """A driver whose device memory is the host's; what is taken is in `held`, and calls need the thread's context."""

    def __init__(self, **calls):
        """calls: those that are otherwise."""
        ok, self.held, self._thread = Status.CUDA_SUCCESS, {}, threading.local()
        flags = types.SimpleNamespace(CU_STREAM_NON_BLOCKING=1)

        def enter(context):
            self._thread.context = context
            return (ok,)

        def within(function):
            def call(*arguments):
                assert self._thread.context == 1
                return function(*arguments)
            return call
        self.within = within

        def allocate(size, _=0):
            block = np.zeros(size, np.uint8)
            self.held[block.ctypes.data] = block
            return ok, block.ctypes.data

        def copy(to, start, size, _=None):
            ctypes.memmove(to, start, size)
            return (ok,)
        free = within(lambda address: (ok if self.held.pop(address) is not None else None,))
        self.driver = Driver(
            CUstream_flags=flags, CU_MEMHOSTREGISTER_DEVICEMAP=2,
            CU_MEMHOSTALLOC_DEVICEMAP=2, cuCtxSetCurrent=enter, cuMemGetInfo=lambda: (ok, 1 << 40, 1 << 40),
            cuDevicePrimaryCtxRetain=lambda _: self.held.update(context=1) or (ok, 1),
            cuDevicePrimaryCtxRelease=lambda _: (ok, self.held.pop("context"))[:1],
            cuMemHostRegister=within(lambda address, *_: self.held.update({f"locked {address}": 1}) or (ok,)),
            cuMemHostUnregister=within(lambda address: (ok, self.held.pop(f"locked {address}"))[:1]),
            cuStreamCreate=within(lambda _: self.held.update(stream=1) or (ok, 5)),
            cuStreamDestroy=within(lambda _: (ok, self.held.pop("stream"))[:1]),
            cuStreamSynchronize=within(lambda _: (ok,)), cuMemAlloc=within(allocate), cuMemFree=free,
            cuMemHostAlloc=within(allocate), cuMemFreeHost=free,
            cuMemsetD8Async=within(lambda address, value, size, _: (
                ctypes.memset(address, value, size) and ok,)),
            cuMemcpyHtoDAsync=within(copy), cuMemcpyDtoH=within(copy))
        vars(self.driver).update(calls)


def no_memory(*_):
    return Status.CUDA_ERROR_OUT_OF_MEMORY, None


@pytest.fixture
def made_up(use, monkeypatch):
    """A HostGpu with the host's library in the place of its own, for --dispatch dynamic."""
    made, opened = HostGpu(), libraries.open_library
    use(made.driver)

    def library_of(checkpoint, arch, build_missing):
        library = opened(checkpoint, "host", build_missing)
        library.headers.constants["COLIBRI_CUDA"] = library.headers.constants["COLIBRI_HOST"]

        def upload(target, source, size, chunks, chunk_bytes, num_threads, stream):
            assert made.held[f"locked {chunks}"] and stream == 5 and chunk_bytes * num_threads > 0
            ctypes.memmove(target, source, size)
        library.upload = upload
        return library
    monkeypatch.setattr(libraries, "open_library", library_of)
    monkeypatch.setattr(gpu, "check_library", lambda _: None)
    monkeypatch.setattr(launch, "buckets", lambda count: list(range(count + 1)))
    monkeypatch.setattr(libraries, "GPU_NODES", ("/",))
    return made
