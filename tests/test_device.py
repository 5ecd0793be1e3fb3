"""What the GPU's side says and does on machines that lack something, with a made-up driver; no GPU is needed."""

import ctypes
import enum
import os
import re
import shutil
import subprocess
import sys
import threading
import types
from pathlib import Path

import numpy as np
import pytest
from conftest import DATA, ROOT, program
from synthetic import STACK, write_model

from colibri import build, device, doctor, engine, gpu, headers, launch, native
from colibri import library as libraries
from colibri.checkpoint import Checkpoint
from colibri.errors import ColibriError


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


@pytest.mark.parametrize("capability, arch", [((8, 0), "sm_80"), ((8, 6), "sm_86"), ((8, 7), "sm_86"),
                                              ((8, 9), "sm_89"),
                                              ((9, 0), "sm_90"), ((10, 3), "sm_100"), ((12, 1), "sm_120")])
def test_arch(use, capability, arch):
    use(Driver(capability))
    assert gpu.arch() == arch


def fails(error):
    """A driver call that raises it."""
    def call(*_):
        raise error
    return call


@pytest.mark.parametrize("driver, line", [
    (Driver(cuInit=fails(RuntimeError("libcuda.so.1 not found"))),
     "NVIDIA driver: libcuda.so not found, expected NVIDIA's; install it, or run with --backend host"),
    (Driver(cuInit=fails(RuntimeError("Failed to get cuGetProcAddress_v2"))),
     "NVIDIA driver: libcuda.so not one of a driver, expected NVIDIA's; install it, or run with --backend host"),
    (Driver(cuInit=fails(ValueError("2000 is not a valid CUresult"))),
     "GPU: cuInit: 2000 is not a valid CUresult, expected CUDA_SUCCESS; pip install -U cuda-python names it"),
    (Driver(cuDeviceGet=fails(ValueError("35 is not a valid CUresult"))),
     "GPU: cuDeviceGet: 35 is not a valid CUresult, expected CUDA_SUCCESS; pip install -U cuda-python names it"),
    (Driver(cuInit=lambda _: (Status.CUDA_ERROR_NO_DEVICE,)),
     "GPU: none, expected one that the driver shows; look at nvidia-smi and CUDA_VISIBLE_DEVICES"),
    (Driver(cuInit=lambda _: (Status.CUDA_ERROR_SYSTEM_DRIVER_MISMATCH,)),
     ("NVIDIA driver: cuInit=CUDA_ERROR_SYSTEM_DRIVER_MISMATCH, expected CUDA_SUCCESS; look at nvidia-smi and dmesg, "
     "and restart after a driver's update")),
    (Driver((7, 5), cuDeviceGetName=lambda *_: (Status.CUDA_SUCCESS, b"caf\xe9\0")),
     ("GPU: caf\ufffd of compute capability 7.5, expected one of 8.0, 8.6, 8.9, 9.0, 10.0, 12.0; run with --backend "
      "host")),
], ids=["no driver", "no library of a driver", "new status of cuInit", "new status", "no GPU", "broken driver", "old GPU"])
def test_each_lack_has_its_line(use, driver, line):
    use(driver)
    with pytest.raises(ColibriError) as error:
        gpu.arch()
    assert str(error.value) == line


@pytest.mark.parametrize("driver, built, line", [
    (Driver((8, 6)), 90, "lib.so: sm_90, expected kernels for Made-up GPU, which is sm_86; build with make ARCH=sm_86"),
    (Driver((8, 0)), 86, "lib.so: sm_86, expected kernels for Made-up GPU, which is sm_80; build with make ARCH=sm_80"),
    (Driver(version=12080), 90, ("NVIDIA driver: CUDA 12.8, expected 13.0 or newer for lib.so; update the driver, or "
                                "build with an older nvcc")),
], ids=["other generation", "newer minor", "old driver"])
def test_library_that_cannot_run(use, driver, built, line):
    use(driver)
    with pytest.raises(ColibriError) as error:
        gpu.check_library(library(built))
    assert str(error.value) == line


def test_library_that_can_run(use):
    use(Driver((8, 9)))
    gpu.check_library(library(86))


