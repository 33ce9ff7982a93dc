from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time

import opendsec
import pytest
from conftest import IMAGE, admin_env, args
from opendsec import DSecClient, DSecRunArgs, SandboxState


def test_short_programs_end_well() -> None:
    program = f"""
import asyncio
from opendsec import DSecClient, DSecRunArgs

async def main():
    async with DSecClient() as client:
        async with await client.run_sandbox(DSecRunArgs({IMAGE!r}, backend="container")) as sb:
            await sb.run_shell("true")

asyncio.run(main())
"""
    for _ in range(25):
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")


def test_twenty_at_once(backend: str) -> None:
    async def main() -> None:
        async with DSecClient() as client:
            made = await client.run_sandboxes(
                args(backend, memory_limit_mb=128, cpu_cores_limit=0.5, labels={"task": "twenty"}), count=20
            )
            try:
                assert len({sb.id for sb in made}) == 20
                ran = await asyncio.gather(
                    *(sb.run_shell("hostname; python3 -c 'print(6*7)'") for sb in made)
                )
                assert [r.stdout for r in ran] == [f"{sb.id}\n42\n" for sb in made]
                listed = [sb.id async for sb in client.list(labels={"task": "twenty"})]
                assert sorted(listed) == sorted(sb.id for sb in made)
            finally:
                await asyncio.gather(*(sb.stop() for sb in made))
            assert [sb.id async for sb in client.list(labels={"task": "twenty"})] == []

    asyncio.run(main())


def test_twenty_calls_at_once(backend: str) -> None:
    async def main() -> None:
        async with DSecClient() as client:
            small = args(backend, memory_limit_mb=128, cpu_cores_limit=0.5)

            async def one(i: int) -> str:
                async with await client.run_sandbox(small) as sb:
                    return (await sb.run_shell(f"echo {i}")).stdout

            assert await asyncio.gather(*(one(i) for i in range(20))) == [f"{i}\n" for i in range(20)]

    asyncio.run(main())


def test_a_life(backend: str) -> None:
    async def main() -> None:
        async with DSecClient() as client:
            sb = await client.run_sandbox(
                args(backend, metadata={"m": "n"}), idempotency_key=f"k{time.time_ns()}-{backend}"
            )
            assert (sb.backend, sb.image, sb.state, sb.end) == (backend, IMAGE, SandboxState.RUNNING, None)
            assert sb.metadata == {"m": "n"}
            await sb.set_ttl(ttl_running_stop=300)
            await sb.refresh()
            m = await sb.metrics()
            assert m.memory_bytes > 0
            assert m.memory_limit_bytes == 512 << 20
            assert m.pids > 0
            await sb.stop()
            await sb.stop()
            assert sb.state is SandboxState.STOPPED
            assert sb.end is not None
            assert (sb.end.reason, sb.end.domain) == ("stopped", "user")
            for call in (sb.run_shell("true"), sb.read_file("/etc/passwd"), sb.exists("/etc"), sb.metrics()):
                with pytest.raises(opendsec.SandboxEndedError) as caught:
                    await call
                assert caught.value.end is not None
                assert caught.value.end.reason == "stopped"
            again = await client.get(sb.id)
            assert again.end == sb.end

    asyncio.run(main())


def test_one_key_one_sandbox(backend: str) -> None:
    async def main() -> None:
        async with DSecClient() as client:
            key = f"key-{backend}-{time.time_ns()}"
            made = await asyncio.gather(
                *(client.run_sandbox(args(backend), idempotency_key=key) for _ in range(5))
            )
            assert len({sb.id for sb in made}) == 1
            await made[0].stop()

    asyncio.run(main())


def test_idle_and_lifetime_end_it(backend: str) -> None:
    async def main() -> None:
        async with DSecClient() as client:
            idle = await client.run_sandbox(DSecRunArgs(IMAGE, backend=backend, ttl_running_stop=2))
            brief = await client.run_sandbox(DSecRunArgs(IMAGE, backend=backend, ttl_lifetime=4))
            for sb, reason in ((idle, "idle"), (brief, "lifetime")):
                until = time.monotonic() + 30
                while (now := await client.get(sb.id)).end is None and time.monotonic() < until:
                    await asyncio.sleep(0.2)
                assert now.end is not None
                assert (now.end.reason, now.end.domain) == (reason, "policy")
            with pytest.raises(opendsec.SandboxEndedError) as caught:
                await brief.run_shell("true")
            assert caught.value.end is not None
            assert caught.value.end.reason == "lifetime"

    asyncio.run(main())


