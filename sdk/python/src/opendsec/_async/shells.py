"""Commands in a sandbox: run, streamed, in the background.

A command has a tag by which the sandbox's agent keeps its output and its end
for a while. So a connection that breaks ends nothing: the rest is read over a
new one, from the byte where the old one stopped. A pause of the sandbox is the
same with a longer wait.
"""

from __future__ import annotations

import builtins
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from secrets import token_hex
from typing import Literal, TypeVar

from connectrpc.code import Code
from connectrpc.errors import ConnectError
from protobuf import Oneof

from .. import _signals, _wire
from .._args import check_env, invalid, seconds
from .._gen.agent.v1 import agent_pb
from .._gen.process import process_pb
from .._output import TIMED_OUT, Callback, Ending, Output, TextStream
from .._values import SandboxState, ShellBytesResult, ShellChunk, ShellLogs, ShellResult
from ..errors import (
    ConnectionError,
    DSecError,
    NotFoundError,
    SandboxEndedError,
    ShellError,
    TimeoutError,
    WrongStateError,
)
from ._concurrent import Side, call, closing, last_words, next_within, reraise_cancelled, sleep
from .agent import Agent
from .connection import PAUSES

R = TypeVar("R", ShellResult, ShellBytesResult)

# Seconds that the sandbox gets to say that a time ran out before the connection counts as dead.
_GRACE = 10.0

# Bytes of input sent in one call.
_INPUT = 256 * 1024


