from __future__ import annotations

import asyncio
import hashlib
import signal
import subprocess
import sys
import time
from typing import Any

import opendsec
import pytest
from opendsec import DSecClient, Sandbox
from opendsec.sync import DSecClient as SyncClient


def test_results(use: Any) -> None:
    async def work(client: DSecClient, sb: Sandbox) -> None:
        r = await sb.run_shell("echo out; echo err >&2; exit 3")
        assert (r.stdout, r.stderr, r.exit_code, r.signal) == ("out\n", "err\n", 3, None)
        r = await sb.run_shell("kill -SEGV $$")
        assert (r.exit_code, r.signal) == (-1, signal.SIGSEGV)
        r = await sb.run_shell("echo $A; pwd; cat; id -u", cwd="/usr", env={"A": "ä b"}, stdin="in\n")
        assert r.stdout == "ä b\n/usr\nin\n0\n"
        assert (await sb.run_shell("id -un", user="nobody")).stdout == "nobody\n"
        assert (await sb.run_shell("cat", timeout=20)).stdout == ""
        with pytest.raises(opendsec.InvalidArgumentError, match="/nowhere"):
            await sb.run_shell("true", cwd="/nowhere")
        with pytest.raises(opendsec.InvalidArgumentError, match="nosuchuser") as caught:
            await sb.run_shell("true", user="nosuchuser")
        assert caught.value.field == "user"
        with pytest.raises(opendsec.ShellError, match="exit code 7: no"):
            await sb.run_shell("echo no >&2; exit 7", check=True)

    use(work)


def test_ten_megabytes_of_bytes_are_exact(use: Any) -> None:
    async def work(client: DSecClient, sb: Sandbox) -> None:
        await sb.run_shell("head -c 10485760 /dev/urandom > /tmp/r", check=True)
        r = await sb.run_shell_bytes("cat /tmp/r; cat /tmp/r >&2")
        want = (await sb.run_shell("sha256sum < /tmp/r", check=True)).stdout.split()[0]
        assert len(r.stdout) == len(r.stderr) == 10 << 20
        assert hashlib.sha256(r.stdout).hexdigest() == hashlib.sha256(r.stderr).hexdigest() == want
        assert (await sb.run_shell_bytes("cat", stdin=r.stdout)).stdout == r.stdout

    use(work)


def test_multibyte_text_is_never_split(use: Any) -> None:
    async def work(client: DSecClient, sb: Sandbox) -> None:
        pieces: list[str] = []
        script = "import sys\nfor i in range(30000): sys.stdout.write('ä€𝄞' + str(i % 10)); sys.stdout.flush() if i % 7 == 0 else None"
        await sb.write_file("/tmp/s.py", script)
        r = await sb.run_shell("python3 /tmp/s.py", on_stdout=pieces.append)
        assert r.stdout == "".join("ä€𝄞" + str(i % 10) for i in range(30000))
        assert len(r.stdout.encode()) == 300_000
        assert "".join(pieces) == r.stdout
        assert len(pieces) > 1

    use(work)


def test_output_streams(use: Any) -> None:
    async def work(client: DSecClient, sb: Sandbox) -> None:
        at: list[float] = []
        await sb.run_shell("echo 1; sleep 0.5; echo 2", on_stdout=lambda _: at.append(time.monotonic()))
        assert at[1] - at[0] > 0.4

    use(work)


def test_a_timeout_kills_all_and_keeps_output(use: Any) -> None:
    async def work(client: DSecClient, sb: Sandbox) -> None:
        began = time.monotonic()
        r = await sb.run_shell("echo before; (sleep 321 & sleep 321)", timeout=1)
        assert (r.stdout, r.exit_code, r.timed_out) == ("before\n", -1, True)
        assert 0.9 < time.monotonic() - began < 5
        # Each process's command line; the shell that looks is not to find itself.
        left = await sb.run_shell(
            "cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' ' ' | grep -c '[s]leep 321'"
        )
        assert left.stdout == "0\n"
        with pytest.raises(opendsec.TimeoutError) as caught:
            await sb.run_shell("echo x; sleep 60", timeout=0.5, check=True)
        assert caught.value.result is not None
        assert caught.value.result.stdout == "x\n"

    use(work)


def test_a_cancelled_command_is_killed(use: Any) -> None:
    async def work(client: DSecClient, sb: Sandbox) -> None:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(sb.run_shell("echo $$ > /tmp/pid; exec sleep 60"), 1)
        pid = (await sb.read_file("/tmp/pid")).strip()
        assert (await sb.run_shell(f"kill -0 {pid}")).exit_code == 1

    use(work)


def test_background(use: Any) -> None:
    async def work(client: DSecClient, sb: Sandbox) -> None:
        shell = await sb.run_shell_background(
            "echo start; while read x; do echo got $x; done; echo end >&2; exit 2"
        )
        await shell.write("one\n")
        with pytest.raises(opendsec.TimeoutError):
            await shell.wait(timeout=1)
        program = f"""
from opendsec.sync import DSecClient
with DSecClient() as client:
    shell = client.get({sb.id!r}).shell({shell.id!r})
    assert shell.pid == {shell.pid}
    shell.write("two\\n")
    shell.close_stdin()
"""
        ran = await asyncio.to_thread(subprocess.run, [sys.executable, "-c", program], check=False)
        assert ran.returncode == 0
        r = await shell.wait(timeout=10)
        assert (r.stdout, r.stderr, r.exit_code) == ("start\ngot one\ngot two\n", "end\n", 2)
        assert (await shell.logs()).stderr == "end\n"
        assert "".join([c.text async for c in shell.output() if c.stream == "stdout"]) == r.stdout
        assert not await shell.kill()
        other = await sb.run_shell_background("sleep 60 & wait")
        assert await other.kill("TERM")
        r = await other.wait(10)
        assert (r.exit_code, r.signal) == (-1, signal.SIGTERM)
        with pytest.raises(opendsec.NotFoundError):
            await sb.shell("sh-nothing")

    use(work)


def test_background_output_that_is_no_longer_held_is_told(use: Any) -> None:
    async def work(client: DSecClient, sb: Sandbox) -> None:
        shell = await sb.run_shell_background("head -c 5000000 /dev/zero; echo; echo last", stdin=False)
        while (await shell.logs()).dropped == 0:
            await asyncio.sleep(0.05)
        r = await shell.wait(10)
        assert r.stdout.endswith("\nlast\n")
        assert len(r.stdout) + r.dropped == 5_000_006

    use(work)


def test_many_commands_at_once(use: Any) -> None:
    async def work(client: DSecClient, sb: Sandbox) -> None:
        results = await asyncio.gather(*(sb.run_shell(f"echo {i}; sleep 0.1") for i in range(60)))
        assert [r.stdout for r in results] == [f"{i}\n" for i in range(60)]

    use(work)


def test_the_sync_side(backend: str) -> None:
    from conftest import args

    with SyncClient() as client, client.run_sandbox(args(backend)) as sb:
        assert sb.run_shell("echo hi").stdout == "hi\n"
        assert sb.run_shell("echo a; sleep 60", timeout=0.5).timed_out
        shell = sb.run_shell_background("read x; echo $x")
        shell.write("hello\n")
        assert [c.text for c in shell.output()] == ["hello\n"]
        sb.write_file("/tmp/x", "y")
        assert sb.read_file("/tmp/x") == "y"
        assert sb.id in [s.id for s in client.list()]