def test_a_command_ends_with_its_sandbox(backend: str) -> None:
    async def main() -> None:
        async with DSecClient() as client:
            sb = await client.run_sandbox(args(backend))
            began = asyncio.Event()
            running = asyncio.ensure_future(
                sb.run_shell("echo x; sleep 300", on_stdout=lambda _: began.set())
            )
            await asyncio.wait_for(began.wait(), 10)
            await (await client.get(sb.id)).stop()
            with pytest.raises(opendsec.SandboxEndedError) as caught:
                await asyncio.wait_for(running, 30)
            assert caught.value.end is not None
            assert caught.value.end.reason == "stopped"

    asyncio.run(main())


@pytest.mark.parametrize(
    ("wanted", "kind", "field"),
    [(DSecRunArgs("root/nothing:1"), opendsec.NotFoundError, None),
     (DSecRunArgs(IMAGE, backend="nonsense"), opendsec.InvalidArgumentError, "backend"),
     (DSecRunArgs(IMAGE, cpu_cores_limit=10**6), opendsec.InvalidArgumentError, "cpu_cores_limit"),
     (DSecRunArgs(IMAGE, memory_limit_mb=2**40), opendsec.InvalidArgumentError, "memory_limit_mb"),
     (DSecRunArgs(IMAGE, disk_limit_mb=2**50), opendsec.InvalidArgumentError, "disk_limit_mb"),
     (DSecRunArgs(IMAGE, pids_limit=10**9), opendsec.InvalidArgumentError, "pids_limit"),
     (DSecRunArgs(IMAGE, user="nosuch"), opendsec.InvalidArgumentError, "user"),
     (DSecRunArgs(IMAGE, memory_limit_mb=10**8), opendsec.InvalidArgumentError, "memory_limit_mb"),
     (DSecRunArgs(IMAGE, network_rules={"not a rule!": True}), opendsec.InvalidArgumentError, "network_rules")],
)  # fmt: skip
def test_what_cannot_be_made_is_refused(
    wanted: DSecRunArgs, kind: type[opendsec.DSecError], field: str | None
) -> None:
    async def main() -> None:
        async with DSecClient() as client:
            with pytest.raises(kind) as caught:
                await client.run_sandbox(wanted)
            err = caught.value
            assert err.request_id
            assert err.domain is not None
            assert "\n" not in err.message
            if field is not None:
                assert isinstance(err, opendsec.InvalidArgumentError)
                assert err.field == field
            assert [sb async for sb in client.list(labels={"none": "x"})] == []

    asyncio.run(main())


def test_strangers_are_refused(backend: str) -> None:
    async def main() -> None:
        async with DSecClient(token="ods_wrong_token") as client:
            with pytest.raises(opendsec.UnauthenticatedError):
                await client.run_sandbox(args(backend))
        async with DSecClient(project="root") as client:
            with pytest.raises((opendsec.NotFoundError, opendsec.PermissionDeniedError)):
                await client.run_sandbox(args(backend))
        async with DSecClient() as client:
            for name in ("sb-000000000000", "nonsense"):
                with pytest.raises(opendsec.NotFoundError):
                    await client.get(name)

    asyncio.run(main())


def test_another_project_sees_nothing(backend: str) -> None:
    admin = admin_env()

    async def main() -> None:
        theirs = DSecClient(
            addr=admin["OPENDSEC_ADDR"],
            token=admin["OPENDSEC_TOKEN"],
            project="root",
            ca=os.environ["OPENDSEC_CA"],
        )
        async with theirs, DSecClient() as client, await theirs.run_sandbox(args(backend)) as sb:
            assert (await sb.run_shell("echo ok")).stdout == "ok\n"
            with pytest.raises(opendsec.NotFoundError):
                await client.get(sb.id)
            assert sb.id not in [s.id async for s in client.list(ended=True)]

    asyncio.run(main())


def test_images() -> None:
    async def main() -> None:
        async with DSecClient() as client:
            image = await client.images.get(IMAGE)
            assert image.digest.startswith("sha256:")
            assert image.size > 0
            assert IMAGE in [i.name for i in await client.images.list()]
            with pytest.raises(opendsec.NotFoundError):
                await client.images.get("root/nothing:1")

    asyncio.run(main())
