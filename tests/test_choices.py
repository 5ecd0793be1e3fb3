"""Requests over HTTP and lines that ask for more than tokens: stops, choices, lists of prompts, log-probabilities."""

import itertools
import json
import random

import numpy as np
import openai
import pytest
import reference
import text_models
from asking import MODEL, PROMPT, ask, complete, message
from conftest import program
from service import TIMEOUT, Service, greedy

CHAT = [{"role": "user", "content": "Hello"}]
PLAIN = "user: Hello\nassistant:"


@pytest.fixture(scope="module")
def service(moe_32, tmp_path_factory):
    with Service(moe_32, tmp_path_factory.mktemp("choices"), "--batch-size", 8, "--queue-size", 12) as service:
        yield service
        assert service.metric("kv_slots_free") == 8 and service.stop() == 0 and "fault" not in service.log


@pytest.fixture(scope="module")
def client(service):
    return openai.OpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0, timeout=TIMEOUT)


def chat(service, **fields):
    status, _, text = ask(service, "POST", "/v1/chat/completions", {"model": MODEL, "messages": CHAT, **fields})
    return status, json.loads(text)


def events(service, path, **fields):
    """The JSON of a stream's events, [DONE] checked."""
    status, _, text = ask(service, "POST", f"/v1/{path}", {"model": MODEL, "stream": True, **fields})
    found = [line.removeprefix("data: ") for line in text.split("\n\n") if line.startswith("data: ")]
    assert status == 200 and found.pop() == "[DONE]"
    return list(map(json.loads, found))


def cut(text, strings):
    found = [(text.find(string) + len(string), -len(string)) for string in strings if string in text]
    return text if not found else text[:sum(min(found))]


# Stops

def test_random_stop_strings(service, engine):
    source, text = random.Random(1), greedy(engine, PROMPT, 80)
    for number in range(40):
        strings = []
        for _ in range(source.randrange(1, 5)):
            start = source.randrange(80)
            strings.append(text[start:start + source.choice([1, 2, 4, 12])])
        expected, is_stopped = cut(text, strings), any(string in text for string in strings)
        stop = strings[0] if len(strings) == 1 and number % 2 else strings
        count = min(text.find(string) + len(string) for string in strings if string in text)
        got = complete(service, prompt=PROMPT, max_tokens=80, stop=stop)[1]
        assert (got["choices"][0]["text"], got["choices"][0]["finish_reason"]) == (expected, "stop") and is_stopped
        assert got["usage"]["completion_tokens"] == count  # those that made the stop, too
        found = events(service, "completions", prompt=PROMPT, max_tokens=80, stop=stop)
        assert "".join(event["choices"][0]["text"] for event in found) == expected
        assert found[-1]["choices"][0]["finish_reason"] == "stop" and len(found) == count + 1
        with service.client() as lines:
            lines.send({"id": 1, "prompt": PROMPT, "max_new_tokens": 80, "stop": stop, "stream": True})
            told = [lines.receive() for _ in range(count + 1)]
        assert "".join(line["text"] for line in told[:-1]) == told[-1]["text"] == expected
        assert (told[-1]["finish_reason"], told[-1]["completion_tokens"]) == ("stop", count)


def test_no_stop_and_what_was_held_back(service, engine):
    text = greedy(engine, PROMPT, 20)
    for stop in (None, [], "", [text[-3:] + "!", "zzz"]):
        assert complete(service, prompt=PROMPT, max_tokens=20, stop=stop)[1]["choices"][0]["text"] == text
        found = events(service, "completions", prompt=PROMPT, max_tokens=20, stop=stop)
        assert "".join(event["choices"][0]["text"] for event in found) == text
        assert found[-1]["choices"][0]["finish_reason"] == "length"
        with service.client() as lines:
            lines.send({"id": 1, "prompt": PROMPT, "max_new_tokens": 20, "stop": stop, "stream": True})
            told = list(itertools.takewhile(lambda line: "token" in line, iter(lines.receive, None)))
            assert "".join(line["text"] for line in told) == text
            assert [line["token"] for line in told] == [*text.encode(), *[None] * (len(told) - 20)]
    with_stop = complete(service, prompt=PROMPT, max_tokens=20, stop=text[5:8], include_stop_str_in_output=True)[1]
    assert with_stop["choices"][0]["text"] == text[:8]


