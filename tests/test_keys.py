"""Who may use HTTP: keys, names of this machine, both loopbacks, and what a server tells of itself."""

import http.client
import json
import os
import re
import resource
import shutil
import socket
import subprocess
import sys
import time

import pytest
from asking import MODEL, ask, complete
from conftest import ROOT
from service import Service, fails

from colibri import __version__
from colibri.access import Access, digest, read_keys
from colibri.errors import ColibriError
from colibri.http import PATHS
from colibri.listen import Listener
from colibri.refused import Refused

KEYS = (b"sk-first", b"s", b"sk-" + b"x" * 200, b"k~!=/+")
MISSING = "Authorization: missing, expected Bearer and one of the server's keys; ask whoever runs it for one"


@pytest.fixture(scope="module")
def keyed(moe_32, tmp_path_factory):
    folder = tmp_path_factory.mktemp("keys")
    (folder / "keys").write_bytes(b"\n".join(KEYS[:2]) + b"\r\n\n  " + b"\n".join(KEYS[2:]))
    with Service(moe_32, folder, "--api-key-file", folder / "keys", "--cors", "http://a") as service:
        yield service
        assert service.stop() == 0 and "fault" not in service.log
        assert not [key for key in KEYS if len(key) > 2 and key.decode() in service.log]


def with_key(key):
    return {"Authorization": f"Bearer {key}"}


@pytest.mark.parametrize("key", KEYS)
def test_each_key_is_good(keyed, key):
    for name, scheme in (("Authorization", "Bearer "), ("authorization", "bearer  ")):
        headers = {name: scheme + key.decode(), "Host": "models.example"}
        assert ask(keyed, "GET", "/v1/models", None, headers)[0] == 200
        body = {"model": MODEL, "prompt": "x", "max_tokens": 1}
        assert ask(keyed, "POST", "/v1/completions", body, headers)[0] == 200


@pytest.mark.parametrize("headers, got", [
    ({}, "missing"), ({"Authorization": ""}, "no Bearer"), ({"Authorization": "Bearer"}, "no key of this server"),
    ({"Authorization": "sk-first"}, "no Bearer"), ({"Authorization": "Basic sk-first"}, "no Bearer"),
    *((with_key(key), "no key of this server") for key in ("sk-firs", "sk-first1", "SK-FIRST", "sk-first sk-first",
                                                           "sk-first,s", "x" * 8000)),
    ({"X-Api-Key": "sk-first"}, "missing")])
def test_no_key_no_answer(keyed, headers, got):
    for method, path in (*(("HEAD", path) for path in PATHS), ("GET", "/metrics"), ("GET", f"/v1/models/{MODEL}"),
                         ("POST", "/v1/completions"), ("POST", "/v1/chat/completions/"), ("POST", "/tokenize"),
                         ("POST", "/detokenize"), ("GET", "/nothing"), ("GET", "/v1/responses")):
        status, head, text = ask(keyed, method, path, b"{}" if method == "POST" else None, headers)
        if path in ("/health", "/ready"):
            assert status == 200
            continue
        assert (status, head["www-authenticate"]) == (401, "Bearer"), path
        assert method == "HEAD" or json.loads(text) == {"error": {
            "message": MISSING.replace("missing", got), "type": "invalid_request_error", "param": None,
            "code": "invalid_api_key"}}


def test_a_browser_asks_without_a_key(keyed):
    head = {"Origin": "http://a", "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "authorization"}
    status, headers, _ = ask(keyed, "OPTIONS", "/v1/completions", None, head)
    assert (status, headers["access-control-allow-headers"]) == (204, "authorization")
    status, headers, _ = ask(keyed, "POST", "/v1/completions", {}, {"Origin": "http://a"})
    assert (status, headers["access-control-allow-origin"]) == (401, "http://a")


def test_two_keys_in_a_request_are_none(keyed):
    with socket.create_connection(("127.0.0.1", keyed.port)) as connection:
        connection.sendall(b"GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer sk-first\r\n"
                           b"Authorization: Bearer sk-first\r\nConnection: close\r\n\r\n")
        assert connection.makefile("rb").readline() == b"HTTP/1.1 401 Unauthorized\r\n"
        connection.close()
    with socket.create_connection(("127.0.0.1", keyed.port)) as connection:  # before a body is sent
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\n"
                           b"Content-Length: 9\r\n\r\n")
        assert connection.makefile("rb").readline() == b"HTTP/1.1 401 Unauthorized\r\n"


