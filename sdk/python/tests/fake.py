"""A server that speaks OpenDsec's public API over TLS and HTTP/2, for tests.

Its sandboxes are directories of this machine and its commands run here, so
that streams, signals and files are real; nothing is isolated. It stands behind
a relay that can cut the connection, see ``Server.break_after``.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import json
import os
import shutil
import signal
import socket
import stat
import tarfile
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import trustme
from connectrpc.code import Code
from connectrpc.errors import ConnectError
from connectrpc.request import RequestContext
from fake_tunnel import Tunnels
from hypercorn.asyncio import serve
from hypercorn.config import Config
from protobuf import Oneof
from protobuf.wkt import Duration, Timestamp

from opendsec._gen.agent.v1 import agent_connect, agent_pb
from opendsec._gen.filesystem import filesystem_connect, filesystem_pb
from opendsec._gen.opendsec.v1 import image_connect, image_pb, sandbox_connect, sandbox_pb
from opendsec._gen.process import process_connect, process_pb

TOKEN = "ods_test_secret"
PROJECT = "root/demo"
Context = RequestContext[Any, Any]

_CODES = {"not_found": Code.NOT_FOUND, "invalid_argument": Code.INVALID_ARGUMENT, "unauthenticated": Code.UNAUTHENTICATED,
          "sandbox_ended": Code.FAILED_PRECONDITION, "capacity": Code.RESOURCE_EXHAUSTED,
          "wrong_state": Code.FAILED_PRECONDITION, "unavailable": Code.UNAVAILABLE, "unsupported": Code.UNIMPLEMENTED}  # fmt: skip


def fault(kind: str, message: str, **detail: Any) -> ConnectError:
    """An error as the API sends it."""
    info = sandbox_pb.ErrorInfo(kind=kind, request_id="req-1", message=message, **detail)
    return ConnectError(_CODES[kind], message, details=[info])


def error_json(error: ConnectError) -> str:
    """An error as it is the body of an answer."""
    info = error.details[0]
    value = base64.b64encode(info.message_bytes).decode().rstrip("=")
    detail = {"type": info.type_name, "value": value}
    return json.dumps({"code": error.code.value, "message": error.message, "details": [detail]})


def _unanswered() -> ConnectError:
    """The error of a call that a pause cut off before its answer."""
    return fault("unavailable", "the sandbox was paused before the call was answered", retryable=True)


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
            raise _unanswered()
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
                raise _unanswered()
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
            await _answer(
                send, 404, json.dumps({"code": 404, "message": f"path '{query['path']}' does not exist"})
            )
        elif path == "/files" and target.is_dir():
            await _answer(
                send, 400, json.dumps({"code": 400, "message": f"path '{query['path']}' is a directory"})
            )
        elif method == "GET" and path == "/files":
            await _answer(send, 200, target.read_bytes())
        elif method == "GET":
            whole = io.BytesIO()
            with tarfile.open(fileobj=whole, mode="w") as archive:
                archive.add(target, "./")
            await _answer(send, 200, whole.getvalue(), sized=False)
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            body = await _body(receive)
            if path == "/files":
                target.write_bytes(body)
                target.chmod(int(query.get("mode", "0644"), 8))
            else:
                target.mkdir(exist_ok=True)
                with tarfile.open(fileobj=io.BytesIO(body)) as archive:
                    archive.extractall(target)
            await _answer(send, 200, "[]")


def _started(event: Any) -> process_pb.StartResponse:
    return process_pb.StartResponse(event=process_pb.ProcessEvent(event=event))


async def _body(receive: Any) -> bytes:
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ConnectionError("the client went away")
        body += message.get("body", b"")
        if not message.get("more_body"):
            return bytes(body)


async def _answer(send: Any, status: int, body: str | bytes, sized: bool = True) -> None:
    data = body.encode() if isinstance(body, str) else body
    headers = [
        (b"content-type", b"application/json" if isinstance(body, str) else b"application/octet-stream")
    ]
    if sized:
        headers.append((b"content-length", str(len(data)).encode()))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    for at in range(0, len(data), 1 << 20):
        await send({"type": "http.response.body", "body": data[at : at + (1 << 20)], "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})


def _free_ports() -> tuple[int, int]:
    with socket.socket() as a, socket.socket() as b:
        a.bind(("127.0.0.1", 0))
        b.bind(("127.0.0.1", 0))
        return a.getsockname()[1], b.getsockname()[1]


class Server(sandbox_connect.SandboxService, image_connect.ImageService):
    """The API. Use it as a context manager; it runs in a thread of its own."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.sandboxes: dict[str, Sandbox] = {}
        self.keys: dict[str, str] = {}
        self.forks: dict[str, list[Any]] = {}
        self.requests: list[str] = []
        self.break_after: int | None = (
            None  # bytes still to come from the server before the line is cut, once
        )
        self.refuse = 0  # calls to answer with 503
        self.warnings: list[str] = []
        self._lines: list[asyncio.StreamWriter] = []
        authority = trustme.CA()
        self.ca = authority.cert_pem.bytes()
        leaf = authority.issue_cert("localhost", "127.0.0.1")
        (root / "key.pem").write_bytes(leaf.private_key_pem.bytes())
        (root / "cert.pem").write_bytes(b"".join(p.bytes() for p in leaf.cert_chain_pems))
        self.port, self._inner = _free_ports()
        self.addr = f"https://127.0.0.1:{self.port}"
        self._apps: dict[str, Callable[..., Awaitable[None]]] = {
            "opendsec.v1.SandboxService": sandbox_connect.SandboxServiceASGIApplication(self),
            "opendsec.v1.ImageService": image_connect.ImageServiceASGIApplication(self),
        }

    def __enter__(self) -> Server:
        started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve(started)), daemon=True)
        self._thread.start()
        assert started.wait(10)
        return self

    def __exit__(self, *exc: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)

    async def _serve(self, started: threading.Event) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        config = Config()
        config.bind = [f"127.0.0.1:{self._inner}"]
        config.certfile, config.keyfile = str(self.root / "cert.pem"), str(self.root / "key.pem")
        config.accesslog = config.errorlog = None
        config.graceful_timeout = 0.1
        serving = asyncio.ensure_future(serve(self._app, config, shutdown_trigger=self._stop.wait))
        while True:
            with contextlib.suppress(OSError):
                (await asyncio.open_connection("127.0.0.1", self._inner))[1].close()
                break
            await asyncio.sleep(0.005)
        relay = await asyncio.start_server(self._relay, "127.0.0.1", self.port)
        started.set()
        await self._stop.wait()
        relay.close()
        self._cut()
        for sandbox in self.sandboxes.values():
            for process in sandbox.processes.values():
                await process.kill()
        with contextlib.suppress(Exception):
            await asyncio.wait_for(serving, 2)

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", self._inner)
        self._lines += [writer, inner_writer]

        async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter, counted: bool) -> None:
            with contextlib.suppress(OSError):
                while data := await source.read(16 << 10):
                    if counted and self.break_after is not None:
                        self.break_after -= len(data)
                        if self.break_after < 0:
                            self.break_after = None
                            self._cut()
                            return
                    sink.write(data)
                    await sink.drain()
            sink.close()

        await asyncio.gather(pump(reader, inner_writer, False), pump(inner_reader, writer, True))

    def _cut(self) -> None:
        for line in self._lines:
            line.transport.abort()
        self._lines = []

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            return
        self.requests.append(scope["path"])
        if self.refuse:
            self.refuse -= 1
            await _body(receive)
            await _answer(send, 503, "")
            return
        app, path = self._apps.get(scope["path"].split("/")[1]), scope["path"]
        headers = dict(scope["headers"])
        error = None
        if headers.get(b"authorization") != f"Bearer {TOKEN}".encode():
            error = fault("unauthenticated", "this token is not known")
        elif path.startswith("/sandboxes/"):
            _, _, name, rest = path.split("/", 3)
            sandbox = self.sandboxes.get(name)
            path = "/" + rest
            if sandbox is None:
                error = fault("not_found", f"there is no sandbox {name}")
            elif sandbox.record.end is not None:
                error = fault("sandbox_ended", f"sandbox {name} has ended", end=sandbox.record.end)
            elif (paused := await self._asleep(sandbox)) is not None:
                error = paused
            elif path.startswith("/tunnel/"):
                if await sandbox.tunnels.open(int(path.rpartition("/")[2]), receive, send):
                    return
                error = fault("not_found", f"nothing listens on port {path[8:]}", field="port")
            elif path in ("/files", "/archive"):
                query = {k: v[0] for k, v in parse_qs(scope["query_string"].decode()).items()}
                sandbox.users.append(headers.get(b"opendsec-user", b"").decode() or None)
                await sandbox.transfer(scope["method"], path, query, receive, send)
                return
            else:
                app = sandbox.apps.get(rest.split("/")[0])
        if error is not None:
            if "/tunnel/" not in path:
                await _body(receive)
            await _answer(send, 400, error_json(error))
        elif app is None:
            await _answer(send, 404, "")
        else:
            await app({**scope, "path": path, "root_path": ""}, receive, send)

    def sandbox(self, name: str) -> Sandbox:
        if name not in self.sandboxes:
            raise fault("not_found", f"there is no sandbox {name}")
        return self.sandboxes[name]

    def end(self, name: str, reason: str) -> None:
        """End a sandbox as if by itself."""
        record = self.sandboxes[name].record
        record.state = sandbox_pb.State.FAILED
        domain = sandbox_pb.Domain.INFRA
        record.end = sandbox_pb.End(
            reason=reason, domain=domain, detail="the node is gone", time=Timestamp.now()
        )

    async def _asleep(self, sandbox: Sandbox) -> ConnectError | None:
        record = sandbox.record
        if record.state != sandbox_pb.State.PAUSED:
            return None
        if record.spec is None or not record.spec.auto_resume:
            return fault("wrong_state", f"sandbox {record.id} is PAUSED", state=record.state)
        await self._wake(sandbox)
        return None

    async def _wake(self, sandbox: Sandbox) -> None:
        sandbox.record.state, sandbox.record.paused_at = sandbox_pb.State.RUNNING, None
        for process in sandbox.processes.values():
            await process.freeze(None)

    def _make(self, request: Any) -> sandbox_pb.Sandbox:
        spec = request.spec
        if spec.image == "root/none:latest":
            raise fault("not_found", "there is no image root/none:latest", field="spec.image")
        if spec.backend == "nonsense":
            raise fault("invalid_argument", 'unknown backend "nonsense"', field="spec.backend")
        if spec.on_idle == sandbox_pb.OnIdle.PAUSE:
            raise fault("unsupported", "container cannot pause", backends=["gvisor", "microvm"])
        if spec.memory_limit_mb > 10**6:
            raise fault("capacity", "no node has 2 TB", domain=sandbox_pb.Domain.INFRA, retryable=True)
        name = f"sb-{len(self.sandboxes):012d}"
        spec.backend = "gvisor" if spec.backend == "auto" else spec.backend
        record = sandbox_pb.Sandbox(
            id=name, project=request.project, spec=spec, state=sandbox_pb.State.RUNNING,
            created_at=Timestamp.now(), started_at=Timestamp.now(), node="n1", warnings=self.warnings,
        )  # fmt: skip
        root = self.root / name
        root.mkdir()
        self.sandboxes[name] = Sandbox(record, root)
        return record

    async def create_sandbox(self, request: Any, ctx: Context) -> sandbox_pb.CreateSandboxResponse:
        name = self.keys.get(request.idempotency_key)
        record = self.sandboxes[name].record if name else self._make(request)
        self.keys[request.idempotency_key] = record.id
        return sandbox_pb.CreateSandboxResponse(sandbox=record)

    async def create_sandboxes(self, request: Any, ctx: Context) -> sandbox_pb.CreateSandboxesResponse:
        made = [
            Oneof("sandbox", self._make(request)) for _ in range(request.count - (not request.all_or_none))
        ]
        results: list[Any] = [*made]
        if not request.all_or_none:
            results.append(
                Oneof("error", sandbox_pb.ErrorInfo(kind="capacity", message="no room for the last"))
            )
        return sandbox_pb.CreateSandboxesResponse(
            results=[sandbox_pb.CreateResult(result=r) for r in results]
        )

    async def pause_sandbox(self, request: Any, ctx: Context) -> sandbox_pb.PauseSandboxResponse:
        sandbox = self._alive(request.id)
        if sandbox.record.state != sandbox_pb.State.PAUSED:
            why = fault("wrong_state", f"sandbox {request.id} is PAUSED", state=sandbox_pb.State.PAUSED)
            for process in sandbox.processes.values():
                await process.freeze(why)
            sandbox.held.set()
            # What is recorded of it comes after its streams end.
            sandbox.record.state, sandbox.record.paused_at = sandbox_pb.State.PAUSED, Timestamp.now()
        return sandbox_pb.PauseSandboxResponse(sandbox=sandbox.record)

    async def resume_sandbox(self, request: Any, ctx: Context) -> sandbox_pb.ResumeSandboxResponse:
        sandbox = self._alive(request.id)
        await self._wake(sandbox)
        return sandbox_pb.ResumeSandboxResponse(sandbox=sandbox.record)

    async def fork_sandbox(self, request: Any, ctx: Context) -> sandbox_pb.ForkSandboxResponse:
        source = self._alive(request.id).record
        assert source.spec is not None
        if source.spec.backend == "container" and not request.files_only:
            raise fault("unsupported", "container has no forks with memory", backends=["gvisor"])
        made = self.forks.get(request.idempotency_key)
        if made is None:
            create = sandbox_pb.CreateSandboxRequest(project=source.project, spec=source.spec)
            made = [Oneof("sandbox", self._make(create)) for _ in range(request.count)]
            for child in made:
                child.value.parent = source.id
                shutil.copytree(self.root / source.id, self.root / child.value.id, dirs_exist_ok=True)
            if not request.all_or_none:
                info = sandbox_pb.ErrorInfo(kind="capacity", message="no room for the last")
                made[-1] = Oneof("error", info)
            self.forks[request.idempotency_key] = made
        return sandbox_pb.ForkSandboxResponse(results=[sandbox_pb.CreateResult(result=r) for r in made])

    async def create_snapshot(self, request: Any, ctx: Context) -> sandbox_pb.CreateSnapshotResponse:
        spec = self._alive(request.id).record.spec
        assert spec is not None
        image = image_pb.Image(name=request.name, digest="sha256:5", size=7, kind="files")
        if not request.files_only:
            image.kind = "memory"
            image.snapshot = image_pb.SnapshotInfo(
                backend=spec.backend, virtualization="systrap", cpu_cores_limit=2, nodes=["n1"]
            )
        return sandbox_pb.CreateSnapshotResponse(image=image)

    async def pack_diff(self, request: Any, ctx: Context) -> sandbox_pb.PackDiffResponse:
        self._alive(request.id)
        image = image_pb.Image(name=request.name, digest="sha256:6", size=8, kind="files")
        return sandbox_pb.PackDiffResponse(image=image)

    def _alive(self, name: str) -> Sandbox:
        sandbox = self.sandbox(name)
        if sandbox.record.end is not None:
            raise fault("sandbox_ended", f"sandbox {name} has ended", end=sandbox.record.end)
        return sandbox

    async def get_sandbox(self, request: Any, ctx: Context) -> sandbox_pb.GetSandboxResponse:
        return sandbox_pb.GetSandboxResponse(sandbox=self.sandbox(request.id).record)

    async def list_sandboxes(self, request: Any, ctx: Context) -> sandbox_pb.ListSandboxesResponse:
        found = [s.record for s in self.sandboxes.values() if request.ended or s.record.end is None]
        found = [
            r for r in found if r.spec and all(r.spec.labels.get(k) == v for k, v in request.labels.items())
        ]
        if request.states:
            found = [r for r in found if r.state in request.states]
        at = int(request.page_token or 0)
        more = str(at + 2) if at + 2 < len(found) else ""
        return sandbox_pb.ListSandboxesResponse(sandboxes=found[at : at + 2], next_page_token=more)

    async def stop_sandbox(self, request: Any, ctx: Context) -> sandbox_pb.StopSandboxResponse:
        record = self.sandbox(request.id).record
        if record.end is None:
            record.state = sandbox_pb.State.STOPPED
            record.end = sandbox_pb.End(
                reason="stopped", domain=sandbox_pb.Domain.USER, detail="stopped by a call"
            )
        return sandbox_pb.StopSandboxResponse(sandbox=record)

    async def get_url(self, request: Any, ctx: Context) -> sandbox_pb.GetURLResponse:
        self._alive(request.id)
        self.ttl = request.ttl.to_seconds()
        if self.ttl > 30 * 86400:
            raise fault("invalid_argument", "ttl must be less", field="ttl")
        return sandbox_pb.GetURLResponse(url=f"{self.addr}/p/{request.id}/{request.port}/secret/")

    async def set_ttl(self, request: Any, ctx: Context) -> sandbox_pb.SetTTLResponse:
        record = self.sandbox(request.id).record
        assert record.spec is not None
        if request.ttl_running_stop is not None:
            record.spec.ttl_running_stop = request.ttl_running_stop
        if request.ttl_lifetime is not None:
            record.spec.ttl_lifetime = request.ttl_lifetime
        return sandbox_pb.SetTTLResponse(sandbox=record)

    async def update_network(self, request: Any, ctx: Context) -> sandbox_pb.UpdateNetworkResponse:
        record = self.sandbox(request.id).record
        assert record.spec is not None
        if "wrong" in request.network_rules:
            raise fault("invalid_argument", "wrong is no rule", field="network_rules")
        record.spec.network_rules = dict(request.network_rules)
        return sandbox_pb.UpdateNetworkResponse(sandbox=record)

    async def explain_network(self, request: Any, ctx: Context) -> sandbox_pb.ExplainNetworkResponse:
        spec = self.sandbox(request.id).record.spec
        assert spec is not None
        rule = request.target if request.target in spec.network_rules else ""
        return sandbox_pb.ExplainNetworkResponse(
            decision=sandbox_pb.NetworkDecision(allow=bool(rule), rule=rule, why="because")
        )

    async def list_denied(self, request: Any, ctx: Context) -> sandbox_pb.ListDeniedResponse:
        self.sandbox(request.id)
        return sandbox_pb.ListDeniedResponse(
            denials=[
                sandbox_pb.Denial(count=2, kind="name", name="example.com", why="no rule"),
                sandbox_pb.Denial(count=1, kind="address", address="192.0.2.1", port=443, protocol="tcp"),
            ],
            total=3,
        )

    async def refresh_sandbox(self, request: Any, ctx: Context) -> sandbox_pb.RefreshSandboxResponse:
        end = self.sandbox(request.id).record.end
        if end is not None:
            raise fault("sandbox_ended", f"sandbox {request.id} has ended", end=end)
        return sandbox_pb.RefreshSandboxResponse()

    async def get_metrics(self, request: Any, ctx: Context) -> sandbox_pb.GetMetricsResponse:
        return sandbox_pb.GetMetricsResponse(
            metrics=sandbox_pb.Metrics(
                cpu_time=Duration.from_seconds(1.5), memory_bytes=1 << 20, pids=3, shared_memory_bytes=5
            )
        )

    async def list_images(self, request: Any, ctx: Context) -> image_pb.ListImagesResponse:
        return image_pb.ListImagesResponse(images=[image_pb.Image(name="root/py:latest", kind="oci", size=9)])

    async def get_image(self, request: Any, ctx: Context) -> image_pb.GetImageResponse:
        if request.name != "root/py:latest":
            raise fault("not_found", f"there is no image {request.name}")
        return image_pb.GetImageResponse(
            image=image_pb.Image(name=request.name, digest="sha256:1", kind="oci")
        )

    async def delete_image(self, request: Any, ctx: Context) -> image_pb.DeleteImageResponse:
        await self.get_image(request, ctx)
        return image_pb.DeleteImageResponse()

    async def import_image(self, request: Any, ctx: Context) -> AsyncIterator[image_pb.ImportImageResponse]:
        yield image_pb.ImportImageResponse(step="pull", done=1, total=2)
        yield image_pb.ImportImageResponse(step="done", image=image_pb.Image(name=request.name, kind="oci"))
