"""What to test before relying on a snapshot: one test for each line of that list, as docs/concepts/state.md answers it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import BACKENDS
from opendsec import DSecClient, Image, Sandbox
from stateful import all_right, ask, begin, ended, look, name, out, run, same_program, small, until
from test_restart import leaks, state
from test_state import MEMORY

BRANCH = ["resume", "fork", "snapshot"]


async def branch(client: DSecClient, sb: Sandbox, how: str) -> Sandbox:
    """What goes on from a sandbox's present state."""
    if how == "resume":
        await sb.pause()
        await sb.resume()
        return sb
    if how == "fork":
        (child,) = await sb.fork()
        return child
    image = await snapshot(sb)
    started = await client.run_sandbox(small(sb.backend, image=image.name))
    await client.images.delete(image.name)
    return started


async def snapshot(sb: Sandbox) -> Image:
    return await sb.create_snapshot(name("branch"))


CASES = [(b, how) for b in BACKENDS for how in BRANCH if b in MEMORY or how == "resume"]


@pytest.mark.parametrize(("on", "how"), CASES)
def test_memory_continuity(on: str, how: str) -> None:
    """A value in memory survives without being made again."""

    async def work(client: DSecClient) -> None:
        async with await client.run_sandbox(small(on)) as sb:
            before = await begin(sb)
            other = await branch(client, sb, how)
            async with ended(other):
                now = await same_program(other, before)
                assert now["counter"] >= before["counter"]
                await all_right(other)
                if other is not sb:
                    await same_program(sb, before)
                    await all_right(sb)

    run(work)


@pytest.mark.parametrize(("on", "how"), [*CASES, *((b, "files") for b in BACKENDS)])
def test_file_continuity(on: str, how: str) -> None:
    """Files are there, and what one branch writes stays out of the others."""

    async def work(client: DSecClient) -> None:
        async with await client.run_sandbox(small(on)) as sb:
            await out(
                sb,
                "mkdir /srv/d; echo before > /srv/d/file; rm /etc/issue; (echo open; sleep 1000) > /srv/d/open 2>&1 &",
            )
            if how == "files":
                (other,) = await sb.fork(memory=False)
            else:
                other = await branch(client, sb, how)
            async with ended(other):
                assert (
                    await out(other, "cat /srv/d/file /srv/d/open; ls /etc/issue 2>&1 | wc -l")
                    == "before\nopen\n1"
                )
                if other is sb:
                    return
                await out(sb, "echo source > /srv/d/file; touch /srv/d/source")
                await out(other, "echo other > /srv/d/file; touch /srv/d/other")
                assert await out(sb, "cd /srv/d; cat file; ls") == "source\nfile\nopen\nsource"
                assert await out(other, "cd /srv/d; cat file; ls") == "other\nfile\nopen\nother"

    run(work)


@pytest.mark.parametrize(("on", "how"), CASES)
def test_process_continuity(on: str, how: str) -> None:
    """The service answers the first call, connections inside are open, and sleepers and pipes go on."""

    async def work(client: DSecClient) -> None:
        async with await client.run_sandbox(small(on)) as sb:
            before = await begin(sb)
            await out(
                sb, "mkfifo /tmp/pipe; cat /tmp/pipe > /tmp/through 2>&1 & sleep 1000 > /tmp/pipe 2>&1 &"
            )
            want = await out(sb, "pgrep -x sleep; pgrep -x cat")
            other = await branch(client, sb, how)
            async with ended(other):
                first = await look(other)  # it is ready, not merely there
                assert (first["value"], first["loop"]) == (before["value"], "ping")
                assert await out(other, "pgrep -x sleep; pgrep -x cat") == want
                await out(other, "echo through > /tmp/pipe; pkill -x sleep")
                await out(other, "until grep -q through /tmp/through; do sleep 0.05; done")

    run(work)


OUTSIDE = """
import socket, sys
s = socket.create_server(("198.51.100.2", 4567))
print("ready", flush=True)
c, _ = s.accept()
while data := c.recv(100):
    c.sendall(data)
"""

