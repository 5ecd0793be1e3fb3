"""HTTP: OpenAI's own client, a Prometheus parser, and requests by hand with their exact answers."""

import asyncio
import json
import re
import shutil
import subprocess
import sys
import threading
import time

import pytest
from asking import MODEL, PROMPT, ask, complete, message, raw
from conftest import ROOT
from service import LONG, TIMEOUT, Service, greedy
from synthetic import STACK, write_model

from colibri.messages import transcript
from colibri.openai import NEUTRAL, RENAMED
from colibri.refused import Refused

openai = pytest.importorskip("openai")


@pytest.fixture(scope="module")
def service(moe_32, tmp_path_factory):
    with Service(moe_32, tmp_path_factory.mktemp("http"), "--batch-size", 4, "--queue-size", 2) as service:
        yield service
        assert service.metric("kv_slots_free") == 4 and service.stop() == 0
        assert "fault" not in service.log


@pytest.fixture(scope="module")
def client(service):
    return openai.OpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0, timeout=TIMEOUT)


COMPLETION_FIELDS = (
    "stream_options, n, best_of, echo, max_tokens, temperature, top_p, top_k, min_p, seed, stream, stop, "
    "stop_token_ids, ignore_eos, min_tokens, presence_penalty, frequency_penalty, repetition_penalty, logit_bias, "
    "include_stop_str_in_output, skip_special_tokens, deadline_ms, add_special_tokens, grammar, response_format, "
    "logprobs, prompt_logprobs")


# OpenAI's client

def test_completes(client, engine):
    got = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=40)
    assert (got.choices[0].text, got.choices[0].finish_reason) == (greedy(engine, PROMPT, 40), "length")
    assert (got.usage.prompt_tokens, got.usage.completion_tokens, got.usage.total_tokens) == (21, 40, 61)
    assert (got.object, got.model, got.choices[0].index) == ("text_completion", MODEL, 0) and got.id.startswith("cmpl-")
    assert abs(got.created - time.time()) < 60


def test_samples_as_asked(client, engine):
    got = client.completions.create(model=MODEL, prompt=[PROMPT], max_tokens=30, temperature=0.8, top_p=0.9, seed=5,
                                    extra_body={"top_k": 20}, user="somebody", n=1, stop=None, presence_penalty=0.0)
    assert got.choices[0].text == greedy(engine, PROMPT, 30, temperature=0.8, top_p=0.9, seed=5, top_k=20)


def test_tokens_as_a_prompt(client, engine):
    got = client.completions.create(model=MODEL, prompt=list(PROMPT.encode()), max_tokens=5)
    assert got.choices[0].text == greedy(engine, PROMPT, 5)


@pytest.mark.parametrize("usage", [False, True])
def test_streams(client, engine, usage):
    options = {"stream_options": {"include_usage": True}} if usage else {}
    chunks = list(client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=40, stream=True, **options))
    if usage:
        *chunks, last = chunks
        assert last.choices == [] and last.usage.completion_tokens == 40
    assert "".join(chunk.choices[0].text for chunk in chunks) == greedy(engine, PROMPT, 40)
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert len(chunks) >= 2 and len({chunk.id for chunk in chunks}) == 1