def test_all_keys_are_compared(monkeypatch):
    """Also where the first is the right one: the time says nothing."""
    compared = []
    monkeypatch.setattr("colibri.access.hmac.compare_digest", lambda a, b: compared.append((a, b)) or a == b)
    access = Access(tuple(map(digest, KEYS)))
    for key in (*KEYS, b"none"):
        compared.clear()
        try:
            access.check("/metrics", [(b"authorization", b"Bearer " + key)], False)
            assert key in KEYS
        except Refused as refused:
            assert key == b"none" and refused.code == "invalid_api_key"
        assert compared == [(digest(key), digest(good)) for good in KEYS] and len({len(a) for a, _ in compared}) == 1


@pytest.mark.parametrize("data, expected", [
    (b"", "no key, expected at least one, a line each; write one, or leave the option out"),
    (b"\n \r\n", "no key, expected at least one, a line each; write one, or leave the option out"),
    *((data, (f"a blank or another character than ASCII's in line {line}, expected one key a line, of visible ASCII "
              "characters; correct it")) for data, line in ((b"good\nse cret\n", 2), (b"\n\ns\xc3\xa9cret\n", 3))),
    (b"x" * (1 << 20) + b"\n", "more than 1048576 bytes, expected a file with a key a line; name another"),
    (None, "No such file or directory, expected a file with a key a line; name another")])
def test_files_of_keys(tmp_path, data, expected):
    path = tmp_path / "keys"
    if data is not None:
        path.write_bytes(data)
    with pytest.raises(ColibriError) as error:
        read_keys(str(path))
    assert str(error.value) == f"--api-key-file: {path}: {expected}"


def test_options(moe_32, tmp_path):
    (tmp_path / "keys").write_bytes(b"secret\n")
    keys = ("--api-key-file", tmp_path / "keys")
    assert fails(moe_32, "--serve", "-", *keys) == "--api-key-file: given, expected only with --http; leave it out\n"
    assert fails(moe_32, "--serve", "-", "--cors", "*") == "--cors: given, expected only with --http; leave it out\n"
    assert fails(moe_32, "--prompt", "x", *keys) == (
        "--api-key-file: given, expected only with --serve or --http; leave it out\n")
    assert fails(moe_32, "--http", ":0", "--api-key-file", tmp_path) == (
        f"--api-key-file: {tmp_path}: Is a directory, expected a file with a key a line; name another\n")
    line = fails(moe_32, "--http", ":0", "--serve", ":0", *keys)
    assert re.sub(r":\d+,", ":PORT,", line) == (
        "--serve: 127.0.0.1:PORT, expected - or unix:PATH with --api-key-file; lines have no keys: a socket's owner "
        "and mode say who may use it\n")


# Names of this machine

@pytest.mark.parametrize("host, is_ours", [
    *((host + port, True) for host in ("localhost", "LocalHost", "127.0.0.1", "127.1.2.3", "[::1]", "app.localhost",
                                       "localhost.", "[::ffff:127.0.0.1]") for port in ("", ":8042", ":1")),
    *((host, False) for host in ("evil.example", "evil.example:8042", "localhost.evil.example",
                                 "127.0.0.1.evil.example", "192.168.0.1", "[2001:db8::1]:8042", "0.0.0.0", "[::]:80",
                                 "xlocalhost", "localhost:x",
                                 "127.1", "[::1", "::1", "localhost@evil.example", "", "localhost:80:80", "[localhost]",
                                 "[::ffff:10.0.0.1]", "evil.example/.localhost"))])
