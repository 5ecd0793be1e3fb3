"""The server's log: a line a request, without what a client has sent."""

import json
import math
import os
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from conftest import ROOT
from service import LONG, SLOW, TIMEOUT, Service, run_lines, wakes
from synthetic import STACK, write_model

from colibri.log import MESSAGE


def test_logs(moe_32):
    secret = b'{"id": "a b\\n\\u00e9", "prompt": "my secret\\n", "max_new_tokens": 2}\n'
    _, text = run_lines(moe_32, secret)
    assert "secret" not in text
    assert re.fullmatch(r'serving moe-32.bin on stdin\n\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ request id="a b\\n\\u00e9" '
                        r"prompt_tokens=10 tokens=2 finish=length ttft_ms=[\d.]+ itl_p99_ms=[\d.]+\n", text)
    _, text = run_lines(moe_32, secret, "--log-format", "json", "--log-prompts")
    serving, line = map(json.loads, text.splitlines())
    assert serving == {"time": serving["time"], "event": "serving", "model": "moe-32.bin", "serve": "stdin"}
    assert line == {**line, "event": "request", "id": "a b\n\xe9", "tokens": 2, "finish": "length",
                    "prompt": "my secret\n"}


@pytest.mark.parametrize("fields, message", [
    ({"prompt": "my secret", "seed": -2}, "seed: ..., expected 0 to 2^64 - 1"),
    ({"prompt": ["my secret"]}, "prompt: ..., expected a string"),
    ({"prompt_ids": "my secret"}, "prompt_ids: ..., expected a list of integers"),
    ({"prompt_ids": [7, 4711]}, "prompt_ids[1]: ..., expected 0 to 255"),
    ({"prompt": "my secret", "max_new_tokens": "my secret"}, "max_new_tokens: ..., expected an integer, 1 or more"),
    ({"prompt": "x", "my secret": 1}, (
        "...: unknown field, expected one of id, prompt, prompt_ids, input, output, max_new_tokens, stream, "
        "deadline_ms, add_special_tokens, temperature, top_k, top_p, seed, min_p, presence_penalty, "
        "frequency_penalty, repetition_penalty, logit_bias, min_tokens, stop_token_ids, ignore_eos, choice, "
        "logprobs, prompt_logprobs, stop, include_stop_str_in_output, skip_special_tokens")),
    ({"prompt": "x", "top_p": "e"}, "top_p: ..., expected a number"),
    ({"prompt": "x", "temperature": 1, "top_p": 4711}, "top_p: ..., expected more than 0 and at most 1"),
    ({"prompt": "x", "top_k": -2}, "top_k: ..., expected 0 or -1 (all) to 2^31 - 1"),
    ({"prompt": "x", "max_new_tokens": 4711}, ("max_new_tokens: ..., expected at most 512 after a prompt of 1 token in "
                                               "a context of 512, the model's own positions (max_positions of PATH); "
                                               "use fewer")),
    ({"prompt": "my secret" * 100}, ("prompt: 900 bytes, expected at most 512, the model's own positions "
                                     "(max_positions of PATH); use fewer"))])
def test_the_message_of_a_refused_request_in_the_log(moe_32, fields, message):
    """In one line, without what may be of a prompt, unless prompts are to be shown."""
    line = json.dumps({"id": 1, **fields}).encode() + b"\n"
    got, text = run_lines(moe_32, line)
    message = message.replace("PATH", str(moe_32))
    logged = re.search(r"Z request id=1 (?:prompt_tokens=0 tokens=0 )?finish=error code=\w+ message=(\"[^\"]*\")", text)
    assert logged[1] == json.dumps(message[:MESSAGE])
    assert "secret" not in text and "4711" not in text
    _, text = run_lines(moe_32, line, "--log-format", "json", "--log-prompts")
    logged = json.loads(text.splitlines()[-1])
    assert logged["message"] == got[0]["error"]["message"][:MESSAGE] and logged["code"] == got[0]["error"]["code"]


@pytest.mark.parametrize("line, said, message", [
    (b'"my secret"', "my secret", "line: ..., expected a JSON object"),
    (b'{"id": 1, "my secret": 1, "my secret": 1}', "my secret",
     "line: ... twice, expected each field once; leave one out"),
    (b'{"id": 1, "prompt": "\xfe"}', "byte 0xfe at 21", "line: byte ... at 21, expected UTF-8; encode it so")])
def test_a_line_that_holds_a_prompt_is_not_logged(moe_32, line, said, message):
    got, text = run_lines(moe_32, line + b"\n")
    assert said in got[0]["error"]["message"] and f'message="{message}"\n' in text and "secret" not in text


