"""Pause, resume, fork and snapshots, as the posts show them and as they are promised."""

from __future__ import annotations

import asyncio
import hashlib
import random
import time

import opendsec
import pytest
from conftest import BACKENDS, IMAGE
from opendsec import DSecClient, DSecRunArgs, Sandbox, SandboxState
from stateful import begin, ended, look, name, out, run, same_program, small, until

MEMORY = [b for b in BACKENDS if b != "container"]
"""Backends that keep memory in copies and snapshots."""

SERVER = (
    'nohup python3 -c "import http.server as h; '
    "h.HTTPServer(('127.0.0.1', 8000), h.SimpleHTTPRequestHandler).serve_forever()\" >/dev/null 2>&1 &"
)
CLIENT = "python3 -c \"import urllib.request as u; print(u.urlopen('http://127.0.0.1:8000/').status)\""


@pytest.mark.filterwarnings("ignore::opendsec.DSecWarning")
def test_steps_6_to_8() -> None:
    async def main() -> None:
        async with DSecClient() as client:
            sb = await client.run_sandbox(
                DSecRunArgs(
                    backend="gvisor",
                    image=IMAGE,
                    cpu_cores_limit=1,
                    memory_limit_mb=1024,
                    ttl_running_stop=600,
                )
            )
            await sb.write_file("/tmp/hello.py", "import platform\nprint('hello from', platform.node())\n")
            await sb.run_shell(SERVER)
            await sb.run_shell(f"until {CLIENT} 2>/dev/null; do sleep 0.05; done")
            assert (await sb.run_shell(CLIENT)).stdout == "200\n"
            await sb.pause()
            assert sb.state == "PAUSED"
            await sb.resume()
            assert (await sb.run_shell(CLIENT)).stdout == "200\n"

            forks = await sb.fork(count=3)
            assert len(forks) == 3
            for f in forks:
                r = await f.run_shell(f"{CLIENT}; head -1 /tmp/hello.py")
                assert r.stdout == "200\nimport platform\n"
            await forks[0].run_shell("echo only-in-fork-0 > /tmp/mark")
            r = await sb.run_shell("cat /tmp/mark")
            assert r.stderr == "cat: /tmp/mark: No such file or directory\n"

            image = name("walk")
            await sb.create_snapshot(image, memory=True)
            started = []
            for _ in range(3):
                started.append(
                    await client.run_sandbox(
                        DSecRunArgs(backend="gvisor", image=image, cpu_cores_limit=1, memory_limit_mb=1024)
                    )
                )
            for s in started:
                assert (await s.run_shell(CLIENT)).stdout == "200\n"
            for s in (sb, *forks, *started):
                await s.stop()
            await client.images.delete(image)

    asyncio.run(main())


def test_input_over_pauses(backend: str) -> None:
    """What a command is given arrives once, however often the sandbox is paused on its way."""

    async def work(client: DSecClient) -> None:
        async with await client.run_sandbox(small(backend)) as sb:
            data = random.randbytes(6 << 20)
            slow = "while head -c 262144 | sha256sum | grep -v e3b0c44298fc1c14; do sleep 0.05; done"
            blocks = [data[at : at + 262144] for at in range(0, len(data), 262144)]
            more = asyncio.Event()
            running = asyncio.ensure_future(sb.run_shell(slow, stdin=data, on_stdout=lambda _: more.set()))
            for _ in range(6):
                await more.wait()  # it is at one of the pieces
                more.clear()
                await sb.pause()
                await sb.resume()
            got = (await running).stdout.split()[::2]
            assert got == [hashlib.sha256(b).hexdigest() for b in blocks]

    run(work)


def test_pause_and_resume(backend: str) -> None:
    async def work(client: DSecClient) -> None:
        async with await client.run_sandbox(small(backend)) as sb:
            before = await begin(sb)
            for _ in range(2):
                await sb.pause()
                assert sb.state is SandboxState.PAUSED
            assert (await client.get(sb.id)).state is SandboxState.PAUSED
            with pytest.raises(opendsec.WrongStateError) as caught:
                await sb.run_shell("true")
            assert caught.value.state is SandboxState.PAUSED
            with pytest.raises(opendsec.WrongStateError):
                await sb.read_file("/etc/hostname")
            for _ in range(2):
                await sb.resume()
                assert sb.state is SandboxState.RUNNING
            await same_program(sb, before)
            await sb.pause()
            await sb.stop()
            assert sb.end is not None
            assert sb.end.reason == "stopped"
            for call in (sb.pause(), sb.resume()):
                with pytest.raises(opendsec.SandboxEndedError):
                    await call

    run(work)


def test_calls_side_by_side_converge(backend: str) -> None:
    async def work(client: DSecClient) -> None:
        async with await client.run_sandbox(small(backend)) as sb:
            before = await begin(sb)
            others = [await client.get(sb.id) for _ in range(8)]
            for _ in range(4):
                calls = [s.pause() if i % 2 else s.resume() for i, s in enumerate(others)]
                for r in await asyncio.gather(*calls, return_exceptions=True):
                    assert r is None or isinstance(r, opendsec.WrongStateError), repr(r)
                await asyncio.gather(*(s.pause() for s in others))
                assert (await client.get(sb.id)).state is SandboxState.PAUSED
                await asyncio.gather(*(s.resume() for s in others))
                assert (await client.get(sb.id)).state is SandboxState.RUNNING
            await same_program(sb, before)

    run(work)


