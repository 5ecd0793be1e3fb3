"""Text to tokens and back: bytes where a token is one, the tokenizer in the model's file, or numbers as they are."""

import codecs
import copy
import functools
import itertools
import json
import math
import os
import re

from colibri.errors import ColibriError

DROPPED_BYTES = 16  # that a token may stand for where its vocabulary is short: blanks that are dropped, unknown words
CHANGING = {"WordPiece", "BPEDecoder", "CTC"}  # decoders by which a token's text depends on its neighbours
CONTEXT = 8  # tokens of a prompt, the last with text, after which an answer's text is read
BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")  # a token of byte fallback
PLAIN = {*range(33, 127), *range(161, 173), *range(174, 256)}  # bytes that byte-level BPE writes as their own character
ALPHABET = [chr(byte if byte in PLAIN else 256 + sum(other not in PLAIN for other in range(byte)))
            for byte in range(256)]
BYTES = {character: byte for byte, character in enumerate(ALPHABET)}

codecs.register_error("colibri.each", lambda error: ("\ufffd" * (error.end - error.start), error.end))


class Codec:
    """Says what tokens stand for. A subclass has encode(text) and data(token), and its own join() where strings have
    more between them than nothing.
    """

    unit = "token"
    errors = "replace"  # how codecs read bytes that are no UTF-8
    is_continued = True  # by an answer: its text is read after the prompt's
    is_uniform = True  # a token has the same text wherever it stands within one
    hidden = frozenset()  # tokens whose text is not for people
    longest = 1      # bytes of text that a token stands for at most
    most = math.inf  # tokens that are wanted at most

    def count(self, tokens):
        """Returns "1 byte", "17 tokens"."""
        return f"{len(tokens)} {self.unit}" + ("s" if len(tokens) != 1 else "")

    def encode(self, text, where, special=True):
        """Returns the tokens of a text in bytes. where: its name in errors. special: with what begins a prompt."""
        raise NotImplementedError

    def data(self, token):
        """Returns bytes of UTF-8, a string for join(), or None for a token without text."""
        raise NotImplementedError

    def spell(self, text):
        """Returns whole characters as a tuple of strings for join()."""
        return (text,)

    def join(self, strings):
        """Returns the text of a tuple of strings."""
        return "".join(strings)

    def decode(self, tokens):
        """Returns the text of tokens that begin a text."""
        return "".join(map(Pieces(self).add, tokens))

    def with_special(self):
        """Returns a Codec of the same for which special tokens have text."""
        return self

    def with_marks(self):
        """Returns a Codec for which special tokens have text, and are hidden."""
        return self

    def name(self, token):
        """Returns (a token's text within a text, its bytes); `bytes:\\xe4` where those are no whole characters."""
        data = self.with_special().data(token)
        if data is None:
            return "", b""
        if isinstance(data, str):
            text = self.join(("a", data)).removeprefix(self.join(("a",)))
            return text, text.encode()
        try:
            return data.decode(), data
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data), data


class Bytes(Codec):
    """A vocabulary of the 256 bytes."""

    unit = "byte"

    def encode(self, text, where="--prompt", special=True):
        return list(text)

    def data(self, token):
        return bytes((token,))


class Numbers(Codec):
    """Tokens as numbers, 17 4 25 or 17,4,25."""

    is_continued = False

    def __init__(self, vocab_size):
        self._vocab_size = vocab_size

    def encode(self, text, where="--prompt-ids", special=True):
        words = re.split(r"\s*,\s*|\s+", text.decode("utf-8", "replace").strip())
        if not all(re.fullmatch(r"\d{1,9}", word) for word in words):
            wrong = next(word for word in words if not re.fullmatch(r"\d{1,9}", word))
            raise ColibriError(where, repr(wrong[:40]), "token numbers such as 17,4,25")
        tokens = [int(word) for word in words]
        if max(tokens) >= self._vocab_size:
            raise ColibriError(where, max(tokens), f"0 to {self._vocab_size - 1}")
        return tokens

    def data(self, token):
        return str(token)

    def join(self, strings):
        return " ".join(strings)