class Follow:
    """One command's output to its end, over as many connections as it takes.

    A sandbox that is paused meanwhile is waited for. The time of a command that
    is started here is kept in the sandbox, where it stands still in a pause; that
    of one that was found is how long to wait for it, pauses included.

    Attributes:
        pid: its process id inside the sandbox; 0 until it is known.
        dropped: bytes of its earliest output that the agent no longer held.
        ending: how it ended; None before.
    """

    def __init__(
        self,
        agent: Agent,
        tag: str,
        *,
        user: str | None = None,
        timeout: float | None = None,
        held: bool = False,
    ) -> None:
        self.pid = 0
        self.dropped = 0
        self.ending: Ending | None = None
        self._agent = agent
        self._tag = tag
        self._user = user
        self._timeout = timeout
        self._until = None if timeout is None else time.monotonic() + timeout
        self._held = held  # only what the agent holds now
        self._at = {"stdout": 0, "stderr": 0}
        self._read = False
        self._started = False  # here
        self._heard = time.monotonic()  # of it last

    async def events(self, start: process_pb.StartRequest | None = None) -> AsyncIterator[tuple[str, bytes]]:
        """Start the command, or find it, and yield the name of a stream and bytes, again and again.

        Yields an empty piece once the command is known to run. When its time
        ran out ``ending`` is TIMED_OUT.
        """
        self._started = start is not None
        source = self._start(start) if start is not None else self._attach()
        pauses = iter(PAUSES)
        broke: ConnectError | None = None
        while True:
            try:
                async with closing(source) as pieces:
                    async for piece in pieces:
                        self._read = True
                        self._heard = time.monotonic()
                        yield piece
                if self.ending is not None or self._held:
                    return
                broke = ConnectError(Code.UNAVAILABLE, "the output stopped before the command's end")
            except ConnectError as err:
                reraise_cancelled(err)
                if self._timeout is not None and err.code is Code.DEADLINE_EXCEEDED and err.__cause__ is None:
                    self.ending = TIMED_OUT
                    return
                if _wire.paused(err) and (self.pid != 0 or broke is not None) and not self._held:
                    if not await self._sit_out():
                        self.ending = TIMED_OUT
                        return
                    broke = broke or err
                    source = self._attach(broke)
                    continue
                if not _wire.unreachable(err):
                    raise await self._agent.failed(err) from err
                broke = err
            if self._read:
                pauses = iter(PAUSES)
                self._read = False
            pause = next(pauses, None)
            if pause is None or self._agent.conn.hopeless(broke):
                raise await self._agent.failed(broke) from broke
            await sleep(pause)
            again = start is not None and self.pid == 0 and _wire.never_sent(broke)
            source = self._start(start) if start is not None and again else self._attach(broke)

    async def _sit_out(self) -> bool:
        """Wait until the paused sandbox runs again; False when the time ran out first."""
        if not self._started:
            return await self._agent.running(self._until)
        await self._agent.running()
        if self._until is not None:
            # It stood still since some moment after it was heard of last.
            self._until += time.monotonic() - self._heard
        self._heard = time.monotonic()
        return True

    async def _start(self, request: process_pb.StartRequest) -> AsyncIterator[tuple[str, bytes]]:
        stream = self._agent.process.start(request, headers=self._agent.headers(self._user, self._left()))
        async with closing(stream) as answers:
            while True:
                try:
                    answer = await next_within(answers, self._patience())
                except StopAsyncIteration:
                    return
                except builtins.TimeoutError as err:
                    raise self._silent() from err
                event = answer.event.event if answer.event is not None else None
                if event is None:
                    continue
                if event.field == "data":
                    output = event.value.output
                    if output is not None and output.field != "pty":
                        self._at[output.field] += len(output.value)
                        yield output.field, output.value
                elif event.field == "start":
                    self.pid = event.value.pid
                    yield "stdout", b""
                elif event.field == "end":
                    self.ending = Ending(
                        event.value.exit_code, _signals.from_status(event.value.status), False
                    )

    async def _attach(self, broke: ConnectError | None = None) -> AsyncIterator[tuple[str, bytes]]:
        request = agent_pb.AttachRequest(
            process=_named(self._tag),
            stdout_offset=self._at["stdout"],
            stderr_offset=self._at["stderr"],
            no_follow=self._held,
        )
        # A command of our own is ended by its sandbox when its time has run out.
        limit = None if self._started else self._left()
        stream = self._agent.agent.attach(request, headers=self._agent.headers(self._user, limit))
        async with closing(stream) as answers:
            while True:
                try:
                    answer = await next_within(answers, self._patience())
                except StopAsyncIteration:
                    return
                except builtins.TimeoutError as err:
                    raise self._silent() from err
                except ConnectError as err:
                    if broke is not None and err.code is Code.NOT_FOUND and self.pid == 0:
                        # It is not known whether the start arrived.
                        raise await self._agent.failed(broke) from err
                    raise
                event = answer.event
                if event is None:
                    continue
                if event.field == "started":
                    self.pid = event.value.pid
                    self._skip("stdout", event.value.stdout_from, broke)
                    self._skip("stderr", event.value.stderr_from, broke)
                    yield "stdout", b""
                elif event.field == "end":
                    end = event.value
                    self.ending = Ending(end.exit_code, end.signal or None, end.timed_out)
                    if end.timed_out and self._started:
                        self.ending = TIMED_OUT
                else:
                    data = event.value.data
                    self._at[event.field] = event.value.offset + len(data)
                    yield event.field, data

    def _skip(self, stream: str, held_from: int, broke: ConnectError | None) -> None:
        """Note that output before a position is gone; that is an error in the middle of a result."""
        gone = held_from - self._at[stream]
        if gone <= 0:
            return
        if broke is not None:
            raise ConnectionError(
                f"the connection to sandbox {self._agent.id} broke, and {gone} bytes of the command's "
                f"{stream} were dropped before it was back; have it write its output to a file"
            )
        self.dropped += gone
        self._at[stream] = held_from

    def _left(self) -> float | None:
        return None if self._until is None else max(0.001, self._until - time.monotonic())

    def _patience(self) -> float | None:
        left = self._left()
        return None if left is None else left + _GRACE

    def _silent(self) -> ConnectionError:
        return ConnectionError(
            f"sandbox {self._agent.id} did not answer within {_GRACE:.0f} s after the command's time ran out",
            retryable=True,
        )


