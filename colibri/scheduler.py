"""Continuous batching: requests join and leave the running batch between steps, on the thread that steps the engine."""

import collections
import contextlib
import heapq
import itertools
import math
import queue
import threading
import time
import traceback

from colibri.errors import ColibriError
from colibri.refused import HIDDEN, Refused
from colibri.requests import Request

STEP_TOKENS = 64  # in a call at most, but for a longer prefill chunk: a GPU has other kernels beyond, of other rounding
PREFILL_CHUNK = {"host": 4, "cuda": 256}  # tokens, by backend: the host's takes half as long as a step of 8 requests
# What ends requests that have no token yet with an error: its beginning, and what was expected.
UNANSWERED = {
    "deadline": ("deadline_ms", "passed", "time for a first token", "allow more, or send it when fewer requests run"),
    "shutdown": ("server", "ended", "a running one", "send it to another, or again later")}


class Scheduler:
    """Runs requests on an engine.

    deliver: called on the scheduler's thread when requests have new tokens or an end, once until take() fetches them
    Requests wait in the order of their arrival, at most queue_size of them beyond the engine's slots. A turn is one
    step of decoding for all that run, then one chunk of the prompt that waits longest. reserve(), enter(), release(),
    cancel(), look() and stop() may be called by any one other thread.
    """

    def __init__(self, engine, queue_size, prefill_chunk, deliver):
        self.engine, self.queue_size = engine, queue_size
        self.prefill_chunk = min(prefill_chunk, engine.max_piece)  # a call each, which has succeeded or not
        self.steps = {"prefill": 0, "decode": 0}
        self.step_began = None         # monotonic seconds, while a step runs
        self.error = None              # why the thread ended, if by itself
        self.most = queue_size + engine.num_slots  # requests that run and wait at once
        self._deliver, self._outbox, self._told = deliver, collections.deque(), False
        self._submitted = self._ended = self._reserved = 0
        self._inbox = queue.SimpleQueue()
        self._waiting = collections.OrderedDict()  # requests without a slot
        self._prefilling, self._running = [], []
        self._deadlines, self._ties = [], itertools.count()
        self._token_seconds = 0  # of prefill, the best so far: what a deadline must leave at least
        self._stopping = self._cancelling = self._is_streaming = False
        self._thread = threading.Thread(target=self._main, name="scheduler", daemon=True)

    def start(self):
        self._thread.start()

    # For other threads.

    def reserve(self, identity, count=1):
        """Takes places in the queue for so many requests, or raises Refused where there are fewer."""
        if self._submitted - self._ended + count > self.most:
            raise Refused("queue", f"{self.queue_size} waiting", "fewer", "send it again later, or raise --queue-size",
                          code="queue_full", id=identity)
        self._submitted += count
        self._reserved += count

    def enter(self, request):
        """Queues a request in a place that was reserved. One that is cancelled already needs no prompt."""
        self._reserved -= 1
        self._inbox.put(request)

    def release(self):
        """Gives a reserved place back."""
        self._submitted -= 1
        self._reserved -= 1

    def cancel(self, request, finish="cancelled"):
        """Ends a request before its time, unless it has ended."""
        request.cancelled = request.cancelled or finish
        self._inbox.put(None)

    def look(self, function):
        """Calls function() on the scheduler's thread between two turns."""
        self._inbox.put(function)

    @property
    def failure(self):
        """Returns the text of the error."""
        return None if self.error is None else str(self.error)

    def take(self):
        """Returns the requests that have news, each once."""
        self._told = False
        if self.error is not None:  # the thread has ended, and will not answer what has come since
            self._refuse(self.error)
        news = {}
        while self._outbox:
            news[self._outbox.popleft()] = None
        return list(news)

    def stop(self, seconds=None):
        """Ends the thread after its turn; what has not ended stays so, its output file removed.

        False where that takes longer than seconds.
        """
        self._stopping = True
        self._inbox.put(None)
        self._thread.join(seconds)
        return not self._thread.is_alive()

    @property
    def is_alive(self):
        return self._thread.is_alive()

    @property
    def num_unfinished(self):
        return self._submitted - self._ended

    @property
    def num_waiting(self):
        return self._reserved + len(self._waiting) + self._inbox.qsize()

    @property
    def num_running(self):
        return len(self._prefilling) + len(self._running)

    # The scheduler's thread.

    def _main(self):
        try:
            while not self._stopping:
                self._turn()
            for request in self._prefilling:
                if request.rows is not None:
                    request.rows.close()
        except (ColibriError, MemoryError) as error:  # a device that is lost, or no memory for the scheduler
            self._fail(_reason(error))
        except BaseException:  # noqa: BLE001 - whatever it is, clients and the operator are told
            self._fail(ColibriError("scheduler", traceback.format_exc(limit=-3).replace("\n", " ")))

    def _fail(self, error):
        self._refuse(error)
        self.error = error
        self._deliver()  # also where no request is left: the service must know

    def _refuse(self, error):
        """Ends all requests with an error, those included that have not been looked at."""
        items = [self._inbox.get() for _ in range(self._inbox.qsize())]
        for request in dict.fromkeys([*self._waiting, *self._prefilling, *self._running, *items]):
            if isinstance(request, Request) and request.finish is None:
                self._finish(request, error=Refused.of(error, code="internal", id=request.id))

    def _turn(self):
        idle = not (self._waiting or self._prefilling or self._running)
        while idle or not self._inbox.empty():
            self._receive(self._inbox.get())
            idle = False
        self._sweep()
        self._admit()
        self._spare()
        for start in range(0, len(self._running), STEP_TOKENS):
            self._decode(self._running[start:start + STEP_TOKENS])
        if self._running:
            self._running = [request for request in self._running if request.finish is None]
        if self._prefilling:
            self._prefill()
        self._tell()

    def _spare(self):
        """Leaves a processor to those who pass tokens on: what they take from a step's threads all of them wait for."""
        is_streaming = any(request.stream for request in self._running)
        if is_streaming != self._is_streaming:
            self._is_streaming = is_streaming
            self.engine.spare(int(is_streaming))

    def _receive(self, item):
        if callable(item):
            item()
        elif item is None:
            self._cancelling = True
        else:
            self._waiting[item] = None
            self._cancelling = self._cancelling or bool(item.cancelled)
            if item.deadline < math.inf:
                self._watch(item)

    def _watch(self, request):
        if len(self._deadlines) > 2 * self.num_unfinished + 64:  # most have ended, long before their deadlines
            self._deadlines = [entry for entry in self._deadlines if entry[2].finish is None]
            heapq.heapify(self._deadlines)
        heapq.heappush(self._deadlines, (request.deadline, next(self._ties), request))

    def _sweep(self):
        """Ends what was cancelled, or has passed its deadline."""
        now = time.monotonic()
        while self._deadlines and (self._deadlines[0][0] <= now or self._deadlines[0][2].finish):
            request = heapq.heappop(self._deadlines)[2]
            request.cancelled = request.cancelled or "deadline"
            self._cancelling = True
        if not self._cancelling:
            return
        self._cancelling = False
        for requests in (self._waiting, self._prefilling, self._running):
            stopped = [request for request in requests if request.cancelled]
            for request in stopped:
                self._cut(request, now)
            if stopped and requests is self._waiting:
                for request in stopped:
                    del self._waiting[request]
            elif stopped:
                requests[:] = [request for request in requests if request.finish is None]

    def _cut(self, request, now):
        if request.tokens or request.cancelled not in UNANSWERED:
            self._finish(request, request.cancelled)
            return
        state = "prefilling" if request in self._prefilling else "waiting"
        where, got, expected, fix = UNANSWERED[request.cancelled]
        passed = 1e3 * (now - request.arrived)
        self._finish(request, error=Refused(where, f"{got} after {passed:.0f} ms while {state}", expected, fix,
                                            code=request.cancelled, id=request.id))

    def _admit(self):
        while self._waiting and len(self._prefilling) + len(self._running) < self.engine.num_slots:
            request, _ = self._waiting.popitem(last=False)
            least = self._token_seconds * len(request.prompt)
            if request.deadline < math.inf and time.monotonic() + least > request.deadline:
                left = math.floor(1e3 * (request.deadline - time.monotonic()))
                self._finish(request, error=Refused("deadline_ms", f"{left} ms left",
                                                    f"at least {math.ceil(1e3 * least)} for a first token",
                                                    "allow more", code="deadline", id=request.id))
                continue
            try:
                if request.rows is None:
                    request.session = self.engine.session()
                    request.session.expect(len(request.prompt))
                    request.begin(self.engine.checkpoint.eos)
                else:
                    request.rows.begin()
            except ColibriError as error:
                self._finish(request, error=_refused(error, "bad_request", request))
                continue
            self._prefilling.append(request)

    def _decode(self, requests):
        work = [(request.session, request.tokens[-1:]) for request in requests]
        tokens = self._step("decode", requests, work, [request.history or request.sampler for request in requests])
        now = time.monotonic()
        for request, token in zip(requests, tokens):
            if token is not None:
                self._add(request, token, now)

    def _chunk(self):
        """Returns how many tokens of a prompt this turn takes.

        Beyond STEP_TOKENS it is the same each time, so that the bits do not depend on the others.
        As many tokens as there are requests that decode take about as long as their step; half as long where somebody
        sees it.
        """
        if self.prefill_chunk > STEP_TOKENS:
            return self.prefill_chunk
        fair = len(self._running) // 2 if self._is_streaming else len(self._running)
        wanted = max(self.prefill_chunk, fair) if self._running else STEP_TOKENS
        return min(wanted, STEP_TOKENS, self.engine.max_piece)

    def _prefill(self):
        """Prefills in one call the next chunk of the oldest prompt, with those of others where all are short."""
        oldest = self._prefilling[0]
        if oldest.rows is not None:
            self._run_rows(oldest)
            return
        chosen, total, chunk = [], 0, self._chunk()
        for request in self._prefilling:
            count = min(chunk, len(request.prompt) - request.prefilled)
            if request.rows is not None or chosen and total + count > min(STEP_TOKENS, chunk):
                break
            chosen.append((request, count))
            total += count
        work, samplers = [], []
        for request, count in chosen:
            end = request.prefilled + count
            work.append((request.session, request.prompt[request.prefilled:end]))
            is_last, history = end == len(request.prompt), request.history
            samplers.append((history or request.sampler) if is_last or history and history.has_prompt_scores else None)
        began = time.monotonic()
        tokens = self._step("prefill", [request for request, _ in chosen], work, samplers)
        now = time.monotonic()
        self._token_seconds = min(self._token_seconds or math.inf, (now - began) / total)
        for (request, count), token in zip(chosen, tokens):
            request.prefilled += count
            if token is not None and now > request.deadline:
                request.cancelled = request.cancelled or "deadline"
                self._cut(request, now)
            elif token is not None:
                self._add(request, token, now)
                if request.finish is None:
                    self._running.append(request)
        self._prefilling = [request for request in self._prefilling
                            if request.finish is None and request.prefilled < len(request.prompt)]

    def _run_rows(self, request):
        """Runs the next rows of a bare stack's input, and writes the last ones' output."""
        rows, code = request.rows, "bad_request"
        try:
            x = rows.read(request.prefilled, self.engine.max_tokens)
            code = "internal"
            self.steps["prefill"] += 1
            with self._watched():
                y = self.engine.stack(x)
            rows.write(y)
            request.prefilled += len(x)
            if request.prefilled < len(rows):
                return
            rows.end()
            request.times.append(time.monotonic())
            self._finish(request, "stop")
        except (ColibriError, MemoryError) as error:
            self.engine.memory.sync()
            self._finish(request, error=_refused(error, code, request))
        self._prefilling.remove(request)

    @contextlib.contextmanager
    def _watched(self):
        """Wraps a step, which others can see to hang."""
        self.step_began = time.monotonic()
        try:
            yield
        finally:
            self.step_began = None

    def _step(self, kind, requests, work, samplers):
        """Returns the next token of each: None for a sampler of None, and where the step failed, which ends it."""
        self.steps[kind] += 1
        with self._watched():
            try:
                return self.engine.advance(work, samplers)
            except (ColibriError, MemoryError) as error:
                self.engine.memory.sync()  # fails where a device is lost: then nothing can go on
                if len(work) == 1:
                    self._finish(requests[0], error=_refused(error, "internal", requests[0]))
                    return [None]
        # One of them spoiled the step: each again alone. A session that a step failed for is as it was before.
        return [self._step(kind, [request], [item], [sampler])[0]
                for request, item, sampler in zip(requests, work, samplers)]

    def _add(self, request, token, now):
        if request.max_new_tokens == 0:  # the prompt's log-probabilities were all that was asked for
            self._finish(request, "length")
            return
        try:
            is_over = request.history is not None and request.history.is_over()
        except ColibriError as error:
            self._finish(request, error=Refused.of(error, id=request.id, logged=HIDDEN))
            return
        if is_over:
            self._finish(request, "stop")
            return
        if request.sampler.ends(token, self.engine.checkpoint.eos):
            request.ending = token
            self._finish(request, "stop")
            return
        request.times.append(now)
        if request.take(token):
            self._finish(request, "stop")
        elif len(request.tokens) == request.max_new_tokens:
            self._finish(request, "length")
        elif request.stream:
            self._outbox.append(request)

    def _finish(self, request, finish="error", error=None):
        if request.session is not None:
            request.session.close()
        if request.rows is not None:
            request.rows.close()
        request.error, request.finish = error, finish
        self._ended += 1
        self._outbox.append(request)

    def _tell(self):
        if self._outbox and not self._told:
            self._told = True
            self._deliver()


def _refused(error, code, request):
    """Returns what a client is told of an error of a step; a file that it is about is the client's."""
    reason, rows = _reason(error), request.rows
    is_of_file = rows is not None and reason.where in (rows.path, rows.output)
    return Refused.of(reason, code=code, id=request.id, logged={"where": "..."} if is_of_file else None)


def _reason(error):
    return error if isinstance(error, ColibriError) else ColibriError(
        "memory", "not enough for a step", "more", "lower --batch-size, or raise the service's limit")