def test_a_host_that_is_another(service, host, is_ours):
    for path in ("/health", "/v1/models"):
        status, _, text = ask(service, "GET", path, None, {"Host": host})
        assert status == (200 if is_ours else 403), text
    if not is_ours:
        error = json.loads(text)["error"]
        assert (error["code"], error["param"]) == ("forbidden", None)
        assert error["message"] == (f'Host: "{host}", expected localhost or a loopback address of a server without '
                                    "keys; use one, or start it with --api-key-file")
        assert ask(service, "POST", "/v1/completions", {"model": MODEL, "prompt": "x"}, {
            "Host": host, "Origin": f"http://{host}", "Content-Type": "text/plain"})[0] == 403
        assert host in ("", "localhost.") or host not in service.log


def test_an_old_client_has_no_host(service):
    with socket.create_connection(("127.0.0.1", service.port)) as connection:
        connection.sendall(b"GET /health HTTP/1.0\r\n\r\n")
        assert connection.makefile("rb").readline() == b"HTTP/1.1 200 OK\r\n"


def test_a_server_of_all_addresses_has_any_name(moe_32, tmp_path):
    with Service(moe_32, tmp_path, "--http", "0.0.0.0:0") as service:
        assert ask(service, "GET", "/v1/models", None, {"Host": "models.example"})[0] == 200
        assert service.stop() == 0


def test_the_name_that_the_option_has():
    access = Access(host="My-Machine")  # which may be 127.0.1.1
    access.check("/", [(b"host", b"my-machine:8042")], True)
    with pytest.raises(Refused):
        Access(host="127.0.0.1").check("/", [(b"host", b"my-machine:8042")], True)


# Both loopbacks

def has_ipv6():
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
        return True
    except OSError:
        return False


def test_a_port_alone_is_of_both_loopbacks(moe_32, tmp_path, engine):
    with Service(moe_32, tmp_path, "--http", ":0", "--serve", ":0") as service:
        assert re.fullmatch(r"127\.0\.0\.1:\d+, http 127\.0\.0\.1:\d+", ", ".join(service.places))
        for address in ("127.0.0.1", *(["::1"] if has_ipv6() else [])):
            with socket.create_connection((address, service.port)) as connection:
                host = f"[{address}]" if ":" in address else address
                connection.sendall(f"GET /ready HTTP/1.1\r\nHost: {host}:{service.port}\r\n"
                                   "Connection: close\r\n\r\n".encode())
                assert connection.makefile("rb").read().endswith(b'{"status": "ready"}\n')
            with socket.create_connection((address, int(service.places[0].rpartition(":")[2]))) as connection:
                connection.sendall(b'{"id": 1, "prompt": "x", "max_new_tokens": 1}\n')
                assert json.loads(connection.makefile("rb").readline())["completion_tokens"] == 1
        assert service.stop() == 0