LIBRARY = types.SimpleNamespace(headers=headers.default(), forward_part=print, forward=print, forward_stack=print,
                                baked={"k": 2, "num_experts": 4, "vocab_size": 9})


def memory_of(driver, use):
    """A DeviceMemory without its context."""
    use(driver)
    opening = types.SimpleNamespace(chunks=None, elapsed=lambda: 0.0)
    memory = device.DeviceMemory(LIBRARY, opening)
    memory.gpu.open, memory.gpu.enter, memory.gpu.stream, memory.launcher.num_steps = lambda: None, lambda: None, None, 12
    return memory


def test_too_little_memory_is_one_line_before_anything_is_allocated(use):
    memory = memory_of(Driver(cuMemGetInfo=lambda: (Status.CUDA_SUCCESS, 3 << 30, 8 << 30)), use)
    memory.reserve({"weights": 1 << 30, "KV cache": 1 << 30})
    with pytest.raises(ColibriError) as error:
        memory.reserve({"weights": 2 << 30, "KV cache": 1 << 30, "workspaces": 1 << 29})
    assert str(error.value) == (
        "GPU memory: 3.56 GiB needed (weights 2.00, KV cache 1.00, workspaces 0.50, graphs 0.06), 3.00 GiB free; lower "
        "--batch-size or --context, end other processes on the GPU, or run with --backend host")


def test_error_on_the_device_names_the_step(use):
    memory = memory_of(Driver(cuStreamSynchronize=lambda _: (Status.CUDA_ERROR_ILLEGAL_ADDRESS,)), use)
    with pytest.raises(ColibriError,
                       match="GPU: step 12: CUDA_ERROR_ILLEGAL_ADDRESS, expected CUDA_SUCCESS; run again"):
        memory.sync()


def test_capture_ends_also_after_an_error(use):
    ended = []
    memory = memory_of(Driver(cuStreamBeginCapture=lambda *_: (Status.CUDA_SUCCESS,),
                              cuStreamEndCapture=lambda _: (Status.CUDA_SUCCESS, 7),
                              cuGraphDestroy=lambda graph: (ended.append(graph) or Status.CUDA_SUCCESS,)), use)

    def broken():
        raise ColibriError("launch")
    with pytest.raises(ColibriError, match="launch"):
        memory.launcher.capture(broken)
    assert ended == [7]


@pytest.mark.parametrize("failing", ["cuGraphGetNodes", "cuGraphInstantiate"])
def test_graph_that_cannot_be_made_is_not_kept(use, failing):
    ok, destroyed = Status.CUDA_SUCCESS, []
    use(Driver(**{"cuGraphGetNodes": lambda *_: (ok, None, 3), "cuGraphInstantiate": lambda *_: (ok, 8),
                  "cuGraphDestroy": lambda graph: (destroyed.append(graph) or ok,), failing: no_memory}))
    with pytest.raises(ColibriError, match=f"GPU: {failing}=CUDA_ERROR_OUT_OF_MEMORY"):
        launch.Graph(7, 5)
    assert destroyed == [7]


@pytest.mark.parametrize("name", ["cuStreamSynchronize", "cuStreamEndCapture", "cuGraphLaunch"])
def test_status_that_is_newer_than_cuda_python(use, name):
    ok = Status.CUDA_SUCCESS
    memory = memory_of(Driver(**{
        "cuStreamBeginCapture": lambda *_: (ok,), "cuStreamEndCapture": lambda _: (ok, 7),
        "cuGraphGetNodes": lambda *_: (ok, None, 3), "cuGraphInstantiate": lambda *_: (ok, 8),
        "cuGraphDestroy": lambda _: (ok,), "cuGraphLaunch": lambda *_: (ok,), name: fails(ValueError("999999 is not a valid CUresult"))}), use)
    with pytest.raises(ColibriError, match=f"^GPU: {name}: 999999 is not a valid CUresult, expected CUDA_SUCCESS; "):
        memory.launcher.capture(lambda: None).launch()
        memory.sync()


