"""What a line may hold: the catalogue of bad ones with their exact messages, and what good ones become."""

import json
import os
import socket

import numpy as np
import pytest
from synthetic import STACK, write_model

from colibri.engine import Engine
from colibri.refused import Refused
from colibri.requests import Reader, cancelled_id, parse
from colibri.sampling import Sampler

NAMES = ("id, prompt, prompt_ids, input, output, max_new_tokens, stream, deadline_ms, add_special_tokens, temperature, "
         "top_k, top_p, seed, min_p, presence_penalty, frequency_penalty, repetition_penalty, logit_bias, min_tokens, "
         "stop_token_ids, ignore_eos, choice, logprobs, prompt_logprobs, stop, include_stop_str_in_output, "
         "skip_special_tokens, grammar, response_format")
INTEGER_ID = "expected a string of at most 128 characters or an integer of 64 bits"
ONE_INPUT = "expected exactly one of prompt, prompt_ids, input"

# A line, or what follows {"id": 1, "prompt": "x", in one; then its message.
BAD = [
    (b"hello", "line: not JSON from character 0 on, expected one JSON object"),
    (b'{"id": 1, "prompt": "x"', "line: not JSON from character 23 on, expected one JSON object"),
    (b'{"id": 1} {"id": 2}', "line: not JSON from character 10 on, expected one JSON object"),
    (b"[1, 2]", "line: a list, expected a JSON object"),
    (b'"text"', 'line: "text", expected a JSON object'),
    (b"12", "line: 12, expected a JSON object"),
    (b"null", "line: null, expected a JSON object"),
    (b'{"id": 1, "prompt": "\xff"}', "line: byte 0xff at 21, expected UTF-8; encode it so"),
    (b'{"id": 1, "prompt": "\xe2\x82"}', "line: byte 0xe2 at 21, expected UTF-8; encode it so"),
    (b"\xef\xbb\xbf{}", "line: not JSON from character 0 on, expected one JSON object"),
    (b'{"id": ' + b"[" * 10_000 + b"]" * 10_000 + b"}",
     "line: nested too deeply, expected a JSON object of plain fields"),
    (b'{"a":' * 10_000 + b"1" + b"}" * 10_000, "line: nested too deeply, expected a JSON object of plain fields"),
    (b'{"id": 1, "temperature": NaN}', "line: NaN, expected numbers that JSON has; leave it out"),
    (b'{"id": 1, "temperature": -Infinity}', "line: -Infinity, expected numbers that JSON has; leave it out"),
    (b'{"id": 1, "seed": ' + b"9" * 5000 + b"}", "line: a number too long to read, expected fewer digits"),
    (b'{"id": 1, "id": 2, "prompt": "x"}', 'line: "id" twice, expected each field once; leave one out'),
    (b'{"prompt": "x"}', f"id: missing, {INTEGER_ID}"),
    (b'{"id": null, "prompt": "x"}', f"id: null, {INTEGER_ID}"),
    (b'{"id": 1.5, "prompt": "x"}', f"id: 1.5, {INTEGER_ID}"),
    (b'{"id": true, "prompt": "x"}', f"id: true, {INTEGER_ID}"),
    (b'{"id": 9223372036854775808, "prompt": "x"}', f"id: 9223372036854775808, {INTEGER_ID}"),
    (b'{"id": "' + b"x" * 129 + b'", "prompt": "x"}', 'id: "' + "x" * 39 + f"..., {INTEGER_ID}"),
    (b'{"id": {}, "prompt": "x"}', f"id: an object, {INTEGER_ID}"),
    (b'{"id": 1}', f"prompt: missing, {ONE_INPUT}"),
    (b'{"id": 1, "prompt": "x", "prompt_ids": [1]}', f"prompt: given with prompt_ids, {ONE_INPUT}"),
    (b'{"id": 1, "prompt_ids": [1], "input": "x.npy"}', f"prompt_ids: given with input, {ONE_INPUT}"),
    (b'{"id": 1, "promt": "x"}', f'"promt": unknown field, expected one of {NAMES}'),
    (b'{"id": 1, "prompt": ""}', "prompt: 0 bytes, expected at least 1; the model needs something to continue"),
    (b'{"id": 1, "prompt": 5}', "prompt: 5, expected a string"),
    (b'{"id": 1, "prompt": null}', "prompt: null, expected a string"),
    (b'{"id": 1, "prompt": ["x"]}', "prompt: a list, expected a string"),
    (b'{"id": 1, "prompt": "\\ud83d"}', "prompt: half a surrogate pair, expected text; send whole characters"),
    (b'{"id": 1, "prompt_ids": []}',
     "prompt_ids: 0 tokens, expected at least 1; the model needs something to continue"),
    (b'{"id": 1, "prompt_ids": "1 2"}', 'prompt_ids: "1 2", expected a list of integers'),
    (b'{"id": 1, "prompt_ids": [1, 2.0]}', "prompt_ids[1]: 2.0, expected an integer"),
    (b'{"id": 1, "prompt_ids": [true]}', "prompt_ids[0]: true, expected an integer"),
    (b'{"id": 1, "prompt_ids": ["429"]}', 'prompt_ids[0]: "429", expected an integer'),
    (b'{"id": 1, "prompt_ids": [3, 5, [1]]}', "prompt_ids[2]: a list, expected an integer"),
    (b'{"id": 1, "prompt_ids": [1, 256]}', "prompt_ids[1]: 256, expected 0 to 255"),
    (b'{"id": 1, "prompt_ids": [-1]}', "prompt_ids[0]: -1, expected 0 to 255"),
    (b'{"id": 1, "prompt_ids": [' + b"1" * 400 + b"]}",
     "prompt_ids[0]: a number of more than 64 bits, expected 0 to 255"),
    (b'"output": "y.npy"', "output: given, expected only with input; leave it out"),
    (b'"max_new_tokens": 0', "max_new_tokens: 0, expected an integer, 1 or more"),
    (b'"max_new_tokens": -5', "max_new_tokens: -5, expected an integer, 1 or more"),
    (b'"max_new_tokens": 2.0', "max_new_tokens: 2.0, expected an integer, 1 or more"),
    (b'"max_new_tokens": true', "max_new_tokens: true, expected an integer, 1 or more"),
    (b'"max_new_tokens": "5"', 'max_new_tokens: "5", expected an integer, 1 or more'),
    (b'"max_new_tokens": null', "max_new_tokens: null, expected an integer, 1 or more"),
    (b'"temperature": -0.5', "temperature: -0.5, expected 0 (greedy) to 1e30"),
    (b'"temperature": 1e400', "temperature: Infinity, expected 0 (greedy) to 1e30"),
    (b'"temperature": 1' + b"0" * 400, "temperature: a number of more than 64 bits, expected 0 (greedy) to 1e30"),
    (b'"temperature": "hot"', 'temperature: "hot", expected a number'),
    (b'"temperature": false', "temperature: false, expected a number"),
    (b'"top_k": -2', "top_k: -2, expected 0 or -1 (all) to 2^31 - 1"),
    (b'"top_k": 1.5', "top_k: 1.5, expected 0 or -1 (all) to 2^31 - 1"),
    (b'"top_k": 2147483648', "top_k: 2147483648, expected 0 or -1 (all) to 2^31 - 1"),
    (b'"top_p": 0', "top_p: 0, expected more than 0 and at most 1"),
    (b'"top_p": 1' + b"0" * 40, "top_p: a number of more than 64 bits, expected more than 0 and at most 1"),
    (b'"top_p": 1e-50', "top_p: 1e-50, expected at least 1e-45, which is more than 0 as a float32, and at most 1"),
    (b'"top_p": 1.01', "top_p: 1.01, expected more than 0 and at most 1"),
    (b'"seed": -2', "seed: -2, expected 0 to 2^64 - 1"),
    (b'"seed": 18446744073709551616', "seed: a number of more than 64 bits, expected 0 to 2^64 - 1"),
    (b'"seed": 1.0', "seed: 1.0, expected 0 to 2^64 - 1"),
    (b'"stream": 1', "stream: 1, expected true or false"),
    (b'"stream": "yes"', 'stream: "yes", expected true or false'),
    (b'"add_special_tokens": 0', "add_special_tokens: 0, expected true or false"),
    (b'"add_special_tokens": null', "add_special_tokens: null, expected true or false"),
    (b'"response_format": "json"', 'response_format: "json", expected an object such as {"type": "json_object"}'),
    (b'"grammar": {"syntax": "lark", "definition": ""}', "grammar.definition: empty, expected a grammar"),
    (b'"grammar": "start: x", "response_format": {"type": "json_object"}',
     "grammar: given with response_format, expected one of them; leave one out"),
    (b'"deadline_ms": 0', "deadline_ms: 0, expected an integer, 1 to 1099511627776"),
    (b'"deadline_ms": 10.5', "deadline_ms: 10.5, expected an integer, 1 to 1099511627776"),
    (b'"deadline_ms": 1' + b"0" * 40,
     "deadline_ms: a number of more than 64 bits, expected an integer, 1 to 1099511627776"),
]
OWN = "the model's own positions (max_positions of MODEL); use fewer"
TOO_LONG = [
    (b'"max_new_tokens": 513', ("max_new_tokens: 513, expected at most 512 after a prompt of 1 token in a context of "
                               f"512, {OWN}")),
    (b'"max_new_tokens": 1' + b"0" * 400, ("max_new_tokens: a number of more than 64 bits, expected at most 512 after "
                                          f"a prompt of 1 token in a context of 512, {OWN}")),
]
CANCEL = [
    (b'{"cancel": 1, "id": 2}', '"id": unknown field, expected one of cancel'),
    (b'{"cancel": null}', f"cancel: null, {INTEGER_ID}"),
    (b'{"cancel": []}', f"cancel: a list, {INTEGER_ID}"),
]


