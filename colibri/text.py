"""Text to tokens and back: bytes where a token is one, the tokenizer in the model's file, or numbers as they are."""

import codecs
import math
import os
import re

from colibri.errors import ColibriError

DROPPED_BYTES = 16  # that a token may stand for where its vocabulary is short: blanks that are dropped, unknown words
WINDOW = 8  # tokens, more than the bytes of a character
REPLACEMENT = "\ufffd".encode()


class Codec:
    unit = "token"
    longest = 1      # bytes of text that a token stands for at most
    most = math.inf  # tokens that are wanted at most

    def count(self, tokens):
        """"1 byte", "17 tokens"."""
        return f"{len(tokens)} {self.unit}" + ("s" if len(tokens) != 1 else "")


class Bytes(Codec):
    """A vocabulary of the 256 bytes."""

    unit = "byte"

    def encode(self, text):
        return list(text)

    def decode(self, tokens):
        return bytes(tokens)


class Numbers(Codec):
    """Tokens as numbers, 17 4 25 or 17,4,25."""

    def __init__(self, vocab_size):
        self._vocab_size = vocab_size

    def encode(self, text):
        words = re.split(r"\s*,\s*|\s+", text.decode("utf-8", "replace").strip())
        if not all(re.fullmatch(r"\d{1,9}", word) for word in words):
            wrong = next(word for word in words if not re.fullmatch(r"\d{1,9}", word))
            raise ColibriError(f"--prompt-ids: {wrong[:40]!r}, expected token numbers such as 17,4,25")
        tokens = [int(word) for word in words]
        if max(tokens) >= self._vocab_size:
            raise ColibriError(f"--prompt-ids: {max(tokens)}, expected 0 to {self._vocab_size - 1}")
        return tokens

    def decode(self, tokens):
        return " ".join(map(str, tokens)).encode()


class Tokenizer(Codec):
    """A tokenizer.json, through the package tokenizers.

    Of a text of more than `most` tokens encode() tells only how many there are: range(number).
    """

    def __init__(self, data, path):
        try:
            os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # a text at a time needs no more threads
            import tokenizers
        except ImportError:
            raise ColibriError("tokenizers: not installed, expected it for --prompt with this model; run "
                               "pip install tokenizers (the extra `text`), or give --prompt-ids") from None
        try:
            self._tokenizer = tokenizers.Tokenizer.from_buffer(data)
        except Exception as error:  # noqa: BLE001 - the package raises Exception itself
            raise ColibriError(f"{path}: tokenizer: {str(error)[:100]}, expected a tokenizer.json that the package "
                               "reads; convert again with a good one") from None
        self.longest = max([DROPPED_BYTES, *(len(word.encode()) for word in self._tokenizer.get_vocab())])

    def encode(self, text):
        try:
            found = self._encoding(text.decode())
            return found.ids if len(found) <= self.most else range(len(found))
        except UnicodeDecodeError:
            raise ColibriError("--prompt: not UTF-8, expected text; convert it first") from None

    def _encoding(self, text):
        """The package's, made while other threads run: encode() would hold Python's lock, this does not."""
        return self._tokenizer.encode_batch_fast([text])[0]

    def decode(self, tokens):
        return self._tokenizer.decode(tokens).encode()


def codec(checkpoint, is_numbers):
    """The one that a model's prompts take. is_numbers: of --prompt-ids, not of --prompt."""
    vocab_size = checkpoint.header["vocab_size"]
    if vocab_size == 0:
        raise ColibriError(f"{checkpoint.path}: vocab_size=0, expected tokens for a prompt; this is a bare stack of "
                           "MoE layers, use --input, or a latency run")
    if is_numbers:
        return Numbers(vocab_size)
    if checkpoint.tokenizer:
        return Tokenizer(checkpoint.tokenizer, checkpoint.path)
    if vocab_size != 256:
        raise ColibriError(f"{checkpoint.path}: vocab_size={vocab_size} and no tokenizer, expected 256 for --prompt, "
                           "where a token is a byte; give --prompt-ids, or convert a folder that has tokenizer.json")
    return Bytes()


class Stream:
    """The text of tokens that come one after another, in pieces that never end within a character.

    Only the last tokens are decoded at each step. The window reaches back to tokens whose text is shown, since the same
    token may read otherwise at the beginning of a text: a tokenizer takes the space before its first word away.
    """

    def __init__(self, used):
        self._codec, self._tokens = used, []
        self._start, self._shown = 0, b""  # the window's first token, and its text as far as it was shown

    def __len__(self):
        return len(self._tokens)

    def add(self, token):
        """What there is to show of the text now that it has this token, bytes."""
        self._tokens.append(token)
        text = self._codec.decode(self._tokens[self._start:])
        safe = text if self._codec.unit == "byte" else _complete(text)
        if not safe.startswith(self._shown):
            return b""  # a later token changed the text before it: wait until both agree again, or for the end
        piece, self._shown = safe[len(self._shown):], safe
        if len(self._tokens) - self._start >= 2 * WINDOW:
            self._move(len(self._tokens) - WINDOW, len(text) - len(safe))
        return piece

    def _move(self, start, held):
        """Begins the window later, where its text still ends alike: in something shown, then the bytes held back."""
        text = self._codec.decode(self._tokens[start:])
        if len(text) > held:
            self._start, self._shown = start, text[:len(text) - held]

    def rest(self):
        """What add() kept back."""
        return self._codec.decode(self._tokens[self._start:])[len(self._shown):]

    def text(self):
        return self._codec.decode(self._tokens).decode(errors="replace")


class Pieces:
    """The same as str, also where a token is a byte: what is no UTF-8 reads as in text()."""

    def __init__(self, used):
        self._stream, self._decoder = Stream(used), codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, token):
        return self._decoder.decode(self._stream.add(token))

    def rest(self):
        return self._decoder.decode(self._stream.rest(), final=True)


def _complete(text):
    """The text without the replacement characters at its end that may yet become one character, of up to 4 bytes."""
    for _ in range(3):
        text = text.removesuffix(REPLACEMENT)
    return text