INSIDE = """
import socket, time
s = socket.create_connection(("198.51.100.2", 4567), 5)
s.settimeout(60)
s.sendall(b"x")
assert s.recv(1) == b"x"
open("/tmp/open", "w").close()
try:
    got = s.recv(1)
    said = "closed" if not got else "data"
except OSError as err:
    said = type(err).__name__
open("/tmp/said", "w").write(said)
"""


@contextlib.contextmanager
def outside() -> Iterator[subprocess.Popen[str]]:
    """A server on a network beside the host."""

    def ip(*args: str) -> None:
        subprocess.run(["ip", *args], check=True, timeout=30)

    there = f"outside-{os.getpid()}"
    ip("netns", "add", there)
    try:
        ip("link", "add", "outside0", "type", "veth", "peer", "name", "eth0", "netns", there)
        ip("address", "add", "198.51.100.1/30", "dev", "outside0")
        ip("link", "set", "outside0", "up")
        ip("-n", there, "address", "add", "198.51.100.2/30", "dev", "eth0")
        ip("-n", there, "link", "set", "eth0", "up")
        server = subprocess.Popen(
            ["ip", "netns", "exec", there, sys.executable, "-c", OUTSIDE], stdout=subprocess.PIPE, text=True
        )
        try:
            assert server.stdout is not None
            assert server.stdout.readline() == "ready\n"
            yield server
        finally:
            server.kill()
            server.communicate()
            ip("link", "delete", "outside0")  # the namespace's end would take it later
    finally:
        ip("netns", "delete", there)


@pytest.mark.parametrize(("on", "how"), CASES)
def test_external_behaviour(on: str, how: str) -> None:
    """A connection to outside breaks at once where the machine is another; where it only stood still it goes on."""

    async def work(client: DSecClient) -> None:
        rules = {"198.51.100.2:4567": True}
        with outside() as server:
            async with await client.run_sandbox(small(on, network_rules=rules)) as sb:
                await sb.write_file("/srv/inside.py", INSIDE)
                await out(sb, "nohup python3 /srv/inside.py >/tmp/log 2>&1 &")
                await out(sb, "until [ -e /tmp/open ]; do sleep 0.05; done")
                other = await branch(client, sb, how)
                began = time.monotonic()
                async with ended(other):
                    if on in MEMORY:
                        await out(other, "until [ -s /tmp/said ]; do sleep 0.05; done")
                        assert await out(other, "cat /tmp/said") in (
                            "ConnectionResetError",
                            "ConnectionAbortedError",
                            "BrokenPipeError",
                            "OSError",
                            "TimeoutError",
                            "closed",
                        )
                        assert time.monotonic() - began < 3
                    if other is not sb or on not in MEMORY:
                        assert await out(sb, "ls /tmp/said 2>/dev/null; true") == ""
                    server.kill()
                    await until("the source's connection ends with its peer", lambda: _said(sb))

    run(work)


async def _said(sb: Sandbox) -> bool:
    return await sb.exists("/tmp/said")


@pytest.mark.parametrize(("on", "how"), CASES)
def test_repeatability(on: str, how: str) -> None:
    """The clock is right, chance of the kernel's is new, a program's own is the same unless it watches, and all stands still as one."""

    async def work(client: DSecClient) -> None:
        async with await client.run_sandbox(small(on)) as sb:
            before = await begin(sb)
            was = await out(sb, "cat /run/opendsec/generation; cat /etc/machine-id; hostname")
            began = time.monotonic()
            other = await branch(client, sb, how)
            async with ended(other):
                least = time.time()
                now = await look(other)
                assert least - 0.1 <= now["wall"] <= time.time() + 0.1
                gone = time.monotonic() - began
                # The monotonic clock goes on meanwhile, and never back.
                assert 0 < now["mono"] - before["mono"] < gone + 60
                assert abs((now["mono"] - before["mono"]) - (now["wall"] - before["wall"])) < 0.2
                await all_right(other)  # memory and files are of one moment
                got = (
                    await out(other, "cat /run/opendsec/generation; cat /etc/machine-id; hostname")
                ).split()
                generation, machine, host = was.split()
                assert (got[0] != generation) is (on in MEMORY)
                assert (got[1] == machine, got[2] == host) == ((other is sb), (other is sb))
                if other is sb:
                    return
                mine, its = await ask(sb, "chance"), await ask(other, "chance")
                assert mine["plain"] == its["plain"]  # why there is a hook
                assert mine["uuid4"] != its["uuid4"]
                mine, its = await ask(sb, "chance"), await ask(other, "chance")
                assert mine["hooked"] != its["hooked"]
                assert mine["plain"] != its["plain"]  # seeded anew by now

    run(work)