@pytest.fixture(scope="module")
def reader(engine):
    return Reader(engine)


def whole(line):
    return line if line[:1] != b'"' or b'": ' not in line else b'{"id": 1, "prompt": "x", ' + line + b"}"


def read(reader, line):
    values = parse(whole(line))
    return cancelled_id(values) or made(reader, values)


def made(reader, values):
    """A request with its prompt in tokens."""
    request = reader.request(values)
    if request.encode:
        request.prompt, request.max_new_tokens = request.encode()[:2]
    return request


@pytest.mark.parametrize("line, message", BAD + CANCEL, ids=[str(line[:40]) for line, _ in BAD + CANCEL])
def test_catalogue(reader, line, message):
    with pytest.raises(Refused) as refused:
        read(reader, line)
    assert (str(refused.value), refused.value.code) == (message, "bad_request")
    assert refused.value.id in (None, 1)


@pytest.mark.parametrize("line, identity", [
    (b'{"id":1,"prompt":"a","prompt":"b"}', 1), (b'{"id": "a", "temperature": NaN}', "a"),
    (b'{"id": 7, "prompt": \xff', 7),
    (b'{"id": 2, "seed": ' + b"9" * 5000 + b"}", 2),
    (b'{"id": 3, "x": ' + b"[" * 10_000, 3), (b'{"id": 4, "prompt": "x"', 4),
    (b'{"id": 1, "id": 2, "prompt": "x"}', None), (b'{"id": 1, "prompt": "x", "id": 2}', None),
    (b'{"prompt": NaN, "id": 1}', None)])
