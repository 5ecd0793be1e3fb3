"""Where a server listens: addresses, sockets of systemd, and the options that say so."""

import socket
import subprocess
import sys

import pytest
from conftest import ROOT
from service import TIMEOUT, Client, Service, fails


def test_places_that_are_taken(moe_32, service, tmp_path):
    assert fails(moe_32, "--serve", f"unix:{service.path}") == (
        f"--serve: unix:{service.path}, in use by another server, expected a free name; choose another, or end that "
        "server\n")
    with service.client() as client:  # which goes on
        assert client.ask(prompt="x", max_new_tokens=1)["finish_reason"] == "length"
    assert fails(moe_32, "--serve", f":{service.port}") == (
        f"--serve: :{service.port}: Address already in use, expected a free address of this machine; choose another\n")
    (tmp_path / "file").write_text("precious")
    assert fails(moe_32, "--serve", f"unix:{tmp_path}/file") == (
        f"--serve: unix:{tmp_path}/file, a file that is no socket, expected none there; choose another name, or remove "
        "it\n")
    assert (tmp_path / "file").read_text() == "precious"
    assert fails(moe_32, "--serve", f"unix:{tmp_path}/none/socket").startswith(
        f"--serve: unix:{tmp_path}/none/socket: No such file or directory, expected a free address")
    assert fails(moe_32, "--serve", "unix:" + "x" * 108) == (
        f"--serve: unix:{'x' * 108}, expected a name of 1 to 107 bytes; choose another\n")
    assert "203.0.113.1:5: Cannot assign requested address, expected" in fails(moe_32, "--serve", "203.0.113.1:5")


@pytest.mark.parametrize("host, shown", [("..", ".."), ("a..b", "a..b"), ("x" * 64, "x" * 64), (b"\xff", "\\udcff")])
def test_hosts_that_are_no_names(moe_32, host, shown):
    ended = subprocess.run([sys.executable, "-m", "colibri.run", "--backend", "host", "--model", str(moe_32), "--http",
                            (host if isinstance(host, bytes) else host.encode()) + b":8099"], cwd=ROOT,
                           capture_output=True, timeout=TIMEOUT, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr.decode()) == (2, b"", (
        f"--http: {shown}:8099, expected a host's name with 1 to 63 characters between two dots; correct it\n"))


@pytest.mark.parametrize("options, message", [
    (("--serve", "localhost"), "--serve: localhost, expected - or HOST:PORT or unix:PATH, with a port of 0 to 65535"),
    (("--serve", ":70000"), "--serve: :70000, expected - or HOST:PORT or unix:PATH, with a port of 0 to 65535"),
    (("--http", "unix:x"), "--http: unix:x, expected HOST:PORT, with a port of 0 to 65535"),
    (("--http", "::1:80"), "--http: ::1:80, expected HOST:PORT, with a port of 0 to 65535"),
    (("--serve", "-", "--prompt", "x"), "--prompt: given, expected only without --serve and --http; leave it out"),
    (("--serve", "-", "--seed", "1"), "--seed: given, expected only without --serve and --http; leave it out"),
    (("--http", ":0", "--json"), "--json: given, expected only without --serve and --http; leave it out"),
    (("--prompt", "x", "--drain", "1"), "--drain: given, expected only with --serve or --http; leave it out"),
    (("--log-prompts",), "--log-prompts: given, expected only with --serve or --http; leave it out"),
    (("--serve", "-", "--queue-size", "-1"), "--queue-size: -1, expected 0 to 1048576"),
    (("--serve", "-", "--log-format", "xml"), "--log-format: xml, expected one of text, json"),
    (("--serve", "-", "--prefill-chunk", "513"), ("--prefill-chunk: 513, expected at most 512, MAX_STEP_TOKENS of the "
     "library; use fewer, or raise it with DEFINES=-DMAX_STEP_TOKENS=513 in the environment")),
    (("--serve", "-", "--batch-size", "33"), ("--batch-size: 33, expected at most 32, MAX_BATCH of the library; use "
     "fewer, or raise it with DEFINES=-DMAX_BATCH=33 in the environment"))])
