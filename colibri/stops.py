"""Stops: the text of an answer, token by token, up to the first of its stop strings."""

from colibri.text import Pieces


class Stops:
    """Finds what of an answer's text may be told.

    The text ends before the stop string that is complete first; of those that the same character completes, it is the
    longest. What may be the beginning of one is held back until that is known. Where tokens end changes nothing, except
    that the text of the first min_tokens tokens completes no stop string.

    is_stopped: one was found. starts: of each token, where its text begins in the text of all. hidden: [(begin, end)]
    of the tokens' text that used.hidden are
    """

    def __init__(self, used, prompt, strings=(), is_included=False, min_tokens=0):
        """used: the Codec. prompt: tokens. is_included: the text ends after the stop string, not before."""
        self._used, self._pieces = used, Pieces(used, prompt)
        self._is_included, self._min_tokens = is_included, min_tokens
        self._strings = [(string, _borders(string), [0]) for string in strings]  # [how much of it the text ends with]
        self._held, self._length = "", 0
        self.is_stopped, self.starts, self.hidden = False, [], []

    def add(self, token):
        """Returns the text that can be told now that a token is there."""
        piece = self._pieces.add(token)
        self.starts.append(self._length)
        self._length += len(piece)
        if token in self._used.hidden and piece:
            self.hidden.append((self.starts[-1], self._length))
        return self._tell(piece) if self._strings else piece

    def start(self, index):
        """Returns where the text of a token begins, or would, for one more than there are."""
        return self.starts[index] if index < len(self.starts) else self._length

    def rest(self):
        """Returns what was held back, for there is no more text."""
        held, self._held = self._held, ""
        return held

    def _tell(self, piece):
        for index, character in enumerate(piece):
            found = max(self._found(character), default=0)
            if found and len(self.starts) > self._min_tokens:
                text = self._held + piece[:index + 1]
                self.is_stopped, self._held = True, ""
                return text if self._is_included else text[:-found]
        text = self._held + piece
        count = len(text) - max(seen[0] for _, _, seen in self._strings)
        self._held = text[count:]
        return text[:count]

    def _found(self, character):
        """Yields the lengths of the stop strings that end with the text's next character."""
        for string, borders, seen in self._strings:
            count = seen[0]
            while count and string[count] != character:
                count = borders[count - 1]
            count += string[count] == character
            if count == len(string):
                yield count
                count = borders[count - 1]
            seen[0] = count


def _borders(string):
    """Returns for each beginning of a string the length of the longest shorter one that it ends with."""
    borders, count = [0], 0
    for character in string[1:]:
        while count and string[count] != character:
            count = borders[count - 1]
        count += string[count] == character
        borders.append(count)
    return borders