def test_a_bad_line_has_the_id_that_it_begins_with(line, identity):
    with pytest.raises(Refused) as refused:
        parse(line)
    assert refused.value.id == identity
    with pytest.raises(Refused) as refused:
        parse(line, "body")
    assert refused.value.id is None  # there, it is no field


@pytest.mark.parametrize("line, message", TOO_LONG, ids=[str(line[:40]) for line, _ in TOO_LONG])
def test_more_than_the_context_holds(reader, line, message):
    with pytest.raises(Refused) as refused:
        read(reader, line)
    message = message.replace("MODEL", str(reader._checkpoint.path))
    assert (str(refused.value), refused.value.code, refused.value.id) == (message, "too_long", 1)


def test_a_prompt_longer_than_the_context(reader, engine):
    for fields, unit in (({"prompt": "x" * 600}, "bytes"), ({"prompt_ids": [1] * 600}, "tokens")):
        with pytest.raises(Refused) as refused:
            made(reader, {"id": "a", **fields})
        assert (str(refused.value), refused.value.code, refused.value.id) == (
            (f"{next(iter(fields))}: 600 {unit}, expected at most 512, "
             f"{OWN}".replace("MODEL", str(engine.checkpoint.path))),
            "too_long", "a")


def test_a_whole_request(reader):
    line = (b'{"id": "a\\u00e9", "prompt": "h\xc3\xa9", "max_new_tokens": 7, "temperature": 0.5, "top_k": 40, '
            b'"top_p": 1, "seed": 18446744073709551615, "stream": true, "deadline_ms": 250}')
    request = read(reader, line)
    assert (request.id, request.prompt) == ("a\xe9", list("h\xe9".encode()))
    assert request.max_new_tokens == 7 and request.stream is True
    assert request.sampler == Sampler(0.5, 40, 1, 2**64 - 1) and request.deadline == request.arrived + 0.25


def test_defaults(reader):
    request = read(reader, b'{"prompt_ids": [0, 255], "id": -9223372036854775807}')
    assert (request.prompt, request.used, request.max_new_tokens, request.stream) == ([0, 255], None, 64, False)
    assert request.sampler == Sampler() and request.deadline == float("inf")
    assert read(reader, json.dumps({"id": 1, "prompt": "x" * 500}).encode()).max_new_tokens == 13
    assert read(reader, b'{"cancel": "a"}') == "a"


