"""Where stop strings end a text, and what may be told before that is known: random cases against the whole text."""

import random

import pytest
import text_models

from colibri.requests import Request
from colibri.sampling import Sampler
from colibri.stops import Stops
from colibri.text import Bytes, Codec, Tokenizer

CASES = 5000
ALPHABETS = ("ab", "abc", "ab \n", "aä中", "the cat")


class Table(Codec):
    """Tokens by number: strings, bytes that may be parts of characters, and one without text."""

    def __init__(self, source, alphabet):
        self.tokens = [None, ""]
        for _ in range(12):
            text = "".join(source.choice(alphabet) for _ in range(source.randrange(1, 5)))
            data = text.encode()
            self.tokens += [text, data, data[:source.randrange(len(data)) + 1], data[source.randrange(len(data)):]]

    def data(self, token):
        return self.tokens[token]


def reference(text, strings, is_included=False):
    """(the text that is left, whether a stop string ended it): by the first to be complete, then the longest."""
    found = [(text.find(string) + len(string), -len(string)) for string in strings if string in text]
    if not found:
        return text, False
    end, negative = min(found)
    return text[:end if is_included else end + negative], True


def case(source):
    """(Codec, tokens, their text, stop strings), of which some are of the text."""
    table = Table(source, source.choice(ALPHABETS))
    tokens = [source.randrange(len(table.tokens)) for _ in range(source.randrange(1, 30))]
    text = table.decode(tokens)
    strings = []
    for _ in range(source.randrange(1, 17)):
        start = source.randrange(len(text) + 1)
        part = text[start:start + source.choice([1, 2, 3, 5, 9, 40])]
        other = "".join(source.choice(text or "x") for _ in range(source.randrange(1, 5)))
        strings.append((part + source.choice(["", "", "x", "a"]) if source.random() < 0.7 else other) or "x")
    return table, tokens, text, tuple(strings)


def test_random_cases():
    """Told piece by piece, a text is never ahead of what stays of it."""
    source, ended, held = random.Random(1), 0, 0
    for _ in range(CASES):
        table, tokens, text, strings = case(source)
        is_included = source.random() < 0.3
        expected, is_stopped = reference(text, strings, is_included)
        stops, told, count = Stops(table, (), strings, is_included), "", 0
        for count, token in enumerate(tokens, 1):
            told += stops.add(token)
            assert expected.startswith(told)
            if stops.is_stopped:
                break
            held += told != table.decode(tokens[:count])
        assert stops.is_stopped == is_stopped
        assert told + stops.rest() == expected and stops.rest() == ""
        before = table.decode(tokens[:count - 1])
        assert not is_stopped or reference(before, strings)[1] is False  # at the very token that completed it
        ended += is_stopped
    assert CASES / 3 < ended < CASES * 0.95 and held > CASES


def test_random_requests_streamed_and_not():
    """The same through a Request, whose reader comes when it comes."""
    source = random.Random(2)
    for number in range(CASES):
        table, tokens, text, strings = case(source)
        expected, is_stopped = reference(text, strings)
        request = Request(number, used=table, stop=strings, prompt=[2, 3], stream=number % 2 == 0)
        told = []
        for token in tokens:
            is_over = request.take(token)
            if request.stream and source.random() < 0.6:
                told += request.news()
            if is_over:
                break
        assert is_over == is_stopped
        if request.stream:
            told += request.news()
            assert [token for token, _ in told] == request.tokens == tokens[:len(told)]
            assert "".join(piece for _, piece in told) + request.rest() == expected
        else:
            assert request.text() == expected and request.tokens == tokens[:len(request.tokens)]


