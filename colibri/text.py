"""Text to tokens and back: bytes where a token is one, the tokenizer in the model's file, or token numbers as they are."""

import re

from colibri.errors import ColibriError


class Codec:
    unit = "token"

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
    """Tokens as numbers, 17 4 256 or 17,4,256."""

    def encode(self, text):
        words = re.split(r"[\s,]+", text.decode("utf-8", "replace").strip())
        if not all(re.fullmatch(r"\d{1,9}", word) for word in words):
            wrong = next(word for word in words if not re.fullmatch(r"\d{1,9}", word))
            raise ColibriError(f"--prompt-ids: {wrong[:40]!r}, expected token numbers such as 17,4,256")
        return [int(word) for word in words]

    def decode(self, tokens):
        return " ".join(map(str, tokens)).encode()


class Tokenizer(Codec):
    """A tokenizer.json, through the package tokenizers."""

    def __init__(self, data, path):
        try:
            import tokenizers
        except ImportError:
            raise ColibriError("tokenizers: not installed, expected it for --prompt with this model; run "
                               "pip install tokenizers (the extra `text`), or give --prompt-ids") from None
        try:
            self._tokenizer = tokenizers.Tokenizer.from_buffer(data)
        except Exception as error:  # noqa: BLE001 - the package raises Exception itself
            raise ColibriError(f"{path}: tokenizer: {str(error)[:100]}, expected a tokenizer.json that the package reads; "
                               "convert again with a good one") from None

    def encode(self, text):
        try:
            return self._tokenizer.encode(text.decode()).ids
        except UnicodeDecodeError:
            raise ColibriError("--prompt: not UTF-8, expected text; convert it first") from None

    def decode(self, tokens):
        return self._tokenizer.decode(tokens).encode()


def codec(checkpoint, is_numbers):
    """The one that a model's prompts take. is_numbers: of --prompt-ids, not of --prompt."""
    vocab_size = checkpoint.header["vocab_size"]
    if vocab_size == 0:
        raise ColibriError(f"{checkpoint.path}: vocab_size=0, expected tokens for a prompt; this is a bare stack of MoE "
                           "layers, use --input, or a latency run")
    if is_numbers:
        return Numbers()
    if checkpoint.tokenizer:
        return Tokenizer(checkpoint.tokenizer, checkpoint.path)
    if vocab_size != 256:
        raise ColibriError(f"{checkpoint.path}: vocab_size={vocab_size} and no tokenizer, expected 256 for --prompt, where "
                           "a token is a byte; give --prompt-ids, or convert a folder that has tokenizer.json")
    return Bytes()


class Stream:
    """The text of tokens that come one after another, in pieces that never end within a character."""

    def __init__(self, used):
        self._codec, self._tokens, self._shown = used, [], b""

    def __len__(self):
        return len(self._tokens)

    def add(self, token):
        """What there is to show of the text now that it has this token, bytes."""
        self._tokens.append(token)
        text = self._codec.decode(self._tokens)
        if not text.startswith(self._shown) or (text.endswith("\ufffd".encode()) and self._codec.unit != "byte"):
            return b""
        piece, self._shown = text[len(self._shown):], text
        return piece

    def rest(self):
        """What add() kept back."""
        return self._codec.decode(self._tokens)[len(self._shown):]

    def text(self):
        return self._codec.decode(self._tokens).decode(errors="replace")
