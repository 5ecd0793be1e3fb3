"""/tokenize and /detokenize: the tokens that a completion takes, and their text."""

import json
import random

import pytest
import text_models
from asking import MODEL, ask, message
from conftest import program
from service import Service
from test_chat import TEMPLATES, made

from colibri.tokens import TOKENS

WORDS = ["▁the", "▁capital", "▁is", "▁It"]
CONTEXT = 128


@pytest.fixture(scope="module")
def tokenizer():
    return text_models.byte_fallback(WORDS, adds_bos=True)


@pytest.fixture(scope="module")
def words(tokenizer, tmp_path_factory):
    """A server of a model whose tokens are words and bytes, after BOS."""
    folder = text_models.chain(tmp_path_factory.mktemp("words") / "words", {}, tokenizer.get_vocab_size(),
                               tokenizer=tokenizer.to_str())
    converted = program("converter", folder, folder.with_suffix(".bin"))
    assert converted.returncode == 0, converted.stderr
    with Service(folder.with_suffix(".bin"), folder.parent) as service:
        yield service
        assert service.stop() == 0 and "fault" not in service.log


def post(service, path, **body):
    status, headers, text = ask(service, "POST", path, body)
    assert headers["content-type"] == "application/json"
    return status, json.loads(text)


def texts(count):
    generator = random.Random(7)
    return ["".join(generator.choice(["It", " is", " the", " capital", "é", "中", "\n", "x", "🙂"])
                    for _ in range(generator.randrange(1, 30))) for _ in range(count)]


@pytest.mark.parametrize("special", [True, False])
def test_tokens_of_a_text(words, tokenizer, special):
    for text in texts(20):
        expected = tokenizer.encode(text, add_special_tokens=special).ids
        got = post(words, "/tokenize", prompt=text, add_special_tokens=special)
        assert got == (200, {"count": len(expected), "max_model_len": CONTEXT, "tokens": expected, "token_strs": None})
        assert post(words, "/detokenize", tokens=expected, model="words.bin") == (200, {"prompt": text})


def test_they_are_those_of_a_completion(words):
    messages = [{"role": "user", "content": "It is the capital"}]
    for path, name, value in (("/v1/completions", "prompt", "It is"), ("/v1/chat/completions", "messages", messages)):
        _, answered = post(words, path, model="words.bin", max_tokens=1, **{name: value})
        _, found = post(words, "/tokenize", model="words.bin", **{name: value})
        assert found["count"] == answered["usage"]["prompt_tokens"] == len(found["tokens"])


def test_messages_of_a_template(tmp_path):
    """Those of the prompt that it makes, of which it says all special tokens."""
    path = made(tmp_path / "chat", TEMPLATES["plain"])
    messages = [{"role": "user", "content": "It is", "name": "bob"}]
    prompt = "<s><|im_start|>user\nIt is<|im_end|><|im_start|>assistant\n"
    with Service(path, tmp_path) as service:
        for fields, text in (({}, prompt), ({"chat_template_kwargs": {"thinking": False}}, prompt + "-\n"),
                             ({"add_generation_prompt": False}, prompt[:-len("<|im_start|>assistant\n")]),
                             ({"tools": [{"type": "x"}], "tool_choice": "none"}, prompt)):
            body = {"model": "chat.bin", "messages": messages, **fields}
            _, expected = post(service, "/tokenize", prompt=text, add_special_tokens=False)
            _, found = post(service, "/tokenize", **body)
            assert found == expected, fields
            _, answered = post(service, "/v1/chat/completions", **body, max_tokens=1)
            assert answered["usage"]["prompt_tokens"] == found["count"]
        status, got = post(service, "/tokenize", messages=[{"role": "user", "content": "stop"}])
        assert status == 400 and "never say stop" in got["error"]["message"] and got["error"]["param"] == "messages"
        assert post(service, "/tokenize", prompt="x", tools=[{}])[0] == 400
        assert service.stop() == 0


def test_more_than_the_context(words, tokenizer):
    """Who cuts a text to the context has to know its tokens."""
    for count in (CONTEXT, CONTEXT + 1, 5 * CONTEXT, 1700):
        text = "It" + " is" * (count - 2)
        status, got = post(words, "/tokenize", prompt=text)
        assert (status, got["count"], got["tokens"]) == (200, count, tokenizer.encode(text).ids)
        assert post(words, "/detokenize", tokens=got["tokens"]) == (200, {"prompt": text})
    status, got = post(words, "/tokenize", prompt="x" * 1_000_000)
    assert (status, got["error"]["code"]) == (400, "too_long")


def test_bytes_and_nothing(service):
    assert post(service, "/tokenize", prompt="") == (
        200, {"count": 0, "max_model_len": 512, "tokens": [], "token_strs": None})
    assert post(service, "/detokenize", tokens=[]) == (200, {"prompt": ""})
    text = "naïve \x00 中"
    assert post(service, "/tokenize/", prompt=text, messages=None, model=None, tools=[], return_token_strs=False) == (
        200, {"count": 12, "max_model_len": 512, "tokens": list(text.encode()), "token_strs": None})
    assert post(service, "/detokenize", tokens=[97, 255, 98])[1] == {"prompt": "a\ufffdb"}


@pytest.mark.parametrize("path, body, expected", [
    ("/tokenize", {}, "prompt: missing, expected exactly one of prompt, messages"),
    ("/tokenize", {"prompt": "x", "messages": []},
     "prompt: given with messages, expected exactly one of prompt, messages"),
    ("/tokenize", {"prompt": ["x"]}, "prompt: a list, expected a string"),
    ("/tokenize", {"prompt": "\ud83d"}, "prompt: half a surrogate pair, expected text; send whole characters"),
    ("/tokenize", {"prompt": "x", "add_special_tokens": 1}, "add_special_tokens: 1, expected true or false"),
    ("/tokenize", {"prompt": "x", "return_token_strs": True},
     "return_token_strs: true, not supported, expected none; leave it out"),
    ("/tokenize", {"prompt": "x", "colour": 1},
     '"colour": unsupported field, expected one of model, prompt, messages, add_special_tokens'),
    ("/tokenize", {"messages": []}, "messages: no message, expected a list of at least one message"),
    ("/tokenize", {"prompt": "x", "model": "else"}, 'model: "else", expected moe-32.bin'),
    ("/detokenize", {}, "tokens: missing, expected a list of integers"),
    ("/detokenize", {"tokens": "x"}, 'tokens: "x", expected a list of integers'),
    ("/detokenize", {"tokens": [1, True]}, "tokens[1]: true, expected an integer"),
    ("/detokenize", {"tokens": [1, 256]}, "tokens[1]: 256, expected 0 to 255"),
    ("/detokenize", {"tokens": [-1] * 600}, "tokens[0]: -1, expected 0 to 255"),
    ("/detokenize", {"tokens": [1], "prompt": "x"}, '"prompt": unsupported field, expected one of model, tokens')])
def test_what_is_refused(service, path, body, expected):
    assert set(TOKENS) == {"/tokenize", "/detokenize"}
    status, _, text = ask(service, "POST", path, body)
    assert (status, message(text)) == (404 if "else" in expected else 400, expected)


def test_a_model_without_text(tmp_path):
    from synthetic import STACK, write_model
    with Service(write_model(tmp_path / "stack.bin", STACK), tmp_path) as service:
        for path, body in (("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": [1]})):
            status, got = post(service, path, **body)
            assert status == 400 and "vocab_size=0, expected tokens for a prompt" in got["error"]["message"]
        assert service.stop() == 0 and MODEL not in service.log
