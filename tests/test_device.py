"""What the GPU's side says and does on machines that lack something, with a made-up driver; no GPU is needed."""

import os
import shutil
import subprocess
import sys
import threading
import types

import numpy as np
import pytest
from conftest import DATA, ROOT
from made_up_gpu import LIBRARY, Driver, HostGpu, Status, library, memory_of, no_memory
from synthetic import write_model

from colibri import device, engine, gpu, headers, launch, native
from colibri import library as libraries
from colibri.checkpoint import Checkpoint
from colibri.errors import ColibriError


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
], ids=["no driver", "no library of a driver", "new status of cuInit", "new status", "no GPU", "broken driver", ("old "
                                                                                                                "GPU")])
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
        "cuGraphDestroy": lambda _: (ok,), "cuGraphLaunch": lambda *_: (ok,),
        name: fails(ValueError("999999 is not a valid CUresult"))}), use)
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
    line = ("GPU: cuDevicePrimaryCtxRetain=CUDA_ERROR_OUT_OF_MEMORY, expected CUDA_SUCCESS; "
            "see python -m colibri.run --doctor")
    with engine.Engine(moe_32) as opened:
        assert opened.path.startswith("host") and opened.why_host == line
    with pytest.raises(ColibriError) as error:
        engine.Engine(moe_32, backend="cuda")
    assert str(error.value) == line


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
        assert used.memory.read(int(used._model.weights[0]["embed"][0]), (8,), np.uint8).tolist() == (
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