def test_a_call_wakes_it(backend: str) -> None:
    async def work(client: DSecClient) -> None:
        async with await client.run_sandbox(small(backend, auto_resume=True)) as sb:
            before = await begin(sb)
            for call in (
                lambda: sb.run_shell("true", check=True),
                lambda: sb.read_file("/etc/hostname"),
                lambda: sb.write_file("/tmp/x", "x"),
                lambda: sb.list_dir("/tmp"),
            ):
                await sb.pause()
                assert (await client.get(sb.id)).state is SandboxState.PAUSED
                await call()
                assert (await client.get(sb.id)).state is SandboxState.RUNNING
            await sb.pause()
            await asyncio.gather(*(sb.run_shell("true", check=True) for _ in range(8)))
            await same_program(sb, before)

    run(work)


def test_idle_pauses_it(backend: str) -> None:
    async def work(client: DSecClient) -> None:
        wanted = small(backend, ttl_running_stop=2, on_idle="pause", auto_resume=True)
        async with await client.run_sandbox(wanted) as sb:
            # A command that runs is use, for as long as it runs.
            await sb.run_shell("sleep 4", check=True)
            assert (await client.get(sb.id)).state is SandboxState.RUNNING
            shell = await sb.run_shell_background("sleep 1000")

            async def paused() -> bool:
                return (await client.get(sb.id)).state is SandboxState.PAUSED

            await shell.kill()
            for _ in range(2):  # the policy outlives a pause
                await until("it is paused", paused)
                assert await out(sb, "echo here") == "here"
            await sb.set_ttl(ttl_running_stop=None)
            await sb.refresh()
            assert sb.state is SandboxState.RUNNING
            await asyncio.sleep(4)
            assert not await paused()

    run(work)


def test_paused_time_does_not_count(backend: str) -> None:
    async def work(client: DSecClient) -> None:
        made = time.monotonic()
        wanted = DSecRunArgs(IMAGE, backend=backend, memory_limit_mb=192, ttl_lifetime=8)
        async with await client.run_sandbox(wanted) as sb:
            await sb.pause()
            await asyncio.sleep(9)
            assert (await client.get(sb.id)).state is SandboxState.PAUSED
            await sb.resume()
            assert await out(sb, "echo here") == "here"
            assert time.monotonic() - made > 9

            async def over() -> bool:
                end = (await client.get(sb.id)).end
                return end is not None and end.reason == "lifetime"

            await until("its lifetime ends it", over)

    run(work)


def test_what_a_backend_cannot_do_is_refused(backend: str) -> None:
    async def work(client: DSecClient) -> None:
        async with await client.run_sandbox(small(backend)) as sb:
            if backend == "container":
                for call in (sb.fork(count=2), sb.create_snapshot(name("no"))):
                    with pytest.raises(opendsec.UnsupportedError) as caught:
                        await call
                    assert "gvisor" in caught.value.backends
                    assert "container" not in caught.value.backends
                    assert "\n" not in caught.value.message
            for count in (0, 101, -1):
                with pytest.raises(opendsec.InvalidArgumentError) as wrong:
                    await sb.fork(count=count, memory=False)
                assert wrong.value.field == "count"
            for bad in ("", "walk", "root/demo/UPPER:1", "root/demo/a b:1"):
                with pytest.raises(opendsec.InvalidArgumentError):
                    await sb.pack_diff(bad)
            with pytest.raises((opendsec.PermissionDeniedError, opendsec.NotFoundError)):
                await sb.pack_diff("root/walk:1")
            assert await out(sb, "echo here") == "here"

    run(work)


async def _change(sb: Sandbox) -> None:
    """Changes files in every way there is."""
    await out(
        sb,
        "mkdir -p /opt/app/deep && echo made > /opt/app/deep/file && chmod 750 /opt/app/deep && "
        "ln -s deep/file /opt/app/link && ln /opt/app/deep/file /opt/app/hard && "
        "rm -r /usr/share/zoneinfo && echo changed >> /etc/os-release && chown nobody /opt/app/hard && "
        "mv /etc/issue /etc/issue.moved && head -c 3000000 /dev/zero | tr '\\0' x > /opt/app/big",
    )


LOOK_AT_FILES = (
    "cd /opt/app && stat -c '%n %a %U' deep && stat -c '%n %a %U %h %s' deep/file big && readlink link && cat link && "
    "tail -1 /etc/os-release && ls -d /usr/share/zoneinfo /etc/issue /etc/issue.moved 2>&1; sha256sum big"
)


