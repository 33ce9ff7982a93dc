"""A restart of the servers is no outage: kill -9, start again, and everything went on."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import BACKENDS, Work, args
from opendsec import DSecClient, DSecError, Sandbox


def ops() -> Path:
    """The installation's configuration, whose servers these tests may kill."""
    return Path(os.environ["OPENDSEC_TEST_OPS"])


def state() -> Path:
    return Path((ops() / "state").read_text().strip())


def server() -> int:
    return int((state() / "opendsec.pid").read_text())


def kill_and_start() -> None:
    """Ends the servers as a crash would, and starts them again."""
    pid = server()
    pidfd = os.pidfd_open(pid)
    os.kill(pid, signal.SIGKILL)
    # A zombie of a parent that does not reap it is as dead as can be.
    signal.pidfd_send_signal(pidfd, 0)
    while (
        Path(f"/proc/{pid}/stat").exists()
        and Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    ):
        os.sched_yield()
    os.close(pidfd)
    start()


def start() -> None:
    opendsec = shutil.which("opendsec")
    assert opendsec, "opendsec is not in PATH"
    # Not a pipe: the servers inherit it and would hold it open.
    done = subprocess.run(
        [opendsec, "up", "--ops", str(ops()), "--detach"], stdin=subprocess.DEVNULL, timeout=120, check=False
    )
    assert done.returncode == 0


def leaks() -> str:
    """What opendsecctl leaks says; it fails when something is left over."""
    env = dict(os.environ)
    for line in (ops() / "env").read_text().splitlines():
        name, _, value = line.removeprefix("export ").partition("=")
        env[name] = value
    done = subprocess.run(
        ["opendsecctl", "leaks"], env=env, capture_output=True, text=True, timeout=60, check=False
    )
    return "" if done.returncode == 0 else done.stdout + done.stderr


async def wait_for_file(sb: Sandbox, path: str, longer_than: int = 0) -> int:
    """Waits until a file in the sandbox has grown past a size, and returns its size."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if await sb.exists(path) and (size := (await sb.stat(path)).size) > longer_than:
            return size
    raise AssertionError(f"{path} did not grow past {longer_than} bytes")


def test_kill_9_loses_nothing(backend: str) -> None:
    async def before() -> tuple[str, str, int, int]:
        async with DSecClient() as client:
            sb = await client.run_sandbox(args(backend))
            await sb.write_file("/var/tmp/kept", "kept\n")
            shell = await sb.run_shell_background(
                "i=0; while :; do echo $((i+=1)) >> /var/tmp/count; sleep 0.05; done"
            )
            size = await wait_for_file(sb, "/var/tmp/count")
            return sb.id, shell.id, shell.pid, size

    async def after(sandbox_id: str, shell_id: str, pid: int, size: int) -> None:
        async with DSecClient() as client:
            sb = await client.get(sandbox_id)
            assert sb.state == "RUNNING"
            assert await sb.read_file("/var/tmp/kept") == "kept\n"
            await wait_for_file(sb, "/var/tmp/count", size)  # the command went on
            numbers = [int(n) for n in (await sb.read_file("/var/tmp/count")).split()]
            assert numbers == list(range(1, len(numbers) + 1))
            shell = await sb.shell(shell_id)
            assert shell.pid == pid
            await shell.kill()
            assert (await shell.wait(30)).signal == signal.SIGKILL
            assert (await sb.run_shell("echo works")).stdout == "works\n"
            await sb.stop()
            with pytest.raises(DSecError):
                await sb.run_shell("true")

    kept = asyncio.run(before())
    kill_and_start()
    asyncio.run(after(*kept))
    assert leaks() == ""


def test_kill_9_in_the_middle_of_creates() -> None:
    """What was being made is finished with, one way or the other; nothing stays behind."""

    async def create(backend: str, started: asyncio.Event) -> str | None:
        async with DSecClient() as client:
            started.set()
            try:
                return (await client.run_sandbox(args(backend))).id
            except DSecError:
                return None

    async def crash() -> None:
        began = [asyncio.Event() for _ in range(8)]
        work = [asyncio.create_task(create(BACKENDS[i % len(BACKENDS)], e)) for i, e in enumerate(began)]
        await asyncio.gather(*(e.wait() for e in began))
        await asyncio.wait(work, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.to_thread(kill_and_start)
        await asyncio.gather(*work)

    async def clean() -> None:
        async with DSecClient() as client:
            for sb in [s async for s in client.list()]:
                await sb.stop()
            assert [s async for s in client.list()] == []

    asyncio.run(crash())
    asyncio.run(clean())
    deadline = time.monotonic() + 30
    while (left := leaks()) and time.monotonic() < deadline:
        pass  # a stop that the crash cut short is finished in the background
    assert left == ""


def test_killed_machine_is_told() -> None:
    """In gVisor code inside may kill process 1; then the sandbox ends, and the end says whose doing it was."""

    async def main() -> None:
        async with DSecClient() as client:
            sb = await client.run_sandbox(args("gvisor"))
            with pytest.raises(DSecError):
                await sb.run_shell("kill -KILL 1; sleep 60", timeout=30, check=True)
            deadline = time.monotonic() + 20
            while (now := await client.get(sb.id)).end is None and time.monotonic() < deadline:
                pass
            assert now.end is not None
            assert (now.end.reason, now.end.domain) == ("exited", "user")

    asyncio.run(main())
    assert leaks() == ""


def test_polite_signals_do_not_end_the_machine(use: Callable[[Work], None]) -> None:
    async def work(client: DSecClient, sb: Sandbox) -> None:
        for name in ("TERM", "INT", "QUIT", "HUP"):
            await sb.run_shell(f"kill -{name} 1", check=True)
        assert (await sb.run_shell("echo here")).stdout == "here\n"

    use(work)
