"""The sockets that a server listens on: host:port, unix:path, or one that systemd opened."""

import errno
import fcntl
import functools
import ipaddress
import os
import re
import resource
import socket
import stat

from colibri.errors import ColibriError

BACKLOG = 4096    # connections that the kernel keeps until they are accepted
ACCEPTS = 64      # of them at a time
ATTEMPTS = 100    # to find a port that is free at both loopbacks
FIRST_PASSED = 3  # the descriptor of the first socket that systemd passes
MAX_PATH = 107    # bytes of a Unix socket's name
FAMILIES = (socket.AF_INET, socket.AF_INET6, socket.AF_UNIX)


class Listener:
    """The sockets of one option: one, or both loopbacks' of :PORT.

    option: the one that named them. place: where the first is, for the line that says so
    """

    def __init__(self, option, address, passed=None):
        self.option, self.sockets, self._servers = option, [], []
        self._path = self._inode = None
        try:
            if passed is not None:
                self.sockets = [_passed(option, passed)]
            elif address.startswith("unix:"):
                self._path = address.removeprefix("unix:")
                self.sockets = [self._unix(self._path)]
            else:
                self.sockets = _tcp(option, address)
        except OSError as error:
            raise ColibriError(option, f"{address}: {error.strerror or error}", "a free address of this machine",
                               "choose another") from None
        self.place = address if self._path else _place(self.sockets[0])
        for listening in self.sockets:
            listening.setblocking(False)

    def _unix(self, path):
        """Takes the place of a socket that a killed server left behind, and of nothing else."""
        if not 0 < len(os.fsencode(path)) <= MAX_PATH:
            raise ColibriError(self.option, f"unix:{path}", f"a name of 1 to {MAX_PATH} bytes", "choose another")
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        folder = os.open(os.path.dirname(path) or ".", os.O_RDONLY)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)  # two servers that start at once
            self._clear(path)
            listening.bind(path)
            listening.listen(BACKLOG)
            self._inode = os.stat(path).st_ino
        except BaseException:
            listening.close()
            raise
        finally:
            os.close(folder)
        return listening

    def _clear(self, path):
        try:
            kind = os.lstat(path).st_mode
        except FileNotFoundError:
            return
        if not stat.S_ISSOCK(kind):
            raise ColibriError(self.option, f"unix:{path}, a file that is no socket", "none there",
                               "choose another name, or remove it")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(1)
            try:
                probe.connect(path)
            except ConnectionRefusedError:
                os.unlink(path)
                return
            except OSError:  # full, or not ours to connect to: somebody is there
                pass
        raise ColibriError(self.option, f"unix:{path}, in use by another server", "a free name",
                           "choose another, or end that server")

    @property
    def is_unix(self):
        return all(listening.family == socket.AF_UNIX for listening in self.sockets)

    async def start(self, loop, make):
        """Gives each connection to a protocol that make(is_local) returns. is_local: the socket is a loopback's"""
        for listening in self.sockets:
            make_one = functools.partial(make, _is_local(listening))
            self._servers.append(await loop.create_server(make_one, sock=listening, backlog=ACCEPTS))
            listening.listen(BACKLOG)  # create_server() has made it as small as its turns

    def unlink(self):
        if self._inode is not None:
            try:
                if os.stat(self._path).st_ino == self._inode:
                    os.unlink(self._path)
            except OSError:
                pass
            self._inode = None

    def close(self):
        """Stops listening; connections go on."""
        self.unlink()
        for opened in (*self._servers, *self.sockets[len(self._servers):]):
            opened.close()


def split(option, address):
    """Returns (host, port) of HOST:PORT, [IPv6]:PORT or :PORT, which is of this machine alone."""
    host, colon, port = address.rpartition(":")
    if not colon or not port.isascii() or not port.isdigit() or int(port) > 65535 or (":" in host and host[0] != "["):
        raise ColibriError(option, address,
                           f"{'- or HOST:PORT or unix:PATH' if option == '--serve' else 'HOST:PORT'}, "
                           "with a port of 0 to 65535")
    return host.removeprefix("[").removesuffix("]"), int(port)


def _tcp(option, address):
    """Returns the listening sockets of an address."""
    host, port = split(option, address)
    if not host:
        return _loopbacks(port)
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except UnicodeError:
        raise ColibriError(option, address, "a host's name with 1 to 63 characters between two dots",
                           "correct it") from None
    family, *_, where = found[0]
    return [_bound(family, where)]


def _loopbacks(port):
    """Returns sockets of 127.0.0.1 and, where the machine has IPv6, of ::1, for clients that take localhost as that.

    Port 0 becomes one that is free at both.
    """
    for attempts_left in reversed(range(ATTEMPTS)):
        first = _bound(socket.AF_INET, ("127.0.0.1", port))
        try:
            return [first, _bound(socket.AF_INET6, ("::1", first.getsockname()[1]))]
        except OSError as error:
            if error.errno in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL):
                return [first]
            first.close()
            if port or not attempts_left:
                raise OSError(error.errno, f"[::1]:{port}: {error.strerror}") from None


def _bound(family, where):
    """Returns a listening socket of TCP."""
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # connections inherit these: a machine that
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30)  # vanished is noticed within a minute
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10)
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
        listening.bind(where)
        listening.listen(BACKLOG)
    except BaseException:
        listening.close()
        raise
    return listening


def is_loopback(address):
    """Returns whether an IP address is of this machine alone; raises ValueError for what is no address."""
    address = ipaddress.ip_address(address.partition("%")[0])
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


def _is_local(listening):
    """Returns whether a socket is of a loopback address."""
    name = listening.getsockname()
    return isinstance(name, tuple) and is_loopback(name[0])


def _passed(option, descriptor):
    """Returns a socket that systemd says it has passed."""
    try:
        listening = socket.socket(fileno=descriptor)
        is_listening = listening.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        wrong = None if is_listening and listening.family in FAMILIES else "not a listening stream socket of IP or Unix"
    except OSError as error:
        wrong = error.strerror
    if wrong:
        raise ColibriError(option, f"descriptor {descriptor} of LISTEN_FDS: {wrong}", "a listening socket there",
                           "correct the .socket unit, or unset LISTEN_FDS")
    os.set_inheritable(descriptor, False)
    return listening


def _place(listening):
    name = listening.getsockname()
    if isinstance(name, tuple):
        host = f"[{name[0]}]" if ipaddress.ip_address(name[0].partition("%")[0]).version == 6 else name[0]
        return f"{host}:{name[1]}"
    return f"unix:{os.fsdecode(name)}"


def activated():
    """{"serve": descriptor, "http": descriptor} of the sockets that systemd passed to this process, by their names.

    A socket whose FileDescriptorName= is not "http" is --serve's. What is not meant for this process is left alone.
    """
    if os.environ.get("LISTEN_PID") != str(os.getpid()):
        return {}
    names, count = os.environ.get("LISTEN_FDNAMES", "").split(":"), os.environ.get("LISTEN_FDS", "0")
    if not re.fullmatch("[0-9]{1,4}", count):
        raise ColibriError("LISTEN_FDS", count[:80], "the number of sockets passed, 0 to 9999", "unset it")
    count = int(count)
    names += [""] * (count - len(names))
    return {"http" if names[index] == "http" else "serve": FIRST_PASSED + index for index in range(count)}


def number_of_files():
    """Raises the limit of open files to what it may be raised to, and returns it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard
