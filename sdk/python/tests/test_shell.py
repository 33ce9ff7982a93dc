from __future__ import annotations

import asyncio
import signal
import time
from typing import Any

import pytest
from fake import PROJECT, TOKEN, Server

import opendsec
from opendsec import DSecClient, Sandbox


def test_result_keeps_streams_apart(use: Any) -> None:
    async def work(client: DSecClient, sb: Sandbox) -> None:
        r = await sb.run_shell("echo out; echo err >&2; exit 3")
        assert (r.stdout, r.stderr, r.exit_code, r.signal, r.timed_out) == ("out\n", "err\n", 3, None, False)
        assert not r.ok
        assert 0 < r.duration < 10
        assert repr(r).startswith("ShellResult(exit_code=3, stdout=4 characters")

    use(work)


def test_environment_directory_user_and_input(use: Any, server: Server) -> None:
    async def work(client: DSecClient, sb: Sandbox) -> None:
        r = await sb.run_shell("echo $A; pwd; cat", cwd="/usr", env={"A": "ä b"}, user="nobody", stdin="in\n")
        assert r.stdout == "ä b\n/usr\nin\n"
        assert server.sandboxes[sb.id].users == ["nobody"]
        assert (await sb.run_shell("cat")).stdout == ""
        with pytest.raises(opendsec.InvalidArgumentError, match="'/nowhere' does not exist"):
            await sb.run_shell("true", cwd="/nowhere")

    use(work)


def test_input_larger_than_any_pipe_while_output_flows(use: Any) -> None:
    async def work(client: DSecClient, sb: Sandbox) -> None:
        data = bytes(range(256)) * 12000  # 3 MB
        assert (await sb.run_shell_bytes("cat", stdin=data)).stdout == data
        assert (await sb.run_shell("head -c 3; exit 4", stdin=data)).exit_code == 4

    use(work)


def test_bytes_are_exact(use: Any) -> None:
    async def work(client: DSecClient, sb: Sandbox) -> None:
        cmd = "python3 -c 'import os; b=bytes(range(256))*4096*10; os.write(1,b[:1]); import sys; sys.stdout.buffer.write(b[1:])'"
        r = await sb.run_shell_bytes(cmd)
        assert r.stdout == bytes(range(256)) * 4096 * 10
        assert (await sb.run_shell("printf 'a\\377b'")).stdout == "a\ufffdb"

    use(work)


def test_callbacks_get_whole_characters_in_order(use: Any) -> None:
    async def work(client: DSecClient, sb: Sandbox) -> None:
        pieces: list[str] = []
        errors: list[str] = []

        async def on_stderr(text: str) -> None:
            await asyncio.sleep(0)
            errors.append(text)

        cmd = "printf '\\xe2\\x82'; sleep 0.1; printf '\\xac\\n'; echo bad >&2; for i in $(seq 3000); do printf 'ä€𝄞%d\\n' $i; done"
        r = await sb.run_shell(cmd, on_stdout=pieces.append, on_stderr=on_stderr)
        assert r.stdout == "€\n" + "".join(f"ä€𝄞{i}\n" for i in range(1, 3001))
        assert "".join(pieces) == r.stdout
        assert "\ufffd" not in r.stdout
        assert "".join(errors) == r.stderr == "bad\n"

    use(work)


def test_output_streams_while_the_command_runs(use: Any) -> None:
    async def work(client: DSecClient, sb: Sandbox) -> None:
        seen = asyncio.Event()
        running = asyncio.ensure_future(sb.run_shell("echo first; sleep 60", on_stdout=lambda _: seen.set()))
        await asyncio.wait_for(seen.wait(), 5)
        assert not running.done()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    use(work)


def test_timeout_is_a_result_with_what_came_before(use: Any) -> None:
    async def work(client: DSecClient, sb: Sandbox) -> None:
        began = time.monotonic()
        r = await sb.run_shell("echo before; sleep 60", timeout=0.4)
        assert (r.stdout, r.exit_code, r.timed_out) == ("before\n", -1, True)
        assert time.monotonic() - began < 5
        with pytest.raises(opendsec.TimeoutError, match="killed after its timeout of 0.2 s") as caught:
            await sb.run_shell("echo x; sleep 60", timeout=0.2, check=True)
        assert caught.value.result is not None
        assert caught.value.result.stdout == "x\n"
        assert isinstance(caught.value, TimeoutError)

    use(work)


def test_signal_is_told(use: Any) -> None:
    async def work(client: DSecClient, sb: Sandbox) -> None:
        r = await sb.run_shell("kill -SEGV $$")
        assert (r.exit_code, r.signal) == (-1, signal.SIGSEGV)

    use(work)


def test_check_raises_with_the_result(use: Any) -> None:
    async def work(client: DSecClient, sb: Sandbox) -> None:
        with pytest.raises(
            opendsec.ShellError, match="'echo no >&2; exit 7' ended with exit code 7: no"
        ) as caught:
            await sb.run_shell("echo no >&2; exit 7", check=True)
        assert caught.value.result.exit_code == 7
        assert (await sb.run_shell("true", check=True)).ok

    use(work)