def test_tokens_that_end_a_text(service, engine):
    text = greedy(engine, PROMPT, 30)
    got = complete(service, prompt=PROMPT, max_tokens=30, stop_token_ids=[ord("o"), 300 % 256])[1]
    assert (got["choices"][0]["text"], got["choices"][0]["finish_reason"]) == (text[:text.index("o")], "stop")
    got = complete(service, prompt=PROMPT, max_tokens=30, stop_token_ids=[ord("o")], include_stop_str_in_output=True)[1]
    assert got["choices"][0]["text"] == text[:text.index("o") + 1]
    got = complete(service, prompt=PROMPT, max_tokens=30, stop_token_ids=[ord("o")], min_tokens=25)[1]
    assert "o" not in got["choices"][0]["text"][:25] and got["usage"]["completion_tokens"] >= 25


@pytest.fixture(scope="module")
def ending(tmp_path_factory):
    """A service of a model that says " the cat" after "It is" and then EOS, over and over where that is ignored."""
    made = text_models.byte_fallback(["▁the", "▁cat", "▁is", "▁It"])
    number = made.token_to_id
    said = ["▁is", "▁the", "▁cat", "</s>", "▁the"]
    folder = text_models.chain(tmp_path_factory.mktemp("ending") / "model",
                               {number(a): number(b) for a, b in itertools.pairwise(said)}, made.get_vocab_size(),
                               tokenizer=made.to_str(), generation_config={"eos_token_id": 2})
    path = folder.with_suffix(".bin")
    assert program("converter", folder, path).returncode == 0
    with Service(path, path.parent) as service:
        service.tokenizer = made
        yield service
        assert service.stop() == 0 and "fault" not in service.log


def said(service, path="completions", **fields):
    where = {"prompt": "It is"} if path == "completions" else {"messages": CHAT}
    status, _, text = ask(service, "POST", f"/v1/{path}", {"model": "model.bin", **where, **fields})
    assert status == 200, text
    return json.loads(text)["choices"][0]


def test_the_end_of_a_text(ending):
    assert (said(ending)["text"], said(ending)["finish_reason"]) == (" the cat", "stop")
    assert said(ending, ignore_eos=True, max_tokens=6)["text"] == " the cat the cat"
    assert said(ending, ignore_eos=True, max_tokens=6, skip_special_tokens=False)["text"] == " the cat</s> the cat</s>"
    assert said(ending, skip_special_tokens=False, include_stop_str_in_output=True)["text"] == " the cat</s>"
    assert said(ending, stop=["the c"])["text"] == " "
    assert said(ending, prompt=[ending.tokenizer.token_to_id("▁is")])["text"] == " the cat"
    assert not said(ending, min_tokens=4, max_tokens=4)["text"].startswith(" the cat the")


def test_the_end_is_among_the_log_probabilities(ending):
    """A chat's list is that of its text; a completion's has the token that ended it."""
    for echo in (False, True):
        choice = said(ending, logprobs=2, echo=echo)
        found = choice["logprobs"]
        assert found["tokens"][-3:] == [" the", " cat", "</s>"] and (echo or len(found["tokens"]) == 3)
        assert len(found["tokens"]) == len(found["token_logprobs"]) == len(found["top_logprobs"])
        text = choice["text"]
        assert text == ("It is" if echo else "") + " the cat" and found["text_offset"][-1] == len(text)
        for name, at, after in zip(found["tokens"][1 if echo else 0:-1], found["text_offset"][1 if echo else 0:],
                                   found["text_offset"][2 if echo else 1:]):
            assert text[at:after] == name
        for name, logprob, top in zip(found["tokens"], found["token_logprobs"], found["top_logprobs"]):
            assert logprob is None or top[name] == logprob


# Log-probabilities

def logits_of(engine, tokens):
    with engine.session() as session:
        return reference.log_softmax(engine.step([(session, tokens)], every=True))


