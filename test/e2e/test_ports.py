"""Servers in sandboxes, reached from outside."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import resource
import socket
import ssl
import struct
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable
from urllib.parse import urlsplit

import opendsec.sync
import pytest
from conftest import admin_env, args
from opendsec import (
    DSecClient,
    DSecError,
    InvalidArgumentError,
    NotFoundError,
    Sandbox,
    SandboxEndedError,
    WrongStateError,
)
from opendsec._gen.opendsec.v1 import sandbox_pb

Use = Callable[[Callable[[DSecClient, Sandbox], Awaitable[None]]], None]

# Servers of TCP that echo, one on each kind of address; one that takes all and
# says its hash, one that sends much, one that ends what it sends first; and one
# of HTTP that says what it was asked, and echoes WebSockets.
SERVERS = r"""
import base64, hashlib, http.server, json, socket, sys, threading

def listen(host, port, handle):
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    server = socket.create_server((host, port), family=family, backlog=256)
    def accept():
        while True:
            conn, _ = server.accept()
            threading.Thread(target=run, args=(handle, conn), daemon=True).start()
    threading.Thread(target=accept).start()

def run(handle, conn):
    with conn:
        handle(conn)

def echo(conn):
    while piece := conn.recv(65536):
        conn.sendall(piece)

def take(conn):
    seen, size = hashlib.sha256(), 0
    while piece := conn.recv(1 << 20):
        seen.update(piece)
        size += len(piece)
    conn.sendall(f"{size} {seen.hexdigest()}".encode())

def send(conn):
    zeros = bytes(1 << 16)
    for _ in range(1 << 14):
        conn.sendall(zeros)

def first(conn):
    conn.sendall(b"hello")
    conn.shutdown(socket.SHUT_WR)
    got = b""
    while piece := conn.recv(65536):
        got += piece
    open("/tmp/first", "wb").write(got)

def note(conn):
    conn.sendall(b"x")
    try:
        while conn.recv(65536):
            pass
        how = "end"
    except OSError:
        how = "break"
    open("/tmp/how", "w").write(how)