def test_news_and_figures(reader):
    request = read(reader, b'{"id": 1, "prompt": "x"}')
    request.arrived = 10.0
    for token, now in ((0xe2, 10.005), (0x82, 10.006), (0xac, 10.008), (0xe2, 10.018)):
        request.tokens.append(token)
        request.times.append(now)
    assert request.news() == [(0xe2, ""), (0x82, ""), (0xac, "\u20ac"), (0xe2, "")]
    assert request.news() == [] and request.rest() == "" and request.text() == "\u20ac"  # but for what is cut
    assert request.figures() == {"prompt_tokens": 1, "completion_tokens": 4, "ttft_ms": 5.0, "itl_p50_ms": 2.0,
                                 "itl_p99_ms": 10.0}


def test_a_stack_takes_files_alone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    np.save("x.npy", np.zeros((3, 64), np.float32))
    np.save("f.npy", np.asfortranarray(np.zeros((3, 64), np.float32)))
    np.save("narrow.npy", np.zeros((3, 65), np.float32))
    os.mkfifo("pipe")
    listener = socket.socket(socket.AF_UNIX)
    listener.bind("socket")
    name = "expected the name of an .npy file"
    with Engine(write_model(tmp_path / "stack.bin", STACK), backend="host") as engine:
        reader = Reader(engine)
        request = made(reader, {"id": 1, "input": "x.npy", "output": "y.npy"})
        assert len(request.rows) == 3 and request.prompt == []
        for fields, message in (
                ({"input": "x.npy"}, f"output: missing, {name}"),
                ({"input": "x.npy", "output": ""}, f'output: "", {name}'),
                ({"input": "x\0.npy", "output": "y.npy"}, f'input: "x\\u0000.npy", {name}'),
                ({"input": 5, "output": "y.npy"}, f"input: 5, {name}"),
                ({"input": "x.npy", "output": "./x.npy"}, ("output: ./x.npy, expected another file than input; choose "
                                                          "another name")),
                ({"input": "x.npy", "output": "pipe"}, "output: pipe: a special file, expected a file or a new name"),
                ({"input": "x.npy", "output": "socket"},
                 "output: socket: a special file, expected a file or a new name"),
                ({"input": "x.npy", "output": "."}, "output: .: a directory, expected a file or a new name"),
                ({"input": "x.npy", "output": "none/y.npy"},
                 "output: none/y.npy, No such file or directory, expected a file's name"),
                ({"input": "x.npy", "output": "x.npy/y"}, "output: x.npy/y, Not a directory, expected a file's name"),
                ({"input": "x.npy", "output": "y.npy", "seed": 1}, ("seed: given, expected only with prompt or "
                                                                   "prompt_ids; leave it out")),
                ({"input": "x.npy", "output": "y.npy", "add_special_tokens": True},
                 "add_special_tokens: given, expected only with prompt or prompt_ids; leave it out"),
                ({"input": "none.npy", "output": "y.npy"}, ("none.npy: No such file or directory, expected an .npy "
                                                           "file of numbers; write it with numpy.save")),
                ({"input": "pipe", "output": "y.npy"}, "pipe: a special file, expected a file that numpy.save wrote"),
                ({"input": "f.npy", "output": "y.npy"}, ("f.npy: fortran_order=True, expected rows one after another; "
                                                        "write it with numpy.save(path, numpy.ascontiguousarray(x))")),
                ({"input": "narrow.npy", "output": "y.npy"}, (f"narrow.npy: shape=(3, 65), expected (tokens, 64) from "
                                                             f"hidden=64 of {tmp_path}/stack.bin; give it rows of that "
                                                             "size")),
                ({"prompt": "x"}, (f"{tmp_path}/stack.bin: vocab_size=0, expected tokens for prompt; this is a bare "
                                  "stack of MoE layers, give it an input over --serve")),
                ({"prompt_ids": [1]}, (f"{tmp_path}/stack.bin: vocab_size=0, expected tokens for prompt_ids; this is a "
                                      "bare stack of MoE layers, give it an input over --serve"))):
            with pytest.raises(Refused) as refused:
                reader.request({"id": 1, **fields})
            assert str(refused.value) == message
    assert sorted(os.listdir()) == ["f.npy", "narrow.npy", "pipe", "socket", "stack.bin", "x.npy"]


def test_a_model_of_tokens_takes_no_files(reader, engine):
    with pytest.raises(Refused) as refused:
        reader.request({"id": 1, "input": "x.npy", "output": "y.npy"})
    assert str(refused.value) == (f"{engine.checkpoint.path}: vocab_size=256, expected 0 for input, a bare stack of "
                                  "MoE layers; give this model a prompt")


def test_text_for_a_model_of_words(tmp_path):
    with Engine(write_model(tmp_path / "words.bin", vocab_size=500), backend="host") as engine:
        with pytest.raises(Refused, match="words.bin: vocab_size=500 and no tokenizer, expected 256 for --prompt"):
            Reader(engine).request({"id": 1, "prompt": "x"})
        assert made(Reader(engine), {"id": 1, "prompt_ids": [499]}).prompt == [499]
