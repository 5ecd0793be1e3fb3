"""The server: one engine, its scheduler, and the clients of --serve and --http."""

import asyncio
import collections
import contextlib
import gc
import os
import signal
import sys
import time
import traceback

from colibri.access import Access
from colibri.arrays import abandon
from colibri.chat import Chat
from colibri.connection import Lines
from colibri.errors import ColibriError
from colibri.intake import Intake
from colibri.listen import Listener, activated, number_of_files, split
from colibri.log import MESSAGE, PROMPT, Log
from colibri.metrics import Metrics, inspect
from colibri.reading import Reading
from colibri.refused import CODES, Refused
from colibri.requests import FINISHES, Reader
from colibri.scheduler import Scheduler
from colibri.stdio import Pipes

MAX_CONNECTIONS = 1000   # of lines, and as many of HTTP, so that one kind does not shut the other out
SPARE_FILES = 200        # of the process's limit of open files, not for connections
SETTLED_SECONDS = 1      # without a request, after which a connection may lose its place: others are about to send one
CUT_SECONDS = 5          # that the last step may take when the time to drain is over
CLOSE_SECONDS = 1        # that clients may take to fetch what is left for them
LOG_SECONDS = 0.5        # that the last line may take, and those before it
CHECK_SECONDS = 1        # between two looks for clients that have stopped
SWITCH_SECONDS = 0.0005  # that the scheduler waits for the interpreter while another thread holds it
STUCK_SECONDS = 60       # of one step, after which the process is not healthy


