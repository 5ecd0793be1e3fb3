"""The units in deploy/: systemd takes them, and what they start serves."""

import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import urllib.request

import pytest
from conftest import ROOT
from service import Client, Service

from colibri import build
from colibri.checkpoint import Checkpoint

UNITS = ["colibri.service", "colibri.socket", "colibri-http.socket"]
PASS = """import os, sys
count = int(sys.argv[1])
descriptors = [os.dup2(int(text), 100 + number) for number, text in enumerate(sys.argv[2:2 + count])]
for number, descriptor in enumerate(descriptors):
    os.dup2(descriptor, 3 + number)
os.environ["LISTEN_PID"] = str(os.getpid())
os.execv(sys.argv[2 + count], sys.argv[2 + count:])"""


def unit(name):
    """{"Service": [(name, value), ...], ...}"""
    sections = {}
    for line in (ROOT / "deploy" / name).read_text().splitlines():
        if section := re.fullmatch(r"\[(\w+)\]", line):
            settings = sections.setdefault(section[1], [])
        elif line and not line.startswith("#"):
            settings.append(tuple(line.split("=", 1)))
    return sections


def of(settings, name):
    return [value for key, value in settings if key == name]


@pytest.fixture
def place(tmp_path, moe_32):
    """What stands for /opt/colibri."""
    os.symlink(ROOT / "colibri", tmp_path / "colibri")
    shutil.copy(moe_32, tmp_path / "model.bin")
    build.library_path(Checkpoint(moe_32))
    return tmp_path


def start_line(place):
    """ExecStart's words and environment, with the folder and its Python in their places."""
    service = unit("colibri.service")["Service"]
    environment = dict(value.split("=", 1) for value in of(service, "Environment"))
    assert of(service, "WorkingDirectory") == ["/opt/colibri"]
    words = []
    for word in shlex.split(of(service, "ExecStart")[0]):
        whole = re.fullmatch(r"\$(\w+)", word)
        filled = re.sub(r"\$\{(\w+)\}", lambda name: environment[name[1]], word)
        words += environment[whole[1]].split() if whole else [filled]
    return [word.replace("/opt/colibri/.venv/bin/python", sys.executable).replace("/opt/colibri", str(place))
            for word in words], environment


def test_the_service_is_started_and_started_again(place):
    """By ExecStart, in the environment and with the sockets that systemd gives; who comes while it is away waits."""
    words, environment = start_line(place)
    names = [of(unit(name)["Socket"], "FileDescriptorName") or [name] for name in UNITS[1:]]
    with socket.socket(socket.AF_UNIX) as lines, socket.create_server(("127.0.0.1", 0)) as http:
        lines.bind(str(place / "colibri.sock"))
        lines.listen()
        descriptors = [str(lines.fileno()), str(http.fileno())]
        command = ["env", "-i", "-C", str(place), "PATH=/usr/local/bin:/usr/bin:/bin", "LISTEN_FDS=2",
                   "LISTEN_FDNAMES=" + ":".join(name for name, in names), *(f"{name}={value}" for name, value in
                   environment.items()), sys.executable, "-c", PASS, "2", *descriptors, *words]
        passed = {"command": command, "pass_fds": [int(number) for number in descriptors]}
        with Service(place / "model.bin", place, **passed) as service:
            assert service.places == [f"unix:{place / 'colibri.sock'}", f"http 127.0.0.1:{http.getsockname()[1]}"]
            service.process.kill()
            assert service.process.wait() != 0  # Restart=on-failure
        with Client(str(place / "colibri.sock")) as waiting:
            waiting.send({"id": 1, "prompt": "It was the custom of ", "max_new_tokens": 5})
            with Service(place / "model.bin", place, **passed) as service:
                assert waiting.receive()["finish_reason"] == "length"
                with urllib.request.urlopen(f"http://127.0.0.1:{http.getsockname()[1]}/ready") as response:
                    assert response.status == 200
                assert service.stop(signal.SIGTERM) == 0


def test_settings():
    service = unit("colibri.service")["Service"]
    assert of(service, "Restart") == ["on-failure"] and of(service, "NoNewPrivileges") == ["yes"]
    assert of(service, "MemoryMax") and of(service, "DynamicUser") == ["yes"]
    listen = [of(unit(name)["Socket"], "ListenStream")[0] for name in ("colibri.socket", "colibri-http.socket")]
    assert f"--serve unix:{listen[0]} --http {listen[1]} " in of(service, "ExecStart")[0]
    for name in UNITS[1:]:
        assert name in of(unit("colibri.service")["Unit"], "Requires")[0].split()
    readme = (ROOT / "README.md").read_text()
    assert all(f"deploy/{name}" in readme for name in UNITS) and all(place in readme for place in listen)


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="no systemd-analyze")
def test_systemd_takes_the_units(tmp_path):
    (tmp_path / "python").symlink_to(sys.executable)  # whose own path may have blanks
    for name in UNITS:
        text = (ROOT / "deploy" / name).read_text()
        text = text.replace("/opt/colibri/.venv/bin/python", str(tmp_path / "python"))
        (tmp_path / name).write_text(text.replace("/opt/colibri", "/"))
    verified = subprocess.run(["systemd-analyze", "verify", "--man=no", *[tmp_path / name for name in UNITS]],
                              capture_output=True, text=True, check=False)
    assert (verified.returncode, verified.stdout, verified.stderr) == (0, "", "")
