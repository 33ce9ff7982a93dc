"""A command that somebody waits for goes on through a restart of the servers, and its output has no gap."""

from __future__ import annotations

import asyncio

from conftest import args
from opendsec import DSecClient
from test_restart import kill_and_start


def test_a_command_is_followed_through_a_restart(backend: str) -> None:
    async def main() -> None:
        async with DSecClient() as client, await client.run_sandbox(args(backend)) as sb:
            began = asyncio.Event()
            pieces: list[str] = []

            def told(text: str) -> None:
                pieces.append(text)
                began.set()

            cmd = "for i in $(seq 300); do echo line $i; sleep 0.02; done; echo end >&2; exit 3"
            running = asyncio.ensure_future(sb.run_shell(cmd, timeout=120, on_stdout=told))
            await began.wait()
            await asyncio.to_thread(kill_and_start)
            r = await running
            assert r.stdout == "".join(f"line {i}\n" for i in range(1, 301))
            assert "".join(pieces) == r.stdout
            assert (r.stderr, r.exit_code, r.timed_out) == ("end\n", 3, False)

            began.clear()
            running = asyncio.ensure_future(sb.run_shell("echo first; sleep 600", timeout=4, on_stdout=told))
            await began.wait()
            await asyncio.to_thread(kill_and_start)
            r = await running
            assert (r.stdout, r.exit_code, r.timed_out) == ("first\n", -1, True)

    asyncio.run(main())