def test_what_a_file_of_a_client_is_called_is_not_logged(tmp_path):
    stack = write_model(tmp_path / "stack.bin", STACK)
    np.save(tmp_path / "secret.npy", np.full((3, 64), np.nan, np.float32))
    name = str(tmp_path / "secret.npy")
    got, text = run_lines(stack, b"".join(json.dumps({"id": number, "input": source, "output": output}).encode() + b"\n"
                                    for number, (source, output) in enumerate((
                                        (name, name), (f"{name}x", "y.npy"), (name, str(tmp_path)),
                                        (name, f"{name}/y"), (name, f"{name}y")))))
    assert len(got) == 5 and all(name in line["error"]["message"] or str(tmp_path) in line["error"]["message"]
                                 for line in got)
    assert sorted(re.findall(r'message="([^"]*)"', text)) == sorted([
        "output: ..., expected another file than input; choose another name",
        "...: No such file or directory, expected an .npy file of numbers; write it with numpy.save",
        "output: ...: a directory, expected a file or a new name",
        "output: ..., Not a directory, expected a file's name",
        "...: row 0 holds NaN or inf, expected finite numbers; look at what made it"])


def test_every_line_of_a_log_in_json(moe_32):
    process = subprocess.Popen([sys.executable, "-c", SLOW, "--backend", "host", "--model", str(moe_32), "--serve", "-",
                                "--http", ":0", "--log-format", "json"], cwd=ROOT, stdin=subprocess.PIPE,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdin.write(json.dumps({"id": 1, **LONG, "stream": True}).encode() + b"\n")
    process.stdin.flush()
    process.stdout.readline()
    lines = [process.stderr.readline()]
    for _ in range(2):
        process.send_signal(signal.SIGTERM)
        lines.append(process.stderr.readline())
    _, rest = process.communicate(timeout=TIMEOUT)
    serving, stopping, terminated = ({**json.loads(line), "time": ""} for line in lines)
    assert process.returncode == 143 and rest == b""
    assert serving == {"time": "", "event": "serving", "model": "moe-32.bin", "serve": "stdin", "http": serving["http"],
                       "chat_template": False}
    assert re.fullmatch(r"127.0.0.1:\d+", serving["http"])
    assert stopping == {"time": "", "event": "stopping", "requests": 1}
    assert terminated == {"time": "", "event": "terminated"}


@pytest.mark.parametrize("address, message", [
    ("unix:none/socket", ("--serve: unix:none/socket: No such file or directory, expected a free address of this "
                          "machine; choose another")),
    ("-", "stdout: No space left on device, expected to write the answers there; free some space")])
def test_an_error_in_a_log_in_json(moe_32, address, message):
    with open("/dev/full", "wb") as full:
        ended = subprocess.run([sys.executable, "-m", "colibri.run", "--model", str(moe_32), "--serve", address,
                                "--log-format", "json"], cwd=ROOT, input=b"{}\n", stdout=full,
                               stderr=subprocess.PIPE, check=False, timeout=TIMEOUT)
    last = [json.loads(line) for line in ended.stderr.splitlines()][-1]
    assert ended.returncode == 2 and last == {"time": last["time"], "event": "fault", "error": message}


def test_a_full_disk_under_the_log(moe_32, tmp_path):
    with Service(moe_32, tmp_path, command=[
            "bash", "-c", 'exec "$@" 2> >(head -n 1 >&2)', "bash", sys.executable, "-m", "colibri.run", "--backend",
            "host", "--model", str(moe_32), "--serve", f"unix:{tmp_path}/socket", "--http", "127.0.0.1:0"]) as service:
        with service.client() as client:  # the log's reader has ended: every further line is lost
            for _ in range(5):
                assert client.ask(prompt="x", max_new_tokens=1)["finish_reason"] == "length"
        service.wait_for("log_lines_lost_total", 5)
        assert service.stop() == 0


def test_an_idle_server_takes_no_time(service):
    """Its threads sleep, but for one look at the clock a second."""
    def all_wakes():
        pid = service.process.pid
        return sum(wakes(pid, thread) for thread in os.listdir(f"/proc/{pid}/task"))
    service.wait_for("running_requests", 0)
    time.sleep(0.5)  # for the end of the connection that asked
    begun, before = time.monotonic(), all_wakes()
    time.sleep(1)
    assert all_wakes() - before <= math.ceil(time.monotonic() - begun) + 1
