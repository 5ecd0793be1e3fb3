"""Fields of a body: what asks for nothing is taken, what changes the answer and is not there is refused by name."""

import json
import random

import pytest
from asking import MODEL, PROMPT, ask, complete
from service import greedy

from colibri.messages import checked, transcript
from colibri.refused import Refused

HARMLESS = {
    "user": "somebody", "store": False, "metadata": {"run": "7"}, "service_tier": "auto", "parallel_tool_calls": True,
    "reasoning_effort": "low", "verbosity": "medium", "prompt_cache_key": "k", "prompt_cache_retention": "24h",
    "safety_identifier": "s", "modalities": ["text"], "response_format": {"type": "text", "json_schema": None}, "n": 1,
    "tools": [], "tool_choice": "auto", "functions": [], "function_call": "none", "logit_bias": {}, "stop": None,
    "top_logprobs": None, "prediction": None, "audio": None, "web_search_options": None, "whatever": None}
CHAT = [{"role": "user", "content": "Hello"}]
PLAIN = "user: Hello\nassistant:"


def chat(service, messages, **fields):
    status, _, text = ask(service, "POST", "/v1/chat/completions",
                          {"model": MODEL, "messages": messages, "max_tokens": 6, **fields})
    return status, json.loads(text)


def test_fields_that_ask_for_nothing(service, engine):
    """Each alone, some together, in both kinds of completion."""
    expected = greedy(engine, PLAIN, 6)
    generator = random.Random(1)
    for names in [[name] for name in HARMLESS] + [generator.sample(list(HARMLESS), 9) for _ in range(5)]:
        status, got = chat(service, CHAT, **{name: HARMLESS[name] for name in names})
        assert (status, got["choices"][0]["message"]["content"]) == (200, expected), names
    for name, value in {"best_of": 1, "suffix": "", "echo": False, "user": "x", "store": True, "else": None}.items():
        status, got = complete(service, prompt=PROMPT, max_tokens=5, **{name: value})
        assert (status, got["choices"][0]["text"]) == (200, greedy(engine, PROMPT, 5)), name


@pytest.mark.parametrize("name, value, expected", [
    ("tools", [{"type": "function"}], "not supported, expected none; leave it out"),
    ("tool_choice", "required", 'tool_choice: "required", not supported, expected "none"; leave it out'),
    ("functions", [{"name": "f"}], "not supported, expected none; leave it out"),
    ("modalities", ["text", "audio"], 'not supported, expected ["text"]; leave it out'),
    ("audio", {"voice": "x"}, '"audio": unsupported field, expected one of model, messages, '),
    ("prediction", {"type": "content"}, '"prediction": unsupported field, expected one of model, messages, '),
    ("web_search_options", {}, '"web_search_options": unsupported field, expected one of model, messages, '),
    ("suffix", "end", 'suffix: "end", not supported, expected none; leave it out'),
    ("store", "yes", 'store: "yes", expected true or false'),
    ("metadata", "x", 'metadata: "x", expected an object'), ("user", 5, "user: 5, expected a string"),
    ("stream_options", {"include_usage": True}, 'stream_options: given, expected only with "stream": true; ')])
def test_fields_that_are_refused(service, name, value, expected):
    status, got = chat(service, CHAT, **{name: value})
    error = got["error"]
    assert status == 400 and expected in error["message"]
    assert set(error) == {"message", "type", "param", "code"} and error["type"] == "invalid_request_error"
    assert error["param"] == name and error["code"] == "bad_request"


# Messages

def test_fields_of_messages(service, engine):
    messages = [{"role": "system", "content": "Be brief.", "name": "rules", "cache_control": {"type": "ephemeral"}},
                {"role": "user", "name": "bob", "content": [
                    {"type": "text", "text": "a"},
                    {"type": "text", "text": "b", "cache_control": {"type": "ephemeral"}, "annotations": None}]},
                {"role": "assistant", "content": None, "refusal": None, "tool_calls": None, "annotations": [],
                 "audio": None, "function_call": None, "reasoning_content": "why"},
                {"role": "assistant", "tool_calls": []},
                {"role": "user", "content": "c", "anything": None}]
    prompt = "system: Be brief.\nuser: ab\nassistant: \nassistant: \nuser: c\nassistant:"
    assert transcript(messages) == prompt
    status, got = chat(service, messages)
    assert (status, got["choices"][0]["message"]) == (200, {"role": "assistant", "content": greedy(engine, prompt, 6)})
    assert got["usage"]["prompt_tokens"] == len(prompt)


