"""Text in pieces: they add up to the tokenizer's own decode, hold whole characters, and cost the same at any length."""

import random
import re

import pytest
import text_models
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as Made

from colibri.errors import ColibriError
from colibri.text import Bytes, Codec, Numbers, Pieces, Tokenizer

CHARACTERS = [
    *"aeiou st,.'\n", "the ", " and", "nai\u0308ve", "é", "ß", "ŋ", "ђ", "я", "λ", "ж", "ש", "م", "ا", "के", "ஸ்",
    "ខ្ញុំ", "ไ", "한",
    "中", "文", "字", "語", "か", "が", "\u3000", "o\u0302\u0323", "a\u0300\u0301\u0302\u0303", "\u200d", "\u00a0", "▁",
    "  ", "\t",
    "\U00020000", "\U0001f426", "\U0001f468\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466",
    "\U0001f3f3\ufe0f\u200d\U0001f308", "\U0001f1e9\U0001f1ea", "\U0001f1ef\U0001f1f5", "\U0001f44d\U0001f3fd",
    "7\ufe0f\u20e3",
    "\u2019", "\u20ac", "1", "<0x41>", "Ġ", "##"]
TEXTS = 10_000
REPLACED = "\ufffd"


def codec(made, **options):
    return Tokenizer(made.to_str().encode(), "model.bin", **options)


def random_text(generator):
    return "".join(generator.choices(CHARACTERS, k=generator.randint(1, 8)))


def pieces(used, tokens, prompt=()):
    text = Pieces(used, prompt)
    return [*(text.add(token) for token in tokens), text.rest()]


def cut_decode(made, prompt, tokens, splits):
    """The tokenizer's own decode without a character that is cut. splits: whether a token may end within one."""
    text = made.decode(prompt + tokens)
    if splits:
        return text.rstrip(REPLACED)
    while REPLACED in text:  # of a run of bytes that its end makes invalid
        tokens = tokens[:-1]
        text = made.decode(prompt + tokens)
    return text


@pytest.mark.parametrize("kind", ["byte fallback", "byte level", "unigram"])
def test_every_cut_of_random_texts(kind):
    """Half of them go on after a prompt, of which the answer's first token is not the first word."""
    generator = random.Random(kind)
    sample = [random_text(generator) for _ in range(300)]
    made = {"byte fallback": lambda: text_models.byte_fallback(["▁the", "▁and", "st", "中文"]),
            "byte "
            "level": lambda: text_models.byte_level(sample), "unigram": lambda: text_models.unigram(sample)}[kind]()
    used = codec(made)
    for number in range(TEXTS):
        prompt = made.encode(random_text(generator)).ids if number % 2 else []
        tokens = made.encode(random_text(generator)).ids
        before, text = len(made.decode(prompt)), ""
        answer = Pieces(used, prompt)
        for end, token in enumerate(tokens, 1):
            text += answer.add(token)
            assert text == cut_decode(made, prompt, tokens[:end], kind == "byte level")[before:], (prompt, tokens[:end])
        assert text + answer.rest() == answer.text() == made.decode(prompt + tokens)[before:]


@pytest.mark.parametrize("text", ["\U0001f426" * 64, "中" * 200 + "é", "ខ្ញុំស្រឡាញ់ភាសាខ្មែរ" * 5, "\ufffd" * 30 + "a",
                                  " \u0301" * 9],
                         ids=lambda text: f"{len(text)} characters")
def test_long_runs_of_byte_tokens(text):
    made = text_models.byte_fallback()
    tokens = made.encode(text).ids
    got = pieces(codec(made), tokens)
    assert "".join(got) == made.decode(tokens) == text
    assert all(len(piece) <= 1 for piece in got)


def by_hand(made, tokens):
    """What README promises of byte tokens that are no UTF-8: U+FFFD for each, whole characters among them as such."""
    data = [made.id_to_token(token) for token in tokens if made.id_to_token(token) not in text_models.SPECIAL]
    raw = b"".join(bytes.fromhex(string[3:5]) if re.fullmatch("<0x..>", string) else string.replace("▁", " ").encode()
                   for string in data)
    return re.sub("[\udc80-\udcff]", REPLACED, raw.decode("utf-8", "surrogateescape")).removeprefix(" ")