class BackgroundShell:
    """A command that runs in the background.

    Its ``id`` is good in another process too, see ``Sandbox.shell``. The
    sandbox keeps its latest output, and how it ended for 30 minutes.

    Attributes:
        id: names it within its sandbox.
        pid: its process id inside the sandbox.
    """

    def __init__(self, agent: Agent, shell_id: str, pid: int) -> None:
        self.id = shell_id
        self.pid = pid
        self._agent = agent

    def __repr__(self) -> str:
        return f"BackgroundShell(id={self.id!r}, pid={self.pid})"

    async def wait(self, timeout: float | None = None) -> ShellResult:
        """Wait until the command ends and return its result with the output from its beginning.

        If the sandbox is paused meanwhile it is waited for.

        Args:
            timeout: seconds to wait, pauses included; the command goes on when they have passed.

        Raises:
            TimeoutError: it still runs, or is paused; ``result`` holds its output so far.
            NotFoundError: it ended more than 30 minutes ago.
            WrongStateError: the sandbox is paused already; ``resume`` it first.
            SandboxEndedError: the sandbox ended first.
        """
        began = time.monotonic()
        output = Output(None, None)
        follow = Follow(self._agent, self.id, timeout=seconds("timeout", timeout))
        async with closing(follow.events()) as pieces:
            async for stream, data in pieces:
                output.add(stream, data)
        ending = follow.ending or TIMED_OUT
        result = output.result(ending, time.monotonic() - began, follow.dropped).text()
        if ending is TIMED_OUT:
            err = TimeoutError(f"shell {self.id} still runs after {timeout:g} s")
            err.result = result
            raise err
        return result

    async def output(self) -> AsyncIterator[ShellChunk]:
        """Yield its output, from the beginning as far as it is held, until it ends.

        If the sandbox is paused meanwhile it is waited for.

        Raises:
            WrongStateError: the sandbox is paused already; ``resume`` it first.
            SandboxEndedError: the sandbox ended first.
        """
        texts = {"stdout": TextStream(), "stderr": TextStream()}
        async with closing(Follow(self._agent, self.id).events()) as pieces:
            async for stream, data in pieces:
                text = texts[stream].feed(data)
                if text:
                    yield ShellChunk(stream, text)
        for stream, rest in texts.items():
            if left := rest.finish():
                yield ShellChunk(stream, left)

    async def logs(self) -> ShellLogs:
        """Return the output that is held now, without waiting."""
        output = Output(None, None)
        follow = Follow(self._agent, self.id, held=True)
        async with closing(follow.events()) as pieces:
            async for stream, data in pieces:
                output.add(stream, data)
        text = output.result(TIMED_OUT, 0.0).text()
        return ShellLogs(stdout=text.stdout, stderr=text.stderr, dropped=follow.dropped)

    async def kill(self, signal: int | str = "KILL") -> bool:
        """Send a signal to the command with all its children.

        Args:
            signal: its number, or its name such as ``TERM``.

        Returns:
            False when the command had ended already.
        """
        request = agent_pb.SignalRequest(process=_named(self.id), signal=_signals.number(signal), group=True)
        try:
            await self._agent.call(self._agent.agent.signal, request, once=True)
        except NotFoundError as err:
            if err.request_id is not None:
                raise  # it is the sandbox that is not there
            return False
        return True

    async def write(self, data: str | bytes) -> None:
        """Write to its standard input.

        If the sandbox is paused meanwhile it is waited for.

        Raises:
            NotFoundError: the command has ended.
            WrongStateError: its standard input is closed, or the sandbox is paused already (``state``).
            ConnectionError: the connection broke, and it is not known how much arrived.
        """
        for content in _pieces(_input(data)):
            piece: Oneof[Literal["stdin"], bytes] = Oneof("stdin", content)
            request = process_pb.SendInputRequest(
                process=_selector(self.id), input=process_pb.ProcessInput(input=piece), piece=token_hex(8)
            )
            # It waits as long as the command does not read.
            try:
                await self._agent.call(self._agent.process.send_input, request, once=True, timeout_ms=0)
            except ConnectionError:
                await self._write_rest(request)

    async def _write_rest(self, request: process_pb.SendInputRequest) -> None:
        """Send a piece of input again; the sandbox leaves out what the command has of it."""
        while True:
            await self._agent.running()
            try:
                await self._agent.call(self._agent.process.send_input, request, timeout_ms=0)
                return
            except WrongStateError as err:
                if err.state is not SandboxState.PAUSED:
                    raise

    async def close_stdin(self) -> None:
        """End its standard input. May be repeated."""
        request = process_pb.CloseStdinRequest(process=_selector(self.id))
        await self._agent.call(self._agent.process.close_stdin, request)


