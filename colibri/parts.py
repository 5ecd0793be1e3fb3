"""An answer's parts, as its text comes: what the model thinks, what it says, and which tools it calls."""

import math
import re
import secrets
import string

from colibri.scan import Malformed, Scan
from colibri.tool_formats import FORMATS, Call, Format

THOUGHTS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<seed:think>", "</seed:think>"))
HEADERS = ("<|start|>assistant", "<|channel|>", "to=")  # one of them begins a message of harmony's
HEADER = re.compile(r"(?:<\|start\|>assistant)?\s*(?:to=(?P<to>[^\s<]+)\s*)?(?:<\|channel\|>\s*(?P<channel>\w+)\s*"
                    r"(?:to=(?P<at>[^\s<]+)\s*)?)?(?:<\|constrain\|>)?\s*\w*\s*")
MAX_HEADER = 400  # characters
MESSAGE, START = "<|message|>", "<|start|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>", START)
FUNCTIONS = "functions."
ID_LETTERS, ID_SIZE = string.ascii_letters + string.digits, 9  # of a call's id: what Mistral's templates take
PIECE = 512  # characters of arguments in one delta
CONTENT, REASONING = "content", "reasoning_content"


class Parts:
    """Takes an answer apart; its text comes by add(), each piece whole characters, and rest() ends it.

    However the text is cut into pieces, the deltas are the same when they are put together: what is not decided yet is
    held back, a call up to its end. What is no call, in the format, is content as it stands.

    form: one of FORMATS, or None: no calls. tools: {name: schema of its parameters}. thought: (begin, end) of what the
    model thinks before it answers, or None. is_begun: the prompt has its begin. most: calls that an answer may have
    calls: what there is of them so far
    """

    def __init__(self, form=None, tools=None, thought=None, is_begun=False, most=math.inf):
        self._said = {CONTENT: [], REASONING: []}
        self.calls = []  # as OpenAI's API has them
        self._form, self._tools, self._most = FORMATS.get(form, Format()), tools or {}, most
        self._thought, self._is_begun = thought, is_begun
        self._scan, self._at, self._base = Scan(), 0, 0  # base: of the text, where scan.text begins
        self._hidden, self._num_past, self._deltas = (), 0, []
        self._blank, self._is_leading, self._is_after_call = "", False, False
        self._reading = self._harmony() if form == "harmony" else self._plain()

    def add(self, piece, hidden=()):
        """Returns the deltas of OpenAI's API that a piece of text brings.

        hidden: [(begin, end)] of the whole text, special tokens whose text is for this alone
        """
        self._scan.text += piece
        self._hidden = hidden
        return self._go()

    def rest(self, piece="", hidden=()):
        """Returns the deltas that the last piece brings, and those held back."""
        self._scan.is_over = True
        return self.add(piece, hidden)

    def message(self):
        """Returns the message of the whole answer."""
        content, reasoning = ("".join(self._said[kind]) for kind in (CONTENT, REASONING))
        return {"role": "assistant", CONTENT: content or (None if self.calls else ""),
                **({REASONING: reasoning} if reasoning else {}), **({"tool_calls": self.calls} if self.calls else {})}

    def _go(self):
        self._deltas = []
        next(self._reading, None)
        return self._deltas

    # What is told.

    def _take(self, end):
        """Returns the text up to a place that is shown, and goes on behind it."""
        begin, self._at = self._at, end
        text, pieces = self._scan.text, []
        while self._num_past < len(self._hidden):
            start, stop = (place - self._base for place in self._hidden[self._num_past])
            if start < end:
                pieces.append(text[begin:max(start, begin)])
                begin = max(begin, min(stop, end))
            if stop > end:
                break
            self._num_past += 1
        return "".join([*pieces, text[begin:end]])

    def _trim(self):
        """Forgets the text up to here."""
        self._scan.text = self._scan.text[self._at:]
        self._base += self._at
        self._at = 0

    def _tell(self, kind, text):
        if not text:
            return
        self._said[kind].append(text)
        if self._deltas and kind in self._deltas[-1]:
            self._deltas[-1][kind] += text
        else:
            self._deltas.append({kind: text})

    def _tell_trimmed(self, kind, end):
        """Tells text up to a place, but holds blanks at its end back, and leaves those at a part's begin out."""
        text = self._blank + self._take(end)
        if self._is_leading:
            text = text.lstrip()
        kept = text.rstrip()
        self._blank = text[len(kept):]
        if kept:
            self._is_leading = self._is_after_call = False
        self._tell(kind, kept)

    def _tell_calls(self, calls, end):
        self._take(end)
        self._blank, self._is_leading, self._is_after_call = "", False, True
        for call in calls:
            index = len(self.calls)
            identity = "".join(secrets.choice(ID_LETTERS) for _ in range(ID_SIZE))
            made = {"id": identity, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            self.calls.append(made)
            begin = {"index": index, **made, "function": {"name": call.name, "arguments": ""}}
            self._deltas.append({"tool_calls": [begin]})
            for start in range(0, len(call.arguments), PIECE):
                piece = {"index": index, "function": {"arguments": call.arguments[start:start + PIECE]}}
                self._deltas.append({"tool_calls": [piece]})

    # Answers with thoughts before them and calls in them.

    def _plain(self):
        if self._thought and (self._is_begun or (yield from self._begins())):
            yield from self._think()
        if self._tools and self._form.is_bare:
            yield from self._bare()
        marks = (*self._form.marks, *self._form.closing) if self._tools else ()
        yield from self._through(CONTENT, marks, self._mark)
        self._tell(CONTENT, "" if self._is_after_call else self._blank)

    def _begins(self):
        """Returns whether the answer begins with a thought, and goes behind its mark."""
        try:
            at = yield from self._scan.blanks(0)
            _, self._at = yield from self._scan.word(at, self._thought[0])
        except Malformed:
            return False
        return True

    def _think(self):
        self._is_leading = True
        yield from self._through(REASONING, self._thought[1:], self._end_of_thought)
        self._blank, self._is_leading = "", True

    def _through(self, kind, marks, meet):
        """Tells text up to its end, or until meet(where a mark stands, it) returns that its kind has ended."""
        pattern = re.compile("|".join(map(re.escape, marks)) if marks else "(?!)")
        while True:
            found = pattern.search(self._scan.text, self._at)
            if found:
                self._tell_trimmed(kind, found.start())
                if (yield from meet(found.start(), found[0])):
                    return
                continue
            self._tell_trimmed(kind, len(self._scan.text) - self._begun(marks))
            if self._scan.is_over:
                return
            self._trim()
            yield

    def _begun(self, marks):
        """Returns how many characters at the text's end may be the begin of a mark."""
        if self._scan.is_over:
            return 0
        text = self._scan.text[self._at:]
        return max((count for mark in marks for count in range(1, len(mark)) if text.endswith(mark[:count])), default=0)

    def _end_of_thought(self, at, mark):
        self._take(at + len(mark))
        return True
        yield  # a generator, as meet() is

    def _mark(self, at, mark):
        """Tells the calls that begin at a mark; the mark as text where there are none."""
        if mark in self._form.closing and self._is_after_call:
            self._take(at + len(mark))
        elif not (yield from self._call(at)):
            self._tell_trimmed(CONTENT, at + len(mark))
        return False

    def _call(self, at):
        """Tells the calls that begin there; returns whether there are some."""
        try:
            if self._form.read is None:
                raise Malformed
            calls, end = yield from self._form.read(self._scan, at, self._tools)
        except Malformed:
            return False
        if len(self.calls) + len(calls) > self._most:
            return False
        self._tell_calls(calls, end)
        return True

    def _bare(self):
        """Tells calls without a mark that are the whole answer."""
        at = yield from self._scan.blanks(self._at)
        if self._scan.text.startswith("{", at):
            yield from self._call(at)

    # Harmony: messages, each with a header that says what it is.

    def _harmony(self):
        while True:
            kind, name = yield from self._header()
            if kind:
                self._take(self._scan.text.index(MESSAGE, self._at) + len(MESSAGE))
            if name is None or not (yield from self._function(name)):
                yield from self._body(kind or CONTENT)
            if self._scan.is_over and self._at == len(self._scan.text):
                return

    def _header(self):
        """Returns (a message's part, None), (None, a function's name), or (None, None) where it has no header."""
        try:
            at = yield from self._scan.blanks(self._at)
            yield from self._scan.word(at, *HEADERS)
            end, _ = yield from self._scan.until(at, (MESSAGE,), MAX_HEADER)
        except Malformed:
            return None, None
        found = HEADER.fullmatch(self._scan.text[at:end])
        if not found:
            return None, None
        to = found["to"] or found["at"] or ""
        if to.startswith(FUNCTIONS) and self._tools:
            return None, to.removeprefix(FUNCTIONS)
        if to.startswith(FUNCTIONS):
            return None, None
        return (REASONING if found["channel"] == "analysis" else CONTENT), None

    def _function(self, name):
        """Tells the call of a message for a function; returns whether it is one."""
        scan = self._scan
        try:
            begin = yield from scan.blanks(scan.text.index(MESSAGE, self._at) + len(MESSAGE))
            end, _ = yield from scan.object(begin)
            at = yield from scan.blanks(end)
            if at < len(scan.text):
                word, after = yield from scan.word(at, *ENDS)
                at = at if word == START else after
        except Malformed:
            return False
        if len(self.calls) >= self._most:
            return False
        self._tell_calls([Call(name, scan.text[begin:end])], at)
        return True

    def _body(self, kind):
        """Tells a message up to its end, on a line of its own; one that has no header as it stands."""
        pattern = re.compile("|".join(map(re.escape, ENDS)))
        before = "\n" if self._said[kind] else ""
        start = self._at + len(START) * self._scan.text.startswith(START, self._at)  # of a header that is none
        while True:
            found = pattern.search(self._scan.text, start)
            text = self._take(found.start() if found else len(self._scan.text) - self._begun(ENDS))
            self._tell(kind, before + text if text else "")
            before = "" if text else before
            if found:
                self._take(found.start() if found[0] == START else found.end())
                return
            self._trim()
            if self._scan.is_over:
                return
            start = 0
            yield