@pytest.mark.parametrize("seed", range(50))
def test_byte_tokens_that_are_no_utf8(seed):
    made = text_models.byte_fallback(["▁the"])
    generator = random.Random(seed)
    likely = [*range(3, 259), *(made.token_to_id(f"<0x{byte:02X}>") for byte in "中é\U0001f426".encode() * 20),
              *[made.token_to_id("▁the")] * 20, 1]
    tokens = [*generator.choices(likely, k=200), made.token_to_id("▁the")]
    assert "".join(pieces(codec(made), tokens)) == by_hand(made, tokens)


def test_what_later_bytes_do_not_change():
    made = text_models.byte_fallback(["▁the"])
    token = {byte: made.token_to_id(f"<0x{byte:02X}>") for byte in range(256)}
    e4, b8, ad = (token[byte] for byte in "中".encode())
    assert pieces(codec(made), [e4, b8, ad, e4, b8, e4, b8, ad]) == ["", "", "中", "", "", REPLACED * 2, "", "中", ""]
    assert pieces(codec(made), [ad, e4, made.token_to_id("▁the")]) == [REPLACED, "", f"{REPLACED} the", ""]
    assert pieces(codec(made), [token[0xed], token[0xa0], token[0x80]]) == ["", "", REPLACED * 3, ""]
    assert pieces(codec(made), [e4, 1, b8, ad]) == ["", "", "", "中", ""]  # a special token has no text
    assert pieces(codec(made), [*(token[byte] for byte in REPLACED.encode()), e4, b8]) == ["", "", REPLACED, "", "", ""]
    assert pieces(codec(made), [e4, 10 ** 6, b8, ad]) == ["", "", "", "中", ""]  # nor has one that is not there


@pytest.mark.parametrize("seed", range(50))
def test_random_tokens_of_byte_level_and_unigram(seed):
    generator = random.Random(seed)
    sample = [random_text(generator) for _ in range(50)]
    for made in (text_models.byte_level(sample, 400), text_models.unigram(sample)):
        tokens = [generator.randrange(made.get_vocab_size()) for _ in range(200)] + [made.token_to_id("a")]
        assert "".join(pieces(codec(made), tokens)) == made.decode(tokens)


def test_added_tokens_among_bytes():
    """Whose text is not in the alphabet of byte-level BPE, or begins within a character."""
    made = text_models.byte_level(["中文"], 260)
    made.add_tokens(["<中>", "two words", "é"])
    made.add_special_tokens(["<end>"])
    tokens = made.encode("中<中>文two words<end>文").ids
    assert "".join(pieces(codec(made), tokens)) == made.decode(tokens) == "中<中>文two words文"
    for end in range(len(tokens)):
        cut = [*tokens[:end], made.token_to_id("<中>"), made.token_to_id("é"), made.token_to_id("a")]
        assert "".join(pieces(codec(made), cut)) == made.decode(cut)


@pytest.mark.parametrize("seed", range(20))
def test_decoders_of_words(seed):
    """WordPiece, BPE with a suffix, words without a decoder, and Metaspace of each scheme: after any prompt."""
    suffixed = Made(models.BPE({"lo": 0, "w</w>": 1, "er</w>": 2, "</w>": 3, "a": 4}, []))
    suffixed.decoder = decoders.BPEDecoder()
    words = Made(models.WordLevel({"it": 0, "is": 1, "so": 2}, unk_token="it"))
    made = [text_models.word_piece(), suffixed, words]
    for scheme in ("always", "never", "first"):
        made.append(Made(models.WordLevel({"▁": 0, "▁a": 1, "b▁": 2, "▁▁▁": 3, "c": 4}, unk_token="c")))
        made[-1].decoder = decoders.Metaspace(prepend_scheme=scheme)
    generator = random.Random(seed)
    for each in made:
        tokens = generator.choices(range(each.get_vocab_size()), k=60)
        for start in (0, 1, 2, 3, 30):
            before = each.decode(tokens[:start])
            got = pieces(codec(each), tokens[start:], tokens[:start])
            assert before + "".join(got) == each.decode(tokens), (each.decoder, tokens, start)


class Contracting(Codec):
    """Decoded with a clean-up: "it ' s" becomes "it's", which changes what was there before."""

    def data(self, token):
        return ("it", "'", "s", "so")[token]

    def join(self, strings):
        return " ".join(strings).replace(" ' s", "'s")


