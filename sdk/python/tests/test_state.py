from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from fake import PROJECT, TOKEN, Server

import opendsec
import opendsec.sync
from opendsec import DSecClient, DSecRunArgs, Sandbox, SandboxState

ARGS = DSecRunArgs(image="root/py:latest", backend="gvisor")

# Writes much on both streams, six times, each time but the last until it may go on.
COUNT = (
    "for j in 1 2 3 4 5 6; do for i in $(seq 500); do echo $j$i; echo e$j$i >&2; done; "
    "while [ $j != 6 ] && [ ! -e go$j ]; do sleep 0.01; done; done; exit 3"
)
NUMBERS = [f"{j}{i}\n" for j in range(1, 7) for i in range(1, 501)]
COUNTED = "".join(NUMBERS), "".join(f"e{n}" for n in NUMBERS)


def test_pause_and_resume(server: Server, use: Any) -> None:
    async def work(client: DSecClient, sb: Sandbox) -> None:
        assert sb.paused_at is None
        await sb.pause()
        await sb.pause()
        assert sb.state is SandboxState.PAUSED
        assert sb.paused_at is not None
        assert sb.paused_at.tzinfo is not None
        assert (await client.get(sb.id)).paused_at == sb.paused_at
        await sb.resume()
        await sb.resume()
        assert (sb.state, sb.paused_at) == (SandboxState.RUNNING, None)
        assert (await sb.run_shell("echo on")).stdout == "on\n"
        await sb.stop()
        for call in (sb.pause, sb.resume, sb.fork):
            with pytest.raises(opendsec.SandboxEndedError):
                await call()

    use(work)


def test_calls_to_a_paused_sandbox_are_refused(server: Server, use: Any) -> None:
    async def work(client: DSecClient, sb: Sandbox) -> None:
        shell = await sb.run_shell_background("sleep 60")
        await sb.pause()
        calls = [sb.run_shell("true"), sb.run_shell_background("true"), sb.write_file("/a", "b"), sb.exists("/a"),
                 sb.read_file("/a"), shell.wait(1), shell.logs(), shell.kill(), shell.write("x"), sb.shell(shell.id)]  # fmt: skip
        for call in calls:
            with pytest.raises(opendsec.WrongStateError, match="PAUSED; resume it first") as caught:
                await call
            assert caught.value.state is SandboxState.PAUSED
        with pytest.raises(opendsec.WrongStateError, match="resume"):
            [c async for c in shell.output()]
        await sb.resume()
        assert await shell.kill()

    use(work)


def test_a_call_wakes_one_that_may_be_woken(server: Server) -> None:
    async def main() -> None:
        async with DSecClient(server.addr, TOKEN, PROJECT, server.ca) as client:
            sb = await client.run_sandbox(DSecRunArgs("root/py", auto_resume=True))
            await sb.pause()
            assert (await sb.run_shell("echo woken")).stdout == "woken\n"
            # Waiting for a command is not a call that wakes.
            running = asyncio.ensure_future(sb.run_shell("echo a; sleep 0.2; echo b"))
            await _sent(server, sb, 2)
            await sb.pause()
            await _looks(server, 3)
            assert not running.done()
            await sb.run_shell("true")
            assert (await running).stdout == "a\nb\n"

    asyncio.run(main())


def test_output_over_many_pauses_is_whole(server: Server, use: Any) -> None:
    async def work(client: DSecClient, sb: Sandbox) -> None:
        pieces: list[str] = []
        running = asyncio.ensure_future(sb.run_shell(COUNT, on_stdout=pieces.append))
        for j in range(1, 6):
            await _until(lambda j=j: sum(map(len, pieces)) > (j - 0.5) * len(COUNTED[0]) / 6)
            await sb.pause()
            await _looks(server, 1)
            assert not running.done()
            await sb.resume()
            (server.root / sb.id / f"go{j}").touch()
        r = await running
        assert (r.stdout, r.stderr, r.exit_code) == (*COUNTED, 3)
        assert "".join(pieces) == r.stdout

    use(work)


