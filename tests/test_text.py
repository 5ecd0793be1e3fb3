"""Text in pieces: they add up to the whole, never end within a character, and cost the same for any length of text."""

import random

import pytest

from colibri.text import REPLACEMENT, WINDOW, Bytes, Codec, Numbers, Pieces, Stream


class ByteLevel(Codec):
    """Tokens of some bytes each, decoded together, as byte-level BPE does; None is a token without text."""

    def __init__(self, tokens):
        self.tokens, self.decoded = tokens, 0

    def decode(self, tokens):
        self.decoded += len(tokens)
        return b"".join(self.tokens[token] or b"" for token in tokens).decode(errors="replace").encode()


class Words(Codec):
    """Words that bring the blank before them, which a text's first word loses, as in SentencePiece; 0 has no text."""

    def decode(self, tokens):
        return "".join(f" w{token}" for token in tokens if token).removeprefix(" ").encode()


class Contracting(Codec):
    """Decoded with a clean-up: "it ' s" becomes "it's", which changes what was there before."""

    def decode(self, tokens):
        return " ".join(("it", "'", "s", "so")[token] for token in tokens).replace(" ' ", "'").encode()


def pieces(codec, tokens):
    stream = Stream(codec)
    return [*(stream.add(token) for token in tokens), stream.rest()]


TEXT = "na\xefve \u20ac5 \U0001f426\u200d\U0001f33a caf\xe9s \u4f60\u597d, " * 20


def cut(data, seed, longest=3):
    """The bytes as tokens at random places."""
    generator, tokens = random.Random(seed), []
    while data:
        count = generator.randint(1, longest)
        tokens.append(data[:count])
        data = data[count:]
        if not generator.randrange(6):
            tokens.append(None)
    return tokens


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("damage", [0, 3])
def test_pieces_of_byte_level_tokens(seed, damage):
    """With damage, bytes that are no UTF-8 stand among them."""
    data = bytearray(TEXT.encode())
    generator = random.Random(seed)
    for _ in range(damage * 10):
        data[generator.randrange(len(data))] = generator.randrange(256)
    tokens = cut(bytes(data), seed, 1 + seed % 4)
    codec = ByteLevel(tokens)
    got = pieces(codec, range(len(tokens)))
    whole = codec.decode(range(len(tokens)))
    assert b"".join(got) == whole
    if not damage:
        assert REPLACEMENT not in b"".join(got)
        for piece in got:
            piece.decode()


def test_endless_bytes_of_no_character():
    tokens = [b"\x80"] * 300 + [b"\xe2", b"\x82", b"\xac"]
    codec = ByteLevel(tokens)
    got = pieces(codec, range(len(tokens)))
    assert b"".join(got) == REPLACEMENT * 300 + "\u20ac".encode()
    assert got[200] == REPLACEMENT  # shown as they come, but for the last three


def test_a_character_is_shown_as_soon_as_it_is_whole():
    tokens = [b"a", b"\xe2", b"\x82", b"\xac", b"\xf0\x9f", b"\x90\xa6", b"!"]
    assert pieces(ByteLevel(tokens), range(7)) == [b"a", b"", b"", "\u20ac".encode(), b"", "\U0001f426".encode(), b"!",
                                                   b""]
    assert pieces(ByteLevel(tokens), range(3)) == [b"a", b"", b"", REPLACEMENT]  # of an end within one


@pytest.mark.parametrize("seed", range(10))
def test_the_blank_before_a_word(seed):
    generator = random.Random(seed)
    tokens = [generator.choice((0, 0, 1, 22, 333)) for _ in range(200)]
    assert b"".join(pieces(Words(), tokens)) == Words().decode(tokens)


def test_a_long_run_of_tokens_without_text():
    tokens = [1, 2] + [0] * 5 * WINDOW + [3, 4] + [0] * 3 * WINDOW + [5]
    assert b"".join(pieces(Words(), tokens)) == b"w1 w2 w3 w4 w5"


def test_text_that_changes_afterwards():
    tokens = [0, 1, 2, 3, 0, 1, 2, 3]
    assert b"".join(pieces(Contracting(), tokens)).startswith(b"it '")  # what was shown stays
    assert pieces(Contracting(), [3, 3, 0]) == [b"so", b" so", b" it", b""]


def test_numbers_and_bytes():
    assert b"".join(pieces(Numbers(500), range(100))) == Numbers(500).decode(range(100))
    assert pieces(Bytes(), "\u20ac".encode()) == [b"\xe2", b"\x82", b"\xac", b""]


def test_the_time_of_a_token_does_not_grow():
    tokens = [b"word "] * 5000
    codec = ByteLevel(tokens)
    stream = Stream(codec)
    for token in range(5000):
        stream.add(token)
    assert codec.decoded < 5000 * 2.5 * WINDOW


def test_pieces_of_bytes_as_str():
    data = "a\u20ac\U0001f426".encode() + b"\xff\xe2"
    text = Pieces(Bytes())
    got = [text.add(byte) for byte in data] + [text.rest()]
    assert got == ["a", "", "", "\u20ac", "", "", "", "\U0001f426", "\ufffd", "", "\ufffd"]
    assert "".join(got) == data.decode(errors="replace")


@pytest.mark.parametrize("kind", ["ByteLevel", "Metaspace"])
def test_pieces_of_a_real_tokenizer(kind):
    tokenizers = pytest.importorskip("tokenizers")
    from colibri.text import Tokenizer
    made = tokenizers.Tokenizer(tokenizers.models.BPE(byte_fallback=kind == "Metaspace"))
    made.pre_tokenizer = getattr(tokenizers.pre_tokenizers, kind)()
    made.decoder = getattr(tokenizers.decoders, kind)()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet() if kind == "ByteLevel" else []
    made.train_from_iterator([TEXT], tokenizers.trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet))
    codec = Tokenizer(made.to_str().encode(), "model.bin")
    tokens = codec.encode(TEXT.encode())
    assert b"".join(pieces(codec, tokens)) == codec.decode(tokens)
    generator = random.Random(0)
    tokens = [generator.randrange(made.get_vocab_size()) for _ in range(500)]
    assert b"".join(pieces(codec, tokens)) == codec.decode(tokens)