class Server:
    def __init__(self, engine, options):
        self.engine, self.options = engine, options
        self.reader = Reader(engine)
        self.reader.prepare()
        settings = engine.checkpoint.settings
        has_chat = options.http is not None and settings.chat_templates
        self.chat = Chat(settings, engine.checkpoint.path) if has_chat else None
        self.reading = Reading(settings.chat_templates, options.tool_format)
        self.metrics = Metrics(FINISHES, CODES)
        self.access = Access(options.keys, options.cors, options.http and split("--http", options.http)[0])
        self.max_connections = max(1, min(MAX_CONNECTIONS, (number_of_files() - SPARE_FILES) // 2))
        self._places = collections.defaultdict(collections.OrderedDict)  # {kind: {connection: None}}, the idlest first
        self.is_draining, self._error = False, None
        self.name = os.path.basename(engine.checkpoint.path)
        self._listeners, self._signals, self._state = [], [], None
        self._num_unanswered = 0  # requests whose end has not been told, accepted or being read on another thread

    async def main(self):
        self.loop, self._stopped, self._idle = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()
        self.scheduler = Scheduler(self.engine, self.options.queue_size, self.options.prefill_chunk,
                                   lambda: self.loop.call_soon_threadsafe(self._news))
        self.log, self._intake = Log(self.options.log_format), Intake(self)
        try:
            self._state = inspect(self.engine)
            await self._listen()
            self._begin()
            await self._stopped.wait()
            if self.scheduler.failure is None:
                await self._drain()
            await self._close()
        finally:
            for listener in self._listeners:
                listener.close()
            self._intake.close()
            if self.chat:
                self.chat.close()
            self.reader.close()
            self.log.close()
        error = self.scheduler.error or self._error
        if error is not None:
            raise error

    async def _listen(self):
        passed = activated()
        for name, address, make in (("serve", self.options.serve, lambda is_local: Lines(self)),
                                    ("http", self.options.http, self._http())):
            if address is None or address == "-":
                continue
            listener = Listener(f"--{name}", address, passed.get(name))
            self._listeners.append(listener)
            if name == "serve" and self.access.has_keys and not listener.is_unix:
                raise ColibriError("--serve", listener.place, "- or unix:PATH with --api-key-file",
                                   "lines have no keys: a socket's owner and mode say who may use it")
            await listener.start(self.loop, make)

    def _http(self):
        if self.options.http is None:
            return None
        from colibri.http import Http  # needs h11
        return lambda is_local: Http(self, is_local)

    def _begin(self):
        self.loop.set_exception_handler(self._fault)
        for number in (signal.SIGTERM, signal.SIGINT):
            self.loop.add_signal_handler(number, self._signal, number)
        sys.setswitchinterval(SWITCH_SECONDS)
        self.scheduler.start()
        places = {listener.option.strip("-"): listener.place for listener in self._listeners}
        if self.options.serve == "-":
            Pipes(self.loop, Lines(self))
            places = {"serve": "stdin", **places}
        self.loop.call_later(CHECK_SECONDS, self._check)
        gc.collect()
        gc.freeze()  # the model's objects: no collection looks at them again
        settings, said = self._settings()
        shown = ", ".join(place if name == "serve" else f"{name} {place}" for name, place in places.items())
        self.log.event("serving", ", ".join([f"serving {self.name} on {shown}", *said]), model=self.name, **places,
                       **settings)

    def _settings(self):
        """Returns what a request need not say and the model's file does, as values and in words: whether chats have a
        template, and how tokens are drawn.
        """
        sampling = self.engine.checkpoint.settings.sampling
        lacks = self.options.http is not None and not self.chat
        return ({**({"chat_template": False} if lacks else {}), **sampling},
                [*(["no chat template"] * lacks), *(f"{name} {value:g}" for name, value in sampling.items())])

    def _signal(self, number):
        """Asks for an end the first time, and makes one the second time."""
        if not self._signals:
            self._signals.append(number)
            self.log.event("stopping", f"stopping: {self._num_unanswered} requests to finish",
                           requests=self._num_unanswered)
            self.stop()
            return
        word = "terminated" if number == signal.SIGTERM else "interrupted"
        self._exit(128 + number, word, word)

    def _exit(self, status, event, text, **values):
        """Ends the process while a step runs, without what it has half done; logs that, where the log can be
        written."""
        for listener in self._listeners:
            listener.unlink()
        abandon()
        self.log.event(event, text, **values)
        self.log.close(LOG_SECONDS)
        os._exit(status)

    def stop(self):
        self.is_draining = True
        self._stopped.set()

    def fail(self, *parts):
        """Stops with an error of these parts, when what was accepted has finished."""
        self._error = ColibriError(*parts)
        self.stop()

    async def _drain(self):
        """Lets what was accepted finish in the time for it, and cuts the rest."""
        for listener in self._listeners:
            listener.close()
        for connection in list(self.connections):
            connection.drain()
        for seconds, finish in ((self.options.drain, "shutdown"), (CUT_SECONDS, None)):
            if self._num_unanswered:
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._idle.wait(), seconds)
            for connection in list(self.connections):
                for request in list(connection.running.values()):
                    if finish:
                        self.cancel(request, finish)

    async def _close(self):
        for connection in list(self.connections):
            connection.close()
        end = time.monotonic() + CLOSE_SECONDS
        while self.connections and time.monotonic() < end:
            await asyncio.sleep(0.01)
        for connection in list(self.connections):
            connection.transport.abort()
        end = time.monotonic() + CUT_SECONDS
        while not self.scheduler.stop(0):
            if time.monotonic() > end:
                error = str(ColibriError("scheduler", "a step does not end", "it to",
                                         "look at the GPU with nvidia-smi and dmesg"))
                self._exit(2, "fault", error, error=error)  # the engine cannot be closed while it runs
            await asyncio.sleep(0.005)

    def _check(self):
        now = time.monotonic()
        for connection in list(self.connections):
            connection.check(now)
        self.loop.call_later(CHECK_SECONDS, self._check)

    # What connections call.

    def opened(self, connection):
        """Returns whether there is a place for it: its own, that of the longest idle one, or a spare one."""
        self.metrics.connections += 1
        places = self._places[type(connection)]
        self._make_room(places, self.max_connections - 1)
        places[connection] = None
        connection.is_spare = len(places) > self.max_connections
        if len(places) > self.max_connections + connection.spare_places:
            self.metrics.dropped_connections += 1
            return False
        return True

    def settle(self, connection):
        """Returns whether a connection has a place that is not a spare one: by now, or since an idle one has ended."""
        places = self._places[type(connection)]
        self._make_room(places, self.max_connections)
        connection.is_spare = len(places) > self.max_connections
        return not connection.is_spare

    def _make_room(self, places, count):
        """Ends the longest idle connections while more than count are open, spare places included."""
        now = time.monotonic()
        for connection in list(places) if len(places) > count else ():
            if len(places) <= count or now - connection.active < SETTLED_SECONDS:
                return
            if connection.is_idle():
                self.dropped(f"idle for {now - connection.active:.0f} s, and its place was needed")
                self.closed(connection)
                connection.close()

    def touched(self, connection):
        """Makes a connection the least idle of all."""
        if connection in self._places[type(connection)]:
            self._places[type(connection)].move_to_end(connection)

    def closed(self, connection):
        self._places[type(connection)].pop(connection, None)

    @property
    def connections(self):
        return [connection for places in self._places.values() for connection in places]

    def dropped(self, reason):
        self.metrics.dropped_connections += 1
        self.log.event("connection", dropped=reason)

    def submit(self, *requests):
        """Accepts requests, all of them or none."""
        if self.is_draining:
            raise Refused("server", "shutting down", "a running one", "send it to another, or again later",
                          code="shutdown", id=requests[0].id)
        self.scheduler.reserve(requests[0].id, len(requests))
        self._num_unanswered += len(requests)
        for request in requests:
            if request.encode:
                self._intake.add(request)
            else:
                self.scheduler.enter(request)

    def cancel(self, request, finish="cancelled"):
        if self._intake.remove(request):
            request.cancelled = finish
            self.scheduler.enter(request)  # which ends it
        else:
            self.scheduler.cancel(request, finish)

    def run(self, function, size, done):
        """Calls function() on another thread, then done(what it returned, what it raised)."""
        def told(made, error):
            done(made, error)
            self._answered()
        self._num_unanswered += 1
        self._intake.run(function, size, told)

    def encoded(self, request, made, error):
        """Submits a request whose prompt is in tokens, or refuses it. made: (prompt, max_new_tokens, grammar)"""
        request.encode = None
        if error is None:
            request.prompt, request.max_new_tokens, grammar = made
            request.sampler = request.sampler._replace(grammar=grammar)
            self.scheduler.enter(request)
            request.owner.accepted(request)
            return
        self.scheduler.release()
        request.error, request.finish, request.is_over = self.refusal(error, request.id), "error", True
        self.refused(request.error)
        self._tell([request])
        self._answered()

    def refusal(self, error, identity=None):
        """Returns what a client is told of an error that reading its request has raised, on whichever thread."""
        if isinstance(error, Refused):
            return error
        if isinstance(error, MemoryError):
            return Refused("memory", "not enough to read the request", "more",
                           "send a shorter one, or raise the service's limit", code="internal", id=identity)
        self._log_fault(type(error).__name__, error)
        return Refused("server", f"{type(error).__name__} while it read the request", "none", "the log has more",
                       code="internal", id=identity)

    def refused(self, error):
        """Counts and logs a request that was not accepted."""
        self.metrics.errors[error.code] += 1
        self.log.event("request", id=error.id, finish="error", code=error.code, message=self._message(error))

    def _message(self, error):
        """Returns an error's text for the log, without what the client has sent, which may be of a prompt."""
        return (str(error) if self.options.log_prompts else error.without_content())[:MESSAGE]

    def health(self):
        """Returns what is wrong, or ""."""
        began = self.scheduler.step_began
        if not self.scheduler.is_alive:
            return "the scheduler has ended"
        if began is not None and time.monotonic() - began > STUCK_SECONDS:
            return f"a step has been running for {time.monotonic() - began:.0f} s"
        return ""

    async def exposition(self):
        """Returns the text of /metrics. What the scheduler alone may read is as of its last answer within 1 s."""
        future = self.loop.create_future()
        self.scheduler.look(lambda: self.loop.call_soon_threadsafe(_set, future, inspect(self.engine)))
        with contextlib.suppress(asyncio.TimeoutError):
            self._state = await asyncio.wait_for(future, 1)
        return self.metrics.text(self.scheduler, self._state, self.log.lost, len(self.connections))

    def _news(self):
        """Takes what the scheduler has brought to the clients that it is for."""
        if self.scheduler.failure is not None:
            for request in self._intake.clear():  # they hear why, as those do that it had
                self.scheduler.enter(request)
        news = [request for request in self.scheduler.take() if not request.is_over]  # else the end was seen before
        for request in news:
            request.is_over = request.finish is not None
            if request.is_over:
                self._ended(request)
        self._tell(news)
        for request in news:
            if request.is_over:
                self._answered()
        if self.scheduler.failure is not None:
            self.stop()

    def _tell(self, requests):
        """Passes news of requests on to their connections."""
        owners = {}
        for request in requests:
            if not request.owner.is_closing:
                owners[request.owner] = None
                try:
                    request.owner.progress(request)
                except Exception as error:  # noqa: BLE001 - of one client: the others go on
                    self._fault(self.loop, {"exception": error})
                    request.owner.drop("an error of the server")
        for owner in owners:
            owner.flush()

    def _answered(self):
        """Counts a request whose end has been told, or a message that is read."""
        self._num_unanswered -= 1
        if self.is_draining and not self._num_unanswered:
            self._idle.set()

    def _fault(self, loop, context):
        """Logs what should not happen in a line of its own; the connection that it happened to has been closed."""
        error = context.get("exception")
        self._log_fault(repr(error) if error else context.get("message", ""), error)

    def _log_fault(self, text, error):
        where = traceback.extract_tb(error.__traceback__)[-1] if error and error.__traceback__ else None
        self.log.event("fault", error=text, at=f"{os.path.basename(where.filename)}:{where.lineno}" if where else None)

    def _ended(self, request):
        self.metrics.ended(request)
        if request.error:
            self.metrics.errors[request.error.code] += 1
        figures = request.figures()
        values = {"id": request.id, "prompt_tokens": figures["prompt_tokens"], "tokens": figures["completion_tokens"],
                  "finish": request.finish,
                  **({"code": request.error.code, "message": self._message(request.error)} if request.error else {}),
                  "ttft_ms": figures["ttft_ms"], "itl_p99_ms": figures["itl_p99_ms"],
                  **({} if request.seed is None else {"seed": request.seed})}
        if self.options.log_prompts and request.rows is None:
            start = request.prompt[:4 * PROMPT]  # a character is at most 4 tokens
            values["prompt"] = (request.used.decode(start) if request.used else " ".join(map(str, start)))[:PROMPT]
        self.log.event("request", **values)


def _set(future, value):
    if not future.done():
        future.set_result(value)