def test_messages_keep_what_a_template_may_use():
    call = {"role": "assistant", "content": None, "name": "bob", "reasoning_content": "why", "audio": None}
    assert checked([call]) == [{"role": "assistant", "content": None, "name": "bob", "reasoning_content": "why"}]


@pytest.mark.parametrize("message, expected", [
    ({"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]},
     "messages[0].tool_calls: not supported, expected none; leave it out"),
    ({"role": "user", "content": "x", "name": 5}, "messages[0].name: 5, expected a string"),
    ({"role": "user", "content": "x", "tool_calls": "x"}, 'messages[0].tool_calls: "x", expected a list'),
    ({"role": "user", "content": "x", "audio": {"id": "1"}},
     ('messages[0]: "audio": unknown field, expected role, content, name, refusal, reasoning_content, reasoning, '
      "tool_calls, annotations, cache_control")),
    ({"role": None, "content": "x"}, "messages[0].role: missing, expected one of system, developer, user, assistant"),
    ({"role": ["user"], "content": "x"},
     "messages[0].role: a list, expected one of system, developer, user, assistant"),
    ({"role": "user"}, "messages[0].content: missing, expected a string, or a list of parts"),
    *(({"role": "user", "content": [part]}, (
        "messages[0].content[0]: an object, expected {\"type\": \"text\", \"text\": ...}, a string and nothing else"))
      for part in ({"type": "image_url", "image_url": {"url": "x"}}, {"type": "text"}, {"text": "x"},
                   {"type": "text", "text": 5}, {"type": "text", "text": "x", "image_url": "y"}))])
def test_messages_that_are_refused(message, expected):
    with pytest.raises(Refused) as refused:
        checked([message])
    assert str(refused.value) == expected


# Streams

def events(service, path, body):
    status, _, text = ask(service, "POST", f"/v1/{path}", {"model": MODEL, "stream": True, **body})
    *lines, done, end = text.split("\n\n")
    assert (status, done, end) == (200, "data: [DONE]", "")
    return [json.loads(line.removeprefix("data: ")) for line in lines]


@pytest.mark.parametrize("count", [1, 2, 13])
def test_an_event_a_token(service, engine, count):
    found = events(service, "completions", {"prompt": PROMPT, "max_tokens": count})
    texts = [event["choices"][0]["text"] for event in found]
    assert texts == [*greedy(engine, PROMPT, count), ""] and not any("usage" in event for event in found)
    found = events(service, "chat/completions", {"messages": CHAT, "max_tokens": count})
    deltas = [event["choices"][0]["delta"] for event in found]
    assert deltas == [{"role": "assistant", "content": ""}, *({"content": letter} for letter in greedy(
        engine, PLAIN, count)), {}]
    found = events(service, "completions", {"prompt": list(PROMPT.encode()), "max_tokens": count})
    assert [event["choices"][0]["text"] for event in found] == [*greedy(engine, PROMPT, count), ""]


def test_usage_in_a_stream(service):
    usage = {"prompt_tokens": len(PROMPT), "completion_tokens": 4, "total_tokens": len(PROMPT) + 4}
    body = {"prompt": PROMPT, "max_tokens": 4}
    for options in ({"include_usage": False}, {"include_usage": None, "continuous_usage_stats": True}, {},
                    {"continuous_usage_stats": True, "include_obfuscation": False}):
        found = events(service, "completions", {**body, "stream_options": options})
        assert not any("usage" in event for event in found)
    found = events(service, "completions", {**body, "stream_options": {"include_usage": True}})
    assert [event["usage"] for event in found] == [None] * 5 + [usage] and found[-1]["choices"] == []
    options = {"include_usage": True, "continuous_usage_stats": True}
    found = events(service, "completions", {**body, "stream_options": options})
    assert [event["usage"]["completion_tokens"] for event in found] == [1, 2, 3, 4, 4, 4]
    assert found[-1]["usage"] == usage
    found = events(service, "chat/completions", {"messages": CHAT, "max_tokens": 2, "stream_options": options})
    assert [event["usage"]["completion_tokens"] for event in found] == [0, 1, 2, 2, 2]
    assert {event["usage"]["prompt_tokens"] for event in found} == {len(PLAIN)}
