"""What differs between the async and the sync side by more than its spelling.

Written by hand, like its twin ``opendsec._async._concurrent``.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, TypeVar, cast

from connectrpc.errors import ConnectError

T = TypeVar("T")

# Seconds that a piece of work beside the main one gets to see that that ended.
_SIDE_END = 5.0


def settle_at_exit() -> None:
    """Nothing: a call that has returned left nothing to its threads."""


def sleep(seconds: float) -> None:
    """Wait."""
    time.sleep(seconds)


def to_thread(function: Callable[..., T], *args: Any) -> T:
    """Do blocking work; here that is simply to do it."""
    return function(*args)


def in_thread(work: Callable[[], T], stop: Callable[[], None]) -> T:
    """Do long blocking work; here that is simply to do it."""
    return work()


def from_thread(callback: Callable[..., Any] | None) -> Callable[..., None] | None:
    """Return a callback as one that may be called where the work is done."""
    return callback


def call(callback: Callable[..., Any], *args: Any) -> None:
    """Call a user's callback."""
    callback(*args)


def reraise_cancelled(err: ConnectError) -> None:
    """Do nothing: a thread is not cancelled."""


def closing(iterator: Iterator[T]) -> AbstractContextManager[Iterator[T]]:
    """Close a generator at the end of a block, however that ends."""
    return contextlib.closing(cast(Any, iterator))


def next_within(iterator: Iterator[T], seconds: float | None) -> T:
    """Return the next item; StopIteration at the end.

    The time is kept by the server alone here; a connection that is silently
    dead is found by TCP's keepalive.
    """
    return next(iterator)


def last_words(work: Callable[[], Any]) -> None:
    """Do a short piece of work although the caller is going away; its failure does not matter."""
    try:
        work()
    except Exception:  # whatever it is, the first error is the one to tell
        return


class Side:
    """A piece of work beside the main one, in a thread."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work
        self._thread = threading.Thread(target=self._run, name="opendsec-side", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._work()
        except Exception:  # the main piece of work sees what matters of it
            return

    def finish(self) -> None:
        """Wait until it has seen that the main piece of work ended."""
        self._thread.join(_SIDE_END)
