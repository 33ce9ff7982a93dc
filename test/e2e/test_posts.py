"""The walk through the posts, as printed, for the steps that exist."""

from __future__ import annotations

import asyncio
import os
import platform

import pytest
from conftest import IMAGE
from opendsec import DSecClient, DSecRunArgs


@pytest.mark.filterwarnings("ignore::opendsec.DSecWarning")
def test_steps_2_to_5_and_9(capsys: pytest.CaptureFixture[str]) -> None:
    async def main() -> None:
        async with DSecClient() as client:  # reads the OPENDSEC_* variables
            sb = await client.run_sandbox(
                DSecRunArgs(
                    backend="gvisor",
                    image=IMAGE,
                    cpu_cores_limit=1,
                    memory_limit_mb=1024,
                    ttl_running_stop=600,  # stop after 10 idle minutes
                    network_rules={"pypi": True},
                )
            )  # outbound traffic is denied unless a rule allows it
            r = await sb.run_shell("python3 -V; uname -r; nproc; free -m | head -2")
            print(r.stdout)
            python, kernel, cores, head, memory = r.stdout.splitlines()
            assert python.startswith("Python 3.")
            assert kernel != platform.release()
            assert cores == "1"
            assert head.split()[:3] == ["total", "used", "free"]
            assert 900 <= int(memory.split()[1]) <= 1024

            await sb.write_file("/tmp/hello.py", "import platform\nprint('hello from', platform.node())\n")
            print((await sb.run_shell("python3 /tmp/hello.py")).stdout)
            print(await sb.read_file("/tmp/hello.py"))
            assert (await sb.run_shell("hostname")).stdout == sb.id + "\n"
            assert [i.name for i in await sb.list_dir("/tmp") if i.name == "hello.py"] == ["hello.py"]

            # Step 5: the network is closed by default.
            r = await sb.run_shell(
                "pip install -q requests; python3 -c 'import requests; print(requests.__version__)'"
            )
            print(r.stdout, r.stderr)
            assert r.exit_code == 0
            assert r.stdout.startswith("2.")
            r = await sb.run_shell(
                """python3 -c "import requests; requests.get('https://example.com', timeout=5)\""""
            )
            assert r.exit_code == 1
            assert "requests.exceptions.ConnectionError" in r.stderr
            assert "Failed to resolve 'example.com' ([Errno -2] Name or service not known)" in r.stderr

            c = await client.run_sandbox(
                DSecRunArgs(backend="container", image=IMAGE, cpu_cores_limit=1, memory_limit_mb=512)
            )
            r = await c.run_shell("python3 -c 'print(6*7)'; uname -r")
            assert r.stdout == f"42\n{platform.release()}\n"
            await c.stop()
            await sb.stop()
            assert f"hello from {sb.id}\n" in capsys.readouterr().out

    asyncio.run(main())


def test_auto_takes_the_strongest() -> None:
    async def main() -> None:
        async with (
            DSecClient() as client,
            await client.run_sandbox(DSecRunArgs(image=os.environ["OPENDSEC_IMAGE"])) as sb,
        ):
            assert sb.backend in ("microvm", "gvisor")

    asyncio.run(main())
