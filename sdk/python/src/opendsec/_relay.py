"""A local port that leads to a port of a sandbox. Both sides use it.

Each connection is one request over a connection of its own: what the local
program sends is the request's body, and what comes back are frames in the
answer's body. It has a thread, and one of the transport's; nothing is held but
a piece each way, so who is slow is waited for.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping

from connectrpc.code import Code
from connectrpc.errors import ConnectError
from pyqwest import SyncClient

from . import _wire
from ._fetch import unbroken

_PIECE = 64 << 10  # bytes that are read at once
_HEAD = struct.Struct(">BI")  # of a frame: what it is, and the length of its payload
_DATA, _EOF, _END = 0, 1, 2
_MOST_WORDS = 64 << 10  # bytes of the error in the last frame
_HARD = struct.pack("hh" if os.name == "nt" else "ii", 1, 0)  # SO_LINGER: closing breaks the connection

TUNNEL = "application/x-opendsec-tunnel"


class Relay:
    """A listener on this machine, and the connections that it took.

    ``failed`` is told why a connection failed before that is broken off, and
    what it returns is called after.

    Attributes:
        host, port: where it listens; known once it is open.
    """

    def __init__(
        self,
        client: Callable[[], SyncClient],
        url: str,
        headers: Mapping[str, str],
        failed: Callable[[ConnectError], Callable[[], None]],
    ) -> None:
        self.host = ""
        self.port = 0
        self._client = client
        self._url = url
        self._headers = headers
        self._failed = failed
        self._lock = threading.Lock()  # guards what follows
        self._open: set[_Link] = set()
        self._closed = False

    def open(self, host: str, port: int) -> None:
        """Listen, and serve in a thread; raise OSError when that cannot be."""
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        self._listener = socket.create_server((host, port), family=family, backlog=128)
        self.host, self.port = self._listener.getsockname()[:2]
        self._wake, self._woken = socket.socketpair()
        self._thread = threading.Thread(target=self._accept, name="opendsec-forward", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening, and break what is open."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            links = list(self._open)
        self._wake.close()
        self._thread.join()
        for link in links:
            link.abandon(socket.SHUT_RDWR)

    def _accept(self) -> None:
        with self._listener, self._woken, selectors.DefaultSelector() as selector:
            self._listener.setblocking(False)
            selector.register(self._listener, selectors.EVENT_READ)
            selector.register(self._woken, selectors.EVENT_READ)
            while not any(key.fileobj is self._woken for key, _ in selector.select()):
                try:
                    local, _ = self._listener.accept()
                except OSError:  # it went away again, or there are too many files open
                    continue
                self._take(local)

    def _take(self, local: socket.socket) -> None:
        local.setblocking(True)
        with contextlib.suppress(OSError):
            local.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        link = _Link(local)
        with self._lock:
            if self._closed:
                local.close()
                return
            self._open.add(link)
        threading.Thread(target=self._lead, args=(link,), name="opendsec-connection", daemon=True).start()

    def _lead(self, link: _Link) -> None:
        after: list[Callable[[], None]] = []

        def failed(err: ConnectError) -> None:
            if not self._closed:
                after.append(self._failed(err))

        try:
            link.run(self._client(), self._url, self._headers, failed)
        finally:
            with self._lock:
                self._open.discard(link)
        for tell in after:
            tell()


class _Link:
    """One local connection on its way to a port of a sandbox."""

    def __init__(self, local: socket.socket) -> None:
        self._local = local
        self._broken = False

    def run(
        self, client: SyncClient, url: str, headers: Mapping[str, str], failed: Callable[[ConnectError], None]
    ) -> None:
        """Pass bytes until all is over, or until it failed on the far side."""
        with self._local:
            try:
                self._run(client, url, headers)
            except ConnectError as err:
                failed(err)
                self.abandon()
            except OSError:  # the local program broke off, which it need not be told
                self.abandon()
            finally:
                with contextlib.suppress(OSError):
                    self._local.shutdown(socket.SHUT_RD)  # wakes who still reads from it

    def _run(self, client: SyncClient, url: str, headers: Mapping[str, str]) -> None:
        try:
            opening = client.stream("POST", url, headers=headers, content=self._pieces())
            response = opening.__enter__()
        except Exception as err:
            raise ConnectError(Code.UNAVAILABLE, str(err)) from err
        try:
            if response.status != 200 or response.headers.get("content-type") != TUNNEL:
                raise _wire.http_error(response.status, b"".join(unbroken(response.content)))
            self._deliver(unbroken(response.content))
        finally:
            opening.__exit__(None, None, None)

    def abandon(self, ways: int = socket.SHUT_RD) -> None:
        """Break the connection, so that nobody takes a cut for an end, and wake who waits for it.

        Args:
            ways: SHUT_RDWR also wakes who sends, at the price of an end that comes before the break.
        """
        self._broken = True
        with contextlib.suppress(OSError):
            self._local.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _HARD)
            self._local.shutdown(ways)
        with contextlib.suppress(OSError):
            self._local.close()

    def _pieces(self) -> Iterator[bytes]:
        """Yield what the local program sends, to its end."""
        while True:
            piece = self._local.recv(_PIECE)
            if self._broken:
                raise ConnectionAbortedError("the connection was broken off")
            if not piece:
                return
            yield piece

    def _deliver(self, body: Iterable[bytes]) -> None:
        """Hand what the far side sent to the local program."""
        head = bytearray()
        words = bytearray()
        kind = left = 0
        for piece in body:
            view = memoryview(piece)
            while view:
                if left == 0:
                    wanted = _HEAD.size - len(head)
                    head += view[:wanted]
                    view = view[wanted:]
                    if len(head) < _HEAD.size:
                        break
                    kind, left = _HEAD.unpack(head)
                    head.clear()
                    if kind > _END or (kind != _DATA and left > _MOST_WORDS):
                        raise ConnectError(Code.INTERNAL, f"a tunnel sent a frame of kind {kind}")
                    if kind == _EOF:
                        self._local.shutdown(socket.SHUT_WR)
                    elif kind == _END and left == 0:
                        return
                    continue
                part, view = view[:left], view[left:]
                left -= len(part)
                if kind == _DATA:
                    self._local.sendall(part)
                else:
                    words += part
                    if left == 0:
                        raise _wire.http_error(503, bytes(words))
        raise ConnectError(Code.UNAVAILABLE, "the connection broke off")
