from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
import threading
from collections.abc import Awaitable, Callable, Iterator

import pytest
from fake import PROJECT, TOKEN, Server
from fake_wire import error_json, fault

import opendsec.sync
from opendsec import (
    ConnectionError,
    DSecClient,
    DSecError,
    DSecRunArgs,
    InvalidArgumentError,
    NotFoundError,
    Sandbox,
    SandboxEndedError,
    SandboxState,
    UnauthenticatedError,
    WrongStateError,
)
from opendsec._gen.opendsec.v1 import sandbox_pb

Use = Callable[[Callable[[DSecClient, Sandbox], Awaitable[None]]], None]
Handle = Callable[[socket.socket], None]
RESET = struct.pack("ii", 1, 0)


@contextlib.contextmanager
def listening(handle: Handle) -> Iterator[int]:
    """A TCP server of this machine, which stands for one in the sandbox."""
    server = socket.create_server(("127.0.0.1", 0), backlog=200)

    def run(conn: socket.socket) -> None:
        with conn, contextlib.suppress(OSError):
            handle(conn)

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                conn, _ = server.accept()
                threading.Thread(target=run, args=(conn,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield server.getsockname()[1]
    finally:
        server.shutdown(socket.SHUT_RDWR)
        server.close()


def echo(conn: socket.socket) -> None:
    while piece := conn.recv(65536):
        conn.sendall(piece)
    conn.shutdown(socket.SHUT_WR)


async def echoed(address: tuple[str, int], data: bytes) -> None:
    reader, writer = await asyncio.open_connection(*address)

    async def send() -> None:
        writer.write(data)
        await writer.drain()
        writer.write_eof()

    sending = asyncio.create_task(send())
    assert await reader.read(-1) == data
    await sending
    writer.close()


async def broken(reader: asyncio.StreamReader) -> None:
    with pytest.raises(ConnectionResetError):
        await asyncio.wait_for(reader.read(-1), 20)


async def told(errors: list[DSecError], count: int) -> DSecError:
    """Wait until so many errors were told, and return the last."""
    while len(errors) < count:
        await asyncio.sleep(0.005)
    return errors[count - 1]


def test_bytes_and_half_closes_pass(use: Use) -> None:
    async def work(client: DSecClient, sb: Sandbox) -> None:
        with listening(echo) as port:
            async with sb.forward(port) as way:
                assert repr(way) == f"Forward({way.address} to port {port} of {sb.id})"
                assert (way.host, way.address) == ("127.0.0.1", f"127.0.0.1:{way.port}")
                assert way.remote_port == port
                await echoed((way.host, way.port), os.urandom(3 << 20))
                await asyncio.gather(*(echoed((way.host, way.port), os.urandom(1000 + i)) for i in range(30)))
                await echoed((way.host, way.port), b"")
                assert way.last_error is None
            with pytest.raises(ConnectionRefusedError):
                await asyncio.open_connection(way.host, way.port)
            await way.close()  # again

    use(work)


def test_frames_in_pieces(server: Server, use: Use) -> None:
    async def work(client: DSecClient, sb: Sandbox) -> None:
        server.sandboxes[sb.id].tunnels.slivers = True
        with listening(echo) as port:
            async with sb.forward(port) as way:
                await echoed((way.host, way.port), os.urandom(2000))
                await echoed((way.host, way.port), b"")

    use(work)


def test_the_server_may_end_first(use: Use) -> None:
    got: list[bytes] = []
    done = threading.Event()

    def first(conn: socket.socket) -> None:
        conn.sendall(b"hello")
        conn.shutdown(socket.SHUT_WR)
        while piece := conn.recv(65536):
            got.append(piece)
        done.set()

    async def work(client: DSecClient, sb: Sandbox) -> None:
        with listening(first) as port:
            async with sb.forward(port) as way:
                reader, writer = await asyncio.open_connection(way.host, way.port)
                assert await reader.read(-1) == b"hello"
                writer.write(b"x" * 100_000)
                writer.close()
                assert await asyncio.to_thread(done.wait, 20)
        assert b"".join(got) == b"x" * 100_000

    use(work)


def test_a_break_is_no_end(use: Use) -> None:
    ends: list[str] = []
    seen = threading.Event()

    def listen(conn: socket.socket) -> None:
        conn.sendall(b"x")
        try:
            while conn.recv(65536):
                continue
            ends.append("end")
        except OSError:
            ends.append("break")
        seen.set()

    async def work(client: DSecClient, sb: Sandbox) -> None:
        with listening(listen) as port:
            async with sb.forward(port) as way:
                conn = socket.create_connection((way.host, way.port))
                assert conn.recv(1) == b"x"
                conn.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
                conn.close()
                assert await asyncio.to_thread(seen.wait, 20)
        assert ends == ["break"]

    use(work)


def test_refusals(server: Server, use: Use) -> None:
    async def work(client: DSecClient, sb: Sandbox) -> None:
        errors: list[DSecError] = []

        async def tell(err: DSecError) -> None:
            errors.append(err)

        async with sb.forward(1, on_error=tell) as way:
            for reason in (NotFoundError, WrongStateError, SandboxEndedError):
                if reason is WrongStateError:
                    await sb.pause()
                elif reason is SandboxEndedError:
                    server.end(sb.id, "lost")
                reader, _ = await asyncio.open_connection(way.host, way.port)
                await broken(reader)
                assert isinstance(way.last_error, reason)
            await told(errors, 3)
        assert [type(e) for e in errors] == [NotFoundError, WrongStateError, SandboxEndedError]
        assert "nothing listens on port 1" in str(errors[0])

    use(work)


def test_a_cut_says_why(server: Server, use: Use) -> None:
    """Also to who sends at that time, and each connection by itself."""

    def take(conn: socket.socket) -> None:
        conn.sendall(b"x")
        while conn.recv(1 << 20):
            continue

    async def work(client: DSecClient, sb: Sandbox) -> None:
        fake = server.sandboxes[sb.id]
        errors: list[DSecError] = []
        paused = fault("wrong_state", "it is paused", state=sandbox_pb.State.PAUSED)
        with listening(take) as port:
            async with sb.forward(port, on_error=errors.append) as way:
                for words, kind in ((error_json(paused), WrongStateError), ("", ConnectionError)):
                    reader, _ = await asyncio.open_connection(way.host, way.port)
                    assert await reader.read(1) == b"x"
                    server._loop.call_soon_threadsafe(fake.tunnels.cut, words)
                    await broken(reader)
                    assert isinstance(way.last_error, kind)
                await told(errors, 2)
                assert isinstance(errors[0], WrongStateError)
                assert errors[0].state is SandboxState.PAUSED
                reader, _ = await asyncio.open_connection(way.host, way.port)
                assert await reader.read(1) == b"x"

    use(work)


def test_close_breaks_what_is_open(use: Use) -> None:
    async def work(client: DSecClient, sb: Sandbox) -> None:
        def flood(conn: socket.socket) -> None:
            while True:
                conn.sendall(bytes(65536))

        with listening(flood) as port:
            errors: list[DSecError] = []
            way = sb.forward(port, on_error=errors.append)
            async with way:
                conn = socket.create_connection((way.host, way.port))  # which does not read
                assert conn.recv(1) == b"\0"
            before = threading.active_count()
            with conn, contextlib.suppress(ConnectionResetError):
                while await asyncio.to_thread(conn.recv, 1 << 20):
                    continue
            while threading.active_count() > before and any(
                t.name == "opendsec-connection" for t in threading.enumerate()
            ):
                await asyncio.sleep(0.005)
            assert errors == []
            with pytest.raises(InvalidArgumentError):
                await way.__aenter__()

    use(work)


def test_bad_arguments(use: Use) -> None:
    async def work(client: DSecClient, sb: Sandbox) -> None:
        for port in (0, 65536, -1, True, "80", None, 1.5):
            for call in (sb.forward, sb.get_url):
                with pytest.raises(InvalidArgumentError) as caught:
                    await call(port)  # type: ignore[arg-type, misc]
                assert caught.value.field == "port"
        with pytest.raises(InvalidArgumentError) as caught:
            sb.forward(80, local_port=70000)
        assert caught.value.field == "local_port"
        with socket.create_server(("127.0.0.1", 0)) as taken:
            for host, local in (("127.0.0.1", taken.getsockname()[1]), ("192.0.2.1", 0), ("no such host", 0)):
                with pytest.raises(InvalidArgumentError, match="cannot listen on"):
                    async with sb.forward(80, host=host, local_port=local):
                        pass
        for ttl in (0, -1, float("nan"), None, "1", 31 * 86400):
            with pytest.raises(InvalidArgumentError) as caught:
                await sb.get_url(80, ttl=ttl)  # type: ignore[arg-type]
            assert caught.value.field == "ttl"

    use(work)


def test_get_url(server: Server, use: Use) -> None:
    async def work(client: DSecClient, sb: Sandbox) -> None:
        assert await sb.get_url(8000) == f"{server.addr}/p/{sb.id}/8000/secret/"
        assert server.ttl == 86400
        await sb.get_url(8000, ttl=1.5)
        assert server.ttl == 1.5
        url = await sb.get_url(8000)
        await sb.revoke_url(url)
        assert server.revoked == [url]
        for wrong in ("https://example.com/", "", None, b"x"):
            with pytest.raises(InvalidArgumentError) as caught:
                await sb.revoke_url(wrong)  # type: ignore[arg-type]
            assert caught.value.field == "url"
        server.end(sb.id, "lost")
        with pytest.raises(SandboxEndedError):
            await sb.get_url(8000)

    use(work)


def test_a_token_that_is_not_good(server: Server, use: Use) -> None:
    async def work(client: DSecClient, sb: Sandbox) -> None:
        async with DSecClient(server.addr, "ods_other", PROJECT, server.ca) as other:
            taken = Sandbox(other._conn, other._api, sandbox_pb.Sandbox(id=sb.id))
            async with taken.forward(80) as way:
                reader, _ = await asyncio.open_connection(way.host, way.port)
                await broken(reader)
                assert isinstance(way.last_error, UnauthenticatedError)

    use(work)


def test_the_sync_side(server: Server) -> None:
    args = DSecRunArgs(image="root/py:latest", backend="gvisor")
    errors: list[DSecError] = []
    with (
        opendsec.sync.DSecClient(server.addr, TOKEN, PROJECT, server.ca) as client,
        client.run_sandbox(args) as sb,
        listening(echo) as port,
    ):
        assert sb.get_url(port).startswith("https://")
        with sb.forward(port, on_error=errors.append) as way:
            with socket.create_connection((way.host, way.port)) as conn:
                conn.sendall(b"hello")
                conn.shutdown(socket.SHUT_WR)
                assert conn.recv(100) == b"hello"
                assert conn.recv(100) == b""
            assert isinstance(way, opendsec.sync.Forward)
        assert errors == []
