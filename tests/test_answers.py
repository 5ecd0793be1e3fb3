"""Text in and out of a model of words and bytes: the same from colibri.run, over lines and HTTP, streamed or not."""

import itertools
import json

import pytest
import text_models
from asking import ask
from conftest import program
from service import Service
from tokenizers import AddedToken

from colibri.checkpoint import Checkpoint
from colibri.engine import Engine
from colibri.requests import Reader

PROMPT, TEXT, CUT = "It is", " the中 capital", " the"  # CUT: of 3 tokens, the last of which is within a character
BEYOND = "expected 0 to {most}, which the model has; leave it out"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A .bin that says TEXT after PROMPT. Its tokenizer.json has a token that the model has not, and is saved with
    truncation and padding; the other two files tell BOS and, beside config.json, an end token each."""
    made = text_models.byte_fallback(["▁the", "▁capital", "▁is", "▁It"])
    made.add_special_tokens(["<|im_end|>"])
    size, number = made.get_vocab_size(), made.token_to_id
    made.add_tokens([AddedToken("<image>", normalized=False)])
    made.enable_truncation(3)
    made.enable_padding(length=16, pad_id=2, pad_token="</s>")
    said = ["▁is", "▁the", *(f"<0x{byte:02X}>" for byte in "中".encode()), "▁capital", "<|im_end|>", "▁It"]
    folder = text_models.chain(
        tmp_path_factory.mktemp("text") / "model", {number(a): number(b) for a, b in itertools.pairwise(said)}, size,
        tokenizer=made.to_str(), generation_config={"eos_token_id": 2},
        tokenizer_config={"add_bos_token": True, "bos_token": "<s>", "eos_token": "<|im_end|>"})
    path = folder.with_suffix(".bin")
    converted = program("converter", folder, path)
    assert converted.returncode == 0, converted.stderr
    assert converted.stderr.decode().replace(f"{folder}/", "") == (
        f"tokenizer.json: tokens beyond vocab_size={size}: 1, the first is '<image>', {size}; a prompt that holds "
        f"one is "
        "refused\n")
    return path


@pytest.fixture(scope="module")
def service(model):
    with Service(model, model.parent, "--log-prompts") as service:
        yield service
        assert service.stop() == 0 and "fault" not in service.log


def test_a_run(model):
    arguments = ("colibri.run", "--model", model, "--backend", "host", "--prompt")
    whole = json.loads(program(*arguments, PROMPT, "--json").stdout)
    assert (whole["text"], whole["prompt_tokens"], whole["new_tokens"]) == (TEXT, 3, 5)
    cut = program(*arguments, PROMPT, "--max-new-tokens", 3).stdout.decode()
    assert cut.startswith(f"{CUT}\n\nbackend ")
    assert json.loads(program(*arguments, PROMPT, "--json", "--max-new-tokens", 3).stdout)["text"] == CUT
    assert json.loads(program(*arguments, f"<s>{PROMPT}", "--json").stdout)["prompt_tokens"] == 3
    wrong = program(*arguments, "It is<image>")
    most = Checkpoint(model).header["vocab_size"] - 1
    assert (wrong.returncode, wrong.stdout, wrong.stderr.decode()) == (
        2, b"", f"--prompt: token '<image>' is {most + 1}, {BEYOND.format(most=most)}\n")


@pytest.mark.parametrize("count, text, finish", [(60, TEXT, "stop"), (3, CUT, "length"), (4, f"{CUT}中", "length")])
def test_lines(service, count, text, finish):
    with service.client() as client:
        whole = client.ask(prompt=PROMPT, max_new_tokens=count)
        assert (whole["text"], whole["finish_reason"], whole["prompt_tokens"]) == (text, finish, 3)
        client.send({"id": 1, "prompt": PROMPT, "max_new_tokens": count, "stream": True})
        pieces = []
        while "token" in (line := client.receive()):
            pieces.append(line["text"])
        assert line["text"] == "".join(pieces) == text
        assert pieces[:count] == [" the", "", "", "中", " capital"][:count]


def complete(service, path, model, **fields):
    status, _, text = ask(service, "POST", path, {"model": model.name, **fields})
    return status, text if fields.get("stream") else json.loads(text)


@pytest.mark.parametrize("count, text", [(60, TEXT), (3, CUT), (4, f"{CUT}中")])
def test_http(service, model, count, text):
    status, answer = complete(service, "/v1/completions", model, prompt=PROMPT, max_tokens=count)
    assert (status, answer["choices"][0]["text"], answer["usage"]["prompt_tokens"]) == (200, text, 3)
    status, answer = complete(service, "/v1/completions", model, prompt=PROMPT, max_tokens=count, stream=True)
    events = [json.loads(line[6:]) for line in answer.splitlines() if line.startswith("data: {")]
    assert status == 200 and "".join(event["choices"][0]["text"] for event in events) == text


def test_special_tokens_as_asked(service, model):
    def count(path="/v1/completions", **fields):
        status, answer = complete(service, path, model, **(fields if "messages" in fields else {"prompt": PROMPT,
                                                                                                **fields}))
        return status, answer["usage"]["prompt_tokens"]
    assert count() == count(add_special_tokens=True) == count(add_special_tokens=None) == (200, 3)
    assert count(add_special_tokens=False) == (200, 2)
    chat = {"path": "/v1/chat/completions", "messages": [{"role": "user", "content": PROMPT}]}
    status, tokens = count(**chat)
    assert (status, tokens) == count(**chat, add_special_tokens=True) == (200, count(**chat,
                                                                                     add_special_tokens=False)[1] + 1)
    status, answer = complete(service, "/v1/completions", model, prompt=PROMPT, add_special_tokens="no")
    assert (status, answer["error"]["message"]) == (400, 'add_special_tokens: "no", expected true or false')
    with service.client() as client:
        assert client.ask(prompt=PROMPT, add_special_tokens=False)["prompt_tokens"] == 2
        assert client.ask(prompt_ids=[3, 4], add_special_tokens=True)["prompt_tokens"] == 2


def test_a_token_that_the_model_has_not(service, model):
    most = Checkpoint(model).header["vocab_size"] - 1
    message = f"token '<image>' is {most + 1}, {BEYOND.format(most=most)}"
    status, answer = complete(service, "/v1/completions", model, prompt="a<image>")
    assert (status, answer["error"]["code"], answer["error"]["message"]) == (400, "bad_request", f"prompt: {message}")
    status, answer = complete(service, "/v1/chat/completions", model,
                              messages=[{"role": "user", "content": "<image>"}])
    assert (status, answer["error"]["message"]) == (400, f"messages: {message}")
    with service.client() as client:
        error = client.ask(prompt="<image>")["error"]
        assert (error["code"], error["message"]) == ("bad_request", f"prompt: {message}")


def test_prompts_in_the_log(service):
    with service.client() as client:
        client.ask(prompt="It is \u4e2d!", max_new_tokens=1)
    service.wait_for_log(r'prompt="It is \u4e2d!"')


@pytest.mark.parametrize("told", range(6))
def test_the_whole_text_is_the_pieces(model, told):
    """However many of its tokens were told before."""
    with Engine(model, backend="host") as engine, engine.session() as session:
        request = Reader(engine).request({"id": 1, "prompt": PROMPT})
        request.prompt, request.max_new_tokens = request.encode()[:2]
        tokens = list(session.generate(request.prompt, 60))
        request.tokens.extend(tokens[:told])
        before = "".join(piece for _, piece in request.news())
        request.tokens.extend(tokens[told:])
        assert request.text() == request.text() == before + TEXT[len(before):] == TEXT and request.news() == []
