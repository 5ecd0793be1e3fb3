"""Tokens that are drawn on the host by more than temperature, top_k and top_p, and what is told of them."""

import itertools
import random
from collections import Counter

import numpy as np
import pytest
import reference
from host_model import TRANSFORMER, library
from made_up_gpu import made_up, use  # noqa: F401 - fixtures

from colibri.draws import Draws
from colibri.engine import Engine
from colibri.errors import ColibriError
from colibri.requests import Request
from colibri.sampling import MAX_CHOICES, PLAIN, History, Sampler, check_sampler, draw, is_plain
from colibri.text import Bytes

VOCAB, TEXT = 131, b"It was the custom of the old captain, "


@pytest.fixture(scope="module")
def draws():
    names = ("num_experts", "k", "hidden", "ffn", "num_heads", "num_kv_heads", "head_dim", "vocab_size")
    return Draws(library(**{name: TRANSFORMER[name] for name in names}), VOCAB)


def sampler_of(source, vocab=VOCAB, **fields):
    """A Sampler with random values for most of its fields."""
    pick = source.choice
    tokens = source.sample(range(vocab), 8)
    return Sampler(**{
        "temperature": pick([0.0, 0.0, 0.5, 1.0, 2.0]), "top_k": pick([-1, 0, 1, 5, 200]),
        "top_p": pick([1.0, 1.0, 0.9, 0.3]), "seed": source.getrandbits(64), "min_p": pick([0.0, 0.0, 0.05, 0.5, 1.0]),
        "presence_penalty": pick([0, -2, 1.5]), "frequency_penalty": pick([0.0, 2.0, -0.3]),
        "repetition_penalty": pick([1.0, 1.3, 0.7]), "choice": pick([0, 1, 127]),
        "logit_bias": pick([(), tuple((token, source.uniform(-100, 100) / pick([1, 50])) for token in tokens[:4])]),
        "min_tokens": pick([0, 3, 50]), "stop_token_ids": pick([(), tuple(tokens[4:])]),
        "ignore_eos": pick([False, True]),
        "logprobs": pick([None, 0, 1, 5, 20]), **fields})


def test_draws_as_the_reference_does(draws):
    source, generator = random.Random(1), np.random.default_rng(1)
    drawn_tokens = set()
    for trial in range(60):
        logits = (generator.standard_normal((20, VOCAB)) * source.choice([0.3, 3, 10])).astype(np.float32)
        if trial % 3 == 0:
            logits = np.round(logits)  # ties
        before, wanted, expected = logits.copy(), [], []
        for row in range(len(logits)):
            sampler = sampler_of(source)
            prompt = [source.randrange(VOCAB) for _ in range(source.randrange(1, 60))]
            drawn = [source.choice([7, source.randrange(VOCAB)]) for _ in range(source.randrange(100))]
            history = History(sampler, prompt, (2, 130))
            for token in drawn:
                history.add(token)
            wanted.append((row, history, len(prompt) + len(drawn)))
            uniform = draw(sampler.seed, len(prompt) + len(drawn), sampler.choice) if sampler.temperature else 0
            expected.append(reference.sample(
                reference.changed(logits[row], sampler, prompt, drawn, (2, 130)), np.float32(sampler.temperature),
                sampler.top_k, np.float32(sampler.top_p), uniform, np.float32(sampler.min_p)))
        order = source.sample(range(len(wanted)), len(wanted))
        got = draws.run(logits, [wanted[i] for i in order], source.choice([1, 2]))
        assert got == [expected[i] for i in order]
        assert np.array_equal(before, logits)
        drawn_tokens.update(got)
    assert len(drawn_tokens) > 100


def test_log_probabilities_are_of_the_logits_as_they_were(draws):
    source, generator = random.Random(2), np.random.default_rng(2)
    for trial in range(40):
        logits = (generator.standard_normal((9, VOCAB)) * 4).astype(np.float32)
        if trial % 2:
            logits = np.round(logits)
        if trial == 7:
            logits[:, 3:90] = -np.inf
        histories = [History(sampler_of(source, logprobs=source.choice([0, 1, 20]), temperature=1.0), [1, 2, 3], ())
                     for _ in logits]
        tokens = draws.run(logits, [(row, history, 3) for row, history in enumerate(histories)], 2)
        for row, history, token in zip(logits, histories, tokens):
            score, expected = history.scores[3], reference.log_softmax(row)
            assert score.token == token and score.rank == 1 + np.sum(row > row[token])
            order = sorted(range(VOCAB), key=lambda i: (-row[i], i))[:history.sampler.logprobs]
            assert score.top.tolist() == order
            assert np.allclose([score.logprob, *score.top_logprobs], expected[[token, *order]], rtol=1e-6, atol=1e-6)
            for other, logprob in zip(score.top, score.top_logprobs):
                assert other != token or logprob == score.logprob


