"""Work that would hold the network's thread up, on threads of its own: large bodies, prompts that become tokens."""

import collections
import contextlib
import math
from concurrent.futures import ThreadPoolExecutor

LARGE = 1 << 14     # bytes, characters or numbers; what is larger has a thread of its own, and holds nothing smaller up
UNKNOWN = math.inf  # size of what a chat template renders, which may take seconds; it holds other chats up alone
THREADS = {"intake": 1, "intake-large": 1, "intake-chat": 2, "intake-grammar": 2}
GRAMMAR = 3  # of them: those that compile grammars, which may take seconds


class Intake:
    """Runs functions on its threads, and encodes accepted requests: each connection's in their order, one at a time.

    server: has loop, cancel(request, finish), and encoded(request, made, error) for what request.encode() returned or
    raised. All methods are for the loop's thread.
    """

    def __init__(self, server):
        self._server = server
        self._threads = [ThreadPoolExecutor(count, name) for name, count in THREADS.items()]
        for thread in self._threads:
            thread.submit(int)  # starts it: where there can be none, that is known before there are clients
        self._queues = {}  # {connection: deque of requests, the first of which is at work}
        self._timers = {}  # {request: its deadline's timer, or None}, without those that were removed

    def close(self):
        """Begins nothing more."""
        for thread in self._threads:
            thread.shutdown(wait=False, cancel_futures=True)

    def run(self, function, size, done, compiles=False):
        """Calls function() on a thread, then done(what it returned, what it raised) on the loop's."""
        thread = GRAMMAR if compiles else (size > LARGE) + (size == UNKNOWN)
        self._threads[thread].submit(self._work, function, done)

    def _work(self, function, done):
        made = error = None
        try:
            made = function()
        except BaseException as raised:  # noqa: BLE001 - a package's panic, too: whoever asked is told
            error = raised
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._server.loop.call_soon_threadsafe(done, made, error)

    def __len__(self):
        return len(self._timers)

    def add(self, request):
        """Queues a request to be encoded, unless it is removed before."""
        timer = None
        if request.deadline < math.inf:
            timer = self._server.loop.call_at(request.deadline, self._server.cancel, request, "deadline")
        self._timers[request] = timer
        queue = self._queues.setdefault(request.owner, collections.deque())
        queue.append(request)
        if len(queue) == 1:
            self._begin(queue)

    def remove(self, request):
        """Forgets a request; returns whether it was there, waiting or at work."""
        if request not in self._timers:
            return False
        timer = self._timers.pop(request)
        if timer:
            timer.cancel()
        return True

    def clear(self):
        """Forgets all requests, and returns them."""
        return [request for request in list(self._timers) if self.remove(request)]

    def _begin(self, queue):
        request = queue[0]
        self.run(lambda: None if request.cancelled else request.encode(), request.size,
                 lambda made, error: self._ended(queue, made, error), request.compiles)

    def _ended(self, queue, made, error):
        request = queue.popleft()
        while queue and queue[0] not in self._timers:
            queue.popleft()
        if queue:
            self._begin(queue)
        else:
            del self._queues[request.owner]
        if self.remove(request):
            self._server.encoded(request, made, error)