def test_a_caller_that_goes_away_kills_the_command(use: Any, server: Server) -> None:
    async def work(client: DSecClient, sb: Sandbox) -> None:
        def fail(text: str) -> None:
            raise ValueError(text)

        with pytest.raises(ValueError, match="hello"):
            await sb.run_shell("echo hello; sleep 60", on_stdout=fail)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(sb.run_shell("sleep 60"), 0.5)
        for process in server.sandboxes[sb.id].processes.values():
            async with asyncio.timeout(5) if hasattr(asyncio, "timeout") else _nothing():
                while process.end is None:
                    await asyncio.sleep(0.01)
            assert process.end.signal == signal.SIGKILL

    use(work)


class _nothing:
    async def __aenter__(self) -> None: ...
    async def __aexit__(self, *exc: object) -> None: ...


@pytest.mark.parametrize("after", [0, 4, 5000, 700_000])
def test_a_broken_connection_leaves_no_gap(use: Any, server: Server, after: int) -> None:
    async def work(client: DSecClient, sb: Sandbox) -> None:
        server.break_after = after
        r = await sb.run_shell("seq 200000; echo done >&2; exit 5")
        assert server.break_after is None
        assert r.stdout == "".join(f"{i}\n" for i in range(1, 200001))
        assert (r.stderr, r.exit_code) == ("done\n", 5)

    use(work)


def test_a_sandbox_that_ends_is_told(use: Any, server: Server) -> None:
    async def work(client: DSecClient, sb: Sandbox) -> None:
        def lose(_: str) -> None:
            server.end(sb.id, "lost")
            server.break_after = 0

        with pytest.raises(opendsec.SandboxEndedError) as caught:
            await sb.run_shell("echo x; sleep 0.2; echo y", on_stdout=lose)
        end = caught.value.end
        assert end is not None
        assert (end.reason, end.domain) == ("lost", opendsec.Domain.INFRA)

    use(work)


def test_no_server_is_a_connection_error(server: Server) -> None:
    async def main() -> None:
        async with DSecClient(server.addr, TOKEN, PROJECT, server.ca) as client:
            server.refuse = 1000
            with pytest.raises(opendsec.ConnectionError):
                await client.get("sb-000000000000")

    asyncio.run(main())


def test_background(use: Any) -> None:
    async def work(client: DSecClient, sb: Sandbox) -> None:
        shell = await sb.run_shell_background(
            "echo start; while read x; do echo got $x; done; echo end >&2; exit 2"
        )
        assert shell.pid > 0
        with pytest.raises(opendsec.TimeoutError, match="still runs after 0.3 s") as caught:
            await shell.wait(timeout=0.3)
        assert caught.value.result is not None
        assert caught.value.result.stdout == "start\n"
        again = await sb.shell(shell.id)
        assert again.pid == shell.pid
        await again.write("one\n")
        await again.write(b"two\n")
        async for chunk in shell.output():
            if "two" in chunk.text:
                break
        assert (await shell.logs()).stdout == "start\ngot one\ngot two\n"
        await shell.close_stdin()
        r = await shell.wait(timeout=5)
        assert (r.stdout, r.stderr, r.exit_code) == ("start\ngot one\ngot two\n", "end\n", 2)
        assert [c.text async for c in again.output() if c.stream == "stderr"] == ["end\n"]
        assert await shell.kill() is False

    use(work)


def test_background_kill_by_name_and_number(use: Any) -> None:
    async def work(client: DSecClient, sb: Sandbox) -> None:
        for sent, number in (("TERM", 15), ("SIGKILL", 9), (9, 9)):
            shell = await sb.run_shell_background("sleep 60 & wait")
            assert await shell.kill(sent)
            r = await shell.wait(5)
            assert (r.exit_code, r.signal) == (-1, number)
        with pytest.raises(opendsec.InvalidArgumentError, match="'NOPE' is not the name of a signal"):
            await shell.kill("NOPE")
        with pytest.raises(opendsec.NotFoundError):
            await sb.shell("sh-unknown")

    use(work)


def test_many_at_once_on_one_connection(use: Any) -> None:
    async def work(client: DSecClient, sb: Sandbox) -> None:
        results = await asyncio.gather(*(sb.run_shell(f"echo {i}") for i in range(40)))
        assert [r.stdout for r in results] == [f"{i}\n" for i in range(40)]

    use(work)


@pytest.mark.parametrize(
    ("arguments", "field"),
    [({"timeout": 0}, "timeout"), ({"timeout": "1"}, "timeout"), ({"env": {"A=B": "x"}}, "env"),
     ({"env": {"A": 1}}, "env"), ({"stdin": 3}, "stdin")],
)  # fmt: skip
def test_wrong_arguments_are_named(use: Any, arguments: dict[str, Any], field: str) -> None:
    async def work(client: DSecClient, sb: Sandbox) -> None:
        with pytest.raises(opendsec.InvalidArgumentError) as caught:
            await sb.run_shell("true", **arguments)
        assert caught.value.field == field

    use(work)
