"""A client's connection: what it has running, and the bytes it has not taken yet. JSON lines; HTTP is in http.py."""

import asyncio
import json
import re
import time
from json.encoder import encode_basestring_ascii

from colibri import logprobs
from colibri.intake import LARGE
from colibri.refused import Refused
from colibri.requests import Request, cancelled_id

MAX_UNREAD_BYTES = 4 << 20  # that a client may leave unread before it is dropped ...
MAX_STALL_SECONDS = 60      # ... and so long it may take nothing of what waits for it, or stop within a message
IDLE_SECONDS = {"lines": 86400, "http": 300}  # without a request before a connection ends: HTTP's clients open another
HTTP_LINE = re.compile(rb"[A-Z]+ \S+ HTTP/")  # by which a browser would bring in a line of somebody else's page
LINES_A_TURN = 64           # of one client, before others have their turn


class Connection(asyncio.Protocol):
    """Holds what lines and HTTP share. The transport is a socket's, or stdio.Pipes.

    running: {id: Request}
    is_reading: a message is read on another thread; what follows it waits
    active: when something arrived or was sent
    arrived: when the message that is read had arrived
    """

    kind = None         # of IDLE_SECONDS
    is_patient = False  # with a client that reads slowly, or sends nothing
    spare_places = 0    # beyond the server's max_connections, for what needs no request

    def __init__(self, server):
        self.server, self.transport = server, None
        self.running = {}
        self.is_full = False    # as many bytes wait for the client as should: nothing more is read from it ...
        self.is_sated = False   # ... nor here, where as many wait to be handled
        self.is_closing = self._is_dropped = self.is_reading = False
        self.is_spare = False   # has one of the spare places
        self.active = self.arrived = self._arrived = time.monotonic()  # _arrived: when the last of the input did
        self._input, self._output = bytearray(), []
        self._waiting, self._moved = 0, time.monotonic()  # bytes for the client at the last check; when anything moved

    def connection_made(self, transport):
        self.transport = transport
        if not self.server.opened(self):
            self.refuse(self.too_many())
            self.close()

    def connection_lost(self, exc):
        """Cancels the requests of a client that has left."""
        self.is_closing = True
        self.server.closed(self)
        for request in list(self.running.values()):
            self.server.cancel(request)

    def pause_writing(self):
        self.is_full = True
        self._pause()

    def resume_writing(self):
        self.is_full = False
        self.pump()

    def data_received(self, data):
        self._input += data
        self._moved = self.active = self._arrived = time.monotonic()
        self.server.touched(self)
        self.pump()

    def pump(self):
        """Handles what has arrived, as long as the client takes the answers, and in turn with other clients."""
        if self.is_closing:
            return
        if self.is_full:
            self._pause()
        elif self.consume(LINES_A_TURN):
            self._pause()
            self.server.loop.call_soon(self.pump)
        elif self.is_sated:
            self._pause()
        else:
            self._resume()

    def _pause(self):
        if not self.is_closing and self.transport.is_reading():
            self.transport.pause_reading()

    def _resume(self):
        if not self.is_closing and not self.transport.is_reading():
            self.transport.resume_reading()
            self._moved = time.monotonic()  # until now it was not the client that stopped

    def write(self, data):
        """Sends at the next flush(), so that what one step brings is one system call."""
        self._output.append(data)

    def flush(self):
        if self.is_closing or not self._output:
            self._output.clear()
            return
        self.transport.write(b"".join(self._output))
        self._output.clear()
        self.active = time.monotonic()
        self.server.touched(self)
        if self.transport.get_write_buffer_size() > MAX_UNREAD_BYTES and not self.is_patient:
            self.drop(f"more than {MAX_UNREAD_BYTES >> 20} MiB unread")

    def drop(self, reason):
        """Ends a connection whose client hinders it, also from being closed."""
        if not self._is_dropped:
            self.server.dropped(reason)
            self.is_closing = self._is_dropped = True
            self.transport.abort()

    def close(self):
        """Ends the connection when the client has taken what was written."""
        self.flush()
        if not self.is_closing:
            self.is_closing = True
            self.transport.close()

    def drain(self):
        """Ends the connection when its requests have ended, since the server will."""
        if not self.running and not self.is_reading:
            self.close()

    def read(self, data, size=None):
        """Handles a message, a large one when another thread has read it. size: what it is taken for, if not its own"""
        self.arrived = self._arrived
        size = len(data) if size is None else size
        if size > LARGE:
            self.is_reading = True
            self.server.run(lambda: self.understand(data), size, self._was_read)
            return
        made = error = None
        try:
            made = self.understand(data)
        except Exception as raised:  # noqa: BLE001 - whatever it is, the client is told
            error = raised
        self._act(made, error)

    def _was_read(self, made, error):
        self.is_reading = False
        if not self.is_closing:
            self._act(made, error)
            self.pump()

    def _act(self, made, error):
        if error is None:
            try:
                self.take(made)
            except Refused as refused:
                error = refused
        if error is not None:
            self.refuse(self.server.refusal(error))

    def is_idle(self):
        """Returns whether it can be closed and nobody would miss an answer."""
        return not (self.running or self.is_reading or self.is_closing or self.is_patient or self.is_within_message()
                    or self.transport.get_write_buffer_size())

    def check(self, now):
        """Drops a client that takes nothing, or stops within what it sends; ends an idle one. Called now and then."""
        waiting = self.transport.get_write_buffer_size()
        if waiting != self._waiting:
            self._waiting, self._moved = waiting, now
        if now - self._moved > MAX_STALL_SECONDS and not self.is_patient:
            if waiting:
                self.drop(f"took nothing for {MAX_STALL_SECONDS} s")
            elif self.is_within_message() and not self.running:
                self.drop(f"sent half a message, then nothing for {MAX_STALL_SECONDS} s")
        if now - self.active > IDLE_SECONDS[self.kind] and self.is_idle():
            self.close()

    def too_many(self):
        return Refused("connections", f"{self.server.max_connections} are open and none is idle", "fewer",
                       "close one first", code="too_many_connections")

    def understand(self, data):
        """Returns what take() needs of a message's bytes. Runs on any thread; raises Refused."""
        raise NotImplementedError

    def take(self, made):
        """Does what a message asks for; raises Refused."""
        raise NotImplementedError

    def is_within_message(self):
        """Returns whether a part of a message has arrived."""
        raise NotImplementedError

    def refuse(self, error):
        """Answers with an error."""
        raise NotImplementedError

    def consume(self, count):
        """Handles up to count messages of the input; returns whether there are more."""
        raise NotImplementedError

    def progress(self, request):
        """Tells the client of new tokens, or of the end."""
        raise NotImplementedError

    def accepted(self, request):
        """Tells the client that a request's prompt is in tokens and waits for its turn."""


