"""File trees as tar streams, for upload and download of directories.

Reading never writes outside the directory it was given, whatever the stream
says: nothing is written through a symbolic link, and links are made last.
"""

from __future__ import annotations

import os
import stat
import tarfile
from collections.abc import Iterator
from pathlib import Path

PIECE = 1 << 20  # bytes read or handed on at once


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


class _Source:
    """Pieces of bytes as the file that tarfile reads from."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces = pieces
        self._left = b""

    def read(self, size: int) -> bytes:
        """Return up to size bytes; nothing at the end."""
        if not self._left:
            self._left = next(self._pieces, b"")
        out, self._left = self._left[:size], self._left[size:]
        return out


def unpack(root: Path, pieces: Iterator[bytes]) -> None:
    """Read a tar stream into a directory, which is made.

    Raises:
        ValueError: an entry leads out of the directory.
        tarfile.TarError: the stream is damaged or not complete.
    """
    root.mkdir(parents=True, exist_ok=True)
    links: list[tuple[Path, str]] = []
    directories: list[tuple[Path, tarfile.TarInfo]] = []
    with tarfile.open(fileobj=_Source(pieces), mode="r|", bufsize=PIECE) as archive:  # type: ignore[call-overload]
        for entry in archive:
            path = _place(root, entry.name)
            if path is None:
                continue
            if entry.isdir():
                path.mkdir(exist_ok=True)
                directories.append((path, entry))
            elif entry.isreg():
                _write(archive, entry, path)
            elif entry.issym():
                links.append((path, entry.linkname))
            elif entry.islnk():
                first = _place(root, entry.linkname)
                if first is None or first == path:
                    raise ValueError(f"{entry.name!r} is a hard link to nothing")
                path.unlink(missing_ok=True)
                os.link(first, path, follow_symlinks=False)
    for path, target in links:
        if path.is_dir() and not path.is_symlink():
            raise ValueError(f"{str(path)!r} is a directory where the archive has a link")
        path.unlink(missing_ok=True)
        path.symlink_to(target)
    for path, entry in reversed(directories):
        path.chmod(entry.mode & 0o777)
        os.utime(path, (entry.mtime, entry.mtime))


def _place(root: Path, name: str) -> Path | None:
    """Return where an entry goes; None for the root. No part of the way is a symbolic link."""
    parts = [p for p in name.split("/") if p not in ("", ".")]
    if ".." in parts or "\0" in name:
        raise ValueError(f"the archive holds {name!r}, which leads out of {str(root)!r}")
    if not parts:
        return None
    path = root
    for part in parts[:-1]:
        path = path / part
        if path.is_symlink():
            raise ValueError(f"{str(path)!r} is a symbolic link; nothing is written through one")
        path.mkdir(exist_ok=True)
    path = path / parts[-1]
    if path.is_symlink():
        path.unlink()
    return path


def _write(archive: tarfile.TarFile, entry: tarfile.TarInfo, path: Path) -> None:
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
