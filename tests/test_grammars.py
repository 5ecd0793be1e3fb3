"""Answers that follow grammars: every one is of the form that was asked for, alone and in a batch."""

import json
import random
import re

import numpy as np
import pytest
import reference
import scheduling
import text_models
from conftest import opened, program
from made_up_gpu import made_up, use  # noqa: F401 - fixtures
from random_schemas import follows, random_schema

from colibri import constraints, grammars
from colibri.constraints import constraint_of
from colibri.draws import Draws
from colibri.engine import Engine
from colibri.errors import ColibriError
from colibri.grammars import Grammars
from colibri.refused import Refused
from colibri.requests import Reader
from colibri.sampling import History, Sampler, draw
from colibri.text import Bytes, Tokenizer

pytest.importorskip("llguidance")
TEXTS = ["It was the custom of the old captain, 12 times", '{"name": "größe", "a b": [1, 2.5, true]}', "日本 red"]
REGEXES = ("[a-c]{3}/x?", r"[0-9]{1,3}(,[0-9]{3}){0,3}", "(yes|no|größe)", r"a\/b", '"[^"]{0,5}"', "(?i)hello")
KINDS = {"byte_level": lambda: text_models.byte_level(TEXTS, 400),
         "unigram": lambda: text_models.unigram([*TEXTS, ASCII + "ü"]),
         "byte_fallback": lambda: text_models.byte_fallback(("▁name", '":', "true", "▁red"))}
ASCII = "".join(map(chr, range(32, 127)))
CONTEXT = 1024
SCHEMA = {"type": "object", "properties": {"a": {"type": "string", "maxLength": 8}, "b": {"type": "integer"}},
          "required": ["a", "b"], "additionalProperties": False}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("grammars")


def uniform(folder, name):
    """An engine of a model for which all tokens but one are as likely as each other, over a tokenizer of a kind."""
    tokenizer = KINDS[name]()
    made = text_models.chain(folder / name, {}, tokenizer.get_vocab_size(), tokenizer=tokenizer.to_str(),
                             generation_config={"eos_token_id": 1})
    config = json.loads((made / "config.json").read_text())
    (made / "config.json").write_text(json.dumps({**config, "max_position_embeddings": CONTEXT, "eos_token_id": 1}))
    path = folder / f"{name}.bin"
    ended = program("converter", made, path)
    assert ended.returncode == 0, ended.stderr
    return opened(path, CONTEXT, 8)


@pytest.fixture(scope="module", params=["bytes", *KINDS])
def reader(request, folder, moe_32):
    """(a Reader, its engine)"""
    engine = opened(moe_32, 512, 8) if request.param == "bytes" else uniform(folder, request.param)
    with engine:
        made = Reader(engine)
        yield made, engine
        made.close()


def json_format(schema):
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


def request_of(reader, identity, **fields):
    request = reader.request({"id": identity, "prompt": "It was ", "temperature": 1.0, "max_new_tokens": 400, **fields})
    if request.encode:
        request.prompt, request.max_new_tokens, grammar = request.encode()
        request.sampler = request.sampler._replace(grammar=grammar)
    return request


def answers(engine, monkeypatch, requests):
    scheduler = scheduling.make(engine, monkeypatch, len(requests))
    for request in requests:
        scheduling.submit(scheduler, request)
    scheduling.finish(scheduler, *requests)
    return [request.text() for request in requests]


def test_answers_follow_their_schemas(reader, monkeypatch):
    made, engine = reader
    source = random.Random(1)
    schemas = [random_schema(source) for _ in range(30)]
    requests = [request_of(made, index, response_format=json_format(schema), seed=index)
                for index, schema in enumerate(schemas)]
    texts, lengths = answers(engine, monkeypatch, requests), 0
    for schema, text, request in zip(schemas, texts, requests):
        if request.finish == "length":
            lengths += 1
            continue
        assert request.error is None and request.finish == "stop"
        assert follows(json.loads(text), schema), (schema, text)
    assert lengths <= 3


def test_answers_follow_regular_expressions(reader, monkeypatch):
    made, engine = reader
    requests = [request_of(made, f"{regex} {seed}", grammar={"syntax": "regex", "definition": regex}, seed=seed)
                for regex in REGEXES for seed in range(5)]
    texts = answers(engine, monkeypatch, requests)
    for request, text in zip(requests, texts):
        assert request.finish == "stop" and re.fullmatch(request.id.rpartition(" ")[0], text), (request.id, text)
    assert len(set(texts)) > 12


