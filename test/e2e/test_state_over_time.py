"""Pauses again and again, many copies, and commands that run over a pause."""

from __future__ import annotations

import asyncio
import os
import time
import uuid

import pytest
from conftest import BACKENDS
from opendsec import DSecClient, Sandbox
from stateful import all_right, ask, begin, ended, name, out, run, same_program, small
from test_state import MEMORY

CYCLES = int(os.environ.get("OPENDSEC_TEST_CYCLES", "50"))
PAIRS = {"container": 200, "gvisor": int(os.environ.get("OPENDSEC_TEST_PAIRS", "60"))}


def test_every_byte_is_right_after_fifty_pauses(backend: str) -> None:
    async def work(client: DSecClient) -> None:
        async with await client.run_sandbox(small(backend)) as sb:
            now = await begin(sb)
            for i in range(CYCLES):
                await sb.pause()
                await sb.resume()
                now = await same_program(sb, now)
                if i % 10 == 9:
                    await all_right(sb)
            await all_right(sb)

    run(work)


def test_pause_and_resume_at_once(backend: str) -> None:
    async def work(client: DSecClient) -> None:
        async with await client.run_sandbox(small(backend)) as sb:
            before = await begin(sb)
            for _ in range(PAIRS.get(backend, 60)):
                await sb.pause()
                await sb.resume()
            await same_program(sb, before)
            await all_right(sb)

    run(work)


def test_a_command_runs_over_a_pause(backend: str) -> None:
    """Who waits for it gets every byte; so does who finds it later, from another process's view."""

    async def work(client: DSecClient) -> None:
        async with await client.run_sandbox(small(backend)) as sb:
            began = asyncio.Event()
            pieces: list[str] = []

            def told(text: str) -> None:
                pieces.append(text)
                began.set()

            slow = "for i in $(seq 200); do echo line $i; sleep 0.01; done; echo end >&2; exit 3"
            running = asyncio.ensure_future(sb.run_shell(slow, on_stdout=told))
            shell = await sb.run_shell_background(slow)
            await began.wait()
            for _ in range(3):
                await sb.pause()
                await sb.resume()
            r = await running
            assert r.stdout == "".join(f"line {i}\n" for i in range(1, 201))
            assert "".join(pieces) == r.stdout
            assert (r.stderr, r.exit_code, r.timed_out) == ("end\n", 3, False)
            again = await (await client.get(sb.id)).shell(shell.id)
            assert again.pid == shell.pid
            other = await again.wait(60)
            assert (other.stdout, other.stderr, other.exit_code) == (r.stdout, "end\n", 3)

    run(work)


def test_a_command_with_much_to_say_loses_nothing(backend: str) -> None:
    async def work(client: DSecClient) -> None:
        async with await client.run_sandbox(small(backend)) as sb:
            size = 400_000_000
            began = asyncio.Event()
            got = 0
            wrong: list[int] = []

            def told(text: str) -> None:
                nonlocal got
                at = got % 8
                first = (got - at) // 8 + 1
                count = (at + len(text) + 7) // 8
                want = "".join(f"{i:07d}\n" for i in range(first, first + count))[at : at + len(text)]
                if want != text:
                    wrong.append(got)
                got += len(text)
                began.set()

            cmd = f"seq -f %07.0f 9999999 | head -c {size // 8 // 8 * 8}"
            running = asyncio.ensure_future(sb.run_shell(cmd, on_stdout=told))
            await began.wait()
            pauses = 0
            while not running.done() and pauses < 5:
                await sb.pause()
                await sb.resume()
                pauses += 1
            r = await running
            assert r.exit_code == 0
            assert wrong == []
            assert got == len(r.stdout) == size // 8 // 8 * 8
            assert pauses > 0

    run(work)


def test_paused_time_is_not_a_commands(backend: str) -> None:
    async def work(client: DSecClient) -> None:
        async with await client.run_sandbox(small(backend)) as sb:
            began = asyncio.Event()
            # It counts what it runs by itself, in turns of the loop.
            cmd = "echo x; i=0; while [ $i -lt 30 ]; do sleep 0.1; i=$((i+1)); done; echo done"
            running = asyncio.ensure_future(sb.run_shell(cmd, timeout=8, on_stdout=lambda _: began.set()))
            await began.wait()
            await sb.pause()
            await asyncio.sleep(10)
            await sb.resume()
            r = await running
            assert (r.stdout, r.exit_code, r.timed_out) == ("x\ndone\n", 0, False)

            began.clear()
            at = time.monotonic()
            running = asyncio.ensure_future(
                sb.run_shell("echo y; exec sleep 600", timeout=4, on_stdout=lambda _: began.set())
            )
            await began.wait()
            await sb.pause()
            await asyncio.sleep(5)
            await sb.resume()
            r = await running
            assert (r.stdout, r.timed_out) == ("y\n", True)
            assert 8 < time.monotonic() - at < 16

    run(work)