def test_options(moe_32, options, message):
    assert fails(moe_32, *options) == message + "\n"


def test_http_without_its_library(moe_32, tmp_path):
    (tmp_path / "h11.py").write_text("raise ImportError")
    assert fails(moe_32, "--http", ":0", environment={"PYTHONPATH": f"{tmp_path}:{ROOT}"}) == (
        "h11: not installed, expected it for --http; run pip install h11 (the extra `serve`)\n")


def test_host_and_port(moe_32, tmp_path):
    with Service(moe_32, tmp_path, "--serve", ":0", "--http", "localhost:0") as service:
        host, port = service.places[0].split(":")
        assert host == "127.0.0.1" and int(port) > 0
        with Client((host, int(port))) as client:
            assert client.ask(prompt="x", max_new_tokens=1)["finish_reason"] == "length"
        assert service.stop() == 0


def test_sockets_of_systemd(moe_32, tmp_path):
    """Passed as descriptors 3 and 4, named; the options' own addresses are not opened."""
    with socket.socket() as lines, socket.socket() as http:
        for listening in (lines, http):
            listening.bind(("127.0.0.1", 0))
            listening.listen()
        script = ("import os, sys\nos.dup2(int(sys.argv[1]), 103)\nos.dup2(int(sys.argv[2]), 3)\nos.dup2(103, 4)\n"
                  "os.environ.update(LISTEN_PID=str(os.getpid()), LISTEN_FDS='2', LISTEN_FDNAMES='lines:http')\n"
                  "os.execv(sys.executable, [sys.executable, '-m', 'colibri.run', *sys.argv[3:]])")
        command = [sys.executable, "-c", script, str(http.fileno()), str(lines.fileno()), "--backend", "host",
                   "--model", str(moe_32), "--serve", "unix:/nonexistent/socket", "--http", ":1"]
        with Service(moe_32, tmp_path, command=command, pass_fds=(lines.fileno(), http.fileno())) as service:
            assert service.places == [f"127.0.0.1:{lines.getsockname()[1]}", f"http 127.0.0.1:{http.getsockname()[1]}"]
            with Client(lines.getsockname()) as client:
                assert client.ask(prompt="x", max_new_tokens=1)["finish_reason"] == "length"
            assert service.metric("connections_total") == 2
            assert service.stop() == 0


@pytest.mark.parametrize("count, kind, message", [
    ("x", "stream", "LISTEN_FDS: x, expected the number of sockets passed, 0 to 9999; unset it"),
    ("9" * 5000, "stream", f"LISTEN_FDS: {'9' * 80}, expected the number of sockets passed, 0 to 9999; unset it"),
    ("99", "stream", ("--serve: descriptor 101 of LISTEN_FDS: Bad file descriptor, expected a listening socket there; "
     "correct the .socket unit, or unset LISTEN_FDS")),
    *(("1", kind, (f"--serve: descriptor 3 of LISTEN_FDS: {wrong}, expected a listening socket there; correct the "
       ".socket unit, or unset LISTEN_FDS")) for kind, wrong in (
          ("datagram", "not a listening stream socket of IP or Unix"),
          ("stream", "not a listening stream socket of IP or Unix"),
          ("file", "Socket operation on non-socket")))])
def test_what_systemd_did_not_pass(moe_32, count, kind, message):
    script = ("import os, socket, sys\ncount, kind, *command = sys.argv[1:]\n"
              "type = socket.SOCK_DGRAM if kind == 'datagram' else socket.SOCK_STREAM\n"
              "one = open('/dev/null') if kind == 'file' else socket.socket(type=type)\n"
              "os.dup2(one.fileno(), 3)\nos.set_inheritable(3, True)\n"
              "os.environ.update(LISTEN_PID=str(os.getpid()), LISTEN_FDS=count)\n"
              "os.execv(sys.executable, [sys.executable, '-m', 'colibri.run', *command])")
    ended = subprocess.run([sys.executable, "-c", script, count, kind, "--backend", "host", "--model", str(moe_32),
                            "--serve", ":0"], cwd=ROOT, capture_output=True, timeout=TIMEOUT, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr.decode()) == (2, b"", message + "\n")
