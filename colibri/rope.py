"""Which rotary frequencies a session's tokens have, in models where that depends on a length."""


class RopeLengths:
    """A session's, for longrope and dynamic NTK.

    length:   of the sequence whose frequencies the next tokens have
    expected: the length that the prompt will have whose next part they are; 0: they are all of it
    """

    def __init__(self):
        self.length = self.expected = 0
        self._is_long = None  # which of longrope's frequencies the cached keys have; None: some these, some those
        self._tokens = []     # whose keys are cached, as long as they may have to be computed again

    def begin(self, start, tokens, original):
        """Chooses the length for the tokens of a step, which follow `start` others.

        original: longrope's, above which a length has the other frequencies; 0: cached keys stay as they are
        Returns the earlier tokens whose keys have to be computed again first, [] mostly.
        """
        self.length = max(self.expected, start + len(tokens))
        was_long, self._is_long = self._is_long, self.length > original
        again = self._tokens[:start] if self._is_long != was_long else []
        if start < original:
            self._tokens[start:] = tokens
        return again

    def spoil(self):
        """Says that computing keys again was interrupted, so that the next step does it."""
        self._is_long = None