class Lines(Connection):
    """One JSON object a line, both ways."""

    kind = "lines"

    def __init__(self, server):
        super().__init__(server)
        self.is_ended = False
        self._searched = 0         # bytes of the input that hold no line's end
        self._is_first = True
        self._is_skipping = False  # the rest of a line that is too long

    def is_within_message(self):
        return self._is_skipping or bool(self._input)

    def consume(self, count):
        """Returns True where more lines may wait."""
        self.is_sated = False
        while count and not (self.is_full or self.is_closing or self.is_reading):
            end = self._input.find(b"\n", self._searched)
            if end < 0:
                self._keep()
                self.flush()
                self._end()
                return False
            line = bytes(self._input[:end])
            del self._input[:end + 1]
            self._searched = 0
            if self._is_skipping:
                self._is_skipping = False
            elif len(line) > self.server.reader.max_bytes:
                self.refuse(self.server.reader.too_long(line, "line"))
            elif self._is_first and HTTP_LINE.match(line):
                self.refuse(Refused("line", "HTTP", "a JSON object a line", "HTTP is spoken at --http"))
                if not self.is_patient:  # no browser writes to stdin
                    self.close()
            elif line.strip():
                self.read(line)
            self._is_first = False
            count -= 1
        self.is_sated = self.is_reading and len(self._input) > self.server.reader.max_bytes
        self.flush()
        return not (self.is_closing or self.is_reading)

    def _keep(self):
        """Keeps of a line that has not ended as much as may be one."""
        self._searched = len(self._input)
        if len(self._input) > self.server.reader.max_bytes or self._is_skipping:
            if not self._is_skipping:
                self.refuse(self.server.reader.too_long(self._input, "line"))
            self._input.clear()
            self._searched, self._is_skipping = 0, True

    def understand(self, data):
        """Returns a Request, or the id of one that is cancelled."""
        values = self.server.reader.parse(data)
        identity = cancelled_id(values)
        return self.server.reader.request(values, self.arrived) if identity is None else identity

    def take(self, made):
        if not isinstance(made, Request):
            if made in self.running:  # else it has just ended
                self.server.cancel(self.running[made])
            return
        if made.id in self.running:
            raise Refused("id", f"{json.dumps(made.id)} is running", "another", "wait for its end", id=made.id,
                          logged={"got": "... is running"})
        made.owner = self
        self.server.submit(made)
        self.running[made.id] = made

    def refuse(self, error):
        self.server.refused(error)
        self.write(error_line(error))

    def progress(self, request):
        if request.stream:
            identity, told = json.dumps(request.id), request.told
            for index, (token, piece) in enumerate(request.news(), told):
                text = f', "text": {encode_basestring_ascii(piece)}' if request.used else ""
                if request.sampler.logprobs is not None:
                    text += f", {json.dumps(logprobs.of_line(request.score(index)))[1:-1]}"
                self.write(f'{{"id": {identity}, "token": {token}{text}}}\n'.encode())
            if request.is_over and not request.error and request.rest():
                rest = encode_basestring_ascii(request.rest())
                self.write(f'{{"id": {identity}, "token": null, "text": {rest}}}\n'.encode())
        if request.is_over:
            del self.running[request.id]
            self.write(error_line(request.error) if request.error else self._final(request))
            self._end()

    def _final(self, request):
        values = {"id": request.id}
        if request.rows is not None:
            values["output"] = request.rows.output
        elif request.used:
            values["text"] = request.text()
        else:
            values["ids"] = request.tokens
        if request.rows is None:
            values |= logprobs.of_lines(request)
        if request.seed is not None:
            values["seed"] = request.seed
        return json.dumps({**values, "finish_reason": request.finish, **request.figures(),
                           "path": self.server.engine.path}).encode() + b"\n"

    def end(self):
        """Takes no more input, but waits for answers: stdin has ended."""
        self._input += b"\n"
        self.is_ended = True
        self.pump()

    def _end(self):
        is_last = self.is_ended and not self._input or self.server.is_draining
        if is_last and not self.running and not self.is_reading:
            self.close()


def error_line(error):
    values = {"id": error.id, "error": {"message": str(error), "code": error.code}}
    return json.dumps(values).encode() + b"\n"