def test_text_that_a_decoder_changes_afterwards():
    assert pieces(Contracting(), [0, 1, 2, 3, 0]) == ["it", " '", "s", " so", " it", ""]  # what was shown stays


def test_numbers_and_bytes():
    assert "".join(pieces(Numbers(500), range(100), [7, 8])) == Numbers(500).decode(range(100))
    assert Numbers(500).decode([1, 22]) == "1 22"
    data = "a\u20ac\U0001f426".encode() + b"\xff\xe2A\xe2\x82"
    got = pieces(Bytes(), data)
    assert got == ["a", "", "", "\u20ac", "", "", "", "\U0001f426", "\ufffd", "", "\ufffdA", "", "", ""]
    assert Bytes().decode(data) == data[:-2].decode(errors="replace")
    assert pieces(Bytes(), b"\xac!", b"x\xe2\x82") == ["\u20ac", "!", ""]  # of a prompt that ends within a character


def test_the_cost_of_a_token_does_not_grow():
    used = codec(text_models.byte_fallback(["▁the"]))
    joined, join = [], used.join
    used.join = lambda strings: (joined.append(len(strings)), join(strings))[1]
    text, generator = Pieces(used, [1] * 5000), random.Random(0)
    for _ in range(5000):
        text.add(generator.randrange(3, used.encode(b"the")[-1] + 1))
    assert sum(joined) < 5000 * 30 and max(joined) < 20


# Prompts

def encode(made, text, special=True, **options):
    return codec(made, **options).encode(text.encode(), "prompt", special)


def test_truncation_and_padding_are_off():
    made = text_models.byte_fallback(["▁the"])
    plain = made.encode("the the the the").ids
    made.enable_truncation(2)
    made.enable_padding(length=16, pad_id=2, pad_token="</s>")
    assert encode(made, "the the the the") == plain and len(plain) == 4


def test_a_prompt_begins_with_bos_once():
    """By tokenizer.json, by the model's header or by the text itself."""
    plain, adds = text_models.byte_fallback(["▁the"]), text_models.byte_fallback(["▁the"], adds_bos=True)
    the = plain.token_to_id("▁the")
    for made, bos in ((adds, None), (adds, 1), (plain, 1)):
        assert encode(made, "the", bos=bos) == encode(made, "<s>the", bos=bos) == [1, the]
        assert encode(made, "the<s>", bos=bos) == [1, the, 1]
        assert encode(made, "", bos=bos) == [1]
        assert encode(made, "the", False, bos=bos) == [the]
        assert encode(made, "<s>the", False, bos=bos) == [1, the]
    assert encode(plain, "the") == [the] and encode(plain, "<s>the") == [1, the]
    plain.post_processor = processors.TemplateProcessing(single="</s> <s> $A "
                                                                "</s>", special_tokens=[("<s>", 1), ("</s>", 2)])
    for bos in (None, 1, 2):
        assert encode(plain, "the", bos=bos) == [2, 1, the, 2]
        assert encode(plain, "</s><s>the", bos=bos) == [2, 1, the, 2]
    assert encode(text_models.word_piece(), "playing") == [1, 3, 4, 2]


def test_prompts_that_the_tokenizer_or_the_model_does_not_take():
    made = text_models.byte_fallback()
    made.add_tokens([AddedToken("<image>", normalized=False)])
    last = made.token_to_id("<image>")
    assert encode(made, "a<image>", vocab_size=last + 1)[-1] == last
    with pytest.raises(ColibriError) as error:
        encode(made, "a<image>b", vocab_size=last)
    assert str(error.value) == (f"prompt: token '<image>' is {last}, expected 0 to {last - 1}, which the model has; "
                                f"leave "
                                "it out")
    words = Made(models.WordLevel({"a": 0}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    with pytest.raises(ColibriError) as error:
        encode(words, "a b")
    assert str(error.value) == ("prompt: WordLevel error: Missing [UNK] token from the vocabulary, expected text "
                                "that the model's tokenizer takes; change it")
    with pytest.raises(ColibriError, match="^--prompt: not UTF-8, expected text; convert it first$"):
        codec(made).encode(b"\xff")
