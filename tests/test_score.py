"""--score: the log-likelihood of a text, in pieces of the context."""

import json
import math

import numpy as np
import pytest
import text_models
from asking import ask
from conftest import DATA, program

from colibri import score
from colibri.checkpoint import Checkpoint
from colibri.engine import Engine
from colibri.text import codec

TEXT = (DATA / "heldout.txt").read_bytes()[:1500]


def figures(model, path, *options, **rest):
    ended = program("colibri.run", "--backend", "host", "--model", model, "--score", path, "--json", *options, **rest)
    assert ended.returncode == 0, ended.stderr.decode()
    return json.loads(ended.stdout)


def expected(model, tokens, context):
    """The sum of log-softmax of NumPy, each token after as many before it as the piece has."""
    total = 0.0
    with Engine(model, backend="host", num_slots=1, context=context) as engine:
        for start, end, first in score.pieces(len(tokens), context):
            with engine.session() as session:
                logits = engine.step([(session, tokens[start:end])], every=True).astype(np.float64)
            logits -= logits.max(axis=1, keepdims=True)
            logits -= np.log(np.exp(logits).sum(axis=1, keepdims=True))
            total += sum(logits[position - 1 - start, tokens[position]] for position in range(first, end))
    return total


@pytest.mark.parametrize("num_tokens, context", [(2, 4), (4, 4), (5, 4), (7, 4), (8, 4), (9, 2), (1000, 64)])
def test_pieces_score_each_token_once(num_tokens, context):
    """After one token at least, within the context, and the last piece after as many as fit."""
    scored, found = [], list(score.pieces(num_tokens, context))
    for start, end, first in found:
        assert 0 <= start < first < end <= num_tokens and end - start <= context
        scored += range(first, end)
    assert scored == list(range(1, num_tokens))
    assert all(first - start == 1 for start, _, first in found[:-1])
    assert found[-1][1] - found[-1][0] == min(num_tokens, context)


@pytest.mark.parametrize("context", [64, 100, 512])
def test_a_text_in_pieces(moe_32, tmp_path, context):
    (tmp_path / "text").write_bytes(TEXT)
    found = figures(moe_32, tmp_path / "text", "--context", context)
    total = expected(moe_32, list(TEXT), context)
    assert found["log_likelihood"] == pytest.approx(total, rel=1e-6)
    assert (found["scored_tokens"], found["scored_bytes"]) == (1499, 1499)
    assert found["perplexity"] == pytest.approx(math.exp(-total / 1499), rel=1e-6)
    assert found["bits_per_byte"] == pytest.approx(-total / math.log(2) / 1499, rel=1e-6)


def test_stdin_and_table(moe_32):
    ended = program("colibri.run", "--backend", "host", "--model", moe_32, "--score", "-", input=TEXT[:300])
    assert ended.returncode == 0, ended.stderr.decode()
    table = " ".join(ended.stdout.decode().split())
    total = expected(moe_32, list(TEXT[:300]), 512)
    assert f"score {total:.4f} nats, perplexity {math.exp(-total / 299):.4g}, " in table
    assert "bits a byte (299 tokens, 299 bytes)" in table


def test_a_model_that_begins_with_bos(tmp_path):
    """The text's first token is scored after it, and all bytes count."""
    tokenizer, model = text_models.byte_fallback(["▁ab", "ba"], adds_bos=True), tmp_path / "model.bin"
    folder = text_models.chain(tmp_path / "folder", {1: 5}, tokenizer.get_vocab_size(), tokenizer=tokenizer.to_str())
    made = program("converter", folder, model)
    assert made.returncode == 0, made.stderr
    text = b"ab ba abba"
    (tmp_path / "text").write_bytes(text)
    used = codec(Checkpoint(model), False)
    begun, plain = list(used.encode(text)), list(used.encode(text, special=False))
    assert begun == [begun[0], *plain] and len(plain) > 2
    found = figures(model, tmp_path / "text")
    assert found["log_likelihood"] == pytest.approx(expected(model, begun, 128), rel=1e-6)
    assert (found["scored_tokens"], found["scored_bytes"]) == (len(plain), len(text))


def test_it_is_what_a_completions_echo_says(service, moe_32, tmp_path):
    """To the bit: both are of the same function."""
    (tmp_path / "text").write_bytes(TEXT[:400])
    status, _, text = ask(service, "POST", "/v1/completions", {
        "model": "moe-32.bin", "prompt": TEXT[:400].decode(), "echo": True, "logprobs": 0, "max_tokens": 0})
    assert status == 200, text
    logprobs = json.loads(text)["choices"][0]["logprobs"]["token_logprobs"]
    assert logprobs[0] is None and len(logprobs) == 400
    assert figures(moe_32, tmp_path / "text")["log_likelihood"] == math.fsum(logprobs[1:])


def test_a_probability_of_zero():
    assert score.figures(np.array([-1.0, -np.inf]), 2) == {
        "log_likelihood": None, "perplexity": None, "bits_per_byte": None, "scored_tokens": 2, "scored_bytes": 2}
    assert score.figures(np.array([-1.0, -3.0]), 4) == {
        "log_likelihood": -4.0, "perplexity": math.exp(2), "bits_per_byte": pytest.approx(1 / math.log(2)),
        "scored_tokens": 2, "scored_bytes": 4}