@pytest.mark.parametrize("count", [0, 1, 5, 20])
def test_log_probabilities_of_a_completion(client, engine, count):
    sampling = {"temperature": 1.3, "seed": 5, "presence_penalty": 1.5, "logit_bias": {"32": -2}}
    got = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=25, logprobs=count, **sampling,
                                    extra_body={"repetition_penalty": 1.2, "top_k": 50}).choices[0]
    tokens, found = list(got.text.encode()), got.logprobs
    expected = logits_of(engine, [*PROMPT.encode(), *tokens])[len(PROMPT) - 1:]
    assert found.tokens == [chr(token) for token in tokens] and found.text_offset == list(range(25))
    for row, token, logprob, top in zip(expected, tokens, found.token_logprobs, found.top_logprobs):
        assert logprob == pytest.approx(row[token], abs=1e-5) and top[chr(token)] == logprob
        best = np.argsort(-row, kind="stable")[:count]
        names = [chr(each) if each < 128 else f"bytes:\\x{each:02x}" for each in best]
        assert list(top)[:count] == names and len(top) == count + (token not in best)
        assert list(top.values())[:count] == pytest.approx(row[best], abs=1e-5)


def test_a_prompt_is_scored(service, engine):
    text = PROMPT * 11  # of more positions than one call has logits for
    expected = logits_of(engine, list(text.encode()))
    for fields in ({"max_tokens": 0}, {"max_tokens": 3}, {"max_tokens": 1, "prompt": list(text.encode())}):
        status, got = complete(service, **{"prompt": text, "echo": True, "logprobs": 1, **fields})
        choice, most = got["choices"][0], fields["max_tokens"]
        found = choice["logprobs"]
        assert choice["text"][:len(text)] == text and got["usage"]["completion_tokens"] == most
        assert found["tokens"][:len(text)] == list(text) and len(found["tokens"]) == len(text) + most
        assert found["text_offset"] == list(range(len(text) + most))
        assert (found["token_logprobs"][0], found["top_logprobs"][0]) == (None, None)
        rows = zip(expected, text[1:], found["token_logprobs"][1:], found["top_logprobs"][1:])
        for row, character, logprob, top in rows:
            assert logprob == pytest.approx(row[ord(character)], abs=1e-5) and top[character] == logprob
            assert max(top.values()) == pytest.approx(row.max(), abs=1e-5)
    status, got = complete(service, prompt=text, echo=True, max_tokens=0)
    assert status == 200 and (got["choices"][0]["text"], got["choices"][0]["logprobs"]) == (text, None)


def test_prompt_logprobs_as_vllm_has_them(service, engine):
    expected = logits_of(engine, list(PROMPT.encode()))
    choice = complete(service, prompt=PROMPT, max_tokens=2, prompt_logprobs=2)[1]["choices"][0]
    assert choice["text"] == greedy(engine, PROMPT, 2) and choice["logprobs"] is None
    first, *found = choice["prompt_logprobs"]
    assert first is None and len(found) == len(PROMPT) - 1
    for row, character, entry in zip(expected, PROMPT[1:], found):
        own = entry[str(ord(character))]
        assert own["decoded_token"] == character and own["logprob"] == pytest.approx(row[ord(character)], abs=1e-5)
        assert own["rank"] == 1 + np.sum(row > row[ord(character)])
        best = np.argsort(-row, kind="stable")[:2]
        assert {int(token) for token in entry} == {ord(character), *best}
        assert [entry[str(token)]["rank"] for token in best] == [1, 2]


