"""What a command wrote, kept as bytes and handed out as text."""

from __future__ import annotations

import codecs
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ._values import ShellBytesResult

Callback = Callable[[str], Any]

_utf8 = codecs.getincrementaldecoder("utf-8")


@dataclass(frozen=True)
class Ending:
    """How a process ended."""

    exit_code: int
    signal: int | None
    timed_out: bool


TIMED_OUT = Ending(exit_code=-1, signal=None, timed_out=True)


class TextStream:
    """Turns pieces of bytes into pieces of text that never split a character."""

    def __init__(self) -> None:
        self._decode = _utf8("replace").decode

    def feed(self, data: bytes) -> str:
        """Return what can be told of the data so far."""
        return self._decode(data)

    def finish(self) -> str:
        """Return what is left of a character that never got whole."""
        return self._decode(b"", True)


class Output:
    """Both streams of one command."""

    def __init__(self, on_stdout: Callback | None, on_stderr: Callback | None) -> None:
        self._pieces: dict[str, list[bytes]] = {"stdout": [], "stderr": []}
        self._told: dict[str, tuple[Callback, TextStream]] = {}
        for stream, callback in (("stdout", on_stdout), ("stderr", on_stderr)):
            if callback is not None:
                self._told[stream] = (callback, TextStream())

    def add(self, stream: str, data: bytes) -> tuple[Callback, str] | None:
        """Keep a piece; return the callback that is to be told of it, and what."""
        self._pieces[stream].append(data)
        if (told := self._told.get(stream)) is None:
            return None
        callback, text = told
        piece = text.feed(data)
        return (callback, piece) if piece else None

    def finish(self) -> list[tuple[Callback, str]]:
        """Return the callbacks that are to be told of what is left."""
        left = [(callback, text.finish()) for callback, text in self._told.values()]
        return [(callback, piece) for callback, piece in left if piece]

    def result(self, ending: Ending, duration: float, dropped: int = 0) -> ShellBytesResult:
        """Return all of it with how the command ended."""
        return ShellBytesResult(
            stdout=b"".join(self._pieces["stdout"]),
            stderr=b"".join(self._pieces["stderr"]),
            exit_code=ending.exit_code,
            signal=ending.signal,
            duration=duration,
            timed_out=ending.timed_out,
            dropped=dropped,
        )
