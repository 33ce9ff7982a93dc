# Made by tools/generate_sync.py from opendsec/_async/files.py. DO NOT EDIT.
"""Files of a sandbox: whole, streamed, as trees."""

from __future__ import annotations

import os
import stat as stat_bits
from collections.abc import Iterator, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from connectrpc.errors import ConnectError

from .. import _wire
from .._args import invalid
from .._gen.filesystem import filesystem_pb
from .._tar import PIECE, Packer
from .._values import FileInfo, FileType
from ..errors import AlreadyExistsError, DSecError, NotFoundError
from ._concurrent import call, from_thread, in_thread, to_thread
from .agent import Agent

ProgressCallback = Callable[[int, "int | None"], Any]


class Files:
    """The part of a sandbox that reads and changes its file tree.

    A relative path starts at the sandbox's ``workdir``, or else at the home of
    the user. ``user`` says as whom a call is made and to whom new entries
    belong: a name or number, None for the sandbox's own user.
    """

    _agent: Agent

    def write_file(
        self, path: str, data: str | bytes, mode: int | None = None, user: str | None = None
    ) -> None:
        """Write a file, whole or not at all; directories above it are made.

        Args:
            path: where; an existing file is replaced.
            data: bytes, or text that is written as UTF-8.
            mode: permission bits such as ``0o755``; None for ``0o644``, or those of the file replaced.
            user: see the class.

        Raises:
            InvalidArgumentError: the path is a directory.
            PermissionDeniedError: the user may not write there.
            QuotaExceededError: the sandbox's disk is full.
        """
        if isinstance(data, str):
            data = data.encode()
        elif not isinstance(data, bytes):
            if not isinstance(data, (bytearray, memoryview)):
                raise invalid("data", f"{type(data).__name__} is neither str nor bytes")
            data = bytes(data)
        self._agent.transfer("POST", "/files", _target(path, mode), user=user, content=data)

    def read_file(self, path: str, user: str | None = None) -> str:
        """Read a file of UTF-8 text.

        Raises:
            NotFoundError: there is no such file.
            InvalidArgumentError: it is a directory, or not UTF-8 text (``read_bytes`` takes anything).
        """
        data = self.read_bytes(path, user)
        try:
            return data.decode()
        except UnicodeDecodeError as err:
            raise invalid("path", f"{path!r} is not UTF-8 text; read it with read_bytes") from err

    def read_bytes(self, path: str, user: str | None = None) -> bytes:
        """Read a file. For one that is too large for memory there is ``download``.

        Raises:
            NotFoundError: there is no such file.
            InvalidArgumentError: it is a directory.
        """
        return self._agent.transfer("GET", "/files", {"path": _path(path)}, user=user)

    def list_dir(self, path: str, depth: int = 1, user: str | None = None) -> list[FileInfo]:
        """List a directory, in the order of names, a directory's entries after it.

        Args:
            path: the directory.
            depth: how many levels down; 1 for its own entries only.
            user: see the class.

        Raises:
            NotFoundError: there is no such directory.
            InvalidArgumentError: it is no directory.
        """
        if isinstance(depth, bool) or not isinstance(depth, int) or not 1 <= depth < 2**32:
            raise invalid("depth", f"{depth!r} is not a whole number of at least 1")
        request = filesystem_pb.ListDirRequest(path=_path(path), depth=depth)
        answer = self._agent.call(self._agent.filesystem.list_dir, request, user=user)
        return [_wire.file_info(entry) for entry in answer.entries]

    def stat(self, path: str, user: str | None = None) -> FileInfo:
        """Describe an entry.

        Raises:
            NotFoundError: there is none.
        """
        request = filesystem_pb.StatRequest(path=_path(path))
        answer = self._agent.call(self._agent.filesystem.stat, request, user=user)
        return _entry(answer.entry, path)

    def exists(self, path: str, user: str | None = None) -> bool:
        """Return whether there is such an entry; a link that leads nowhere is one."""
        try:
            self.stat(path, user)
        except NotFoundError as err:
            if err.request_id is not None:
                raise  # it is the sandbox that is not there
            return False
        return True

    def make_dir(self, path: str, user: str | None = None) -> bool:
        """Make a directory with those above it.

        Returns:
            False when it was there already.

        Raises:
            InvalidArgumentError: something else is in the way.
        """
        request = filesystem_pb.MakeDirRequest(path=_path(path))
        try:
            self._agent.call(self._agent.filesystem.make_dir, request, user=user)
        except AlreadyExistsError:
            return False
        return True

    def move(self, path: str, to: str, user: str | None = None) -> FileInfo:
        """Rename an entry, making the directories above its new path.

        Raises:
            NotFoundError: there is no such entry.
        """
        request = filesystem_pb.MoveRequest(source=_path(path), destination=_path(to, "to"))
        answer = self._agent.call(self._agent.filesystem.move, request, user=user, once=True)
        return _entry(answer.entry, to)

    def remove(self, path: str, recursive: bool = False, user: str | None = None) -> None:
        """Delete a file, a link, or a directory.

        Args:
            path: what to delete; of a link only itself.
            recursive: whether a directory goes with all that is in it; False refuses one that is not empty.
            user: see the class.

        Raises:
            NotFoundError: there is no such entry.
            InvalidArgumentError: a directory that is not empty, and ``recursive`` is False.
        """
        info = self.stat(path, user)
        if info.type is FileType.DIRECTORY and not recursive:
            entries = len(self.list_dir(path, user=user))
            if entries:
                raise invalid(
                    "recursive",
                    f"{path!r} is a directory with {entries} entries; give recursive=True to delete all",
                )
        request = filesystem_pb.RemoveRequest(path=_path(path))
        self._agent.call(self._agent.filesystem.remove, request, user=user)

    def upload(
        self,
        local: str | os.PathLike[str],
        path: str,
        progress: ProgressCallback | None = None,
        user: str | None = None,
    ) -> None:
        """Copy a file or a directory from this machine into the sandbox, of any size.

        A file arrives whole or not at all. The entries of a directory are put
        into ``path``, which is made; what else is there stays. Permission bits,
        links and, in a directory, times are kept; owners are not.

        Args:
            local: what to copy.
            path: its new name; with ``/`` at the end, the directory into which a file goes.
            progress: called with the bytes done and those in all.
            user: see the class.

        Raises:
            OSError: the local side cannot be read.
            QuotaExceededError: the sandbox's disk is full.
        """
        source = Path(local)
        if source.is_dir():
            packer = to_thread(Packer, source)
            pieces = _told(iter(packer), lambda: (packer.done, packer.total), progress)
            self._send("/archive", {"path": _path(path)}, user, pieces, lambda: packer.error)
            return
        if path.endswith("/"):
            path += source.name
        with open(source, "rb") as file:
            info = os.fstat(file.fileno())
            reader = _Reader(file)
            pieces = _told(reader, lambda: (reader.done, info.st_size), progress)
            query = _target(path, stat_bits.S_IMODE(info.st_mode) & 0o777)
            self._send("/files", query, user, pieces, lambda: reader.error)

    def _send(
        self,
        path: str,
        query: Mapping[str, str],
        user: str | None,
        pieces: Iterator[bytes],
        local_error: Callable[[], OSError | None],
    ) -> None:
        kind = "application/x-tar" if path == "/archive" else "application/octet-stream"
        headers = {**self._agent.headers(user), "content-type": kind}
        try:
            with self._agent.stream("POST", path, query, headers=headers, content=pieces) as response:
                self._agent.whole(response)
        except ConnectError as err:
            if (why := local_error()) is not None:
                raise why from None
            raise self._agent.failed(err) from err

    def download(
        self,
        path: str,
        local: str | os.PathLike[str],
        progress: ProgressCallback | None = None,
        user: str | None = None,
    ) -> None:
        """Copy a file or a directory from the sandbox to this machine, of any size.

        A file arrives whole or not at all. The entries of a directory are put
        into ``local``, which is made; nothing is ever written outside it.

        Args:
            path: what to copy.
            local: its new name; for a file also an existing directory into which it goes.
            progress: called with the bytes done and those in all (None for a directory).
            user: see the class.

        Raises:
            NotFoundError: there is no such entry.
            OSError: the local side cannot be written.
        """
        info = self.stat(path, user)
        target = Path(local)
        is_dir = info.type is FileType.DIRECTORY
        if info.type is FileType.SYMLINK and info.link_target is not None:
            is_dir = (self.stat(info.link_target, user)).type is FileType.DIRECTORY
        if not is_dir and target.is_dir():
            target = target / info.name
        fetch = self._agent.fetch(
            "/archive" if is_dir else "/files", {"path": _path(path)}, user, from_thread(progress)
        )
        try:
            if is_dir:
                in_thread(lambda: fetch.to_tree(target), fetch.stop)
            else:
                in_thread(lambda: fetch.to_file(target, info.mode), fetch.stop)
        except ConnectError as err:
            raise self._agent.failed(err) from err