class Web(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def log_message(self, *_):
        pass
    def answer(self):
        if self.headers.get("Upgrade") == "websocket":
            return self.websocket()
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        seen = {"method": self.command, "path": self.path, "headers": dict(self.headers), "body": body.decode()}
        data = json.dumps(seen).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
    do_GET = do_POST = do_PUT = answer
    def websocket(self):
        key = self.headers["Sec-WebSocket-Key"] + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
        accept = base64.b64encode(hashlib.sha1(key.encode()).digest()).decode()
        self.send_response(101)
        for name, value in (("Upgrade", "websocket"), ("Connection", "Upgrade"), ("Sec-WebSocket-Accept", accept)):
            self.send_header(name, value)
        self.end_headers()
        while head := self.rfile.read(2):
            mask = self.rfile.read(4)
            text = bytes(b ^ mask[i % 4] for i, b in enumerate(self.rfile.read(head[1] & 127)))
            self.wfile.write(bytes([head[0], len(text)]) + text)
        self.close_connection = True

listen("127.0.0.1", 9001, echo)
listen("::1", 9002, echo)
listen("192.0.0.2", 9003, echo)
listen("0.0.0.0", 9004, echo)
listen("127.0.0.1", 9010, take)
listen("127.0.0.1", 9011, send)
listen("127.0.0.1", 9012, first)
listen("127.0.0.1", 9013, note)
web = http.server.ThreadingHTTPServer(("127.0.0.1", 8000), Web)
threading.Thread(target=web.serve_forever).start()
print("serving", flush=True)
"""


async def serve(sb: Sandbox) -> None:
    """Start the servers and wait until they listen."""
    await sb.write_file("/tmp/servers.py", SERVERS)
    shell = await sb.run_shell_background("python3 /tmp/servers.py")
    async for chunk in shell.output():
        assert chunk.text == "serving\n"
        return


def trusted() -> ssl.SSLContext:
    return ssl.create_default_context(cafile=os.environ["OPENDSEC_CA"])


def get(url: str, **more: object) -> tuple[int, str]:
    """Ask for an address as one who knows nothing else."""
    request = urllib.request.Request(url, **more)  # type: ignore[arg-type]
    try:
        with urllib.request.urlopen(request, context=trusted(), timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as err:
        return err.code, err.read().decode()


async def echoed(host: str, port: int, data: bytes) -> None:
    reader, writer = await asyncio.open_connection(host, port)

    async def send() -> None:
        writer.write(data)
        await writer.drain()
        writer.write_eof()

    sending = asyncio.create_task(send())
    assert await reader.read(-1) == data
    await sending
    writer.close()


async def broken(reader: asyncio.StreamReader) -> None:
    """A connection breaks; it does not end."""
    with pytest.raises(ConnectionError):
        assert await asyncio.wait_for(reader.read(-1), 20) == b"an end"


def test_forward(use: Use) -> None:
    async def work(client: DSecClient, sb: Sandbox) -> None:
        await serve(sb)
        for port in (9001, 9002, 9003, 9004):  # whichever address the server listens on
            async with sb.forward(port) as way:
                assert way.address == f"127.0.0.1:{way.port}"
                await echoed(way.host, way.port, b"hello " * port)
        async with sb.forward(9001) as way:
            await asyncio.gather(*(echoed(way.host, way.port, os.urandom(10_000 + i)) for i in range(100)))
            assert way.last_error is None
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection(way.host, way.port)
        async with sb.forward(9012) as way:  # the server sends no more first
            reader, writer = await asyncio.open_connection(way.host, way.port)
            assert await reader.read(-1) == b"hello"
            writer.write(b"still here")
            writer.close()
            done = "until [ -s /tmp/first ]; do sleep 0.05; done; cat /tmp/first"
            assert (await sb.run_shell(done, timeout=20)).stdout == "still here"
        async with sb.forward(9013) as way:  # a break of ours is one there, and an end an end
            for linger, how in (((1, 0), "break"), ((0, 0), "end")):
                with socket.create_connection((way.host, way.port)) as conn:
                    assert await asyncio.to_thread(conn.recv, 1) == b"x"
                    conn.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", *linger))
                look = "until [ -s /tmp/how ]; do sleep 0.05; done; cat /tmp/how; rm /tmp/how"
                assert (await sb.run_shell(look, timeout=20)).stdout == how

    use(work)


def test_forward_refuses(use: Use) -> None:
    async def work(client: DSecClient, sb: Sandbox) -> None:
        errors: list[DSecError] = []
        async with sb.forward(9001, on_error=errors.append) as way:
            reader, _ = await asyncio.open_connection(way.host, way.port)
            await broken(reader)
            assert isinstance(way.last_error, NotFoundError)
            assert "nothing listens on port 9001" in way.last_error.message
            assert sb.id in way.last_error.message
            await serve(sb)  # a server that comes later is found
            await echoed(way.host, way.port, b"hello")
            with pytest.raises(InvalidArgumentError, match="listen"):
                async with sb.forward(9001, local_port=way.port):
                    pass
        for port in (0, 65536, -1, True, "8000", None):
            with pytest.raises(InvalidArgumentError) as caught:
                sb.forward(port)  # type: ignore[arg-type]
            assert caught.value.field == "port"
        async with sb.forward(49983) as way:
            reader, _ = await asyncio.open_connection(way.host, way.port)
            await broken(reader)
            assert isinstance(way.last_error, InvalidArgumentError)

    use(work)


def test_much_goes_through_forward(use: Use) -> None:
    """A gigabyte each way, in a thread beside the event loop; nothing grows with it."""

    async def work(client: DSecClient, sb: Sandbox) -> None:
        await serve(sb)

        def take(port: int) -> int:
            size = 0
            with socket.create_connection(("127.0.0.1", port)) as conn:
                while piece := conn.recv(1 << 20):
                    size += len(piece)
            return size

        def send(port: int) -> str:
            zeros, seen = bytes(1 << 16), hashlib.sha256()
            with socket.create_connection(("127.0.0.1", port)) as conn:
                for _ in range(1 << 14):
                    conn.sendall(zeros)
                    seen.update(zeros)
                conn.shutdown(socket.SHUT_WR)
                assert conn.recv(100).decode() == f"{1 << 30} {seen.hexdigest()}"
            return seen.hexdigest()

        async with sb.forward(9011) as out, sb.forward(9010) as into:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            begin = time.monotonic()
            assert await asyncio.to_thread(take, out.port) == 1 << 30
            middle = time.monotonic()
            await asyncio.to_thread(send, into.port)
            end = time.monotonic()
            print(
                f"{(1 << 30) / 1e6 / (middle - begin):.0f} MB/s out, {(1 << 30) / 1e6 / (end - middle):.0f} in"
            )
            assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 << 10  # of 2 GiB

    use(work)


def test_a_slow_reader_holds_up_nobody_else(use: Use) -> None:
    async def work(client: DSecClient, sb: Sandbox) -> None:
        await serve(sb)
        async with sb.forward(9011) as flood, sb.forward(9001) as way:
            with socket.create_connection(("127.0.0.1", flood.port)) as slow:
                assert await asyncio.to_thread(slow.recv, 1)
                for _ in range(20):
                    await echoed(way.host, way.port, os.urandom(100_000))
                assert (await sb.run_shell("echo here")).stdout == "here\n"

    use(work)


def test_the_host_is_not_reached(use: Use) -> None:
    """A server of the host, and one of another sandbox, are not found at a sandbox's ports."""

    async def work(client: DSecClient, sb: Sandbox) -> None:
        server = socket.create_server(("0.0.0.0", 0))
        reached = threading.Event()

        def accept() -> None:
            with server:
                conn, _ = server.accept()
                with conn:
                    conn.recv(1)
                    reached.set()
                    conn.sendall(b"the host's secret")

        threading.Thread(target=accept, daemon=True).start()
        port = server.getsockname()[1]
        async with sb.forward(port) as way:
            reader, _ = await asyncio.open_connection(way.host, way.port)
            await broken(reader)
            assert isinstance(way.last_error, NotFoundError)
        code, text = await asyncio.to_thread(get, await sb.get_url(port))
        assert (code, "nothing listens" in text) == (502, True)
        assert not reached.is_set()
        async with await client.run_sandbox(args(sb.backend)) as other:
            await serve(other)
            code, text = await asyncio.to_thread(get, await sb.get_url(8000))
            assert (code, "nothing listens on port 8000" in text) == (502, True)

    use(work)


def test_get_url(use: Use) -> None:
    async def work(client: DSecClient, sb: Sandbox) -> None:
        await serve(sb)
        url = await sb.get_url(8000)
        assert url.startswith("https://")
        assert url.endswith("/")
        code, text = await asyncio.to_thread(get, f"{url}a%20b/c?x=1", data=b"the body", method="POST")
        seen = json.loads(text)
        assert (code, seen["method"], seen["path"], seen["body"]) == (200, "POST", "/a%20b/c?x=1", "the body")
        headers = seen["headers"]
        assert headers["Host"] == "localhost:8000"
        assert headers["X-Forwarded-Proto"] == "https"
        token = max(url.split("/"), key=len)
        assert len(token) > 20
        assert token not in text
        curl = ["curl", "-sS", "--cacert", os.environ["OPENDSEC_CA"], url]
        done = await asyncio.to_thread(subprocess.run, curl, capture_output=True, text=True, check=True)
        assert json.loads(done.stdout)["path"] == "/"
        answers = await asyncio.gather(*(asyncio.to_thread(get, f"{url}{i}") for i in range(30)))
        assert [json.loads(text)["path"] for _, text in answers] == [f"/{i}" for i in range(30)]

    use(work)


def test_get_url_serves_websockets(use: Use) -> None:
    async def work(client: DSecClient, sb: Sandbox) -> None:
        await serve(sb)
        parts = urlsplit(await sb.get_url(8000))

        def talk() -> list[bytes]:
            raw = socket.create_connection((parts.hostname, parts.port), timeout=20)
            context = trusted()
            context.set_alpn_protocols(["http/1.1"])
            with (
                context.wrap_socket(raw, server_hostname=parts.hostname) as conn,
                conn.makefile("rb") as answers,
            ):
                conn.sendall(
                    f"GET {parts.path}ws HTTP/1.1\r\nHost: {parts.netloc}\r\nUpgrade: websocket\r\n"
                    "Connection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
                    "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n".encode()
                )
                assert answers.readline().split()[1] == b"101"
                head = b"".join(iter(answers.readline, b"\r\n"))
                assert b"s3pPLMBiTxaQ9kYGzzhZRbK+xOo=" in head
                got = []
                for text in (b"one", b"two", b"three"):
                    conn.sendall(bytes([0x81, 0x80 | len(text)]) + bytes(4) + text)
                    got.append(answers.read(2 + len(text))[2:])
                return got

        assert await asyncio.to_thread(talk) == [b"one", b"two", b"three"]

    use(work)


def test_an_address_is_for_one_port_of_one_sandbox(use: Use) -> None:
    async def work(client: DSecClient, sb: Sandbox) -> None:
        await serve(sb)
        url = await sb.get_url(8000)
        async with await client.run_sandbox(args(sb.backend)) as other:
            bad = [
                url.replace("8000", "9001"),
                url.replace(sb.id, other.id),
                url.replace("/8000/", "/8000/x"),
                f"{url.rstrip('/')[:-1]}/",
            ]
            for address in bad:
                assert (await asyncio.to_thread(get, address))[0] == 403, address
        short = await sb.get_url(8000, ttl=1)
        until = time.monotonic() + 20
        while (await asyncio.to_thread(get, short))[0] != 403:  # it expires
            assert time.monotonic() < until
        second = await sb.get_url(8000)
        await sb.revoke_url(second)
        assert (await asyncio.to_thread(get, second))[0] == 403
        assert (await asyncio.to_thread(get, url))[0] == 200
        for port, ttl, field in (
            (0, 60, "port"),
            (65536, 60, "port"),
            (8000, 0, "ttl"),
            (8000, 31 * 86400, "ttl"),
            (49983, 9, "port"),
        ):
            with pytest.raises(InvalidArgumentError) as caught:
                await sb.get_url(port, ttl=ttl)
            assert caught.value.field == field

    use(work)


def test_others_may_not(backend: str) -> None:
    """A token of another project opens no way, and does not learn that there is a sandbox."""
    env = admin_env()
    name = f"stranger-{time.time_ns()}"

    def ctl(*words: str) -> str:
        run = subprocess.run(
            ["opendsecctl", "-q", *words],
            env={**os.environ, **env},
            capture_output=True,
            text=True,
            check=True,
        )
        return run.stdout.strip()

    project = f"root/{name}"
    ctl("project", "create", project)
    ctl("caller", "create", name, "--grant", f"developer@{project}")
    token = ctl("token", "create", name)

    async def main() -> None:
        async with DSecClient() as client, await client.run_sandbox(args(backend)) as sb:
            await serve(sb)
            async with DSecClient(token=token, project=project) as stranger:
                taken = Sandbox(stranger._conn, stranger._api, sandbox_pb.Sandbox(id=sb.id))
                with pytest.raises(NotFoundError):
                    await taken.get_url(8000)
                async with taken.forward(9001) as way:
                    reader, _ = await asyncio.open_connection(way.host, way.port)
                    await broken(reader)
                    assert isinstance(way.last_error, NotFoundError)
                    assert "does not exist" in way.last_error.message

    asyncio.run(main())


def test_a_pause_breaks_and_a_call_wakes(backend: str) -> None:
    async def main() -> None:
        async with (
            DSecClient() as client,
            await client.run_sandbox(args(backend)) as still,
            await client.run_sandbox(args(backend, auto_resume=True)) as waking,
        ):
            for sb in (still, waking):
                await serve(sb)
            async with still.forward(9001) as way, waking.forward(9001) as other:
                urls = [await sb.get_url(8000) for sb in (still, waking)]
                conns = [await asyncio.open_connection(w.host, w.port) for w in (way, other)]
                for reader, writer in conns:
                    writer.write(b"x")
                    assert await reader.read(1) == b"x"
                for sb, w, conn in ((still, way, conns[0]), (waking, other, conns[1])):
                    await sb.pause()
                    begin = time.monotonic()
                    await broken(conn[0])
                    assert time.monotonic() - begin < 2
                    assert isinstance(w.last_error, WrongStateError), w.last_error
                    assert "paused" in w.last_error.message
                reader, _ = await asyncio.open_connection(way.host, way.port)
                await broken(reader)
                assert isinstance(way.last_error, WrongStateError)
                code, text = await asyncio.to_thread(get, urls[0])
                assert (code, "paused" in text) == (503, True)
                await echoed(other.host, other.port, b"it wakes")
                await waking.pause()
                assert (await asyncio.to_thread(get, urls[1]))[0] == 200
                await still.resume()
                await echoed(way.host, way.port, b"it is back")
                assert (await asyncio.to_thread(get, urls[0]))[0] == 200

    asyncio.run(main())


def test_the_end_breaks(backend: str) -> None:
    async def main() -> None:
        async with DSecClient() as client:
            sb = await client.run_sandbox(args(backend))
            await serve(sb)
            url = await sb.get_url(8000)
            async with sb.forward(9001) as way:
                reader, writer = await asyncio.open_connection(way.host, way.port)
                writer.write(b"x")
                assert await reader.read(1) == b"x"
                await sb.stop()
                await broken(reader)
                assert isinstance(way.last_error, SandboxEndedError)
                reader, _ = await asyncio.open_connection(way.host, way.port)
                await broken(reader)
                assert isinstance(way.last_error, SandboxEndedError)
            code, text = await asyncio.to_thread(get, url)
            assert (code, "ended" in text) == (410, True)
            with pytest.raises(SandboxEndedError):
                await sb.get_url(8000)

    asyncio.run(main())


def test_an_open_connection_is_use(backend: str) -> None:
    async def main() -> None:
        async with DSecClient() as client:
            held = await client.run_sandbox(args(backend, ttl_running_stop=2))
            try:
                # A server that no command of ours holds open.
                daemon = "setsid python3 -m http.server --bind 127.0.0.1 8000 >/dev/null 2>&1 </dev/null &"
                ready = "until python3 -c 'import socket; socket.create_connection((\"127.0.0.1\", 8000))'; do :; done"
                await held.run_shell(f"{daemon} {ready}")
                async with held.forward(8000) as way:
                    reader, writer = await asyncio.open_connection(way.host, way.port)
                    left = await client.run_sandbox(args(backend, ttl_running_stop=3))
                    while left.end is None:  # as long idle, and longer, but without a connection
                        left = await client.get(left.id)
                    writer.write(b"GET / HTTP/1.0\r\n\r\n")
                    assert (await reader.read(-1)).startswith(b"HTTP/1.0 200")
                while held.end is None:
                    held = await client.get(held.id)
                assert held.end.reason == "idle"
            finally:
                await held.stop()

    asyncio.run(main())


def test_a_fork_has_its_own(backend: str) -> None:
    if backend != "gvisor":
        return  # others copy files only

    async def main() -> None:
        async with DSecClient() as client, await client.run_sandbox(args(backend)) as sb:
            await serve(sb)
            url = await sb.get_url(8000)
            async with sb.forward(9001) as way:
                reader, writer = await asyncio.open_connection(way.host, way.port)
                writer.write(b"x")
                assert await reader.read(1) == b"x"
                async with (await sb.fork())[0] as copy:
                    writer.write(b"y")  # the source's connection goes on
                    assert await reader.read(1) == b"y"
                    assert (await asyncio.to_thread(get, url.replace(sb.id, copy.id)))[0] == 403
                    async with copy.forward(9001) as own:
                        await echoed(own.host, own.port, b"the copy's server")
                    assert (await asyncio.to_thread(get, await copy.get_url(8000)))[0] == 200

    asyncio.run(main())


def test_the_sync_side(backend: str) -> None:
    with opendsec.sync.DSecClient() as client, client.run_sandbox(args(backend)) as sb:
        sb.write_file("/tmp/servers.py", SERVERS)
        shell = sb.run_shell_background("python3 /tmp/servers.py")
        assert next(iter(shell.output())).text == "serving\n"
        assert get(sb.get_url(8000))[0] == 200
        with sb.forward(9001) as way, socket.create_connection((way.host, way.port)) as conn:
            conn.sendall(b"hello")
            conn.shutdown(socket.SHUT_WR)
            assert conn.recv(100) == b"hello"
            assert conn.recv(100) == b""


def test_ctl(backend: str) -> None:
    async def main() -> None:
        async with DSecClient() as client, await client.run_sandbox(args(backend)) as sb:
            await serve(sb)
            url = (
                await asyncio.to_thread(
                    subprocess.run,
                    ["opendsecctl", "sandbox", "url", sb.id, "8000"],
                    capture_output=True,
                    text=True,
                    check=True,
                )
            ).stdout.strip()
            assert (await asyncio.to_thread(get, url))[0] == 200
            way = await asyncio.create_subprocess_exec(
                "opendsecctl",
                "sandbox",
                "forward",
                sb.id,
                "0:9001",
                "0:9999",
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
            assert way.stdout is not None
            assert way.stderr is not None
            try:
                ports = [int((await way.stdout.readline()).split()[0].rpartition(b":")[2]) for _ in range(2)]
                await echoed("127.0.0.1", ports[0], os.urandom(100_000))
                reader, _ = await asyncio.open_connection("127.0.0.1", ports[1])
                await broken(reader)
                assert b"port 9999: nothing listens" in await way.stderr.readline()
            finally:
                way.terminate()
                assert await way.wait() == 0

    asyncio.run(main())