def test_background_over_a_pause(server: Server, use: Any) -> None:
    async def work(client: DSecClient, sb: Sandbox) -> None:
        shell = await sb.run_shell_background("echo one; read x; echo $x; exit 2")
        chunks: list[str] = []

        async def read() -> None:
            async for chunk in shell.output():
                chunks.append(chunk.text)

        waiting, reading = asyncio.ensure_future(shell.wait()), asyncio.ensure_future(read())
        await _until(lambda: bool(chunks))
        await sb.pause()
        await _looks(server, 2)
        await sb.resume()
        await shell.write("two\n")
        r = await waiting
        await reading
        assert (r.stdout, r.exit_code) == ("one\ntwo\n", 2)
        assert "".join(chunks) == r.stdout

    use(work)


def test_the_end_of_a_paused_sandbox_is_told(server: Server, use: Any) -> None:
    async def work(client: DSecClient, sb: Sandbox) -> None:
        shell = await sb.run_shell_background("echo a; sleep 60")
        waiting = [
            asyncio.ensure_future(sb.run_shell("echo b; sleep 60")),
            asyncio.ensure_future(shell.wait()),
        ]
        await _followed(server, sb, shell)
        await _sent(server, sb, 2)
        await sb.pause()
        await _looks(server, 2)
        server.end(sb.id, "lost")
        for task in waiting:
            with pytest.raises(opendsec.SandboxEndedError, match="the node is gone") as caught:
                await task
            assert caught.value.end is not None
            assert (caught.value.end.reason, caught.value.domain) == ("lost", opendsec.Domain.INFRA)

    use(work)