def test_log_probabilities_of_a_chat(client, engine):
    got = client.chat.completions.create(model=MODEL, messages=CHAT, max_tokens=12, logprobs=True, top_logprobs=3,
                                         temperature=1, seed=1)
    tokens, content = list(got.choices[0].message.content.encode()), got.choices[0].logprobs.content
    expected = logits_of(engine, [*PLAIN.encode(), *tokens])[len(PLAIN) - 1:]
    assert [entry.bytes for entry in content] == [[token] for token in tokens]
    for row, token, entry in zip(expected, tokens, content):
        assert entry.logprob == pytest.approx(row[token], abs=1e-5)
        best = np.argsort(-row, kind="stable")[:3]
        assert [top.bytes for top in entry.top_logprobs] == [[each] for each in best]
        for top in entry.top_logprobs:
            assert top.token != entry.token or top.logprob == entry.logprob
    chunks = client.chat.completions.create(model=MODEL, messages=CHAT, max_tokens=12, logprobs=True, top_logprobs=3,
                                            temperature=1, seed=1, stream=True)
    streamed = [entry for chunk in chunks if chunk.choices[0].logprobs for entry in chunk.choices[0].logprobs.content]
    assert streamed == content
    plain = client.chat.completions.create(model=MODEL, messages=CHAT, max_tokens=3, logprobs=True)
    assert [entry.top_logprobs for entry in plain.choices[0].logprobs.content] == [[], [], []]


def test_a_stream_of_an_echo(service, engine):
    found = [event["choices"][0] for event in events(service, "completions", prompt=PROMPT, max_tokens=4, echo=True,
                                                     logprobs=0)]
    whole = complete(service, prompt=PROMPT, max_tokens=4, echo=True, logprobs=0)[1]["choices"][0]
    assert found[0]["text"] == PROMPT and "".join(choice["text"] for choice in found) == whole["text"]
    for name, values in whole["logprobs"].items():
        assert [value for choice in found if choice["logprobs"] for value in choice["logprobs"][name]] == values


def test_log_probabilities_in_lines(service, engine):
    expected = logits_of(engine, [*PROMPT.encode(), *greedy(engine, PROMPT, 3).encode()])
    with service.client() as lines:
        last = lines.ask(prompt=PROMPT, max_new_tokens=3, logprobs=2, prompt_logprobs=1)
        scored = lines.ask(prompt_ids=list(PROMPT.encode()), max_new_tokens=0, prompt_logprobs=0)
        lines.send({"id": 1, "prompt": PROMPT, "max_new_tokens": 3, "logprobs": 2, "stream": True})
        told = [lines.receive() for _ in range(4)]
    assert last["prompt_logprobs"][0] is None and len(last["prompt_logprobs"]) == len(PROMPT)
    entries = [*last["prompt_logprobs"][1:], *last["logprobs"]]
    for row, entry in zip(expected, entries):
        assert entry["logprob"] == pytest.approx(row[entry["token"]], abs=1e-5)
        assert entry["top_logprobs"][0] == [np.argmax(row), pytest.approx(row.max(), abs=1e-5)]
    assert (scored["ids"], scored["completion_tokens"], scored["finish_reason"]) == ([], 0, "length")
    assert [(entry["token"], entry["logprob"]) for entry in scored["prompt_logprobs"][1:]] == [
        (entry["token"], entry["logprob"]) for entry in last["prompt_logprobs"][1:]]
    assert [{name: line[name] for name in ("token", "logprob", "top_logprobs")} for line in told[:3]] == \
        last["logprobs"] == told[3]["logprobs"]


def test_what_is_cancelled_has_the_log_probabilities_that_there_are(service):
    with service.client() as lines:
        for number, prompt in enumerate((PROMPT, PROMPT * 20, PROMPT)):
            lines.send({"id": number, "prompt": prompt, "max_new_tokens": 90, "logprobs": 0, "prompt_logprobs": 0})
            lines.send({"cancel": number})
            last = lines.receive()
            assert last["finish_reason"] in ("cancelled", "length") and last["prompt_logprobs"][0] is None
            assert len(last["logprobs"]) == last["completion_tokens"]


# Choices and lists of prompts

def test_choices_and_prompts(service, client):
    """Each is what a line gives for the same seed and choice; prompts are counted once."""
    prompts = [PROMPT, list(b"The "), "A"]
    got = client.completions.create(model=MODEL, prompt=[PROMPT, "The ", "A"], n=3, max_tokens=12,
                                    temperature=0.9, seed=7)
    same = client.completions.create(model=MODEL, prompt=[list(PROMPT.encode()), *[[*b"The "], [*b"A"]]], n=3,
                                     max_tokens=12, temperature=0.9, seed=7)
    with service.client() as lines:
        expected = [lines.ask(prompt=bytes(prompt).decode() if isinstance(prompt, list) else prompt, temperature=0.9,
                              max_new_tokens=12, seed=7, choice=choice)["text"]
                    for prompt in prompts for choice in range(3)]
    assert [choice.index for choice in got.choices] == list(range(9))
    assert [choice.text for choice in got.choices] == [choice.text for choice in same.choices] == expected
    assert len(set(expected)) == 9
    assert (got.usage.prompt_tokens, got.usage.completion_tokens) == (len(PROMPT) + 4 + 1, 9 * 12)


