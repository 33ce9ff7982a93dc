"""File trees as tar streams, for upload and download of directories.

Reading never writes outside the directory it was given, whatever the stream
says: nothing is written through a symbolic link, and links are made last.
"""

from __future__ import annotations

import os
import queue
import stat
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path

PIECE = 1 << 20  # bytes read or handed on at once

_WAITING = 4  # pieces that may wait for the disk


class Packer:
    """A directory to be written as a tar stream.

    Files, directories, symbolic and hard links are carried with their modes
    and times; owners are not, and devices, sockets and pipes are left out.

    Attributes:
        total: bytes of all files together.
        done: those written so far.
        error: what could not be read; the stream is not complete then.
    """

    def __init__(self, root: Path) -> None:
        self.total = 0
        self.done = 0
        self.error: OSError | None = None
        self._root = root
        self._seen: dict[tuple[int, int], str] = {}
        self._entries = list(self._walk(root, ""))

    def _walk(self, directory: Path, prefix: str) -> Iterator[tuple[str, os.stat_result]]:
        with os.scandir(directory) as found:
            entries = sorted(found, key=lambda e: e.name)
        for entry in entries:
            info = entry.stat(follow_symlinks=False)
            name = prefix + entry.name
            if stat.S_ISDIR(info.st_mode):
                yield name, info
                yield from self._walk(directory / entry.name, name + "/")
            elif stat.S_ISLNK(info.st_mode) or stat.S_ISREG(info.st_mode):
                if stat.S_ISREG(info.st_mode):
                    self.total += info.st_size
                yield name, info

    def __iter__(self) -> Iterator[bytes]:
        try:
            for name, info in self._entries:
                yield from self._entry(name, info)
        except OSError as err:
            self.error = err
            raise
        yield bytes(2 * tarfile.BLOCKSIZE)

    def _entry(self, name: str, info: os.stat_result) -> Iterator[bytes]:
        head = tarfile.TarInfo(name)
        head.mode = stat.S_IMODE(info.st_mode)
        head.mtime = info.st_mtime
        if stat.S_ISDIR(info.st_mode):
            head.type = tarfile.DIRTYPE
        elif stat.S_ISLNK(info.st_mode):
            head.type, head.linkname = tarfile.SYMTYPE, os.readlink(self._root / name)
        elif info.st_nlink > 1 and (first := self._seen.setdefault((info.st_dev, info.st_ino), name)) != name:
            head.type, head.linkname = tarfile.LNKTYPE, first
            self.done += info.st_size
        else:
            yield from self._file(head)
            return
        yield _header(head)

    def _file(self, head: tarfile.TarInfo) -> Iterator[bytes]:
        with open(self._root / head.name, "rb") as file:
            head.size = os.fstat(file.fileno()).st_size
            yield _header(head)
            left = head.size
            while left > 0:
                piece = file.read(min(PIECE, left))
                if not piece:
                    raise OSError(f"{file.name} shrank while it was read; try again")
                left -= len(piece)
                self.done += len(piece)
                yield piece
        if rest := head.size % tarfile.BLOCKSIZE:
            yield bytes(tarfile.BLOCKSIZE - rest)


def _header(head: tarfile.TarInfo) -> bytes:
    return head.tobuf(format=tarfile.PAX_FORMAT, encoding="utf-8", errors="surrogateescape")


class Unpacker:
    """A tar stream to be read into a directory, which is made.

    Pieces are fed in; a thread of its own writes to the disk.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._queue: queue.Queue[bytes | None] = queue.Queue(_WAITING)
        self._over = threading.Event()
        self._error: BaseException | None = None
        self._left = b""
        self._links: list[tuple[Path, str]] = []
        self._thread = threading.Thread(target=self._run, name="opendsec-unpack", daemon=True)
        self._thread.start()

    def feed(self, piece: bytes | None) -> None:
        """Hand over the next piece, or None for the end; waits while the disk is behind."""
        while not self._over.is_set():
            try:
                self._queue.put(piece, timeout=0.05)
            except queue.Full:
                continue
            return

    def finish(self) -> None:
        """Wait until all is written; raise what went wrong."""
        self.feed(None)
        self._thread.join()
        if self._error is not None:
            raise self._error

    def abort(self) -> None:
        """Stop; what was written stays."""
        self.feed(None)
        self._thread.join()

    def read(self, size: int) -> bytes:
        """Return up to size bytes; what tarfile reads from."""
        if not self._left:
            self._left = self._queue.get() or b""
            if not self._left:
                self._queue.put(None)  # for the next read
        out, self._left = self._left[:size], self._left[size:]
        return out

    def _run(self) -> None:
        try:
            self._unpack()
        except BaseException as err:  # handed to the caller by finish
            self._error = err
        finally:
            self._over.set()

    def _unpack(self) -> None:
        self._root.mkdir(parents=True, exist_ok=True)
        directories: list[tuple[Path, tarfile.TarInfo]] = []
        with tarfile.open(fileobj=self, mode="r|", bufsize=PIECE) as archive:  # type: ignore[call-overload]
            for entry in archive:
                path = self._place(entry.name)
                if path is None:
                    continue
                if entry.isdir():
                    path.mkdir(exist_ok=True)
                    directories.append((path, entry))
                elif entry.isreg():
                    self._file(archive, entry, path)
                elif entry.issym():
                    self._links.append((path, entry.linkname))
                elif entry.islnk():
                    first = self._place(entry.linkname)
                    if first is None or first == path:
                        raise ValueError(f"{entry.name!r} is a hard link to nothing")
                    path.unlink(missing_ok=True)
                    os.link(first, path, follow_symlinks=False)
        for path, target in self._links:
            if path.is_dir() and not path.is_symlink():
                raise ValueError(f"{str(path)!r} is a directory where the archive has a link")
            path.unlink(missing_ok=True)
            path.symlink_to(target)
        for path, entry in reversed(directories):
            path.chmod(entry.mode & 0o777)
            os.utime(path, (entry.mtime, entry.mtime))

    def _place(self, name: str) -> Path | None:
        """Return where an entry goes; None for the root. No part of the way is a symbolic link."""
        parts = [p for p in name.split("/") if p not in ("", ".")]
        if ".." in parts or "\0" in name:
            raise ValueError(f"the archive holds {name!r}, which leads out of {str(self._root)!r}")
        path = self._root
        for part in parts[:-1]:
            path = path / part
            if path.is_symlink():
                raise ValueError(f"{str(path)!r} is a symbolic link; nothing is written through one")
            path.mkdir(exist_ok=True)
        if not parts:
            return None
        path = path / parts[-1]
        if path.is_symlink():
            path.unlink()
        return path

    def _file(self, archive: tarfile.TarFile, entry: tarfile.TarInfo, path: Path) -> None:
        source = archive.extractfile(entry)
        if source is None:
            raise ValueError(f"{entry.name!r} has no content")
        path.unlink(missing_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
        with open(os.open(path, flags, entry.mode & 0o777), "wb") as file:
            left = entry.size
            while left > 0:
                piece = source.read(min(PIECE, left))
                if not piece:
                    raise tarfile.ReadError("unexpected end of data")
                file.write(piece)
                left -= len(piece)
        os.utime(path, (entry.mtime, entry.mtime))