@pytest.mark.parametrize("on", MEMORY)
def test_sixteen_forks_share_no_chance(on: str) -> None:
    async def work(client: DSecClient) -> None:
        async with await client.run_sandbox(small(on, cpu_cores_limit=0.5)) as sb:
            before = await begin(sb)
            forks = await sb.fork(count=16)
            everyone = [sb, *forks]
            async with ended(*forks):
                looks = (
                    "cat /proc/sys/kernel/random/uuid",
                    "head -c 1024 /dev/urandom | sha256sum",
                    "hostname",
                    "cat /etc/hostname",
                    "cat /etc/machine-id",
                    "cat /run/opendsec/generation",
                    "getent hosts $(hostname); grep 127.0.1.1 /etc/hosts",
                )
                for line in looks:
                    said = await asyncio.gather(*(out(s, line) for s in everyone))
                    assert len(set(said)) == 17, (line, said)
                    assert all(said)
                assert await out(forks[3], "cat /etc/hosts") == (await out(sb, "cat /etc/hosts")).replace(
                    sb.id, forks[3].id
                )
                drawn = [await ask(s, "chance") for s in everyone]
                assert len({uuid.UUID(d["uuid4"]) for d in drawn}) == 17
                assert len({d["hooked"] for d in drawn}) == 17
                for f in forks:
                    await same_program(f, before)
                    assert (f.image, f.backend, f.labels) == (sb.image, sb.backend, sb.labels)

    run(work)


@pytest.mark.parametrize("on", MEMORY)
def test_a_command_runs_in_every_copy(on: str) -> None:
    """Who waits for it in the source notices nothing; in a copy it is found by its id, with all it said before."""

    async def work(client: DSecClient) -> None:
        async with await client.run_sandbox(small(on, cpu_cores_limit=0.5)) as sb:
            cmd = "for i in $(seq 100); do echo line $i; sleep 0.02; done; hostname"
            began = asyncio.Event()
            running = asyncio.ensure_future(sb.run_shell(cmd, on_stdout=lambda _: began.set()))
            shell = await sb.run_shell_background(cmd)
            await began.wait()
            forks = await sb.fork(count=3)
            async with ended(*forks):
                lines = "".join(f"line {i}\n" for i in range(1, 101))
                found = [await (await f.shell(shell.id)).wait(60) for f in forks]
                assert [(r.stdout, r.exit_code) for r in found] == [(f"{lines}{f.id}\n", 0) for f in forks]
                assert (await running).stdout == f"{lines}{sb.id}\n"

    run(work)


WATCHER = """
import ctypes, os
libc = ctypes.CDLL(None)
watch = libc.inotify_init()
assert libc.inotify_add_watch(watch, b"/run/opendsec", 0x80) > 0  # IN_MOVED_TO
print(open("/run/opendsec/generation").read(), end="", flush=True)
while os.read(watch, 4096):
    print(open("/run/opendsec/generation").read(), end="", flush=True)
"""


@pytest.mark.parametrize("on", MEMORY)
def test_a_program_can_wait_for_a_new_life(on: str) -> None:
    async def work(client: DSecClient) -> None:
        async with await client.run_sandbox(small(on)) as sb:
            await sb.write_file("/srv/watcher.py", WATCHER)
            await out(sb, "nohup python3 /srv/watcher.py > /tmp/lives 2>&1 &")
            await out(sb, "until [ -s /tmp/lives ]; do sleep 0.05; done")
            for n in (2, 3):
                await sb.pause()
                await sb.resume()
                await out(sb, f"until [ $(wc -l < /tmp/lives) = {n} ]; do sleep 0.05; done")
            (fork,) = await sb.fork()
            async with ended(fork):
                await out(fork, "until [ $(wc -l < /tmp/lives) = 4 ]; do sleep 0.05; done")
                lives = (await out(fork, "cat /tmp/lives")).split()
                assert len(set(lives)) == 4
                assert lives[-1] == await out(fork, "cat /run/opendsec/generation")
                assert (await out(sb, "cat /tmp/lives")).split() == lives[:3]

    run(work)


@pytest.mark.parametrize("on", BACKENDS)
def test_eight_forks_at_once(on: str) -> None:
    async def work(client: DSecClient) -> None:
        async with await client.run_sandbox(
            small(on, memory_limit_mb=96, cpu_cores_limit=0.5, labels={"a": "b"})
        ) as sb:
            await sb.write_file("/var/tmp/mark", "mark\n")
            for _ in range(int(os.environ.get("OPENDSEC_TEST_FORKS", "3"))):
                lists = await asyncio.gather(*(sb.fork(memory=on in MEMORY) for _ in range(8)))
                forks = [f for made in lists for f in made]
                async with ended(*forks):
                    assert len({f.id for f in forks}) == 8
                    said = await asyncio.gather(*(out(f, "cat /var/tmp/mark; hostname") for f in forks))
                    assert said == [f"mark\n{f.id}" for f in forks]
                    assert all(f.labels == {"a": "b"} for f in forks)

    run(work)


@pytest.mark.parametrize("on", MEMORY)
def test_the_twentieth_snapshot_is_as_fast_as_the_first(on: str) -> None:
    async def work(client: DSecClient) -> None:
        async with await client.run_sandbox(small(on)) as sb:
            await begin(sb)
            took: list[float] = []
            images: list[str] = []
            for _ in range(20):
                images.append(name("again"))
                at = time.monotonic()
                await sb.create_snapshot(images[-1])
                took.append(time.monotonic() - at)
            await _one_starts(client, sb, images[0], images[-1])
            for image in images:
                await client.images.delete(image)
            first, last = sorted(took[:5])[2], sorted(took[-5:])[2]
            assert last < 1.5 * first + 0.05, took

    run(work)


async def _one_starts(client: DSecClient, sb: Sandbox, *images: str) -> None:
    for image in images:
        async with await client.run_sandbox(small(sb.backend, image=image)) as started:
            await all_right(started)