def test_a_timeout_counts_no_pause(server: Server, use: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("opendsec._async.shells._GRACE", 0.2)

    async def work(client: DSecClient, sb: Sandbox) -> None:
        done = asyncio.ensure_future(sb.run_shell("echo a; sleep 0.3; echo b", timeout=0.8))
        late = asyncio.ensure_future(sb.run_shell("echo a; sleep 60", timeout=0.8))
        await _sent(server, sb, 2)
        await sb.pause()
        began = time.monotonic()
        await _until(lambda: time.monotonic() - began > 1.2)
        assert not done.done()
        assert not late.done()
        await sb.resume()
        r = await done
        assert (r.stdout, r.timed_out) == ("a\nb\n", False)
        r = await late
        assert (r.stdout, r.exit_code, r.signal, r.timed_out) == ("a\n", -1, None, True)

    use(work)


def test_waiting_with_a_timeout_counts_all(server: Server, use: Any) -> None:
    async def work(client: DSecClient, sb: Sandbox) -> None:
        shell = await sb.run_shell_background("while [ ! -e go ]; do sleep 0.01; done; echo a; sleep 60")
        waiting = asyncio.ensure_future(shell.wait(timeout=1.5))
        reading = asyncio.ensure_future(anext(shell.output()))
        (server.root / sb.id / "go").touch()
        assert (await reading).text == "a\n"
        await _followed(server, sb, shell, 4)
        await sb.pause()
        with pytest.raises(opendsec.TimeoutError, match="still runs after 1.5 s") as caught:
            await waiting
        assert caught.value.result is not None
        assert caught.value.result.stdout == "a\n"

    use(work)


def test_input_that_a_pause_cut_arrives_once(server: Server, use: Any) -> None:
    async def work(client: DSecClient, sb: Sandbox) -> None:
        running = asyncio.ensure_future(sb.run_shell("echo go; sleep 0.5; wc -c", stdin=b"x" * (8 << 20)))
        await _sent(server, sb)
        await _until(lambda: any("SendInput" in r for r in server.requests))
        await sb.pause()
        await _looks(server, 1)
        await sb.resume()
        assert (await running).stdout == f"go\n{8 << 20}\n"

    use(work)


def test_a_download_that_a_pause_cut_says_so(server: Server, use: Any, tmp_path: Path) -> None:
    async def work(client: DSecClient, sb: Sandbox) -> None:
        await sb.write_file("/x", b"x" * (16 << 20))

        async def cut(done: int, total: int | None) -> None:
            if sb.state is SandboxState.RUNNING:
                await sb.pause()
                server.break_after = 0

        with pytest.raises(opendsec.ConnectionError, match="was paused meanwhile; resume it"):
            await sb.download("/x", tmp_path / "x", progress=cut)
        assert list(tmp_path.glob("*x*")) == []

    use(work)


def test_a_start_that_a_pause_cut(server: Server, use: Any) -> None:
    async def work(client: DSecClient, sb: Sandbox) -> None:
        inside = server.sandboxes[sb.id]
        for holds in ("late", "lost"):
            inside.holds = holds
            starts = len(inside.users)
            running = asyncio.ensure_future(sb.run_shell("echo a; sleep 0.2; echo b"))
            await _until(lambda starts=starts: len(inside.users) > starts)
            await sb.pause()
            await _looks(server, 1)
            await sb.resume()
            if holds == "late":
                assert (await running).stdout == "a\nb\n"
            else:
                with pytest.raises(opendsec.ConnectionError, match="paused before the call was answered"):
                    await running

    use(work)


def test_input_waits_for_the_end_of_a_pause(server: Server, use: Any) -> None:
    async def work(client: DSecClient, sb: Sandbox) -> None:
        data = b"x" * (1 << 20)
        command = "echo go; while [ ! -e go ]; do sleep 0.01; done; head -c 1000000 | wc -c; wc -c"
        shell = await sb.run_shell_background(command)
        waiting = asyncio.ensure_future(shell.wait())
        await _followed(server, sb, shell)
        await sb.pause()
        with pytest.raises(opendsec.WrongStateError):
            await shell.write(data)
        await sb.resume()
        (server.root / sb.id / "go").touch()
        await shell.write(data)
        await shell.close_stdin()
        assert (await waiting).stdout.split() == ["go", "1000000", "48576"]

    use(work)


def test_a_broken_connection_around_a_pause(server: Server, use: Any) -> None:
    async def work(client: DSecClient, sb: Sandbox) -> None:
        running = asyncio.ensure_future(sb.run_shell("echo a; sleep 0.2; echo b"))
        await _sent(server, sb)
        server.break_after = 0
        await sb.pause()  # over the line that this breaks, and again over a new one
        await _looks(server, 2)
        await sb.resume()
        assert (await running).stdout == "a\nb\n"

    use(work)


def test_fork(server: Server, use: Any) -> None:
    async def work(client: DSecClient, sb: Sandbox) -> None:
        await sb.write_file("/a", "b")
        (child,) = await sb.fork()
        assert (child.parent, child.image, child.state) == (sb.id, sb.image, SandboxState.RUNNING)
        assert sb.parent is None
        assert await child.read_file("/a") == "b"
        children = await sb.fork(count=3, idempotency_key="k")
        assert [c.id for c in children] == [c.id for c in await sb.fork(3, idempotency_key="k")]
        assert children.errors == []
        some = await sb.fork(count=3, all_or_none=False)
        assert len(some) == 2
        assert [type(e) for e in some.errors] == [opendsec.CapacityError]
        with pytest.raises(opendsec.CapacityError):
            await sb.fork(all_or_none=False)
        await child.stop()
        assert child.state is SandboxState.STOPPED
        arguments: list[tuple[str, Any]] = [("count", 0), ("count", 101), ("count", True), ("memory", 1),
                                            ("all_or_none", None), ("idempotency_key", "")]  # fmt: skip
        for field, value in arguments:
            with pytest.raises(opendsec.InvalidArgumentError) as caught:
                await sb.fork(**{field: value})
            assert caught.value.field == field
        plain = await client.run_sandbox(DSecRunArgs("root/py", backend="container"))
        with pytest.raises(opendsec.UnsupportedError) as refused:
            await plain.fork()
        assert refused.value.backends == ("gvisor",)
        assert len(await plain.fork(2, memory=False)) == 2

    use(work)


def test_snapshots(use: Any) -> None:
    async def work(client: DSecClient, sb: Sandbox) -> None:
        image = await sb.create_snapshot("root/demo/walk:1")
        assert (image.name, image.digest, image.kind, image.size) == (
            "root/demo/walk:1",
            "sha256:5",
            "memory",
            7,
        )
        assert image.snapshot is not None
        assert (image.snapshot.backend, image.snapshot.cpu_cores_limit, image.snapshot.nodes) == (
            "gvisor",
            2,
            ("n1",),
        )
        files = await sb.create_snapshot("root/demo/walk:2", memory=False)
        assert (files.kind, files.snapshot) == ("files", None)
        packed = await sb.pack_diff("root/demo/walk:3")
        assert (packed.name, packed.kind, packed.size) == ("root/demo/walk:3", "files", 8)
        for call in (sb.create_snapshot, sb.pack_diff):
            with pytest.raises(opendsec.InvalidArgumentError, match="name: '' is not an image name"):
                await call("")

    use(work)


def test_limits_that_are_left_out_are_the_servers(server: Server, use: Any) -> None:
    async def work(client: DSecClient, _: Sandbox) -> None:
        args = DSecRunArgs("root/demo/walk:1")
        assert (args.cpu_cores_limit, args.memory_limit_mb) == (None, None)
        assert repr(args) == "DSecRunArgs(image='root/demo/walk:1')"
        spec = server.sandboxes[(await client.run_sandbox(args)).id].record.spec
        assert spec is not None
        assert (spec.cpu_cores_limit, spec.memory_limit_mb, spec.disk_limit_mb, spec.pids_limit) == (
            0,
            0,
            0,
            0,
        )

    use(work)


def test_the_sync_side(server: Server, tmp_path: Path) -> None:
    with (
        opendsec.sync.DSecClient(server.addr, TOKEN, PROJECT, server.ca) as client,
        client.run_sandbox(ARGS) as sb,
    ):
        out = threading.Event()
        results: list[opendsec.ShellResult] = []
        thread = threading.Thread(
            target=lambda: results.append(sb.run_shell(COUNT, on_stdout=lambda _: out.set()))
        )
        thread.start()
        assert out.wait(10)
        for j in range(1, 6):
            (server.root / sb.id / f"go{j}").touch()
        sb.pause()
        with pytest.raises(opendsec.WrongStateError, match="resume"):
            sb.run_shell("true")
        sb.resume()
        thread.join(20)
        assert (results[0].stdout, results[0].stderr, results[0].exit_code) == (*COUNTED, 3)
        children = sb.fork(count=2)
        assert [c.parent for c in children] == [sb.id, sb.id]
        assert sb.create_snapshot("root/demo/x:1").kind == "memory"
        assert sb.pack_diff("root/demo/x:2").kind == "files"


async def _sent(server: Server, sb: Sandbox, count: int = 1) -> None:
    """Wait until that many commands were started and each has sent something."""
    found = server.sandboxes[sb.id].processes
    await _until(lambda: len(found) == count and all(p.sent or p.followed for p in found.values()))


async def _followed(server: Server, sb: Sandbox, shell: opendsec.BackgroundShell, size: int = 1) -> None:
    """Wait until so many bytes of a background command went to those who follow it."""
    process = server.sandboxes[sb.id].processes[shell.id]
    await _until(lambda: process.followed >= size)


async def _until(condition: Any) -> None:
    async def wait() -> None:
        while not condition():
            await asyncio.sleep(0.005)

    await asyncio.wait_for(wait(), 20)


async def _looks(server: Server, count: int) -> None:
    """Wait until that many looks at a sandbox have been had."""
    before = sum(r.endswith("GetSandbox") for r in server.requests)
    await _until(lambda: sum(r.endswith("GetSandbox") for r in server.requests) >= before + count)
