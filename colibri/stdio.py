"""stdin and stdout as a connection's transport."""

import os
import queue
import threading

READ_BYTES = 1 << 16
FULL_BYTES = 1 << 16  # that may wait to be written before no more is read


class Pipes:
    """A transport with a thread for each direction: a file, a terminal or a pipe, whether or not it can be polled."""

    def __init__(self, loop, connection, source=0, target=1):
        self._loop, self._connection, self._source, self._target = loop, connection, source, target
        self._reading, self._handled = threading.Event(), threading.Semaphore(1)
        self._reading.set()
        self._waiting, self._is_full, self._is_closing = 0, False, False
        self._is_ended = self._is_lost = False  # stdin; the connection. When both have, so does the server
        self._pieces = queue.SimpleQueue()
        connection.is_patient = True
        connection.connection_made(self)
        for main in (self._read, self._write):
            threading.Thread(target=main, name=f"std{main.__name__}", daemon=True).start()

    def is_reading(self):
        return self._reading.is_set()

    def pause_reading(self):
        self._reading.clear()

    def resume_reading(self):
        self._reading.set()

    def get_write_buffer_size(self):
        return self._waiting

    def write(self, data):
        self._waiting += len(data)
        self._pieces.put(data)
        if self._waiting > FULL_BYTES and not self._is_full:
            self._is_full = True
            self._connection.pause_writing()

    def close(self):
        """Closes when all is written."""
        self._is_closing = True
        if not self._waiting:
            self.abort()

    def abort(self):
        if not self._is_lost:
            self._is_lost = True
            self._reading.set()  # to the end, which ends the server
            self._connection.connection_lost(None)
            if self._is_ended:
                self._connection.server.stop()

    def _read(self):
        while True:
            self._handled.acquire()  # one piece at a time is on its way
            self._reading.wait()
            try:
                data = os.read(self._source, READ_BYTES)
            except OSError as error:
                self._hop(self._unread, error)
                return
            self._hop(self._received, data)
            if not data:
                return

    def _received(self, data):
        self._handled.release()
        self._is_ended = not data
        if self._is_lost:
            if self._is_ended:
                self._connection.server.stop()
        elif data:
            self._connection.data_received(data)
        else:
            self._connection.end()

    def _unread(self, error):
        self._received(b"")
        self._connection.server.fail("stdin", error.strerror, "requests there", "give it a file or a pipe")

    def _write(self):
        while True:
            data = memoryview(self._pieces.get())
            count = len(data)
            try:
                while data:
                    data = data[os.write(self._target, data):]
            except OSError as error:
                self._hop(self._lost, error)
                return
            self._hop(self._written, count)

    def _written(self, count):
        self._waiting -= count
        if self._is_closing and not self._waiting:
            self.abort()
        elif self._is_full and self._waiting < FULL_BYTES // 4:
            self._is_full = False
            self._connection.resume_writing()

    def _lost(self, error):
        """Ends the connection: nobody reads stdout any more, or it cannot be written."""
        self._waiting = 0
        self.abort()
        if isinstance(error, BrokenPipeError):
            self._connection.server.stop()
        else:
            self._connection.server.fail("stdout", error.strerror, "to write the answers there", "free some space")

    def _hop(self, function, *arguments):
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:
            pass  # the loop has ended