def test_neither_the_batch_nor_choices_change_an_answer(reader, monkeypatch):
    """Choices have a Guide each; an answer alone has the bits that it has beside others."""
    made, engine = reader
    def requests():
        first = request_of(made, 0, response_format=json_format(SCHEMA), seed=3, logprobs=2)
        return [first.choice(number, number) for number in range(3)] + [
            request_of(made, 9, grammar='start: "yes" | "no" | /[0-9]+x/', seed=4, frequency_penalty=1.0),
            request_of(made, 10, seed=5)]
    sampler = [request.sampler for request in requests()]
    assert len({id(each.grammar) for each in sampler[:3]}) == 1

    def set_prompts(found):
        for request in found:
            request.prompt, request.max_new_tokens, _ = request.encode() if request.encode else (None, None, None)
        return found
    together = set_prompts(requests())
    texts = answers(engine, monkeypatch, together)
    alone = [answers(engine, monkeypatch, [request])[0] for request in set_prompts(requests())]
    assert texts == alone and len(set(texts[:3])) == 3
    for text in texts[:3]:
        assert set(json.loads(text)) == {"a", "b"}
    for request in together[:3]:
        assert [request.score(index).token for index in range(len(request.tokens))] == request.tokens


def test_masks_are_applied_as_the_reference_does(moe_32):
    source, generator = random.Random(2), np.random.default_rng(2)

    class Mask:
        """A grammar, its own guide, of a fixed mask."""
        is_complete = error = None

        def __init__(self, allowed):
            self.bits = allowed

        def guide(self, ends):
            return self

        def allowed(self, barred):
            bits = np.zeros(288, bool)
            bits[:256] = self.bits
            return np.packbits(bits, bitorder="little").view(np.uint32)
    with opened(moe_32, 64) as engine:
        draws = Draws(engine.library, 256)
    seen = set()
    for _ in range(40):
        logits = np.round(generator.standard_normal((12, 256)) * 4, source.choice([0, 5])).astype(np.float32)
        wanted, expected = [], []
        for row in range(len(logits)):
            allowed = generator.random(256) < source.choice([0.01, 0.3, 0.99])
            allowed[source.randrange(256)] = True
            sampler = Sampler(source.choice([0.0, 1.0, 2.0]), source.choice([0, 1, 5]), source.choice([1.0, 0.5]),
                              source.getrandbits(60), min_p=source.choice([0.0, 0.2]), repetition_penalty=1.3,
                              logit_bias=((source.randrange(256), 50.0),), logprobs=3, grammar=Mask(allowed))
            wanted.append((row, History(sampler, [1, 2, 3], ()), 3))
            changed = reference.changed(logits[row], sampler, [1, 2, 3], [])
            changed[~allowed] = -np.inf
            uniform_draw = draw(sampler.seed, 3) if sampler.temperature else 0
            token = reference.sample(changed, np.float32(sampler.temperature), sampler.top_k,
                                     np.float32(sampler.top_p), uniform_draw, np.float32(sampler.min_p))
            assert allowed[token]
            expected.append(token)
        assert draws.run(logits, wanted, 2) == expected
        seen.update(expected)
        for row, history, _ in wanted:  # of the logits as the model gave them
            score = history.scores[3]
            assert score.logprob == pytest.approx(reference.log_softmax(logits[row])[score.token], abs=1e-5)
    assert len(seen) > 100


def compiled(text, codec=None, vocab_size=256, eos=()):
    made = Grammars(codec or Bytes(), vocab_size, eos)
    return made, made.compile(constraint_of({"grammar": text}))


