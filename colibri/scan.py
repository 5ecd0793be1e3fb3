"""Text that comes in pieces, read by generators, which wait where what they look for may still come."""

import json
import math
import re

MAX_DEPTH = 100  # of lists and objects within each other in an answer's JSON
BLANKS = re.compile(r"[ \t\r\n]*")
STRING = re.compile(r'(?:[^"\\\x00-\x1f]+|\\["\\/bfnrt]|\\u[0-9A-Fa-f]{4})*')  # between its quotes
ESCAPE = re.compile(r"\\(?:u[0-9A-Fa-f]{0,3})?")  # that is not whole yet
WORD = re.compile(r"[-+.0-9A-Za-z]*")
NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
CONSTANTS = ("true", "false", "null")


class Malformed(Exception):
    """The text is not what was looked for, and no more of it can make it so."""


class Scan:
    """text: what there is, and may grow. is_over: it does not grow any more"""

    def __init__(self):
        self.text, self.is_over = "", False
        self._missing = {}  # {words: where none of them stands any more}, once the text is over

    def more(self):
        """Waits for more text. Raises Malformed where none comes."""
        if self.is_over:
            raise Malformed
        yield

    def blanks(self, at):
        """Returns where the next text that is not blank begins, or the end where there is none."""
        while True:
            at = BLANKS.match(self.text, at).end()
            if at < len(self.text) or self.is_over:
                return at
            yield

    def word(self, at, *words):
        """Returns (the first of some words that stands there, where it ends)."""
        while True:
            rest = self.text[at:at + max(map(len, words))]
            for word in words:
                if rest.startswith(word):
                    return word, at + len(word)
                if word.startswith(rest):
                    break  # it may still come
            else:
                raise Malformed
            yield from self.more()

    def until(self, at, words, most=None):
        """Returns (where one of some words stands next, that word). most: characters before it"""
        pattern, longest, start = re.compile("|".join(map(re.escape, words))), max(map(len, words)), at
        most = math.inf if most is None else most
        while at < self._missing.get(words, math.inf):
            found = pattern.search(self.text, start, min(len(self.text), at + most + longest))
            if found and found.start() - at <= most:
                return found.start(), found[0]
            if found or len(self.text) - at >= most + longest:
                raise Malformed
            if self.is_over:
                self._missing[words] = at
            start = max(at, len(self.text) - longest + 1)
            yield from self.more()
        raise Malformed

    def object(self, at, depth=0):
        """Returns (where a JSON object ends, {name: (begin, end) of its value}). Each name stands there once."""
        _, at = yield from self.word(at, "{")
        members, at = {}, (yield from self.blanks(at))
        if self.text[at:at + 1] == "}":
            return at + 1, members
        while True:
            end = yield from self._string(at)
            name = json.loads(self.text[at:end])
            at = yield from self.blanks(end)
            _, at = yield from self.word(at, ":")
            begin = yield from self.blanks(at)
            end = yield from self._value(begin, depth + 1)
            if name in members:
                raise Malformed
            members[name] = begin, end
            at = yield from self.blanks(end)
            found, at = yield from self.word(at, ",", "}")
            if found == "}":
                return at, members
            at = yield from self.blanks(at)

    def _value(self, at, depth):
        """Returns where a JSON value ends that begins there."""
        if depth > MAX_DEPTH:
            raise Malformed
        first = self.text[at:at + 1]
        if first == "{":
            return (yield from self.object(at, depth))[0]
        if first == "[":
            return (yield from self._list(at, depth))
        return (yield from self._string(at) if first == '"' else self._scalar(at))

    def _list(self, at, depth):
        at = yield from self.blanks(at + 1)
        if self.text[at:at + 1] == "]":
            return at + 1
        while True:
            at = yield from self._value(at, depth + 1)
            at = yield from self.blanks(at)
            found, at = yield from self.word(at, ",", "]")
            if found == "]":
                return at
            at = yield from self.blanks(at)

    def _string(self, at):
        _, at = yield from self.word(at, '"')
        while True:
            at = STRING.match(self.text, at).end()
            rest = self.text[at:at + 6]
            if rest.startswith('"'):
                return at + 1
            if rest and not ESCAPE.fullmatch(rest):
                raise Malformed
            yield from self.more()

    def _scalar(self, at):
        """Returns where a number, true, false or null ends: something follows it within an object."""
        end = at
        while (end := WORD.match(self.text, end).end()) == len(self.text):
            yield from self.more()
        text = self.text[at:end]
        if text not in CONSTANTS and not NUMBER.fullmatch(text):
            raise Malformed
        return end