def test_streams_tokens(client, engine):
    chunks = list(client.completions.create(model=MODEL, prompt=list(PROMPT.encode()), max_tokens=9, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == greedy(engine, PROMPT, 9)


def test_chats(client, engine):
    messages = [{"role": "system", "content": "Be brief."},
                {"role": "user", "content": [{"type": "text", "text": "Hello"}]}]
    prompt = "system: Be brief.\nuser: Hello\nassistant:"
    expected = greedy(engine, prompt, 20)
    got = client.chat.completions.create(model=MODEL, messages=messages, max_completion_tokens=20)
    message = got.choices[0].message
    assert (message.role, message.content, got.usage.prompt_tokens) == ("assistant", expected, len(prompt))
    chunks = list(client.chat.completions.create(model=MODEL, messages=messages, max_tokens=20, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant" and chunks[0].object == "chat.completion.chunk"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected
    assert chunks[-1].choices[0].finish_reason == "length"


def test_cancels(service, client):
    cancelled = service.metric('requests_total{finish="cancelled"}')
    with client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=490, stream=True) as stream:
        for _ in stream:
            break
    service.wait_for('requests_total{finish="cancelled"}', cancelled + 1)
    service.wait_for("kv_slots_free", 4)


def test_many_at_once(service, engine):
    """An asynchronous client with retries: 429 makes it wait and try again."""
    async def talk():
        async with openai.AsyncOpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=20) as client:
            return await asyncio.gather(*(client.completions.create(model=MODEL, prompt=f"{number}. ", max_tokens=9)
                                          for number in range(12)))
    got = asyncio.run(talk())
    assert [answer.choices[0].text for answer in got] == [greedy(engine, f"{number}. ", 9) for number in range(12)]


def test_lists_its_model(client):
    assert [model.id for model in client.models.list()] == [MODEL]


def test_errors_of_the_client(service, client):
    with pytest.raises(openai.NotFoundError, match='model: "gpt-4", expected moe-32.bin'):
        client.completions.create(model="gpt-4", prompt=PROMPT)
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model=MODEL, prompt="x" * 600)
    assert refused.value.code == "too_long" and refused.value.type == "invalid_request_error"
    with pytest.raises(openai.BadRequestError, match="logprobs: 21, expected 0 to 20"):
        client.completions.create(model=MODEL, prompt=PROMPT, logprobs=21)
    blockers = [threading.Thread(target=complete, args=[service], kwargs={"prompt": PROMPT, "max_tokens": 490})
                for _ in range(6)]
    for thread in blockers:
        thread.start()
    service.wait_for("queue_depth", 2)
    with pytest.raises(openai.RateLimitError) as refused:
        client.completions.create(model=MODEL, prompt=PROMPT)
    assert refused.value.response.headers["retry-after"] == "1" and refused.value.code == "queue_full"
    for thread in blockers:
        thread.join()


# By hand

@pytest.mark.parametrize("path, body, expected", [
    ("completions", {"prompt": "x"}, "model: missing, expected moe-32.bin"),
    ("completions", {"model": MODEL}, "prompt: missing, expected a string"),
    ("completions", {"model": MODEL, "prompt": "x", "max_tokens": 0}, "max_tokens: 0, expected an integer, 1 or more"),
    ("completions", {"model": MODEL, "prompt": "x", "max_tokens": 600},
     ("max_tokens: 600, expected at most 512 after a prompt of 1 token in a context of 512, the model's own positions "
      "(max_positions of PATH); use fewer")),
    ("completions", {"model": MODEL, "prompt": "x", "max_new_tokens": 5},
     f'"max_new_tokens": unsupported field, expected one of model, prompt, {COMPLETION_FIELDS}'),
    ("completions", {"model": MODEL, "prompt": ["a"] * 7},
     ("prompt: 7 prompts with 7 choices, expected at most 6, which run and wait at once; send fewer at a time, or "
      "raise --queue-size")),
    ("completions", {"model": MODEL, "prompt": ["a", 5]}, "prompt[1]: 5, expected a string, or a list of integers"),
    ("completions", {"model": MODEL, "prompt": ["a", [256]]}, "prompt[1][0]: 256, expected 0 to 255"),
    ("completions", {"model": MODEL, "prompt": 5}, "prompt: 5, expected a string"),
    ("completions", {"model": MODEL, "prompt": [300]}, "prompt[0]: 300, expected 0 to 255"),
    ("completions", {"model": MODEL, "prompt": "x", "echo": 0}, "echo: 0, expected true or false"),
    ("completions", {"model": MODEL, "prompt": "x", "temperature": 3e38},
     "temperature: 3e+38, expected 0 (greedy) to 1e30"),
    ("completions", {"model": MODEL, "prompt": "x", "stream_options": {"include_usage": True}},
     'stream_options: given, expected only with "stream": true; leave it out'),
    ("completions", {"model": MODEL, "prompt": "x", "stream": True, "stream_options": [1]},
     'stream_options: a list, expected an object such as {"include_usage": true}'),
    ("completions", {"model": MODEL, "prompt": "x", "stream": True, "stream_options": {"usage": True}},
     ('stream_options: "usage": unknown field, expected one of include_usage, continuous_usage_stats, '
      "include_obfuscation")),
    ("completions", {"model": MODEL, "prompt": "x", "stream": True, "stream_options": {"include_usage": 1}},
     "stream_options.include_usage: 1, expected true or false"),
    ("completions", {"model": MODEL, "prompt": "x", "messages": []},
     f'"messages": unsupported field, expected one of model, prompt, {COMPLETION_FIELDS}'),
    ("chat/completions", {"model": MODEL}, "messages: missing, expected a list of messages"),
    ("chat/completions", {"model": MODEL, "messages": [{"role": "user", "content": "\ud83d"}]},
     "messages: half a surrogate pair, expected text; send whole characters"),
    ("chat/completions", {"model": MODEL, "messages": []},
     "messages: no message, expected a list of at least one message"),
    ("chat/completions", {"model": MODEL, "messages": "hello"},
     'messages: "hello", expected a list of at least one message'),
    ("chat/completions", {"model": MODEL, "messages": ["hello"]},
     'messages[0]: "hello", expected an object with role and content'),
    ("chat/completions", {"model": MODEL, "messages": [{"content": "x"}]},
     "messages[0].role: missing, expected one of system, developer, user, assistant"),
    ("chat/completions", {"model": MODEL, "messages": [{"role": "user", "content": "x"}, {"role": "user"}]},
     "messages[1].content: missing, expected a string, or a list of parts"),
    ("chat/completions", {"model": MODEL, "messages": [{"role": "user", "content": 5}]},
     'messages[0].content: 5, expected a string, or a list of {"type": "text", "text": ...}'),
    ("chat/completions", {"model": MODEL, "messages": [{"role": "tool", "content": "x"}]},
     'messages[0].role: "tool", expected one of system, developer, user, assistant'),
    ("chat/completions", {"model": MODEL, "messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
     'messages[0].content[0]: an object, expected {"type": "text", "text": ...}, a string and nothing else'),
    ("chat/completions", {"model": MODEL, "messages": [{"role": "user", "content": "x", "mood": "sad"}]},
     ('messages[0]: "mood": unknown field, expected role, content, name, refusal, reasoning_content, reasoning, '
      "tool_calls, annotations, cache_control")),
    ("chat/completions", {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "max_tokens": 1,
                          "max_completion_tokens": 1},
     "max_completion_tokens: given twice, expected max_tokens or max_completion_tokens; leave one out"),
    ("completions", b"nonsense", "body: not JSON from character 0 on, expected one JSON object"),
    ("completions", b"", "body: not JSON from character 0 on, expected one JSON object"),
    ("completions", b"\xff", "body: byte 0xff at 0, expected UTF-8; encode it so"),
    ("completions", b"[" * 10_000, "body: nested too deeply, expected a JSON object of plain fields")])
def test_bad_bodies(service, path, body, expected):
    status, _, text = ask(service, "POST", f"/v1/{path}", body)
    assert re.sub(r"max_positions of /[^)]*", "max_positions of PATH", message(text)) == expected
    assert status == (404 if "gpt" in expected else 400)


def test_every_neutral_value_is_taken(service):
    for name, values in NEUTRAL.items():
        for value in (*values, None):
            assert complete(service, prompt="x", max_tokens=1, **{name: value})[0] == 200, name
    assert set(RENAMED["/v1/completions"].values()) | {"id", "prompt", "prompt_ids", "input", "output"} >= {
        "max_new_tokens", "temperature", "top_k", "top_p", "seed", "stream", "deadline_ms"}


def test_paths_and_methods(service):
    assert [ask(service, "GET", path)[::2] for path in ("/health", "/ready?x=1")] == [
        (200, '{"status": "ok"}\n'), (200, '{"status": "ready"}\n')]
    status, _, text = ask(service, "GET", "/v2/x")
    assert (status, message(text)) == (404, ("path: /v2/x, expected one of /health, /ready, /metrics, /v1/models, "
                                             "/v1/models/ID, /v1/completions, /v1/chat/completions, /tokenize, "
                                             "/detokenize"))
    status, headers, text = ask(service, "GET", "/v1/completions")
    assert (status, headers["allow"], message(text)) == (405, "POST", "method: GET, expected POST for /v1/completions")
    for path in ("/health", "/ready", "/metrics", "/v1/models"):
        (status, head, text), get = ask(service, "HEAD", path), ask(service, "GET", path)
        assert (status, text, head["content-type"]) == (200, "", get[1]["content-type"]), path
        assert path == "/metrics" or head == get[1]  # its length is that of the body that is not sent
    before = service.metric('errors_total{code="bad_request"}')
    status, headers, text = ask(service, "DELETE", "/metrics")
    assert (status, headers["allow"]) == (405, "GET, HEAD")
    assert message(text) == "method: DELETE, expected GET or HEAD for /metrics"
    assert ask(service, "HEAD", "/v1/completions")[::2] == (405, "")
    assert service.metric('errors_total{code="bad_request"}') == before + 2
    service.wait_for_log('code=bad_request message="method: ..., expected GET or HEAD for /metrics"\n')


@pytest.mark.parametrize("path, fields, param", [
    ("completions", {"prompt": "x", "temperature": -1}, "temperature"), ("completions", {"model": "other"}, "model"),
    ("completions", {"prompt": "x", "max_tokens": 0}, "max_tokens"), ("completions", {"prompt": [1, 256]}, "prompt[1]"),
    ("completions", {"prompt": "x" * 4000}, "prompt"), ("completions", {"prompt": "x", "suffix": "y"}, "suffix"),
    ("completions", {"prompt": "x", "colour\"": 1}, "colour\""), ("completions", {"prompt": "x" * (1 << 21)}, None),
    ("completions", {"prompt": "x", "stream": True, "stream_options": {"include_usage": 1}},
     "stream_options.include_usage"),
    ("completions", {"prompt": "x", "deadline_ms": 1e-3}, "deadline_ms"), ("chat/completions", {}, "messages"),
    ("chat/completions", {"messages": "x"}, "messages"),
    ("chat/completions", {"messages": [{"role": "user", "content": "x"}], "max_completion_tokens": 0},
     "max_completion_tokens"),
    ("chat/completions", {"messages": [{"role": "user", "content": "x"}, {"role": "cook", "content": "x"}]},
     "messages[1].role"),
    ("chat/completions", {"messages": [{"role": "user", "content": [1]}]}, "messages[0].content[0]"),
    ("chat/completions", {"messages": [{"role": "user", "content": "x" * 4000}]}, "messages"),
    ("else", {}, None)])
def test_an_error_has_the_field_that_it_is_about(service, path, fields, param):
    status, _, text = ask(service, "POST", f"/v1/{path}", {"model": MODEL, **fields})
    assert status in (400, 404) and json.loads(text)["error"]["param"] == param


def test_what_is_refused_is_not_logged(service):
    for method, path, body in (("GET", "/secret", None), ("POST", "/v1/completions", {"model": "secret"}),
                               ("POST", "/v1/completions", {"model": MODEL, "secret": 1}),
                               ("POST", "/v1/completions", {"model": MODEL, "prompt": "x", "suffix": "secret"}),
                               ("POST", "/v1/chat/completions", {"model": MODEL, "messages": [
                                   {"role": "secret", "content": "x"}]})):
        status, _, text = ask(service, method, path, body)
        assert status in (400, 404) and "secret" in message(text)
    assert b"secret" in raw(service, b"GET /secret[ HTTP/1.1\r\nHost: localhost\r\nsecret\r\n\r\n").lower()
    service.metric("queue_depth")
    for text in ("path: ..., expected one of /health, ", "model: ..., expected moe-32.bin", "...: unsupported field, ",
                 "suffix: ..., not supported, expected none; leave it out", "messages[0].role: ..., expected one of "):
        service.wait_for_log(text)
    assert "secret" not in service.log


def test_a_deadline(service):
    status, got = complete(service, prompt=PROMPT, max_tokens=490, deadline_ms=15)
    assert status == 200 and got["choices"][0]["finish_reason"] == "length"  # OpenAI's word for what is cut
    with service.client() as other:
        other.send(*({"id": number, **LONG} for number in range(4)))
        before = service.metric('errors_total{code="deadline"}')
        status, got = complete(service, prompt=PROMPT, deadline_ms=1)
        assert status == 504 and got["error"]["code"] == "deadline"
        assert service.metric('errors_total{code="deadline"}') == before + 1
        for _ in range(4):
            other.receive()


def test_a_bare_stack_has_no_completions(tmp_path):
    with Service(write_model(tmp_path / "stack.bin", STACK), tmp_path) as service:
        status, _, text = ask(service, "POST", "/v1/completions", {"model": "stack.bin", "prompt": "x"})
        assert status == 400 and message(text).endswith("expected tokens for prompt; this is a bare stack of MoE "
                                                        "layers, give it an input over --serve")
        assert ask(service, "GET", "/metrics")[0] == 200
        assert service.stop() == 0


# What it counts

def test_a_prometheus_parser_reads_the_metrics(moe_32, tmp_path, engine):
    parser = pytest.importorskip("prometheus_client.parser")
    with Service(moe_32, tmp_path, "--batch-size", 3, "--queue-size", 7) as service:
        with service.client() as client:
            client.ask(prompt="abcd", max_new_tokens=6)
            client.ask(prompt="ab", max_new_tokens=600)
            client.ask(nonsense=1)
        complete(service, prompt="abc", max_tokens=4)
        status, headers, text = ask(service, "GET", "/metrics")
        assert status == 200 and headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
        families = {family.name: family for family in parser.text_string_to_metric_families(text)}
        assert service.stop() == 0
    samples = {(sample.name, *sample.labels.values()): sample.value
               for family in families.values() for sample in family.samples}
    counts = {"requests_total": {"length": 2, "stop": 0, "cancelled": 0, "deadline": 0, "shutdown": 0, "error": 0},
              "errors_total": {"bad_request": 1, "too_long": 1, "queue_full": 0}}
    for name, labels in counts.items():
        for label, value in labels.items():
            assert samples[f"colibri_{name}", label] == value, (name, label)
    for name, value in {"prompt_tokens_total": 7, "completion_tokens_total": 10, "queue_depth": 0, "queue_size": 7,
                        "running_requests": 0, "kv_slots": 3, "kv_slots_free": 3, "ttft_seconds_count": 2,
                        "itl_seconds_count": 8, "log_lines_lost_total": 0, "open_connections": 1}.items():
        assert samples[f"colibri_{name}",] == value, name
    assert samples["colibri_steps_total", "prefill"] == 2 and samples["colibri_steps_total", "decode"] == 8
    assert samples["colibri_ttft_seconds_bucket", "+Inf"] == 2 and samples["colibri_ttft_seconds_bucket", "60"] == 2
    fed = 7 + 8  # tokens that went through the model: the prompts, and those of decoding
    assert sum(samples["colibri_routed_tokens_total", str(expert)] for expert in range(32)) == fed * 2 * 6
    assert 0 < samples["colibri_experts_read_total", engine.path] <= fed * 2 * 6
    assert samples["colibri_resident_bytes",] > 10 << 20
    assert abs(samples["colibri_start_time_seconds",] - time.time()) < 60
    assert all(family.documentation for family in families.values())
    assert {family.type for family in families.values()} == {"counter", "gauge", "histogram"}


def test_transcript():
    assert transcript([{"role": "user", "content": "a\nb"}]) == "user: a\nb\nassistant:"
    with pytest.raises(Refused, match='messages: "x", expected a list'):
        transcript("x")


@pytest.mark.skipif(not shutil.which("curl"), reason="no curl")
def test_readme_service(service):
    """The section's curl lines and its Python example, as written but for the port."""
    text = (ROOT / "README.md").read_text()
    section = text[text.index("## As a service"):text.index("## What can be converted")]
    commands = re.findall(r"^    (curl (?:.*\\\n)*.*)$", section, re.MULTILINE)
    assert len(commands) == 5
    for command in commands:
        ran = subprocess.run(["bash", "-c", command.replace(":8042", f":{service.port}")], capture_output=True,
                             text=True, check=False)
        assert ran.returncode == 0 and ran.stdout and '{"error"' not in ran.stdout, ran
    code, = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    ran = subprocess.run([sys.executable, "-c", code.replace(":8042", f":{service.port}")], capture_output=True,
                         text=True, check=False)
    assert ran.returncode == 0 and len(ran.stdout) > 50, ran.stderr