def test_where_tokens_end_changes_nothing():
    source = random.Random(3)
    for _ in range(500):
        text = "".join(source.choice("ab c") for _ in range(40))
        strings = tuple("".join(source.choice("ab c") for _ in range(source.randrange(1, 7))) for _ in range(3))
        found = set()
        for _ in range(4):
            codec, tokens = Codec(), []
            while (done := sum(map(len, tokens))) < len(text):
                tokens.append(text[done:done + source.randrange(1, 6)])
            codec.data = lambda token: token
            stops, told = Stops(codec, (), strings), ""
            for token in tokens:
                told += stops.add(token)
                if stops.is_stopped:
                    break
            found.add((told + stops.rest(), stops.is_stopped))
        assert found == {reference(text, strings)}


@pytest.mark.parametrize("text, strings, expected", [
    ("abcdef", ("cd",), "ab"), ("abcdef", ("xy", "ef"), "abcd"), ("abcdef", ("abcdef",), ""),
    ("abcdef", ("g",), "abcdef"),
    ("abcdef", ("bcd", "cd"), "a"), ("abcdef", ("abcd", "b"), "a"), ("aaab", ("aab",), "a"), ("abab", ("abb",), "abab"),
    ("a\n\nHuman: b", ("\n\nHuman:", "\n"), "a"), ("ababac", ("abac",), "ab"), ("中文中", ("中文中",), ""),
    ("hello", ("lo", "hello", "o"), "")])
def test_named_cases(text, strings, expected):
    stops, told = Stops(Bytes(), (), strings), ""
    for byte in text.encode():
        told += stops.add(byte)
        if stops.is_stopped:
            break
    assert told + stops.rest() == expected


def test_the_text_of_the_first_tokens_completes_none():
    """min_tokens: a stop string within them is text; one that begins there and ends later is one."""
    for least, expected in ((0, ""), (1, ""), (2, "ab"), (3, "ab"), (4, "ababa"), (5, "ababa")):
        stops, told = Stops(Bytes(), (), ("ab",), min_tokens=least), ""
        for byte in b"ababa":
            told += stops.add(byte)
            if stops.is_stopped:
                break
        assert told + stops.rest() == expected, least


def test_text_of_a_tokenizer_and_its_special_tokens():
    made = text_models.byte_fallback(["▁the", "▁cat"])
    codec = Tokenizer(made.to_str().encode(), "x.bin")
    the, cat, end = (made.token_to_id(token) for token in ("▁the", "▁cat", "</s>"))
    tokens = [the, cat, end, the]

    def text(used, strings):
        stops = Stops(used, (the,), strings)
        return "".join(map(stops.add, tokens)) + stops.rest()
    assert text(codec, ()) == " the cat the"
    assert text(codec.with_special(), ()) == " the cat</s> the"
    assert codec.with_special().with_special() is codec.with_special() is codec.with_special()
    stops, told = Stops(codec.with_special(), (the,), ("t</s>",)), ""
    for token in tokens[:3]:
        told += stops.add(token)
    assert (told, stops.is_stopped) == (" the ca", True)
    assert [codec.name(token) for token in (the, end, made.token_to_id("<0xE4>"), made.token_to_id("<0x41>"))] == [
        (" the", b" the"), ("</s>", b"</s>"), ("bytes:\\xe4", b"\xe4"), ("A", b"A")]


def test_what_ended_it_may_be_shown():
    made = text_models.byte_fallback(["▁the", "▁cat"])
    codec = Tokenizer(made.to_str().encode(), "x.bin")
    the, cat, end = (made.token_to_id(token) for token in ("▁the", "▁cat", "</s>"))
    for used, ending, includes, expected in (
            (codec, cat, False, " the"), (codec, cat, True, " the cat"), (codec, end, True, " the"),
            (codec.with_special(), end, True, " the</s>"), (codec.with_special(), end, False, " the")):
        for stop in ((), ("eca",)):
            request = Request(1, used=used, prompt=[the], includes_stop=includes, stop=stop, sampler=Sampler())
            request.take(the)
            request.ending = ending
            assert "".join(piece for _, piece in request.news()) + request.rest() == expected
