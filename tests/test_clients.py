"""What stock clients send, as recorded of each: the answers have the values that the model gives alone.

tests/data/clients has a file a client: headers that all its requests have, and the requests. Host, length and keys are
left out, and headers that say which machine it was. long.bin is a random model of more positions than the example's.
"""

import json

import numpy as np
import pytest
from asking import MODEL, ask
from conftest import DATA
from prometheus_client.parser import text_string_to_metric_families
from service import Service
from synthetic import write_model

from colibri.engine import Engine
from colibri.messages import transcript
from colibri.text import Bytes, Pieces

RECORDED = {path.stem: json.loads(path.read_text()) for path in sorted((DATA / "clients").glob("*.json"))}
REQUESTS = [pytest.param(request, recorded["headers"], id=f"{name}-{number}")
            for name, recorded in RECORDED.items() for number, request in enumerate(recorded["requests"])]
SAMPLING = ("temperature", "top_p", "seed")


@pytest.fixture(scope="module")
def servers(moe_32, service, engine, tmp_path_factory):
    """{model: (its server, its engine)}"""
    folder = tmp_path_factory.mktemp("long")
    path = write_model(folder / "long.bin", max_positions=4096)
    with Service(path, folder) as long_service, Engine(path, backend="host") as long_engine:
        yield {MODEL: (service, engine), "long.bin": (long_service, long_engine)}
        assert long_service.stop() == 0


def test_every_client_is_there():
    assert set(RECORDED) >= {"openai-python", "openai-node", "litellm", "langchain-openai", "llama-index", "llm",
                             "aider", "inspect-ai", "lm-eval", "guidellm", "ai-sdk", "prometheus", "nginx"}
    assert all(recorded["client"] and recorded["requests"] for recorded in RECORDED.values())


@pytest.mark.parametrize("recorded, headers", REQUESTS)
def test_a_client_gets_what_the_model_says(servers, recorded, headers):
    body, path = recorded.get("body"), recorded["path"].partition("?")[0]
    service, engine = servers[body["model"] if body else MODEL]
    status, _, text = ask(service, recorded["method"], path, body, {**headers, **recorded.get("headers", {})})
    assert status == 200, text
    if path == "/metrics":
        names = {family.name for family in text_string_to_metric_families(text)}
        assert names >= {"colibri_requests", "colibri_build_info", "process_open_fds"}
    elif path == "/health":
        assert json.loads(text) == {"status": "ok"}
    elif path.startswith("/v1/models"):
        got = json.loads(text)
        assert [model["id"] for model in got.get("data", [got])] == [MODEL]
    else:
        check(engine, path == "/v1/chat/completions", body, text)


def check(engine, is_chat, body, text):
    """Checks the choices, their ends, their log-probabilities and the usage of an answer."""
    choices, usage = streamed(is_chat, text) if body.get("stream") else whole(is_chat, json.loads(text))
    expected = list(answers(engine, is_chat, body))
    assert [(said, end) for said, end, _ in choices] == [(said, end) for said, end, *_ in expected]
    if usage is not None:
        prompts = [len(prompt) for _, _, prompt, _ in expected][::body.get("n") or 1]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (
            sum(prompts), sum(len(tokens) for *_, tokens in expected))
    for (_, _, found), (_, _, prompt, tokens) in zip(choices, expected):
        if body.get("logprobs") is None:
            assert found is None
        else:
            skip = 0 if body.get("echo") else len(prompt)
            number = body.get("top_logprobs") or 0 if is_chat else body["logprobs"]
            check_logprobs(engine, [*prompt, *tokens], skip, number, *(chat_logprobs if is_chat else logprobs)(found))


def answers(engine, is_chat, body):
    """Yields (text, finish reason, the prompt's tokens, the answer's tokens) of each choice."""
    prompts = transcript(body["messages"]) if is_chat else body["prompt"]
    prompts = prompts if isinstance(prompts, list) else [prompts]
    limit = body.get("max_completion_tokens") or body.get("max_tokens")
    sampling = {name: body[name] for name in SAMPLING if body.get(name) is not None}
    stops = [body["stop"]] if isinstance(body.get("stop"), str) else body.get("stop") or []
    for prompt in prompts:
        prompt = list(prompt.encode() if isinstance(prompt, str) else prompt)
        for _ in range(body.get("n") or 1):
            assert body.get("n") in (None, 1) or not sampling.get("temperature")
            said, end, tokens = one(engine, prompt, limit, stops, sampling)
            yield (bytes(prompt).decode() if body.get("echo") else "") + said, end, prompt, tokens


def one(engine, prompt, limit, stops, sampling):
    """Returns (text, finish reason, tokens) of the model alone."""
    pieces, tokens = Pieces(Bytes(), prompt), []
    with engine.session() as session:
        for token in session.generate(prompt, limit, **sampling):
            tokens.append(token)
            pieces.add(token)
            ends = [pieces.text().find(stop) for stop in stops if stop in pieces.text()]
            if ends:
                return pieces.text()[:min(ends)], "stop", tokens
    return pieces.text(), "length", tokens


def check_logprobs(engine, tokens, skip, number, words, found, best):
    """Checks the tokens from `skip` on. best: of each {token: log-probability} of it and the `number` likeliest."""
    with engine.session() as session:
        logits = [session.prefill(tokens[:1])] + [session.decode(token) for token in tokens[1:-1]]
    logits = np.asarray(logits, np.float64)
    logits -= logits.max(1, keepdims=True)
    expected = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    assert words == [chr(token) for token in tokens[skip:]] and len(found) == len(best) == len(words)
    for index, token in enumerate(tokens[skip:], skip):
        got, top = found[index - skip], best[index - skip]
        if index == 0:
            assert got is top is None
            continue
        row = expected[index - 1]
        likeliest = {chr(other): row[other] for other in (token, *np.argsort(-row)[:number])}
        assert set(top) == set(likeliest) and top[chr(token)] == got
        np.testing.assert_allclose([top[word] for word in likeliest], list(likeliest.values()), rtol=1e-5, atol=1e-6)


def logprobs(found):
    return found["tokens"], found["token_logprobs"], found["top_logprobs"]


def chat_logprobs(found):
    content = found["content"]
    return ([token["token"] for token in content], [token["logprob"] for token in content],
            [{top["token"]: top["logprob"] for top in token["top_logprobs"]} for token in content])


def whole(is_chat, got):
    """Returns ([(text, finish reason, logprobs)], usage)."""
    choices = sorted(got["choices"], key=lambda choice: choice["index"])
    return [(choice["message"]["content"] if is_chat else choice["text"], choice["finish_reason"], choice["logprobs"])
            for choice in choices], got["usage"]


def streamed(is_chat, text):
    """Returns the same of events; no client has asked for log-probabilities in a stream."""
    texts, ends, usage = {}, {}, None
    *events, done, end = text.split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    for event in (json.loads(event.removeprefix("data: ")) for event in events if event != ":"):
        usage = event.get("usage") or usage
        for choice in event["choices"]:
            piece = choice["delta"].get("content", "") if is_chat else choice["text"]
            texts[choice["index"]] = texts.get(choice["index"], "") + piece
            ends[choice["index"]] = choice["finish_reason"]
    return [(texts[index], ends[index], None) for index in sorted(texts)], usage
