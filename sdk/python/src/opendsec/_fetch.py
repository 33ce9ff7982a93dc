"""Large answers, read in a thread of their own over a connection of their own.

Both sides use it. A thread takes a third of the processor time that an event
loop takes for the same bytes, and a connection apart keeps a large file from
holding up commands. It is HTTP/1.1, which costs both ends less per byte than
the frames of HTTP/2.
"""

from __future__ import annotations

import os
import secrets
import tarfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from connectrpc.code import Code
from connectrpc.errors import ConnectError
from pyqwest import HTTPVersion, SyncClient, SyncHTTPTransport

from . import _tar, _wire
from .errors import DSecError

# Told of the bytes done and of those in all, None when unknown.
Report = Callable[[int, "int | None"], None]

_REPORT = 1 << 20  # bytes between two reports


class Bulk:
    """Connections apart, for large answers or for tunnels; made when first used.

    ``silence`` is after how many seconds without a byte one counts as broken; None for never.
    """

    def __init__(self, secure: bool, certificates: bytes | None, silence: float | None) -> None:
        self._transport = SyncHTTPTransport(
            tls_ca_cert=certificates,
            tls_include_system_certs=secure and certificates is None,
            http_version=HTTPVersion.HTTP1,
            read_timeout=silence,
            enable_gzip=False,
            enable_brotli=False,
            enable_zstd=False,
            follow_redirects=False,
        )
        self.client = SyncClient(self._transport)

    def close(self) -> None:
        """Close the connections."""
        self._transport.close()


class Fetch:
    """One answer.

    Attributes:
        total: bytes in all; None before they are known, or when the server does not say.
    """

    def __init__(
        self, client: SyncClient, url: str, headers: Mapping[str, str], report: Report | None
    ) -> None:
        self.total: int | None = None
        self._client = client
        self._url = url
        self._headers = headers
        self._report = report
        self._stopped = False

    def stop(self) -> None:
        """Have the thread give up at the next piece."""
        self._stopped = True

    def to_file(self, target: Path, mode: int) -> None:
        """Write the answer to a file, whole or not at all."""
        part = target.with_name(f".{target.name[:200]}.{secrets.token_hex(4)}.part")
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
        with open(os.open(part, flags, mode & 0o777), "wb", buffering=_tar.PIECE) as file:
            try:
                for piece in self._pieces():
                    file.write(piece)
                file.close()
                os.replace(part, target)
            except BaseException:
                part.unlink(missing_ok=True)
                raise

    def to_tree(self, root: Path) -> None:
        """Unpack the answer, a tar stream, into a directory, which is made."""
        pieces = self._pieces()
        try:
            _tar.unpack(root, pieces)
        except (tarfile.TarError, ValueError) as err:
            raise DSecError(f"the archive that the sandbox sent is refused: {err}") from err
        for _ in pieces:  # what follows the end of the archive
            continue

    def _pieces(self) -> Iterator[bytes]:
        opening = self._client.stream("GET", self._url, headers=self._headers)
        try:
            response = opening.__enter__()
        except Exception as err:
            raise ConnectError(Code.UNAVAILABLE, str(err)) from err
        try:
            body = iter(response.content)
            if response.status >= 400:
                raise _wire.http_error(response.status, b"".join(unbroken(body)))
            length = response.headers.get("content-length")
            self.total = None if length is None else int(length)
            yield from self._counted(unbroken(body))
        finally:
            opening.__exit__(None, None, None)

    def _counted(self, body: Iterator[bytes]) -> Iterator[bytes]:
        done = told = 0
        for piece in body:
            if self._stopped:
                raise ConnectError(Code.CANCELED, "the transfer was given up")
            yield piece
            done += len(piece)
            if self._report is not None and done - told >= _REPORT:
                told = done
                self._report(done, self.total)
        if self.total is not None and done != self.total:
            raise ConnectError(Code.UNAVAILABLE, f"the answer broke off after {done} of {self.total} bytes")
        if self._report is not None and (done != told or done == 0):
            self._report(done, self.total)


def unbroken(body: Iterator[bytes | bytearray | memoryview]) -> Iterator[bytes]:
    """Yield the pieces of a body; raise ConnectError when it breaks off."""
    while True:
        try:
            piece = next(body)
        except StopIteration:
            return
        except Exception as err:
            raise ConnectError(Code.UNAVAILABLE, str(err)) from err
        yield piece if isinstance(piece, bytes) else bytes(piece)