def test_too_many_combinations_are_not_made_ahead(use):
    """128 experts of which 8 are chosen: 10^12 graphs."""
    model = np.zeros(1, headers.default().structs["Model"])
    model["header"]["num_layers"] = 1
    memory = memory_of(Driver(), use)
    memory.launcher.dispatch = "combo"
    memory.launcher._library = types.SimpleNamespace(**{**vars(LIBRARY), "baked": {"k": 8, "num_experts": 128,
                                                                                   "vocab_size": 9}})
    with pytest.raises(ColibriError, match="--precapture: 1429702652400 graphs of combinations of experts, expected at "
                                           "most 8192; leave it out, "):
        memory.precapture(model.ctypes.data)


def test_buckets():
    sizes = launch.buckets(100)
    assert sizes[:10] == [0, 1, 2, 4, 4, 8, 8, 8, 8, 16] and sizes[64:67] == [64, 100, 100] and len(sizes) == 101


@pytest.mark.parametrize("num_bytes", [1, 4096, 4097, 3 * 4096, 100_001])
def test_parts_are_the_whole(monkeypatch, num_bytes):
    monkeypatch.setattr(device, "PART_BYTES", 4096)
    ends = [0]
    for offset, count in device.parts(num_bytes):
        assert offset == ends[-1] and 0 < count <= 4096
        ends.append(offset + count)
    assert ends[-1] == num_bytes and len(ends) == 1 + -(-num_bytes // 4096)


def test_auto_runs_on_the_host_and_says_why(use, monkeypatch, moe_32):
    use(Driver(cuInit=fails(RuntimeError())))
    monkeypatch.setattr(libraries, "GPU_NODES", ("/",))
    with engine.Engine(moe_32) as opened:
        assert opened.path.startswith("host") and opened.why_host.startswith("NVIDIA driver: libcuda.so not found")


def f32_model(tmp_path, monkeypatch):
    """A model in f32, for which no CUDA library can be asked for."""
    monkeypatch.setattr(libraries, "GPU_NODES", ("/",))
    opened = libraries.open_library
    monkeypatch.setattr(libraries, "open_library", lambda checkpoint, arch, build: (
        opened(checkpoint, arch, build) if arch == "host" else pytest.fail(f"a library for {arch}")))
    return write_model(tmp_path / "f32.bin", weight_dtype=0)


@pytest.mark.parametrize("dtypes, got", [
    ({"expert_dtype": 1}, "expert_dtype=f32, expected f16 or bf16 on a GPU"),
    ({"dense_dtype": 1}, "dense_dtype=f32, expected f16 or bf16 on a GPU"),
    ({"dense_dtype": 3}, "experts in f16 and dense matrices in bf16, expected one dtype on a GPU"),
    ({"embed_dtype": 3}, "embedding in bf16 and dense matrices in f16, expected one dtype on a GPU"),
    ({"expert_dtype": 5, "expert_group": 64, "compute_dtype": 2}, "expert_dtype=int4, expected f16 or bf16 on a GPU"),
    ({"dense_dtype": 6, "dense_group": 128, "compute_dtype": 3}, "dense_dtype=fp8, expected f16 or bf16 on a GPU"),
    ({"embed_dtype": 4, "embed_group": 32, "compute_dtype": 2}, "embed_dtype=int8, expected f16 or bf16 on a GPU")])
def test_dtypes_that_the_gpu_lacks_are_refused(use, tmp_path, dtypes, got):
    use(Driver())
    path = write_model(tmp_path / "mixed.bin", **dtypes)
    with pytest.raises(ColibriError) as error:
        engine.Engine(path, backend="cuda")
    assert str(error.value) == f"{path}: {got}; convert the model with --dtype bf16, or run it with --backend host"


@pytest.mark.parametrize("driver", [Driver(), Driver(cuInit=fails(RuntimeError()))], ids=["a GPU", "no driver"])
def test_f32_weights_are_refused_before_a_library_is_built(use, monkeypatch, tmp_path, driver):
    use(driver)
    path = f32_model(tmp_path, monkeypatch)
    with pytest.raises(ColibriError) as error:
        engine.Engine(path, backend="cuda")
    assert str(error.value) == (f"{path}: weight_dtype=f32, expected f16 or bf16 on a GPU; convert the model with "
                                "--dtype bf16, or run it with --backend host")


def test_f32_weights_run_on_the_host_under_auto(use, monkeypatch, tmp_path):
    use(Driver())
    with engine.Engine(f32_model(tmp_path, monkeypatch)) as opened, opened.session() as session:
        assert opened.path.startswith("host") and "weight_dtype=f32, expected f16 or bf16" in opened.why_host
        assert np.isfinite(session.prefill(b"hello")).all()


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


@pytest.mark.skipif(not shutil.which("nvcc"), reason="no nvcc")
@pytest.mark.parametrize("refused", [{}, {"cuMemHostRegister": no_memory}], ids=["locks", "does not lock"])
def test_too_little_memory_runs_on_the_host_under_auto(use, monkeypatch, moe_32, refused):
    """The GPU's context is given back, and what was page-locked, where that is not refused; where the run asks for a
    GPU in any way, it is an error."""
    made = HostGpu(cuMemGetInfo=lambda: (Status.CUDA_SUCCESS, 1 << 20, 8 << 30), **refused)
    use(made.driver)
    monkeypatch.setattr(libraries, "GPU_NODES", ("/",))
    with engine.Engine(moe_32) as opened, opened.session() as session:
        assert opened.path.startswith("host") and not made.held
        assert opened.why_host.startswith("GPU memory: ") and "0.00 GiB free; lower --batch-size" in opened.why_host
        assert np.isfinite(session.prefill(b"hello")).all()
    for asked in ({"backend": "cuda"}, {"dispatch": "combo"}):
        with pytest.raises(ColibriError, match="GPU memory: .* GiB needed"):
            engine.Engine(moe_32, **asked)
        assert not made.held


@pytest.mark.skipif(not shutil.which("nvcc"), reason="no nvcc")
@pytest.mark.parametrize("failing", ["cuCtxSetCurrent", "cuMemHostRegister", "cuStreamCreate", "cuMemGetInfo",
                                     "cuMemAlloc"])
def test_nothing_is_kept_where_a_call_fails(use, monkeypatch, moe_32, failing):
    """Contexts, page-locked memory, streams; the driver's memory runs out later where only page-locking is refused."""
    made = HostGpu(**{"cuMemAlloc": no_memory, failing: no_memory})
    use(made.driver)
    monkeypatch.setattr(libraries, "GPU_NODES", ("/",))
    with engine.Engine(moe_32) as opened:
        named = "cuMemAlloc" if failing == "cuMemHostRegister" else failing
        assert opened.why_host.startswith(f"GPU: {named}=CUDA_ERROR_OUT_OF_MEMORY") and not made.held


@pytest.mark.skipif(not shutil.which("nvcc"), reason="no nvcc")
def test_context_is_given_back_where_the_library_does_not_fit(use, monkeypatch, moe_32):
    ok, log = Status.CUDA_SUCCESS, []
    use(Driver(version=12080, cuDevicePrimaryCtxRetain=lambda _: log.append("retain") or (ok, 1),
               cuDevicePrimaryCtxRelease=lambda _: log.append("release") or (ok,)))
    monkeypatch.setattr(libraries, "GPU_NODES", ("/",))
    with engine.Engine(moe_32) as opened:
        assert opened.path.startswith("host") and opened.why_host.startswith("NVIDIA driver: CUDA 12.8, expected ")
    assert log == ["retain", "release"]


@pytest.mark.skipif(not shutil.which("nvcc"), reason="no nvcc")
def test_context_that_cannot_be_had(use, monkeypatch, moe_32):
    use(Driver(cuDevicePrimaryCtxRetain=lambda _: (Status.CUDA_ERROR_OUT_OF_MEMORY, None)))
    monkeypatch.setattr(libraries, "GPU_NODES", ("/",))
    line = "GPU: cuDevicePrimaryCtxRetain=CUDA_ERROR_OUT_OF_MEMORY, expected CUDA_SUCCESS; see python -m colibri.run --doctor"
    with engine.Engine(moe_32) as opened:
        assert opened.path.startswith("host") and opened.why_host == line
    with pytest.raises(ColibriError) as error:
        engine.Engine(moe_32, backend="cuda")
    assert str(error.value) == line


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


def test_engine_over_a_made_up_gpu(made_up, moe_32):
    """Weights arrive, threads come and go, and all is given back."""
    texts = []

    def generate(used):
        with used.session() as session:
            texts.append(bytes(session.generate(b"It was the custom of ", 30)))
    with engine.Engine(moe_32, backend="host") as used:
        generate(used)
    for _ in range(2):
        used = in_thread(engine.Engine, moe_32, backend="cuda", dispatch="dynamic")
        assert used.seconds["library"] >= 0
        for _ in range(2):
            in_thread(generate, used)
        assert used.memory.read(int(used._weights[0]["embed"][0]), (8,), np.uint8).tolist() == (
            used.checkpoint.tensors["embed"].view(np.uint8)[:8].tolist())
        used.close()
        assert not made_up.held
    assert len(texts) == 5 and len(set(texts)) == 1


def test_what_another_thread_opened(made_up, moe_32):
    """Each call makes the context its own thread's first."""
    used = in_thread(engine.Engine, moe_32, backend="cuda", dispatch="dynamic")
    array = np.zeros(4096, np.float32)
    assert in_thread(used.pin, array) is array and f"locked {array.ctypes.data}" in made_up.held
    made_up.driver.cuEventCreate = made_up.within(fails(ColibriError("here")))
    for call in (lambda: used.memory.read_bandwidth(used.checkpoint, 1), lambda: used.memory.gpu.pinned_rate(4096)):
        with pytest.raises(ColibriError, match="here"):
            call()
    used.close()
    assert not made_up.held


def test_all_is_given_back_where_a_call_fails(made_up, moe_32):
    used = engine.Engine(moe_32, backend="cuda", dispatch="dynamic")
    made_up.driver.cuMemHostUnregister = no_memory
    array = used.pin(np.zeros(4096, np.float32))
    used.close()
    assert list(made_up.held) == [f"locked {array.ctypes.data}"]


def test_file_is_not_watched_where_an_engine_does_not_open(made_up, monkeypatch, moe_32):
    watches, watch = [], native.Library.watch
    monkeypatch.setattr(native.Library, "watch", lambda *of: watches.append(watch(*of)) or watches[-1])
    made_up.driver.cuMemGetInfo = lambda: (Status.CUDA_SUCCESS, 1 << 20, 8 << 30)
    checkpoint = Checkpoint(moe_32)
    with pytest.raises(ColibriError, match="GPU memory: "):
        engine.Engine(checkpoint, backend="cuda")
    with engine.Engine(checkpoint):  # on the host, after the same error
        assert [watch.alive for watch in watches] == [False, False, True]
    assert not watches[-1].alive


def in_thread(function, *arguments, **options):
    """function(...) in a thread of its own, which then ends: the next one may get its number."""
    results = []
    thread = threading.Thread(target=lambda: results.append(function(*arguments, **options)))
    thread.start()
    thread.join()
    return results[0]


@pytest.mark.parametrize("dense, combinations", [((), 3 * 6), ((0,), 2 * 6 + 1), ((1, 2), 6 + 2)])
def test_parts_of_a_step_follow_the_layers_routers(use, dense, combinations):
    """Three layers of 2 of 4 experts: after one without a router nothing is waited for, and one graph is made."""
    structs = headers.default().structs
    model = np.zeros(1, structs["Model"])
    model["header"]["num_layers"], model["header"]["dense_layers"] = 3, headers.mask(dense)
    model["state"]["expert_ids"] = 77
    log, chosen = [], iter([(3, 1), (0, 2), (2, 3)])
    ok = Status.CUDA_SUCCESS

    def copy(to, start, size, _):
        assert (start, size) == (77, 8)
        gpu.host_array(to, size).view(np.int32)[:] = next(chosen)
        log.append("copy")
        return (ok,)
    pinned = np.zeros(8, np.uint8)
    memory = memory_of(Driver(cuMemcpyDtoHAsync=copy, cuStreamSynchronize=lambda _: (ok,), CU_MEMHOSTALLOC_DEVICEMAP=2,
                              cuMemHostAlloc=lambda size, _: (ok, pinned.ctypes.data)), use)
    launcher = memory.launcher
    launcher.dispatch = "combo"
    launcher.graphs = types.SimpleNamespace(get_or_create=lambda key, _: log.append(key[2:]),
                                            create=lambda key, _: made.append(key[2:]))
    launcher._launch_combinations(model.ctypes.data, 1, 1)
    routed = iter([(1, 3), (0, 2), (2, 3)])
    expected = [(0, ())]
    for part in (1, 2, 3):
        expected += [(part, ())] if part - 1 in dense else ["copy", (part, next(routed))]
    assert log == expected
    made = []
    memory.precapture(model.ctypes.data)
    assert len(made) == 1 + combinations and set(expected) - {"copy"} <= set(made)


def test_dispatch_is_for_a_gpu(moe_32):
    with pytest.raises(ColibriError, match="--dispatch: combo, expected only on a GPU"):
        engine.Engine(moe_32, backend="host", dispatch="combo")
    with pytest.raises(ColibriError, match="^dispatch: combos, expected one of device, combo, dynamic"):
        engine.Engine(moe_32, backend="host", dispatch="combos")


def test_doctor_needs_nothing(tmp_path):
    run = program("colibri.run", "--doctor", cwd=tmp_path)
    lines = dict(line.split("  ", 1) for line in run.stdout.decode().splitlines())
    assert run.returncode == 0 and run.stderr == b""
    assert {"host", "host memory", "gcc and make", "GPU driver", "GPU", "GPU memory", "nvcc",
            "to build"} <= lines.keys()
    assert all(text.strip() for text in lines.values())


@pytest.mark.parametrize("script, said", [
    ("#!/bin/sh\nprintf '\\377\\376'", "status 0, without a version"), ("#!/bin/sh\nexit 3", "status 3, without a version"),
    ("#!/nonexistent", "No such file or directory"), ("garbage", "Exec format error"),
    ("#!/bin/sh\nexec sleep 1000", "silent for 0.2 s")])
def test_doctor_with_an_nvcc_that_is_none(tmp_path, monkeypatch, script, said):
    (tmp_path / "nvcc").write_text(script)
    (tmp_path / "nvcc").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(doctor, "NVCC_SECONDS", 0.2 if "sleep" in script else 20)
    with pytest.raises(ColibriError) as error:
        doctor.nvcc()
    assert str(error.value) == (f"{tmp_path / 'nvcc'} --version: {said}, expected CUDA's compiler; install the CUDA "
                                "toolkit again, or take it off PATH")


def test_doctor_asks_whether_the_driver_runs_a_library(use, monkeypatch, moe_32):
    use(Driver(version=12080))
    monkeypatch.setattr(libraries, "GPU_NODES", ("/",))
    monkeypatch.setattr(build, "place", lambda checkpoint, arch: (f"/{arch}.so", "", ["make"]))
    monkeypatch.setattr(build, "compare", lambda *_: None)
    monkeypatch.setattr(doctor.native, "Library", lambda path: library(90))
    host, cuda = doctor.model(Checkpoint(moe_32), set()).split("; ", 1)
    assert host == "ok: /host.so, by make"
    assert cuda.startswith("optional: NVIDIA driver: CUDA 12.8, expected 13.0 or newer for lib.so; ")


def test_doctor_says_which_models_have_their_library(tmp_path, moe_32):
    build.library_path(Checkpoint(moe_32))
    shutil.copy(moe_32, tmp_path / "ready.bin")
    write_model(tmp_path / "a-model-with-a-long-name.bin", ffn=1000 + os.getpid() % 1000)
    (tmp_path / "broken.bin").write_bytes(b"COLI" + bytes([1, 0, 0, 0]) * 100)
    lines = program("colibri.run", "--doctor", cwd=tmp_path).stdout.decode().splitlines()
    assert all(len(line) <= 80 or "/libcolibri.so" in line for line in lines) and lines[-1].startswith("to build")
    text = re.sub(r"\n +", " ", "\n".join(lines))
    ready, broken = r"^ready.bin +ok: .+/libcolibri.so, by make$", r"^broken.bin +version=1"
    new = (r"^a-model-with-a-long-name.bin +.+/libcolibri.so: not built; colibri.run builds it when it is needed, as "
           r"make MODEL=a-model-with-a-long-name.bin does$")
    assert all(re.search(line, text, re.MULTILINE) for line in (ready, broken, new))
    others = {*(ROOT / "build").glob("*/libcolibri.so")} - {Path(build.library_path(Checkpoint(moe_32)))}
    line = rf"^libraries +{len(others)} more in build/, of other models, options or sources; make clean removes all there$"
    assert bool(re.search(line, text, re.MULTILINE)) == bool(others)


@pytest.mark.parametrize("named_first", [True, False])
def test_doctor_of_one_model(tmp_path, moe_32, named_first):
    """Wherever --model stands: the library that it needs, and no other model's."""
    library = build.library_path(Checkpoint(moe_32))
    shutil.copy(moe_32, tmp_path / "other.bin")
    options = ("--model", moe_32, "--doctor") if named_first else ("--doctor", "--model", moe_32)
    run = program("colibri.run", *options, cwd=tmp_path)
    text = " ".join(run.stdout.decode().split())
    assert run.returncode == 0 and f"{Path(moe_32).name} ok: {library}, by make to build" in text
    assert "other.bin" not in text
    run = program("colibri.run", *options, cwd=tmp_path, environment={"COLIBRI_LIBRARY": library})
    assert f"ok: COLIBRI_LIBRARY={library} to build" in " ".join(run.stdout.decode().split())


def test_doctor_ends_with_what_is_needed(tmp_path, moe_32):
    """A model that cannot be read is, unless there is another; so is a library that suits the model."""
    (tmp_path / "broken.bin").write_bytes(b"COLI" + bytes(1000))
    run = program("colibri.run", "--doctor", cwd=tmp_path)
    assert run.returncode == 2 and b"\nbroken.bin       needed: version=0, " in run.stdout
    shutil.copy(moe_32, tmp_path / "whole.bin")
    run = program("colibri.run", "--doctor", cwd=tmp_path)
    assert run.returncode == 0 and b"needed" not in run.stdout
    other = build.library_path(Checkpoint(write_model(tmp_path / "other.bin", STACK)))
    run = program("colibri.run", "--doctor", "--model", "whole.bin", cwd=tmp_path, environment={"COLIBRI_LIBRARY": other})
    text = " ".join(run.stdout.decode().split())
    assert run.returncode == 2 and text.count("needed: ") == 1 and "whole.bin needed: " in text


@pytest.mark.parametrize("options, line", [
    (("--model", "a"), "a: not found, expected a model file; make one with python -m converter checkpoint.pt a"),
    (("--json",), "--json: given with --doctor, expected nothing but --doctor and --model; leave it out"),
    (("--prompt", "a"), "--prompt: given with --doctor, expected nothing but --doctor and --model; leave it out"),
])
def test_doctor_refuses(tmp_path, options, line):
    run = program("colibri.run", "--doctor", *options, cwd=tmp_path)
    assert (run.returncode, run.stdout, run.stderr.decode()) == (2, b"", line + "\n")


@pytest.mark.skipif(not shutil.which("nvcc"), reason="no nvcc")
def test_cuda_library_runs_the_host_without_a_driver(moe_32):
    """The library loads where libcuda.so is missing, and its host backend gives the golden logits."""
    made = subprocess.run(["make", "-s", "-j2", "ARCH=sm_90", "CONFIG="], cwd=ROOT, check=False, capture_output=True,
                          text=True)
    assert made.returncode == 0, made.stderr
    built = ROOT / "build" / "sm_90-e3b0c44298fc" / "libcolibri.so"
    needed = subprocess.run(["ldd", built], check=True, capture_output=True, text=True).stdout
    assert "libcuda" not in needed and "not found" not in needed
    script = ("import sys, numpy as np\nfrom colibri.engine import Engine\ngolden = np.load(sys.argv[2])\n"
              "with Engine(sys.argv[1], backend='host') as e, e.session() as s:\n"
              "    assert e.library.baked['cuda_arch'] == 90\n"
              "    out, ref = e.step([(s, golden['p0_bytes'])], every=True), golden['p0_logits']\n"
              "    assert np.linalg.norm(out - ref) < 1e-4 * np.linalg.norm(ref)\n")
    run = subprocess.run([sys.executable, "-c", script, str(moe_32),
                          str(DATA / "golden.npz")], cwd=ROOT, check=False, capture_output=True, text=True,
                         env={**os.environ, "COLIBRI_LIBRARY": str(built)})
    assert run.returncode == 0, run.stderr