def tokens_of(mask, size):
    return [token for token in range(size) if mask[token // 32] >> np.uint32(token % 32) & 1]


def test_the_end_is_allowed_only_where_the_grammar_ends():
    tokenizer = KINDS["byte_level"]()
    codec, size = Tokenizer(tokenizer.to_str().encode(), "x"), tokenizer.get_vocab_size()
    stop = tokenizer.token_to_id("a")
    made, grammar = compiled('start: "b" "b"*', codec, size + 7, (1,))
    b = tokenizer.token_to_id("b")
    for ends in ((), (1,), (1, stop)):
        guide = grammar.guide(ends)
        assert not set(ends) & set(tokens_of(guide.allowed(), size + 7))
        guide.add(b)
        allowed = tokens_of(guide.allowed(), size + 7)
        assert set(ends) <= set(allowed) and b in allowed and not guide.is_complete
        assert all(codec.data(token) and set(codec.data(token)) == {ord("b")} for token in allowed if token not in ends)
        assert set(tokens_of(guide.allowed([b]), size + 7)) == set(allowed) - ({b} if len(allowed) > 1 else set())
    guide = grammar.guide((1,))
    guide.add(b)
    everything = tokens_of(guide.allowed(), size + 7)
    assert tokens_of(guide.allowed(everything), size + 7) == everything  # nothing else is left
    made.close()


def test_what_is_never_allowed():
    """Tokens that the model has and its tokenizer has not, and special ones, whose text may stand there otherwise."""
    tokenizer = KINDS["byte_level"]()
    codec, size = Tokenizer(tokenizer.to_str().encode(), "x"), tokenizer.get_vocab_size()
    made, grammar = compiled("start: /(.|\\n)*/", codec, size + 40, (1,))
    allowed = tokens_of(grammar.guide((1,)).allowed(), size + 40)
    assert 0 not in allowed and 1 in allowed and max(allowed) < size and len(allowed) > 150
    made.close()


@pytest.mark.parametrize("constraint", [
    constraints.Constraint('start: "b" mark_0 until_1 "b"', "x", ("<s>", "</s>")),
    constraints.Constraint('start: "b" <s> /(?s:.*)/ </s> "b"', "grammar"),
    constraints.Constraint('start: "b" <[0]> /(?s:.*)/ <[1]> "b"', "grammar")])
def test_special_tokens_in_a_grammar(constraint):
    """Their text, spelled by other tokens, is another thing; without such tokens a mark is its text."""
    tokenizer = KINDS["byte_level"]()
    codec, size = Tokenizer(tokenizer.to_str().encode(), "x"), tokenizer.get_vocab_size()
    made = Grammars(codec, size, (1,))
    guide, b = made.compile(constraint).guide((1,)), tokenizer.token_to_id("b")
    guide.add(b)
    assert tokens_of(guide.allowed(), size) == [0]
    for token in (0, *tokenizer.encode("a</s>", add_special_tokens=False).ids[:1], *tokenizer.encode("b</").ids):
        assert token in tokens_of(guide.allowed(), size)
        guide.add(token)
    guide.add(1)
    guide.add(b)
    assert guide.is_complete and guide.error is None
    made.close()


def test_a_complete_answer_ends_without_another_token(engine):
    made, grammar = compiled('start: "yes" | "no"')
    with engine.session() as session:
        answer = bytes(session.generate(b"It was ", 50, grammar=grammar))
        assert answer in (b"yes", b"no") and session.length == len(b"It was ") + len(answer) - 1
    made.close()


def test_a_gpus_rows_follow_a_grammar(engine, moe_32, made_up):  # noqa: F811
    """The made-up GPU has the host's kernels: masks are applied to what is read back."""
    made, grammar = compiled("start: " + constraints.json_rule(SCHEMA))
    with engine.session() as session:
        expected = bytes(session.generate(b"It was ", 300, temperature=1.0, seed=8, grammar=grammar))
    with Engine(moe_32, backend="cuda", dispatch="dynamic") as gpu, gpu.session() as session:
        assert bytes(session.generate(b"It was ", 300, temperature=1.0, seed=8, grammar=grammar)) == expected
    assert set(json.loads(expected)) == {"a", "b"}
    made.close()


def test_an_answer_goes_on_in_another_session(engine):
    """What is computed again, without drawing, leaves the grammar where it is."""
    made, grammar = compiled("start: " + constraints.json_rule(SCHEMA))

    def run(pauses):
        sampler = Sampler(1.0, seed=11, grammar=grammar)
        history, session, tokens = History(sampler, list(b"It was "), ()), engine.session(), []
        token, = engine.step([(session, history.prompt)], [history])
        while not history.is_over():
            history.add(token)
            tokens.append(token)
            if history.is_over():
                break
            if len(tokens) in pauses:
                session.close()
                session = engine.session()
                engine.step([(session, [*history.prompt, *tokens[:-1]])], [None])
            token, = engine.step([(session, [token])], [history])
        session.close()
        return bytes(tokens)
    assert run(()) == run((1, 5, 12)) and json.loads(run(()))
    made.close()


def test_a_batch_that_fails_keeps_its_grammars(engine, monkeypatch):
    """A step is repeated, each request alone: the masks are those of the first try."""
    reader, failed = Reader(engine), []
    regex = {"syntax": "regex", "definition": "[a-z]{20}"}

    def requests():
        return [request_of(reader, number, grammar=regex, seed=number) for number in range(3)]
    expected = answers(engine, monkeypatch, requests())
    advance = type(engine).advance

    def fails(self, work, samplers):
        found = advance(self, work, samplers)
        if len(work) == 3 and len(failed) < 4:
            failed.append(work)
            for session, tokens in work:
                session.length -= len(tokens)
            raise ColibriError("step", "fails")
        return found
    monkeypatch.setattr(type(engine), "advance", fails)
    assert answers(engine, monkeypatch, requests()) == expected and len(failed) == 4
    assert all(re.fullmatch("[a-z]{20}", text) for text in expected)
    reader.close()


def test_stop_strings_and_lengths_cut_an_answer(reader, monkeypatch):
    made, engine = reader
    grammar = 'start: "abcd" "e"{30}'
    cut, short, bars = (request_of(made, number, grammar=grammar, **fields) for number, fields in enumerate((
        {"stop": "cd"}, {"max_new_tokens": 1}, {"min_tokens": 390, "stop": ["x"]})))
    texts = answers(engine, monkeypatch, [cut, short, bars])
    assert texts[0] == "ab" and cut.finish == "stop"
    assert short.finish == "length" and "abcd".startswith(texts[1][:4])
    assert texts[2] == "abcd" + 30 * "e" and bars.finish == "stop"


def test_a_grammar_without_a_way_on_is_an_error(monkeypatch):
    tokenizer = text_models.word_piece()
    with pytest.raises(ColibriError, match="grammar: given, expected a model whose tokens have the same text"):
        compiled("start: /.*/", Tokenizer(tokenizer.to_str().encode(), "x"), 11)
    tokenizer = KINDS["unigram"]()
    codec = Tokenizer(tokenizer.to_str().encode(), "x")
    made, grammar = compiled('start: "It" "ж"', codec, tokenizer.get_vocab_size())
    guide = grammar.guide(())
    for _ in range(9):
        allowed = tokens_of(guide.allowed(), tokenizer.get_vocab_size())
        if guide.error:
            break
        guide.add(allowed[0])
    assert "no token of the model continues it" in str(guide.error) and not guide.is_complete
    made.close()


@pytest.mark.parametrize("text, words", [
    ("start: foo", 'unknown name: "foo"'), ({"syntax": "regex", "definition": "a("}, "error: unclosed group"),
    ({"syntax": "regex", "definition": "a(?=b)"}, "error: look-around"), ('start: start "a"', "no token of the model"),
    ("".join(f"a{number}: a{number + 1} \"a\"\n" for number in range(3000)).replace("a0:", "start:") + 'a3000: "b"',
     "compiling it: its process ended with SIG"),
    ('start: %json {"type": "integer", "multipleOf": 1000003}', "compiling it: more than 0.5 s of computing")])
def test_grammars_that_do_not_compile(monkeypatch, text, words):
    """And the next one does."""
    monkeypatch.setattr(grammars, "CHECK_SECONDS", 0.5)
    made, _ = compiled('start: "a"')
    with pytest.raises(ColibriError, match=f'grammar: ".*{re.escape(words)}.*", expected what llguidance takes'):
        made.compile(constraint_of({"grammar": text}))
    made.compile(constraint_of({"grammar": 'start: "a"'}))
    made.close()


def test_without_llguidance(engine, monkeypatch):
    def missing():
        raise ImportError
    monkeypatch.setattr(grammars, "package", missing)
    reader = Reader(engine)
    assert request_of(reader, 1).prompt  # needs none
    with pytest.raises(Refused) as error:
        request_of(reader, 1, response_format={"type": "json_object"})
    assert str(error.value) == ("response_format: llguidance is not installed, expected it for answers of a form; run "
                                "pip install llguidance (the extra `grammar`) for the server")
    assert error.value.code == "bad_request"