class Tokenizer(Codec):
    """A tokenizer.json, through the package tokenizers.

    Of a text of more than `most` tokens encode() tells only how many there are: range(number).

    vocab_size: of the model. bos: the token that begins a prompt even where tokenizer.json does not put it there.
    """

    def __init__(self, data, path, vocab_size=math.inf, bos=None):
        try:
            os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # a text at a time needs no more threads
            import tokenizers
        except ImportError:
            raise ColibriError("tokenizers", "not installed",
                               "it for the text of this model",
                               "run pip install tokenizers (the extra `text`); a text run with --prompt-ids does "
                               "without") from None
        try:
            self._tokenizer = tokenizers.Tokenizer.from_buffer(data)
        except Exception as error:  # noqa: BLE001 - the package raises Exception itself
            raise ColibriError(path, f"tokenizer: {str(error)[:100]}", "a tokenizer.json that the package reads",
                               "convert again with a good one") from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._vocab_size, self._bos = vocab_size, bos
        added = self._tokenizer.get_added_tokens_decoder()
        self._special = {token for token, what in added.items() if what.special}
        decoder = self._tokenizer.decoder
        kinds = _kinds(json.loads(decoder.__getstate__())) if decoder else ()
        self.is_uniform = not CHANGING & set(kinds)
        self._has_bytes, self._has_fallback = "ByteLevel" in kinds, "ByteFallback" in kinds
        self.errors = "colibri.each" if self._has_fallback else "replace"
        self.join = decoder.decode if decoder else " ".join
        self.data = functools.cache(self._data)
        self.longest = max([DROPPED_BYTES, *(len(word.encode()) for word in self._tokenizer.get_vocab())])

    def encode(self, text, where="--prompt", special=True):
        try:
            found = self._encoding(text.decode(), special)
        except UnicodeDecodeError:
            raise ColibriError(where, "not UTF-8", "text", "convert it first") from None
        except Exception as error:  # noqa: BLE001 - the package raises Exception itself
            raise ColibriError(where, str(error)[:100], "text that the model's tokenizer takes",
                               "change it") from None
        if len(found) > self.most:
            return range(len(found))
        tokens = self._begun(found.ids, found.special_tokens_mask) if special else found.ids
        wrong = next((token for token in tokens if token >= self._vocab_size), None)
        if wrong is not None:
            raise ColibriError(where, f"token {self._tokenizer.id_to_token(wrong)[:40]!r} is {wrong}",
                               f"0 to {self._vocab_size - 1}, which the model has", "leave it out")
        return tokens

    def _encoding(self, text, special):
        """Returns the package's Encoding of a text, while other threads run: encode() would hold Python's lock."""
        return self._tokenizer.encode_batch_fast([text], add_special_tokens=special)[0]

    def _begun(self, tokens, mask):
        """Returns a prompt's tokens with BOS, and with what begins it once where the text begins with that, too.

        mask: 1 for each token that tokenizer.json's post-processor added.
        """
        count = len(list(itertools.takewhile(bool, mask)))
        begin, rest = tokens[:count], tokens[count:]
        if self._bos is not None and self._bos not in begin:
            begin = [self._bos, *begin]
        return rest if rest[:len(begin)] == begin else begin + rest

    def with_special(self):
        return self._with_special

    @functools.cached_property
    def _with_special(self):
        other = copy.copy(self)
        other._special, other._with_special = frozenset(), other
        other.data = functools.cache(other._data)
        return other

    @functools.cached_property
    def _with_marks(self):
        other = copy.copy(self.with_special())
        other.hidden, other._with_marks = self._special, other
        return other

    def with_marks(self):
        return self._with_marks

    def _data(self, token):
        string = self._tokenizer.id_to_token(token)
        if string is None or token in self._special:
            return None
        if self._has_bytes and all(character in BYTES for character in string):
            return bytes(BYTES[character] for character in string)
        if self._has_fallback and (byte := BYTE.fullmatch(string)):
            return bytes.fromhex(byte[1])
        return string

    def spell(self, text):
        if self._has_bytes:
            return ("".join(ALPHABET[byte] for byte in text.encode()),)
        return tuple(f"<0x{byte:02X}>" for byte in text.encode())


def _kinds(decoder):
    """Returns the types of the decoders in tokenizer.json's `decoder`."""
    return {decoder["type"]}.union(*map(_kinds, decoder.get("decoders", ())))


def codec(checkpoint, is_numbers):
    """Returns the Codec that a model's prompts take. is_numbers: of --prompt-ids, not of --prompt."""
    vocab_size = checkpoint.header["vocab_size"]
    if vocab_size == 0:
        raise ColibriError(checkpoint.path, "vocab_size=0", "tokens for a prompt",
                           "this is a bare stack of MoE layers, use --input, or a latency run")
    if is_numbers:
        return Numbers(vocab_size)
    if checkpoint.tokenizer:
        return Tokenizer(checkpoint.tokenizer, checkpoint.path, vocab_size, checkpoint.bos)
    if vocab_size != 256:
        raise ColibriError(checkpoint.path, f"vocab_size={vocab_size} and no tokenizer",
                           "256 for --prompt, where a token is a byte",
                           "give --prompt-ids, or convert a folder that has tokenizer.json")
    return Bytes()


class Pieces:
    """The text of an answer, token by token.

    A piece holds whole characters and stays as it is, whatever comes. All pieces together are the answer's text: what
    the tokens of prompt and answer read as together, after the prompt's text, without the bytes at the end of a
    character that is not complete. Other bytes that are no UTF-8 read as U+FFFD: each byte where they are tokens of
    byte fallback, else as the Unicode standard has it. Whole characters among them stay.

    A tokenizer's decoder may take the blank away from a text's first word, and otherwise looks at neighbours at most.
    So a token is decoded after two others: the first of the text, and the one before it.
    """

    def __init__(self, used, prompt=()):
        self._codec, self._shown = used, []
        self._utf8 = codecs.getincrementaldecoder("utf-8")(used.errors)
        self._first = self._last = ()  # strings: those up to the first that has text, and those of the token before
        with_text = (token for token in reversed(prompt) if used.is_continued and used.data(token) is not None)
        for token in reversed(list(itertools.islice(with_text, CONTEXT))):
            self.add(token)
        self._shown.clear()

    def add(self, token):
        """Returns the text that a token adds, "" within a character."""
        data = self._codec.data(token)
        if data is None:
            return ""
        is_string = isinstance(data, str)
        text = self._utf8.decode(b"" if is_string else data, final=is_string)
        piece = self._next(self._codec.spell(text)) if text else ""
        if is_string:
            piece += self._next((data,))
        self._shown.append(piece)
        return piece

    def _next(self, strings):
        """Returns what strings add to the text of those before them."""
        codec, before = self._codec, self._first + self._last
        text, longer = codec.join(before), codec.join(before + strings)
        if text:
            self._last = strings
        else:
            self._first += strings
        return longer[len(text):] if longer.startswith(text) else codec.join(strings)

    def rest(self):
        """Returns what add() kept back and the answer's end makes text of: nothing of a character that it cuts."""
        return ""

    def text(self):
        """Returns all pieces."""
        return "".join(self._shown)
