"""What several tests share: the example model as a .bin, and the command lines as programs."""

import hashlib
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytest_plugins = ("made_up_gpu", "refusals")  # their fixtures
ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "tests" / "data"
PYTHON = f"PYTHON={shlex.quote(sys.executable)}"  # for make
HAS_GPU = any(map(os.path.exists, ("/dev/nvidiactl", "/dev/dxg")))


def pytest_sessionstart():
    """Nearly all tests need a library: what building one lacks is one line.

    A process inherits signals that are ignored, as nohup and a shell's & leave them: tests of signals need them.
    """
    for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, handler)
    from colibri import build
    from colibri.errors import ColibriError
    try:
        build.check_tools()
        build.check_compiler()
    except ColibriError as error:
        pytest.exit(str(error), 2)


def pytest_collection_modifyitems(config, items):
    """Tests marked gpu run where there is a GPU."""
    if not HAS_GPU:
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("gpu")])
        items[:] = [item for item in items if not item.get_closest_marker("gpu")]


def pytest_terminal_summary(terminalreporter):
    if not HAS_GPU and terminalreporter.stats.get("deselected"):
        terminalreporter.write_line("deselected: tests marked gpu, for there is no NVIDIA GPU on this machine")


@pytest.fixture(autouse=True)
def signals():
    """Puts back the handlers that a command line sets which a test runs in this process."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    handlers = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, handlers):
        signal.signal(number, handler)


def program(module, *arguments, environment=(), **options):
    """python -m module arguments, run in the project; returns the CompletedProcess with bytes."""
    return subprocess.run([sys.executable, "-m", module, *map(str, arguments)], cwd=options.pop("cwd", ROOT),
                          env={**os.environ, "PYTHONPATH": str(ROOT), **dict(environment)}, capture_output=True,
                          check=False, timeout=300, **options)


def opened(path, context, num_slots=None):
    """The model's Engine on the host over a library that is built in seconds rather than for speed.

    context: the most tokens of a session, where the model has as many
    """
    from colibri import build
    from colibri.checkpoint import Checkpoint
    from colibri.engine import Engine
    header = Checkpoint(path).header
    config = " ".join([*build.defines(header), "-O1"])
    subprocess.run(["make", "-s", "-j2", f"CONFIG={config}"], cwd=ROOT, check=True)
    key = hashlib.sha256(config.encode()).hexdigest()[:12]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLIBRI_LIBRARY", str(ROOT / "build" / f"host-{key}" / "libcolibri.so"))
        return Engine(path, backend="host", num_slots=num_slots,
                      context=min(context, header["max_positions"] or context))


@pytest.fixture(scope="session")
def moe_32(tmp_path_factory):
    """models/moe-32.pt, converted."""
    path = tmp_path_factory.mktemp("models") / "moe-32.bin"
    made = program("converter", "models/moe-32.pt", path)
    assert made.returncode == 0, made.stderr
    return path


@pytest.fixture(scope="session")
def engine(moe_32):
    from colibri.engine import Engine
    with Engine(moe_32, backend="host") as engine:
        yield engine


@pytest.fixture(scope="module")
def service(moe_32, tmp_path_factory):
    """One server for what leaves it as it was."""
    from service import Service
    with Service(moe_32, tmp_path_factory.mktemp("service"), "--batch-size", 8, "--queue-size", 4) as service:
        yield service
        assert service.metric("kv_slots_free") == 8 and service.metric("queue_depth") == 0
        assert service.stop() == 0 and "fault" not in service.log


@pytest.fixture(scope="session")
def gpt_moe_32(tmp_path_factory):
    """A function: the GPT-style checkpoint, converted for an activation."""
    folder = tmp_path_factory.mktemp("gpt")

    def convert(activation):
        path = folder / f"{activation}.bin"
        if not path.exists():
            made = program("converter", DATA / "gpt-moe-32.pt", path, "--k", 2, "--activation", activation,
                           "--renormalize")
            assert made.returncode == 0, made.stderr
        return path
    return convert