def test_a_prompts_tokens_are_scored_and_not_drawn(draws):
    logits = np.random.default_rng(3).standard_normal((3, VOCAB)).astype(np.float32)
    history = History(Sampler(prompt_logprobs=2, logit_bias=((5, 100.0),)), [9, 8, 7], (), start=10)
    tokens = draws.run(logits, [(row, history, 11 + row) for row in range(3)], 1)
    assert tokens == [8, 7, 5] and list(history.scores) == [11, 12]  # logprobs is None: nothing is told of the third
    assert history.scores[12].logprob == pytest.approx(reference.log_softmax(logits[1])[7], rel=1e-6)
    logits[0, 130] = np.nan
    history.scores.clear()
    assert draws.run(logits, [(0, history, 11), (0, history, 13)], 1) == [-1, -1] and not history.scores


def test_a_history_counts():
    source = random.Random(4)
    for _ in range(50):
        prompt, drawn = ([source.randrange(300) for _ in range(source.randrange(size))] for size in (200, 400))
        history = History(Sampler(presence_penalty=1, min_tokens=len(drawn)), prompt, (3,))
        for token in drawn:
            assert history.barred.tolist() == [3]
            history.add(token)
        assert history.barred.size == 0 and len(history.seen) == len({*prompt, *drawn})
        counts = Counter(drawn)
        assert dict(zip(history.seen.tolist(), history.counts.tolist())) == {
            token: counts[token] for token in {*prompt, *drawn}}


def test_choices_have_draws_of_their_own():
    assert [draw(5, position) for position in range(200)] == [draw(5, position, 0) for position in range(200)]
    values = [draw(5, position, choice) for position in range(100) for choice in range(MAX_CHOICES)]
    assert len(set(values)) > 12_000 and abs(np.mean(values) - 0.5) < 0.01
    with pytest.raises(ColibriError, match="choice: 128, expected 0 to 127"):
        check_sampler(Sampler(choice=128))


# An engine

@pytest.mark.parametrize("seed", range(4))
def test_generates_as_the_reference_does(engine, seed):
    """Token by token from the logits that the engine gives."""
    source = random.Random(seed)
    sampler = sampler_of(source, 256, stop_token_ids=(1, 2), logprobs=None)
    with engine.session() as session:
        got = list(session.generate(TEXT, 40, **sampler._asdict()))
    drawn = []
    with engine.session() as session:
        logits = session.prefill(TEXT)
        for position in range(len(TEXT), len(TEXT) + 40):
            uniform = draw(sampler.seed, position, sampler.choice) if sampler.temperature else 0
            token = reference.sample(reference.changed(logits, sampler, list(TEXT), drawn),
                                     np.float32(sampler.temperature), sampler.top_k, np.float32(sampler.top_p), uniform,
                                     np.float32(sampler.min_p))
            if token in (1, 2):
                break
            drawn.append(token)
            logits = session.decode(token)
    assert got == drawn


def answers(engine, samplers, sizes):
    """The tokens and scores of sequences that run together, prompts in pieces of those sizes."""
    sessions = [engine.session() for _ in samplers]
    histories = [History(sampler, TEXT, ()) for sampler in samplers]
    for start, end in itertools.pairwise(itertools.accumulate(sizes, initial=0)):
        last = end == len(TEXT)
        tokens = engine.step([(session, TEXT[start:end]) for session in sessions],
                             [history if last or history.has_prompt_scores else None for history in histories])
    found = [[] for _ in sessions]
    for _ in range(8):
        for history, token, drawn in zip(histories, tokens, found):
            history.add(token)
            drawn.append(token)
        tokens = engine.step([(session, [token]) for session, token in zip(sessions, tokens)], histories)
    for session in sessions:
        session.close()
    return [(drawn, {position: (score.token, score.logprob, score.rank, score.top.tolist(),
                                score.top_logprobs.tolist()) for position, score in history.scores.items()})
            for drawn, history in zip(found, histories)]


def test_neither_the_batch_nor_pieces_of_the_prompt_change_anything(engine):
    source = random.Random(5)
    samplers = [sampler_of(source, 256, prompt_logprobs=source.choice([None, 3])) for _ in range(9)]
    together = answers(engine, samplers, [len(TEXT)])
    assert answers(engine, samplers, [1, 7, 20, len(TEXT) - 28]) == together
    assert [answers(engine, [sampler], [30, len(TEXT) - 30])[0] for sampler in samplers] == together
    for sampler, (drawn, scores) in zip(samplers, together):
        first = 1 if sampler.prompt_logprobs is not None else len(TEXT)
        last = len(TEXT) + (len(drawn) + 1 if sampler.logprobs is not None else 0)
        assert sorted(scores) == list(range(first, last if sampler.logprobs is not None else max(first, len(TEXT))))