def test_one_loopback_is_taken():
    """A port that is given is free at both, or refused; port 0 is one that is."""
    if not has_ipv6():
        assert len(Listener("--http", ":0").sockets) == 1
        return
    with socket.socket(socket.AF_INET6) as taken:
        taken.bind(("::1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ColibriError) as error:
            Listener("--http", f":{port}")
        assert str(error.value) == (f"--http: :{port}: [::1]:{port}: Address already in use, expected a free address "
                                    "of this machine; choose another")
        with socket.create_server(("127.0.0.1", port)):  # the first was given back
            pass
        for _ in range(20):
            listener = Listener("--http", ":0")
            ports = [one.getsockname()[1] for one in listener.sockets]
            assert len(ports) == 2 and len(set(ports)) == 1 and ports[0] != port
            listener.close()


def test_a_machine_without_ipv6(monkeypatch):
    made = socket.socket

    def without(family, *more, **named):
        if family == socket.AF_INET6:
            raise OSError(97, "Address family not supported by protocol")
        return made(family, *more, **named)
    monkeypatch.setattr("colibri.listen.socket.socket", without)
    listener = Listener("--http", ":0")
    assert [one.family for one in listener.sockets] == [socket.AF_INET] and listener.place.startswith("127.0.0.1:")
    listener.close()


# What it tells of itself

def test_figures_of_the_process(moe_32, tmp_path, engine):
    parser = pytest.importorskip("prometheus_client.parser")
    with Service(moe_32, tmp_path) as service:
        stays = http.client.HTTPConnection("127.0.0.1", service.port)

        def read():
            stays.request("GET", "/metrics")
            text = stays.getresponse().read().decode()
            return {family.name: family for family in parser.text_string_to_metric_families(text)}
        before = read()
        assert complete(service, prompt="x", max_tokens=400)[0] == 200
        with open(f"/proc/{service.process.pid}/limits") as file:
            limit = int(re.search(r"Max open files +(\d+)", file.read())[1])
        clients = [socket.create_connection(("127.0.0.1", service.port)) for _ in range(7)]
        service.wait_for("open_connections", 9)
        after = read()
        value = {name: family.samples[0].value for name, family in after.items() if family.samples}
        kinds = {"cpu_seconds": "counter", "resident_memory_bytes": "gauge", "virtual_memory_bytes": "gauge",
                 "start_time_seconds": "gauge", "open_fds": "gauge", "max_fds": "gauge"}
        assert {name: after[f"process_{name}"].type for name in kinds} == kinds
        assert all(after[f"process_{name}"].documentation for name in kinds)
        assert value["process_open_fds"] - before["process_open_fds"].samples[0].value == 7
        assert value["process_open_fds"] == len(os.listdir(f"/proc/{service.process.pid}/fd"))
        assert value["process_max_fds"] == limit == resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        assert value["process_cpu_seconds"] > before["process_cpu_seconds"].samples[0].value > 0
        assert abs(value["process_start_time_seconds"] - time.time()) < 60
        assert 10 << 20 < value["process_resident_memory_bytes"] < value["process_virtual_memory_bytes"]
        info, = after["colibri_build_info"].samples
        assert (info.value, info.labels) == (1, {"version": __version__, "path": engine.path,
                                                 "python": ".".join(map(str, sys.version_info[:3]))})
        for client in (stays, *clients):
            client.close()
        assert service.stop() == 0


# Under systemd

def test_the_credential(tmp_path, moe_32):
    """What api-keys.conf adds to the service gives it the file that systemd lays out."""
    settings = (ROOT / "deploy" / "api-keys.conf").read_text()
    source, = re.findall(r"^LoadCredential=api-keys:(\S+)$", settings, re.MULTILINE)
    option, = re.findall(r'^Environment="KEYS=(.*)"$', settings, re.MULTILINE)
    readme = (ROOT / "README.md").read_text()
    assert f"install -m 600 /dev/stdin {source}" in readme and "deploy/api-keys.conf" in readme
    service = (ROOT / "deploy" / "colibri.service").read_text()
    assert re.search(r"^ExecStart=.* \$KEYS \$OPTIONS$", service, re.MULTILINE) and "\nEnvironment=KEYS=\n" in service
    (tmp_path / "api-keys").write_text("secret\n")
    with Service(moe_32, tmp_path, *option.replace("%d", str(tmp_path)).split()) as started:
        assert ask(started, "GET", "/v1/models")[0] == 401
        assert ask(started, "GET", "/v1/models", None, with_key("secret"))[0] == 200
        assert started.stop() == 0


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="no systemd-analyze")
def test_systemd_takes_the_credential(tmp_path):
    (tmp_path / "python").symlink_to(sys.executable)  # whose own path may have blanks
    text = (ROOT / "deploy" / "colibri.service").read_text()
    text = text.replace("/opt/colibri/.venv/bin/python", str(tmp_path / "python"))
    (tmp_path / "colibri.service").write_text(text.replace("/opt/colibri", "/"))
    for name in ("colibri.socket", "colibri-http.socket"):
        shutil.copy(ROOT / "deploy" / name, tmp_path)
    (tmp_path / "colibri.service.d").mkdir()
    shutil.copy(ROOT / "deploy" / "api-keys.conf", tmp_path / "colibri.service.d")
    verified = subprocess.run(["systemd-analyze", "verify", "--man=no", tmp_path / "colibri.service"],
                              capture_output=True, text=True, check=False)
    assert (verified.returncode, verified.stdout, verified.stderr) == (0, "", "")
