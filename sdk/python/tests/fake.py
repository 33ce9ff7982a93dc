"""A server that speaks OpenDsec's public API over TLS and HTTP/2, for tests.

Its sandboxes are directories of this machine and its commands run here, so
that streams, signals and files are real; nothing is isolated. It stands behind
a relay that can cut the connection, see ``Server.break_after``.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import trustme
from connectrpc.errors import ConnectError
from fake_sandbox import Sandbox
from fake_wire import Context, answer, error_json, fault, read_body
from hypercorn.asyncio import serve
from hypercorn.config import Config
from protobuf import Oneof
from protobuf.wkt import Duration, Timestamp

from opendsec._gen.opendsec.v1 import image_connect, image_pb, network_pb, sandbox_connect, sandbox_pb

TOKEN = "ods_test_secret"
PROJECT = "root/demo"


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
        self.revoked: list[str] = []
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
            await read_body(receive)
            await answer(send, 503, "")
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
                await read_body(receive)
            await answer(send, 400, error_json(error))
        elif app is None:
            await answer(send, 404, "")
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

    async def revoke_url(self, request: Any, ctx: Context) -> sandbox_pb.RevokeURLResponse:
        self._alive(request.id)
        if not request.url.startswith(f"{self.addr}/p/{request.id}/"):
            raise fault("invalid_argument", "no address of this sandbox", field="url")
        self.revoked.append(request.url)
        return sandbox_pb.RevokeURLResponse()

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
        record.spec.network_rules = network_pb.NetworkRules(rules=dict(request.network_rules))
        return sandbox_pb.UpdateNetworkResponse(sandbox=record)

    async def explain_network(self, request: Any, ctx: Context) -> sandbox_pb.ExplainNetworkResponse:
        spec = self.sandbox(request.id).record.spec
        assert spec is not None
        rules = spec.network_rules.rules if spec.network_rules is not None else {}
        rule = request.target if request.target in rules else ""
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