def test_files_only(backend: str) -> None:
    """fork(memory=False), create_snapshot(memory=False) and pack_diff carry files, and no process."""

    async def work(client: DSecClient) -> None:
        async with await client.run_sandbox(small(backend)) as sb:
            await begin(sb)
            await _change(sb)
            want = await out(sb, LOOK_AT_FILES)
            assert "No such file" in want
            assert want.count("nobody") == 1  # a hard link: both names are one file
            (copy,) = await sb.fork(memory=False)
            images = [name("files"), name("diff")]
            made = [await sb.create_snapshot(images[0], memory=False), await sb.pack_diff(images[1])]
            assert [i.kind for i in made] == ["files", "files"]
            started = [await client.run_sandbox(small(b, image=image)) for b in BACKENDS for image in images]
            async with ended(copy, *started):
                for other in (copy, *started):
                    assert await out(other, LOOK_AT_FILES) == want, other
                    assert await out(other, "hostname") == other.id
                    assert await out(other, "pgrep -f '[w]orker.py'; true") == ""
                await out(copy, "echo mine > /opt/app/deep/file")
                assert await out(sb, LOOK_AT_FILES) == want
                listed = {i.name: i for i in await client.images.list()}
                for image in images:
                    assert listed[image].kind == "files"
                    assert listed[image].size > 0
                    await client.images.delete(image)

    run(work)


SET_ATTRIBUTES = (
    "import os; [os.setxattr(p, 'user.a', b'v') for p in ('/usr', '/etc/passwd', '/usr/bin/env')];"
    "open('/etc/marked', 'w').write('m'); os.setxattr('/etc/marked', 'user.a', b'v')"
)


def test_extended_attributes(backend: str) -> None:
    """An image with extended attributes starts on every backend; a container shows them."""

    async def work(client: DSecClient) -> None:
        async with await client.run_sandbox(small(backend)) as sb:
            await out(sb, f'python3 -c "{SET_ATTRIBUTES}"')
            image = name("attributes")
            await sb.pack_diff(image)
        started = {b: await client.run_sandbox(small(b, image=image)) for b in BACKENDS}
        async with ended(*started.values()):
            for b, other in started.items():
                assert (
                    await out(other, "cat /etc/marked; head -1 /etc/passwd; /usr/bin/env true")
                    == "mroot:x:0:0:root:/root:/bin/bash"
                )
                if b == "container":
                    assert (
                        await out(other, "python3 -c \"import os; print(os.getxattr('/usr', 'user.a'))\"")
                        == "b'v'"
                    )
        await client.images.delete(image)

    run(work)


@pytest.mark.parametrize("memory_backend", MEMORY)
def test_a_snapshot_with_memory(memory_backend: str) -> None:
    async def work(client: DSecClient) -> None:
        sb = await client.run_sandbox(small(memory_backend))
        before = await begin(sb)
        image = name("warm")
        made = await sb.create_snapshot(image)
        assert (made.name, made.kind) == (image, "memory")
        assert made.size > 1 << 20
        assert made.snapshot is not None
        await same_program(sb, before)  # the source went on
        await sb.stop()  # it stands by itself

        a, b = [await client.run_sandbox(small(memory_backend, image=image)) for _ in range(2)]
        async with ended(a, b):
            for s in (a, b):
                await same_program(s, before)
                assert await out(s, "hostname") == s.id
            with pytest.raises(opendsec.InvalidArgumentError) as wrong:
                await client.run_sandbox(small(memory_backend, image=image, memory_limit_mb=320))
            assert wrong.value.field == "memory_limit_mb"
            if "container" in BACKENDS:
                with pytest.raises(opendsec.DSecError) as other:
                    await client.run_sandbox(small("container", image=image))
                assert memory_backend in other.value.message

            # Deleted while it is used, it is gone for new ones and stays for those.
            await client.images.delete(image)
            with pytest.raises(opendsec.NotFoundError):
                await client.images.get(image)
            with pytest.raises(opendsec.NotFoundError):
                await client.run_sandbox(small(memory_backend, image=image))
            await same_program(a, before)
            await a.pause()
            await a.resume()
            await same_program(a, before)
            (c,) = await a.fork()
            async with ended(c):
                await same_program(c, before)

    run(work)


@pytest.mark.parametrize("memory_backend", MEMORY)
def test_chains(memory_backend: str) -> None:
    """Copies of copies, snapshots of what a snapshot began, a copy of a paused one."""

    async def work(client: DSecClient) -> None:
        sb = await client.run_sandbox(small(memory_backend))
        before = await begin(sb)
        made = [sb]
        images: list[str] = []
        for generation in range(3):
            (child,) = await made[-1].fork()
            made.append(child)
            await child.write_file(f"/var/tmp/gen{generation}", child.id)
            await same_program(child, before)
        await made[-1].pause()
        (child,) = await made[-1].fork()
        made.append(child)
        assert await out(child, "cat /var/tmp/gen0 /var/tmp/gen1 /var/tmp/gen2 | grep -o sb- | wc -l") == "3"
        for _ in range(2):
            images.append(name("chain"))
            await made[-1].create_snapshot(images[-1])
            made.append(await client.run_sandbox(small(memory_backend, image=images[-1])))
            await same_program(made[-1], before)
        await look(sb)
        await asyncio.gather(*(s.stop() for s in made))
        for image in images:
            await client.images.delete(image)

    run(work)