class _Reader:
    """Reads a local file in pieces and remembers what went wrong."""

    def __init__(self, file: BinaryIO) -> None:
        self.done = 0
        self.error: OSError | None = None
        self._file = file

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        try:
            piece = self._file.read(PIECE)
        except OSError as err:
            self.error = err
            raise
        if not piece:
            raise StopIteration
        self.done += len(piece)
        return piece


def _told(
    pieces: Iterator[bytes], state: Callable[[], tuple[int, int]], progress: ProgressCallback | None
) -> Iterator[bytes]:
    """Yield local pieces without holding up others, and tell of the progress."""
    while (piece := to_thread(next, pieces, None)) is not None:
        yield piece
        if progress is not None:
            call(progress, *state())


def _path(path: str, field: str = "path") -> str:
    if not isinstance(path, str) or not path or "\0" in path:
        raise invalid(field, f"{path!r} is not a path")
    return path


def _target(path: str, mode: int | None) -> dict[str, str]:
    query = {"path": _path(path), "atomic": "true"}
    if mode is not None:
        if isinstance(mode, bool) or not isinstance(mode, int) or not 0 <= mode <= 0o777:
            raise invalid("mode", f"{mode!r} is not permission bits, such as 0o644")
        query["mode"] = f"{mode:04o}"
    return query


def _entry(entry: filesystem_pb.EntryInfo | None, path: str) -> FileInfo:
    if entry is None:
        raise DSecError(f"the sandbox said nothing about {path!r}")
    return _wire.file_info(entry)