class Shells:
    """The part of a sandbox that runs commands."""

    _agent: Agent

    async def run_shell(
        self,
        cmd: str,
        timeout: float | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        stdin: str | bytes | None = None,
        on_stdout: Callback | None = None,
        on_stderr: Callback | None = None,
        check: bool = False,
    ) -> ShellResult:
        """Run a command with the sandbox's shell and wait for its end.

        A command that fails is a result, not an exception. One whose time runs
        out is killed with all its children; its result has ``timed_out`` and
        the output until then. If the caller goes away (its task is cancelled,
        a callback raises) the command is killed as well. A connection that
        breaks is taken up again without a gap where that is possible. If the
        sandbox is paused while the command runs, the call waits until it runs
        again and reads on where it was.

        Args:
            cmd: a line for ``bash -c``, or for ``sh -c`` in an image without bash.
            timeout: seconds, not counting those in which the sandbox is paused; None for no limit.
            cwd: directory to run in; None for the sandbox's.
            env: variables besides those of the sandbox.
            user: name or number of the user; None for the sandbox's.
            stdin: what it can read; None for nothing.
            on_stdout, on_stderr: called with each piece of text as it comes; may be async.
            check: whether a command that fails raises.

        Raises:
            ShellError: with check, the exit code is not 0; ``result`` is its result.
            TimeoutError: with check, its time ran out; ``result`` is its result.
            InvalidArgumentError: ``cwd`` or ``user`` does not exist.
            WrongStateError: the sandbox is paused (``state``); ``resume`` it first.
            SandboxEndedError: the sandbox ended, or had ended before.
            ConnectionError: the connection broke and the command's end is unknown, or it is unknown
                how much of its ``stdin`` it got.
        """
        result = await self._run(cmd, timeout, cwd, env, user, stdin, on_stdout, on_stderr)
        return _checked(cmd, timeout, result.text(), check)

    async def run_shell_bytes(
        self,
        cmd: str,
        timeout: float | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        stdin: str | bytes | None = None,
        check: bool = False,
    ) -> ShellBytesResult:
        """Do as :meth:`run_shell` does, and keep the output as the bytes that it is."""
        result = await self._run(cmd, timeout, cwd, env, user, stdin, None, None)
        return _checked(cmd, timeout, result, check)

    async def run_shell_background(
        self,
        cmd: str,
        timeout: float | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        stdin: bool = True,
    ) -> BackgroundShell:
        """Start a command and return when it runs.

        Args:
            cmd: a line for ``bash -c``, or for ``sh -c`` in an image without bash.
            timeout: seconds after which it is killed with all its children; None for no limit.
            cwd: directory to run in; None for the sandbox's.
            env: variables besides those of the sandbox.
            user: name or number of the user; None for the sandbox's.
            stdin: whether its standard input stays open for ``write``; False for nothing to read.

        Raises:
            InvalidArgumentError: ``cwd`` or ``user`` does not exist.
        """
        tag = _tag()
        follow = Follow(self._agent, tag, user=user, timeout=seconds("timeout", timeout))
        async with closing(follow.events(_request(cmd, tag, cwd, env, stdin))) as pieces:
            async for _ in pieces:
                break
        return BackgroundShell(self._agent, tag, follow.pid)

    async def shell(self, shell_id: str) -> BackgroundShell:
        """Return a background command by its id, also one that another process started.

        Raises:
            NotFoundError: there is none of that id, or it ended more than 30 minutes ago.
        """
        follow = Follow(self._agent, shell_id, held=True)
        async with closing(follow.events()) as pieces:
            async for _ in pieces:
                break
        return BackgroundShell(self._agent, shell_id, follow.pid)

    async def _run(
        self,
        cmd: str,
        timeout: float | None,
        cwd: str | None,
        env: Mapping[str, str] | None,
        user: str | None,
        stdin: str | bytes | None,
        on_stdout: Callback | None,
        on_stderr: Callback | None,
    ) -> ShellBytesResult:
        began = time.monotonic()
        tag = _tag()
        content = None if stdin is None else _input(stdin)
        request = _request(cmd, tag, cwd, env, content is not None)
        follow = Follow(self._agent, tag, user=user, timeout=seconds("timeout", timeout))
        output = Output(on_stdout, on_stderr)
        feed: _Feed | None = None
        try:
            async with closing(follow.events(request)) as pieces:
                async for stream, data in pieces:
                    if content is not None and feed is None:
                        feed = _Feed(self._agent, tag, content)
                    if told := output.add(stream, data):
                        await call(*told)
            for callback, text in output.finish():
                await call(callback, text)
        except BaseException:
            if follow.pid != 0 and follow.ending is None:
                await last_words(BackgroundShell(self._agent, tag, follow.pid).kill)
            raise
        finally:
            if feed is not None:
                await feed.finish()
        if feed is not None and feed.error is not None:
            raise feed.error
        return output.result(follow.ending or TIMED_OUT, time.monotonic() - began)


