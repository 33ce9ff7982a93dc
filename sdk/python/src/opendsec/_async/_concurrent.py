"""What differs between the async and the sync side by more than its spelling.

``opendsec._sync._concurrent`` is this module's twin and is written by hand as
well; everything else in ``_sync`` is generated from ``_async``.
"""

from __future__ import annotations

import asyncio
import atexit
import inspect
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, aclosing
from typing import Any, TypeVar, cast

from connectrpc.errors import ConnectError

T = TypeVar("T")

# Seconds that work which must not be lost gets when its caller was cancelled.
_LAST_WORDS = 2.0


# Seconds that the transport's native threads get to let go of Python objects
# before the interpreter is taken down. Before Python 3.14 one that comes for
# the interpreter's lock during that ends the whole process with SIGABRT: without
# the pause one in ten short programs did.
_SETTLE = 0.05
_settling: list[bool] = []


def settle_at_exit() -> None:
    """See to it that the process ends well, once for all clients."""
    if sys.version_info < (3, 14) and not _settling:
        _settling.append(True)
        atexit.register(time.sleep, _SETTLE)


async def sleep(seconds: float) -> None:
    """Wait."""
    await asyncio.sleep(seconds)


async def to_thread(function: Callable[..., T], *args: Any) -> T:
    """Do blocking work without holding up the event loop."""
    return await asyncio.to_thread(function, *args)


async def in_thread(work: Callable[[], T], stop: Callable[[], None]) -> T:
    """Do long blocking work in a thread of its own; ``stop`` tells it that its caller is gone."""
    executor = ThreadPoolExecutor(1, "opendsec")
    task = asyncio.get_running_loop().run_in_executor(executor, work)
    executor.shutdown(wait=False)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        stop()
        await asyncio.wait([task], timeout=_LAST_WORDS)
        raise
    finally:
        task.add_done_callback(lambda t: t.cancelled() or t.exception())


def from_thread(callback: Callable[..., Any] | None) -> Callable[..., None] | None:
    """Make a user's callback one that a thread can call; its error is raised there."""
    if callback is None:
        return None
    loop = asyncio.get_running_loop()

    def tell(*args: Any) -> None:
        asyncio.run_coroutine_threadsafe(call(callback, *args), loop).result()

    return tell


async def call(callback: Callable[..., Any], *args: Any) -> None:
    """Call a user's callback, which may be plain or async."""
    result = callback(*args)
    if inspect.isawaitable(result):
        await result


def reraise_cancelled(err: ConnectError) -> None:
    """Raise the task's cancellation that the RPC runtime turned into an error."""
    if isinstance(err.__cause__, asyncio.CancelledError):
        raise err.__cause__


def closing(iterator: AsyncIterator[T]) -> AbstractAsyncContextManager[AsyncIterator[T]]:
    """Close a generator at the end of a block, however that ends."""
    return aclosing(cast(Any, iterator))


async def next_within(iterator: AsyncIterator[T], seconds: float | None) -> T:
    """Return the next item; StopAsyncIteration at the end, TimeoutError after the time.

    An iterator that timed out is broken and must be closed.
    """
    if seconds is None:
        return await anext(iterator)
    task = asyncio.current_task()
    loop = asyncio.get_running_loop()
    fired = False

    def fire() -> None:
        nonlocal fired
        fired = True
        if task is not None:
            task.cancel()

    timer = loop.call_later(seconds, fire)
    try:
        return await anext(iterator)
    except (asyncio.CancelledError, ConnectError) as err:
        cancelled = isinstance(err, asyncio.CancelledError) or isinstance(
            err.__cause__, asyncio.CancelledError
        )
        if not fired or not cancelled:
            raise
        uncancel = getattr(task, "uncancel", None)
        if uncancel is not None and uncancel() > 0:
            raise  # somebody else wants the task to end as well
        raise TimeoutError from err
    finally:
        timer.cancel()


async def last_words(work: Callable[[], Awaitable[Any]]) -> None:
    """Do a short piece of work although the caller is going away; its failure does not matter."""
    try:
        await asyncio.wait_for(asyncio.ensure_future(work()), _LAST_WORDS)
    except (Exception, asyncio.CancelledError):  # whatever it is, the first error is the one to tell
        return


class Side:
    """A piece of work beside the main one."""

    def __init__(self, work: Callable[[], Awaitable[None]]) -> None:
        self._task = asyncio.ensure_future(work())

    async def finish(self) -> None:
        """Stop it if it still runs, and forget how it ended."""
        self._task.cancel()
        await asyncio.wait([self._task])
        if not self._task.cancelled():
            self._task.exception()
