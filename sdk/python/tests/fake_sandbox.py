"""The sandboxes of the fake server: directories of this machine, in which commands run."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import shutil
import signal
import stat
import tarfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

from connectrpc.code import Code
from connectrpc.errors import ConnectError
from fake_tunnel import Tunnels
from fake_wire import Context, answer, read_body, unanswered
from protobuf import Oneof
from protobuf.wkt import Timestamp

from opendsec._gen.agent.v1 import agent_connect, agent_pb
from opendsec._gen.filesystem import filesystem_connect, filesystem_pb
from opendsec._gen.opendsec.v1 import sandbox_pb
from opendsec._gen.process import process_connect, process_pb


class Process:
    """A command with all that it ever wrote."""

    def __init__(self) -> None:
        self.out = {"stdout": bytearray(), "stderr": bytearray()}
        self.pid = 0
        self.end: agent_pb.AttachResponse.End | None = None
        self.timed_out = False
        self.changed = asyncio.Condition()
        self.child: asyncio.subprocess.Process | None = None
        self.frozen: ConnectError | None = None  # why nothing is to be had from it
        self.pieces: set[str] = set()  # of input, that it has had
        self.sent = self.followed = 0  # bytes that went to the one who runs it, and to those who found it
        self._left: float | None = None  # seconds of running
        self._timer: asyncio.TimerHandle | None = None

    async def start(self, request: process_pb.StartRequest, root: Path, timeout_ms: float | None) -> None:
        config = request.process
        assert config is not None
        argv = [config.cmd, *config.args] if config.cmd else ["/bin/bash", *config.args]
        self.child = await asyncio.create_subprocess_exec(
            *argv,
            stdin=asyncio.subprocess.PIPE if request.stdin else asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            cwd=config.cwd or root,
            env={**os.environ, **config.envs},
            start_new_session=True,
        )
        self.pid = self.child.pid
        self._left = None if timeout_ms is None else timeout_ms / 1000
        self._count(True)
        self._task = asyncio.ensure_future(self._run())

    def _count(self, on: bool) -> None:
        """Let its time run, or stand still."""
        now = asyncio.get_running_loop().time()
        if self._timer is not None:
            self._left = self._timer.when() - now
            self._timer.cancel()
            self._timer = None
        if on and self._left is not None and self.end is None:
            self._timer = asyncio.get_running_loop().call_later(self._left, self._expire)

    def _expire(self) -> None:
        self.timed_out = True
        os.killpg(self.pid, signal.SIGKILL)

    async def freeze(self, why: ConnectError | None) -> None:
        """Stop it, or with None let it go on."""
        if self.end is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGSTOP if why else signal.SIGCONT)
        self._count(why is None)
        async with self.changed:
            self.frozen = why
            self.changed.notify_all()

    async def kill(self) -> None:
        """End it for good."""
        if self.end is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            await asyncio.wait([self._task], timeout=5)

    async def _run(self) -> None:
        child = self.child
        assert child is not None
        await asyncio.gather(
            self._pump("stdout", child.stdout), self._pump("stderr", child.stderr), child.wait()
        )
        self._count(False)
        code = child.returncode or 0
        async with self.changed:
            self.end = agent_pb.AttachResponse.End(
                exit_code=code if code >= 0 else -1, signal=max(0, -code), timed_out=self.timed_out
            )
            self.changed.notify_all()

    async def _pump(self, name: str, pipe: asyncio.StreamReader | None) -> None:
        assert pipe is not None
        while data := await pipe.read(32 << 10):
            async with self.changed:
                self.out[name] += data
                self.changed.notify_all()

    async def follow(self, at: dict[str, int], stay: bool) -> AsyncIterator[tuple[str, int, bytes]]:
        while True:
            async with self.changed:
                while (
                    stay
                    and self.end is None
                    and self.frozen is None
                    and all(len(self.out[n]) <= at[n] for n in at)
                ):
                    await self.changed.wait()
                if self.frozen is not None:
                    raise self.frozen
                ended = self.end is not None
                new = [(n, at[n], bytes(self.out[n][at[n] : at[n] + (32 << 10)])) for n in at]
            new = [item for item in new if item[2]]
            for name, offset, data in new:
                yield name, offset, data
                at[name] = offset + len(data)
            if not new and (ended or not stay):
                return


class Sandbox(process_connect.Process, filesystem_connect.Filesystem, agent_connect.Agent):
    """One sandbox and its agent."""

    def __init__(self, record: sandbox_pb.Sandbox, root: Path) -> None:
        self.record = record
        self.root = root
        self.processes: dict[str, Process] = {}
        self.users: list[str | None] = []
        self.tunnels = Tunnels()
        self.holds = ""  # "late" to answer no start before a pause, "lost" not to start it either
        self.held = asyncio.Event()
        self.apps: dict[str, Callable[..., Awaitable[None]]] = {
            "process.Process": process_connect.ProcessASGIApplication(self),
            "filesystem.Filesystem": filesystem_connect.FilesystemASGIApplication(self),
            "agent.v1.Agent": agent_connect.AgentASGIApplication(self),
        }

    def find(self, tag: str) -> Process:
        if tag not in self.processes:
            raise ConnectError(Code.NOT_FOUND, f"process with tag {tag} not found")
        return self.processes[tag]

    async def start(
        self, request: process_pb.StartRequest, ctx: Context
    ) -> AsyncIterator[process_pb.StartResponse]:
        self.users.append(ctx.request_headers.get("opendsec-user"))
        assert request.process is not None
        if request.process.cwd and not Path(request.process.cwd).is_dir():
            raise ConnectError(Code.INVALID_ARGUMENT, f"cwd '{request.process.cwd}' does not exist")
        process = Process()
        self.held.clear()  # before anything is waited for: a pause may come
        if self.holds != "lost":
            await process.start(request, self.root, ctx.timeout_ms)
            self.processes[request.tag or str(process.pid)] = process
        if self.holds:
            await self.held.wait()
            raise unanswered()
        event = process_pb.ProcessEvent
        yield _started(Oneof("start", event.StartEvent(pid=process.pid)))
        async for name, _, data in process.follow({"stdout": 0, "stderr": 0}, True):
            yield _started(Oneof("data", event.DataEvent(output=Oneof(name, data))))  # type: ignore[arg-type]
            process.sent += len(data)
        assert process.end is not None
        if process.timed_out:
            raise ConnectError(Code.DEADLINE_EXCEEDED, "deadline exceeded")
        code, number = process.end.exit_code, process.end.signal
        words = {9: "killed", 11: "segmentation fault", 15: "terminated"}
        status = f"signal: {words.get(number, f'signal {number}')}" if number else f"exit status {code}"
        yield _started(Oneof("end", event.EndEvent(exit_code=code, exited=not number, status=status)))

    async def send_input(
        self, request: process_pb.SendInputRequest, ctx: Context
    ) -> process_pb.SendInputResponse:
        child = self._child(request.process)
        assert request.input is not None
        assert request.input.input is not None
        assert child.stdin is not None
        process = self.find(str(request.process.selector.value))  # type: ignore[union-attr]
        try:
            if request.piece not in process.pieces:
                process.pieces.add(request.piece)
                child.stdin.write(request.input.input.value)
            drained = asyncio.ensure_future(child.stdin.drain())
            async with process.changed:
                while not drained.done() and process.frozen is None:
                    with contextlib.suppress(TimeoutError, asyncio.TimeoutError):
                        await asyncio.wait_for(process.changed.wait(), 0.01)
            if process.frozen is not None:
                drained.cancel()
                raise unanswered()
            await drained
        except (BrokenPipeError, ConnectionResetError) as err:
            raise ConnectError(Code.NOT_FOUND, "the process ended") from err
        return process_pb.SendInputResponse()

    async def close_stdin(
        self, request: process_pb.CloseStdinRequest, ctx: Context
    ) -> process_pb.CloseStdinResponse:
        child = self._child(request.process)
        assert child.stdin is not None
        child.stdin.close()
        return process_pb.CloseStdinResponse()

    def _child(self, selector: process_pb.ProcessSelector | None) -> asyncio.subprocess.Process:
        assert selector is not None
        assert selector.selector is not None
        process = self.find(str(selector.selector.value))
        if process.end is not None or process.child is None:
            raise ConnectError(Code.NOT_FOUND, "the process ended")
        return process.child

    async def attach(
        self, request: agent_pb.AttachRequest, ctx: Context
    ) -> AsyncIterator[agent_pb.AttachResponse]:
        assert request.process is not None
        process = self.find(str(request.process.value))
        answer = agent_pb.AttachResponse
        started: Any = Oneof("started", answer.Started(pid=process.pid))
        yield answer(event=started)
        at = {"stdout": request.stdout_offset, "stderr": request.stderr_offset}
        pieces = process.follow(at, not request.no_follow)
        left = None if ctx.timeout_ms is None else time.monotonic() + ctx.timeout_ms / 1000
        while True:
            wait = None if left is None else left - time.monotonic()
            try:
                name, offset, data = await asyncio.wait_for(pieces.__anext__(), wait)
            except StopAsyncIteration:
                break
            except (TimeoutError, asyncio.TimeoutError):
                raise ConnectError(Code.DEADLINE_EXCEEDED, "deadline exceeded") from None
            yield answer(event=Oneof(name, answer.Output(offset=offset, data=data)))  # type: ignore[arg-type]
            process.followed += len(data)
        if process.end is not None:
            end: Any = Oneof("end", process.end)
            yield answer(event=end)

    async def signal(self, request: agent_pb.SignalRequest, ctx: Context) -> agent_pb.SignalResponse:
        assert request.process is not None
        process = self.find(str(request.process.value))
        if process.end is not None:
            raise ConnectError(Code.NOT_FOUND, "the process ended")
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, request.signal)
        return agent_pb.SignalResponse()

    def path(self, name: str) -> Path:
        return self.root / name.lstrip("/")

    def entry(self, path: Path) -> filesystem_pb.EntryInfo:
        try:
            own = path.lstat()
        except FileNotFoundError:
            raise ConnectError(
                Code.NOT_FOUND, f"path '/{path.relative_to(self.root)}' does not exist"
            ) from None
        link = stat.S_ISLNK(own.st_mode)
        info = path.stat() if link and path.exists() else own
        kind = filesystem_pb.FileType.DIRECTORY if stat.S_ISDIR(info.st_mode) else filesystem_pb.FileType.FILE
        target = f"/{path.resolve().relative_to(self.root.resolve())}" if link else None
        return filesystem_pb.EntryInfo(
            name=path.name, path=f"/{path.relative_to(self.root)}", type=kind, size=info.st_size,
            mode=stat.S_IMODE(info.st_mode), owner="root", group="root", is_symlink=link,
            modified_time=Timestamp.from_seconds(info.st_mtime), symlink_target=target,
        )  # fmt: skip

    async def stat(self, request: filesystem_pb.StatRequest, ctx: Context) -> filesystem_pb.StatResponse:
        return filesystem_pb.StatResponse(entry=self.entry(self.path(request.path)))

    async def list_dir(
        self, request: filesystem_pb.ListDirRequest, ctx: Context
    ) -> filesystem_pb.ListDirResponse:
        found: list[filesystem_pb.EntryInfo] = []

        def walk(path: Path, depth: int) -> None:
            for child in sorted(path.iterdir()):
                found.append(self.entry(child))
                if depth > 1 and child.is_dir():
                    walk(child, depth - 1)

        self.entry(self.path(request.path))
        walk(self.path(request.path), request.depth or 1)
        return filesystem_pb.ListDirResponse(entries=found)

    async def make_dir(
        self, request: filesystem_pb.MakeDirRequest, ctx: Context
    ) -> filesystem_pb.MakeDirResponse:
        path = self.path(request.path)
        if path.is_dir():
            raise ConnectError(Code.ALREADY_EXISTS, f"directory {request.path} exists")
        path.mkdir(parents=True)
        return filesystem_pb.MakeDirResponse(entry=self.entry(path))

    async def move(self, request: filesystem_pb.MoveRequest, ctx: Context) -> filesystem_pb.MoveResponse:
        self.entry(self.path(request.source))
        to = self.path(request.destination)
        to.parent.mkdir(parents=True, exist_ok=True)
        self.path(request.source).rename(to)
        return filesystem_pb.MoveResponse(entry=self.entry(to))

    async def remove(
        self, request: filesystem_pb.RemoveRequest, ctx: Context
    ) -> filesystem_pb.RemoveResponse:
        path = self.path(request.path)
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
        return filesystem_pb.RemoveResponse()

    async def transfer(self, method: str, path: str, query: dict[str, str], receive: Any, send: Any) -> None:
        """Serve /files and /archive."""
        target = self.path(query["path"])
        if method == "GET" and not target.exists():
            await answer(
                send, 404, json.dumps({"code": 404, "message": f"path '{query['path']}' does not exist"})
            )
        elif path == "/files" and target.is_dir():
            await answer(
                send, 400, json.dumps({"code": 400, "message": f"path '{query['path']}' is a directory"})
            )
        elif method == "GET" and path == "/files":
            await answer(send, 200, target.read_bytes())
        elif method == "GET":
            whole = io.BytesIO()
            with tarfile.open(fileobj=whole, mode="w") as archive:
                archive.add(target, "./")
            await answer(send, 200, whole.getvalue(), sized=False)
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            body = await read_body(receive)
            if path == "/files":
                target.write_bytes(body)
                target.chmod(int(query.get("mode", "0644"), 8))
            else:
                target.mkdir(exist_ok=True)
                with tarfile.open(fileobj=io.BytesIO(body)) as archive:
                    archive.extractall(target)
            await answer(send, 200, "[]")


def _started(event: Any) -> process_pb.StartResponse:
    return process_pb.StartResponse(event=process_pb.ProcessEvent(event=event))