class _Feed:
    """Gives a command its input while its output is read."""

    def __init__(self, agent: Agent, tag: str, content: bytes) -> None:
        self.error: DSecError | None = None
        self._agent = agent
        self._shell = BackgroundShell(agent, tag, 0)
        self._content = content
        self._side = Side(self._feed)

    async def _feed(self) -> None:
        try:
            for piece in _pieces(self._content):
                await self._awake(self._shell.write, piece)
            await self._awake(self._shell.close_stdin)
        except (ConnectionError, SandboxEndedError) as err:
            # It is not known how much arrived; no result may come of that.
            self.error = err
            await self._shell.kill()
        except DSecError:
            return  # it ended, or closed its input itself

    async def _awake(self, work: Callable[..., Awaitable[None]], *args: bytes) -> None:
        """Do a piece of work, again when it was refused because of a pause."""
        while True:
            try:
                await work(*args)
                return
            except WrongStateError as err:
                if err.state is not SandboxState.PAUSED:
                    raise
            await self._agent.running()

    async def finish(self) -> None:
        await self._side.finish()


def _tag() -> str:
    return f"sh-{token_hex(8)}"


def _named(tag: str) -> Oneof[Literal["tag"], str]:
    return Oneof("tag", tag)


def _selector(tag: str) -> process_pb.ProcessSelector:
    return process_pb.ProcessSelector(selector=_named(tag))


def _input(data: str | bytes) -> bytes:
    if isinstance(data, str):
        return data.encode()
    if not isinstance(data, (bytes, bytearray, memoryview)):
        raise invalid("stdin", f"{type(data).__name__} is neither str nor bytes")
    return bytes(data)


def _pieces(content: bytes) -> list[bytes]:
    return [content[at : at + _INPUT] for at in range(0, len(content), _INPUT)]


def _request(
    cmd: str, tag: str, cwd: str | None, env: Mapping[str, str] | None, stdin: bool
) -> process_pb.StartRequest:
    if not isinstance(cmd, str) or "\0" in cmd:
        raise invalid("cmd", "the command is not a text without NUL characters")
    check_env(env)
    # No program means the sandbox's shell.
    config = process_pb.ProcessConfig(args=["-c", cmd], envs=dict(env or {}), cwd=cwd)
    return process_pb.StartRequest(process=config, tag=tag, stdin=stdin)


def _checked(cmd: str, timeout: float | None, result: R, check: bool) -> R:
    if not check or result.ok:
        return result
    short = cmd if len(cmd) <= 60 else cmd[:57] + "..."
    if result.timed_out:
        err = TimeoutError(f"{short!r} was killed after its timeout of {timeout} s")
        err.result = result
        raise err
    how = f"ended with exit code {result.exit_code}"
    if result.signal is not None:
        how = f"was ended by signal {result.signal}"
    last = result.stderr if isinstance(result.stderr, str) else result.stderr.decode("utf-8", "replace")
    line = last.strip().rpartition("\n")[2][:200]
    raise ShellError(f"{short!r} {how}" + (f": {line}" if line else ""), result)
