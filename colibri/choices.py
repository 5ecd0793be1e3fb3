"""Choices: what OpenAI's API shows of one request, whole or event by event."""

import math
from dataclasses import dataclass

from colibri import logprobs
from colibri.parts import CONTENT
from colibri.stops import Stops

FINISHES = {"stop": "stop"}  # OpenAI's words; whatever else cuts an answer has made it shorter: "length"


@dataclass(slots=True)
class Asked:
    """Holds what a body asks to see of each choice."""

    is_chat: bool = False
    stream: bool = False
    echo: bool = False           # the prompt, before the answer
    logprobs: int = None         # how many of the likeliest tokens; None: no log-probabilities
    prompt_logprobs: int = None  # the same of the prompt, by itself
    reading: object = None       # the Reading of the answer's parts; None: it is text
    most_calls: float = math.inf  # that an answer may have


class Choice:
    """One of an answer's choices. index: among them. source: the prompt as the client sent it"""

    def __init__(self, index, request, source, asked):
        self.index, self.request, self._source, self._asked = index, request, source, asked
        self._names = logprobs.Names(request.used)
        self._prompt_text, self._prompt_starts = "", []
        self._has_begun, self._parts = False, None

    def whole(self):
        """Returns the choice of an answer in one piece."""
        self._begin()
        request, asked = self.request, self._asked
        tokens = request.tokens
        text = request.text() if request.used else self._numbers(0, tokens)
        if self._parts:
            self._parts.rest(text, self._hidden())
        found = self._shape(self._prompt_text + text, self._finish(),
                            self._logprobs(0, len(tokens) + self._has_ending(), asked.echo))
        if asked.prompt_logprobs is not None:
            found["prompt_logprobs"] = logprobs.prompt(logprobs.of_prompt(request), self._names, asked.prompt_logprobs)
        return found

    def events(self):
        """Yields (choice, tokens so far) of the events that are due: one a token, with what it adds.

        A choice that is a string is piece() of that.
        """
        request, asked = self.request, self._asked
        if not self._has_begun and not request.error:
            self._begin()
            if asked.is_chat:
                yield {**self._shape("", None, None), "delta": {"role": "assistant", "content": ""}}, 0
            elif asked.echo:
                yield self._shape(self._prompt_text, None, self._logprobs(0, 0, True)), 0
        first = request.told
        for index, (token, piece) in enumerate(request.news(), first):
            text = piece if request.used else self._numbers(index, [token])
            scores = None if asked.logprobs is None else self._logprobs(index, index + 1)
            for choice in self._told(text, scores):
                yield choice, index + 1
        if request.is_over and not request.error:
            count = len(request.tokens)
            text = request.rest()
            if self._parts:
                for delta in self._parts.rest(text, self._hidden()):
                    yield {**self._shape("", None, None), "delta": delta}, count
                text = ""
            ending = self._logprobs(count, count + 1) if self._has_ending() else None
            yield self._shape(text, self._finish(), ending), count

    def _told(self, text, scores):
        """Yields the choices that a token's text brings, at least one. A string is piece() of that."""
        if not self._parts:
            yield text if scores is None else self._shape(text, None, scores)
            return
        for delta in self._parts.add(text, self._hidden()) or [{CONTENT: ""}]:
            yield delta[CONTENT] if CONTENT in delta and scores is None else {
                **self._shape("", None, scores), "delta": delta}
            scores = None

    def _hidden(self):
        """Returns where in the answer's text special tokens stand that nobody is shown."""
        return self.request.stops.hidden if self.request.stops else ()

    def _finish(self):
        finish = FINISHES.get(self.request.finish, "length")
        return "tool_calls" if finish == "stop" and self._parts and self._parts.calls else finish

    def piece(self, text):
        """Returns the choice of an event that has nothing but text."""
        return self._shape(text, None, None)

    def _begin(self):
        """Makes what is shown of the prompt."""
        self._has_begun = True
        request = self.request
        if self._asked.reading:
            self._parts = self._asked.reading.parts(self._source, self._asked.most_calls)
        if not self._asked.echo:
            return
        if request.used is None:
            self._prompt_text = " ".join(map(str, request.prompt))
            return
        text = Stops(request.used, ())
        decoded = "".join(map(text.add, request.prompt))
        self._prompt_text = self._source if isinstance(self._source, str) else decoded
        self._prompt_starts = text.starts

    def _numbers(self, index, tokens):
        """Returns tokens as text: numbers with a blank between two, as in a text run."""
        return (" " if index or self._prompt_text else "")[:len(tokens)] + " ".join(map(str, tokens))

    def _has_ending(self):
        """Returns whether the token that ended the text is listed: of chats it is not."""
        return not self._asked.is_chat and self.request.ending is not None

    def _shape(self, text, finish, scores):
        choice = {"index": self.index}
        if not self._asked.is_chat:
            choice["text"] = text
        elif self._asked.stream:
            choice["delta"] = {} if finish and not text else {"content": text}
        else:
            choice["message"] = self._parts.message() if self._parts else {"role": "assistant", "content": text}
        return {**choice, "logprobs": scores, "finish_reason": finish}

    def _logprobs(self, begin, end, with_prompt=False):
        """Returns the logprobs of the answer's tokens from begin to end, or None where nobody asked."""
        request, count = self.request, self._asked.logprobs
        if count is None:
            return None
        scores = [request.score(index) for index in range(begin, end)]
        if self._asked.is_chat:
            return logprobs.chat(scores, self._names, count)
        tokens = [*request.tokens[begin:end], *([request.ending] if end > len(request.tokens) else [])]
        offsets = self._offsets(begin, end)
        if with_prompt:
            tokens, offsets = [*request.prompt, *tokens], [*self._prompt_offsets(), *offsets]
            scores = [*logprobs.of_prompt(request), *scores]
        return logprobs.completion(tokens, scores, offsets, self._names, count)

    def _offsets(self, begin, end):
        """Returns where in the choice's text the answer's tokens begin."""
        request, first = self.request, len(self._prompt_text)
        if request.used is None:
            lengths = [len(self._numbers(index, [token])) for index, token in enumerate(request.tokens)]
            starts = [sum(lengths[:index]) for index in range(begin, end)]
        else:
            starts = [request.stops.start(index) if request.stops else 0 for index in range(begin, end)]
        return [first + start for start in starts]

    def _prompt_offsets(self):
        if self.request.used is not None:
            return self._prompt_starts
        offsets, offset = [], 0
        for token in self.request.prompt:
            offsets.append(offset)
            offset += len(str(token)) + 1
        return offsets