@pytest.mark.parametrize("seed", range(6))
def test_a_request_goes_on_from_its_tokens(engine, seed):
    """What is computed again in another session, without drawing, changes no token, no text and no score."""
    source = random.Random(seed)
    sampler = sampler_of(source, 256, prompt_logprobs=1, logprobs=2, stop_token_ids=())

    def run(pauses):
        request = Request(1, prompt=list(TEXT), sampler=sampler, used=Bytes(), stop=("zz", "qx", "e e e e e"))
        request.begin(engine.checkpoint.eos)
        session = engine.session()
        token, = engine.step([(session, request.prompt)], [request.history])
        while not request.take(token) and len(request.tokens) < 40:
            if len(request.tokens) in pauses:
                session.close()
                session = engine.session()
                engine.step([(session, [*request.prompt, *request.tokens[:-1]])], [None])
            token, = engine.step([(session, [token])], [request.history])
        session.close()
        return request.tokens, request.text(), [
            (position, score.logprob, score.top.tolist()) for position, score in sorted(request.history.scores.items())]
    assert run(()) == run((1, 2, 17, 33))


def test_scores_of_more_positions_than_a_call_has_logits(engine):
    tokens = (TEXT * 9)[:330]
    history = History(Sampler(prompt_logprobs=1), tokens, ())
    with engine.session() as session:
        engine.step([(session, tokens)], [history])
    with engine.session() as session:
        logits = engine.step([(session, tokens)], every=True)
    assert sorted(history.scores) == list(range(1, 330)) and engine.batch.max_logits < 330
    for position, score in history.scores.items():
        expected = reference.log_softmax(logits[position - 1])
        assert score.token == tokens[position] and score.logprob == pytest.approx(expected[score.token], abs=1e-6)
        assert score.top[0] == np.argmax(expected)


def test_a_gpus_rows_are_drawn_from_what_is_read_back(engine, moe_32, made_up, monkeypatch):  # noqa: F811
    """The made-up GPU has the host's kernels: rows that they do not sample come over the driver's copy."""
    source = random.Random(6)
    samplers = [sampler_of(source, 256, prompt_logprobs=source.choice([None, 0])) for _ in range(6)]
    expected, copied, copy = answers(engine, samplers, [20, len(TEXT) - 20]), [], made_up.driver.cuMemcpyDtoH

    def counted(to, start, size):
        copied.append(size)
        return copy(to, start, size)
    made_up.driver.cuMemcpyDtoH = counted
    with Engine(moe_32, backend="cuda", dispatch="dynamic") as gpu:
        assert answers(gpu, samplers, [20, len(TEXT) - 20]) == expected
        assert len(copied) >= 10 and all(size % (4 * 256) == 0 for size in copied)
        copied.clear()
        with gpu.session() as session:
            list(session.generate(TEXT, 5, temperature=1.0, top_p=0.9, top_k=20))
        assert not copied  # such rows are sampled where they are


def test_which_rows_a_step_samples_itself():
    assert is_plain(PLAIN) and is_plain(Sampler(0.7, 40, 0.9, 5, choice=3, stop_token_ids=(5,), ignore_eos=True))
    for name, value in {"min_p": 0.1, "presence_penalty": 1, "frequency_penalty": 1, "repetition_penalty": 1.1,
                        "logit_bias": ((1, 1.0),), "min_tokens": 1, "logprobs": 0, "prompt_logprobs": 0}.items():
        assert not is_plain(Sampler(**{name: value}))


@pytest.mark.parametrize("fields, message", [
    ({"min_p": 1.1}, "min_p: 1.1, expected 0 \\(all\\) to 1"), ({"min_p": float("nan")}, "min_p: nan"),
    ({"presence_penalty": 2.1}, "presence_penalty: 2.1, expected -2 to 2"), ({"frequency_penalty": -3}, "frequency_p"),
    ({"repetition_penalty": 0}, "repetition_penalty: 0, expected more than 0"),
    ({"repetition_penalty": 1e-50}, "repetition_penalty: 1e-50, expected more than 0"),
    ({"logit_bias": ((5, 101),)}, "logit_bias: .*expected at most 1024 different tokens, each with -100 to 100"),
    ({"logit_bias": ((5, 1), (5, 2))}, "logit_bias: "), ({"logit_bias": {5: 1}}, "logit_bias: "),
    ({"logit_bias": ((256, 1),)}, "logit_bias: token 256, expected 0 to 255"),
    ({"stop_token_ids": (256,)}, "stop_token_ids: token 256, expected 0 to 255"),
    ({"stop_token_ids": (-1,)}, "stop_token_ids: "), ({"stop_token_ids": [1]}, "stop_token_ids: "),
    ({"min_tokens": -1}, "min_tokens: -1, expected 0 to"), ({"logprobs": 21}, "logprobs: 21, expected 0 to 20"),
    ({"ignore_eos": 1}, "ignore_eos: 1, expected true or false")])
def test_wrong_fields(engine, fields, message):
    with engine.session() as session, pytest.raises(ColibriError, match=message):
        session.generate(TEXT, 5, **fields)


def test_a_sampler_that_needs_a_history(engine):
    with engine.session() as session, pytest.raises(ColibriError, match=(
            "samplers: min_p in a Sampler alone, expected a History, which knows the sequence's tokens")):
        engine.step([(session, TEXT)], [Sampler(min_p=0.5)])
    assert engine.num_free_slots == engine.num_slots