def _size(path: Path) -> int:
    return sum(f.stat().st_blocks * 512 for f in path.rglob("*") if f.is_file() and not f.is_symlink())


@pytest.mark.parametrize("on", MEMORY)
def test_resource_use(on: str) -> None:
    """A paused sandbox holds no memory; a branch holds what it changed; disk comes back when branches go."""

    async def work(client: DSecClient) -> None:
        async with await client.run_sandbox(small(on, memory_limit_mb=256)) as sb:
            await begin(sb)
            fill = 'x = bytes(range(256)) * 400000; open("/tmp/filled", "w"); time.sleep(1000)'
            await out(sb, f"nohup python3 -c 'import time; {fill}' >/dev/null 2>&1 &")
            own = state() / "edge" / "sandboxes" / sb.id
            await out(sb, "until [ -e /tmp/filled ]; do sleep 0.05; done")
            assert (await sb.metrics()).memory_bytes > 100 << 20
            forks = await sb.fork(count=3)
            async with ended(*forks):
                for f in forks:
                    m = await f.metrics()
                    assert m.memory_bytes < 64 << 20
                    assert 100 << 20 < m.memory_bytes + m.shared_memory_bytes < 256 << 20
                    assert _size(state() / "edge" / "sandboxes" / f.id) < 16 << 20
            assert _size(own) < 16 << 20  # the copies' common state is gone
            for f in forks:
                assert _size(state() / "edge" / "sandboxes" / f.id) <= 16 << 10  # how it ended

            pid = json.loads((own / "journal.json").read_text())["handle"]["data"]["sentry"]["pid"]
            assert Path(f"/proc/{pid}").exists()
            await sb.pause()

            async def ended_machine() -> bool:
                return not Path(f"/proc/{pid}").exists()

            await until("the machine has ended", ended_machine)
            assert 100 << 20 < _size(own) < 256 << 20
            await sb.resume()

            async def given_back() -> bool:
                return _size(own) < 16 << 20

            await until("the saved state is gone", given_back)

            image = await snapshot(sb)
            stored = state() / "edge" / "images" / "sha256" / image.digest.removeprefix("sha256:")
            assert 100 << 20 < _size(stored) < 256 << 20
            await client.images.delete(image.name)

            async def removed() -> bool:
                return not stored.exists()

            await until("the snapshot's space is back", removed, 60)

    run(work)


def test_secrets_are_in_snapshots(backend: str) -> None:
    """An image of files has what was written, and the sandbox's variables."""

    async def work(client: DSecClient) -> None:
        async with await client.run_sandbox(small(backend, env={"SECRET": "variable"})) as sb:
            await sb.write_file("/root/.token", "on the disk, ")
            image = await sb.create_snapshot(name("secret"), memory=False)
            async with await client.run_sandbox(small(backend, image=image.name)) as other:
                assert await out(other, "cat /root/.token; echo $SECRET") == "on the disk, variable"
            await client.images.delete(image.name)

    run(work)


def test_nothing_is_left() -> None:
    """After all that was paused, copied and taken, no machine, file or slot is left over."""

    async def work(client: DSecClient) -> None:
        for sb in [s async for s in client.list()]:
            await sb.stop()

    run(work)
    limit = time.monotonic() + 60
    while (left := leaks()) and time.monotonic() < limit:
        asyncio.run(asyncio.sleep(0.2))
    assert left == ""