def test_choices_of_a_stream(service, client):
    whole = client.chat.completions.create(model=MODEL, messages=CHAT, n=4, max_tokens=15, temperature=1, seed=3,
                                           stop=["e"])
    found = events(service, "chat/completions", messages=CHAT, n=4, max_tokens=15, temperature=1, seed=3, stop=["e"],
                   stream_options={"include_usage": True})
    *found, last = found
    assert last["usage"] == whole.usage.model_dump(include={"prompt_tokens", "completion_tokens", "total_tokens"})
    for choice in whole.choices:
        mine = [event["choices"][0] for event in found if event["choices"][0]["index"] == choice.index]
        assert mine[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(event["delta"].get("content", "") for event in mine) == choice.message.content
        assert [event["finish_reason"] for event in mine] == [None] * (len(mine) - 1) + [choice.finish_reason]


def test_one_that_fails_is_the_answer(service):
    before = service.metric('errors_total{code="too_long"}')
    cancelled = service.metric('requests_total{finish="cancelled"}')
    for stream in (False, True):
        status, _, text = ask(service, "POST", "/v1/completions", {
            "model": MODEL, "prompt": [PROMPT, "x" * 513, PROMPT], "max_tokens": 300, "stream": stream})
        assert "prompt[1]: 513 bytes, expected at most 512" in text and "[DONE]" not in text
        assert status == 400 or stream
    service.wait_for('requests_total{finish="cancelled"}', cancelled + 4)  # the others of each
    assert service.metric('errors_total{code="too_long"}') == before + 2


def test_all_choices_have_a_place_or_none_has(service):
    with service.client() as lines:
        lines.send(*({"id": number, "prompt": PROMPT, "max_new_tokens": 450} for number in range(15)))
        service.wait_for("queue_depth", 7)
        status, got = complete(service, prompt=PROMPT, n=6, max_tokens=1)
        assert (status, got["error"]["code"]) == (429, "queue_full")
        status, got = complete(service, prompt=[PROMPT, "x"], n=2, max_tokens=1)
        assert status == 200 and len(got["choices"]) == 4
        for _ in range(15):
            lines.receive()


# What is left out

def test_a_chat_fills_the_context(service, engine):
    room = engine.context - len(PLAIN) + 1
    for fields in ({}, {"max_tokens": None}, {"max_tokens": -1}, {"max_completion_tokens": 10 ** 9},
                   {"max_tokens": room + 1}):
        got = chat(service, **fields)[1]
        assert got["usage"]["completion_tokens"] == room and got["choices"][0]["finish_reason"] == "length"
    assert complete(service, prompt=PROMPT)[1]["usage"]["completion_tokens"] == 64


def test_a_seed_is_drawn_and_told(service):
    for fields in ({}, {"seed": None}, {"seed": -1}):
        first, second = (chat(service, temperature=1, max_tokens=20, **fields)[1] for _ in range(2))
        assert first["seed"] != second["seed"]
        again = chat(service, temperature=1, max_tokens=20, seed=first["seed"])[1]
        assert again["choices"] == first["choices"] != second["choices"] and "seed" not in again
        service.wait_for_log(f" seed={first['seed']}\n")
    assert "seed" not in chat(service, max_tokens=2)[1]
    found = events(service, "completions", prompt=PROMPT, max_tokens=20, temperature=1)
    again = complete(service, prompt=PROMPT, max_tokens=20, temperature=1, seed=found[0]["seed"])[1]
    assert "".join(event["choices"][0]["text"] for event in found) == again["choices"][0]["text"]
    with service.client() as lines:
        first = lines.ask(prompt=PROMPT, temperature=1, seed=-1)
        assert lines.ask(prompt=PROMPT, temperature=1, seed=first["seed"])["text"] == first["text"]
        assert "seed" not in lines.ask(prompt=PROMPT, temperature=1)


@pytest.mark.parametrize("fields, expected", [
    ({"stop": [""]}, 'stop[0]: "", expected a string of at least 1 character'),
    ({"stop": ["a", 5]}, "stop[1]: 5, expected a string of at least 1 character"),
    ({"stop": 5}, "stop: 5, expected a string, or a list of 1 to 16"),
    ({"stop": ["a"] * 17}, "stop: 17 strings, expected at most 16"),
    ({"stop_token_ids": [256]}, "stop_token_ids: token 256, expected 0 to 255"),
    ({"stop_token_ids": [-1]}, "stop_token_ids[0]: -1, expected a token number"),
    ({"stop_token_ids": 5}, "stop_token_ids: 5, expected a list of integers"),
    ({"n": 0}, "n: 0, expected an integer, 1 to 8"), ({"n": 9}, "n: 9, expected an integer, 1 to 8"),
    ({"n": True}, "n: true, expected an integer, 1 to 8"), ({"n": 2, "best_of": 3}, "best_of: 3, expected 2, as n"),
    ({"logprobs": 21}, "logprobs: 21, expected 0 to 20"), ({"logprobs": True}, "logprobs: true, expected a number"),
    ({"logprobs": -1, "echo": True}, "logprobs: -1, expected 0 to 20"),
    ({"prompt_logprobs": -1}, "prompt_logprobs: -1, expected 0 to 20"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs: given with stream, expected one of them; leave one out"),
    ({"presence_penalty": 2.5}, "presence_penalty: 2.5, expected -2 to 2"),
    ({"frequency_penalty": "1"}, 'frequency_penalty: "1", expected a number'),
    ({"repetition_penalty": 0}, "repetition_penalty: 0, expected more than 0 (1: none) and at most 1e30"),
    ({"min_p": 2}, "min_p: 2, expected 0 (all) to 1"), ({"top_k": -2}, "top_k: -2, expected 0 or -1 (all) to 2^31 - 1"),
    ({"logit_bias": [1]}, 'logit_bias: a list, expected an object such as {"429": -100}'),
    ({"logit_bias": {"a": 1}}, 'logit_bias: "a", expected token numbers as its names'),
    ({"logit_bias": {"5": 101}}, "logit_bias.5: 101, expected -100 to 100"),
    ({"logit_bias": {"256": 1}}, "logit_bias: token 256, expected 0 to 255"),
    ({"logit_bias": {str(token): 1 for token in range(1025)}}, "logit_bias: 1025 tokens, expected at most 1024"),
    ({"min_tokens": 1.5}, "min_tokens: 1.5, expected 0 to 2^31 - 1"),
    ({"ignore_eos": 1}, "ignore_eos: 1, expected true or false"),
    ({"max_tokens": 0}, "max_tokens: 0, expected an integer, 1 or more"),
    ({"choice": 1}, None)])
def test_what_is_refused(service, fields, expected):
    status, _, text = ask(service, "POST", "/v1/completions", {"model": MODEL, "prompt": "x", **fields})
    assert status == 400
    assert message(text) == expected or expected is None and '"choice": unsupported' in message(text)


def test_what_a_chat_refuses(service):
    for fields, expected in (({"top_logprobs": 2},
                              'top_logprobs: given, expected only with "logprobs": true; leave it out'),
                             ({"logprobs": 1}, "logprobs: 1, expected true or false"),
                             ({"logprobs": True, "top_logprobs": 21}, "top_logprobs: 21, expected 0 to 20"),
                             ({"echo": True}, "echo: true, not supported, expected none; leave it out")):
        status, got = chat(service, **fields)
        assert (status, got["error"]["message"]) == (400, expected)
    with service.client() as lines:
        assert lines.ask(prompt_ids=[1], stop="x")["error"]["message"] == (
            "stop: given, expected only with a prompt of text, whose answer is text; give stop_token_ids")
