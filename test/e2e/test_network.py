"""The network of sandboxes, with the package index of the machine that the tests run on."""

from __future__ import annotations

import asyncio

import pytest
from conftest import IMAGE
from opendsec import DSecClient, DSecRunArgs, InvalidArgumentError, SandboxState
from stateful import ended, name

FETCH = "python3 -c \"import urllib.request as u; print(u.urlopen('https://pypi.org/simple/', timeout=20).status)\""


@pytest.mark.parametrize("backend", ["gvisor", "container"])
def test_rules_over_a_life(backend: str) -> None:
    async def main() -> None:
        async with DSecClient() as client:
            sb = await client.run_sandbox(DSecRunArgs(backend=backend, image=IMAGE, cpu_cores_limit=1))
            assert (await sb.run_shell(FETCH)).exit_code == 1
            denied = await sb.denied_egress()
            assert [(d.kind, d.name) for d in denied] == [("name", "pypi.org")]
            assert denied[0].count >= 1
            assert denied[0].rule is None
            assert not await sb.explain_network("pypi.org:443")

            await sb.update_network({"pypi": True})
            r = await sb.run_shell(FETCH)
            assert r.stdout == "200\n", r.stderr
            d = await sb.explain_network("pypi.org:443")
            assert d.allow
            assert d.rule == "pypi"
            assert not await sb.explain_network("example.com:443")
            assert not await sb.explain_network("pypi.org:22")
            m = await sb.metrics()
            assert m.network_received_bytes > 1000
            assert m.network_denied >= 1

            await sb.pause()
            await sb.refresh()
            assert sb.state == SandboxState.PAUSED
            assert await sb.explain_network("pypi.org:443")
            await sb.resume()
            assert (await sb.run_shell(FETCH)).stdout == "200\n"

            await sb.update_network({})
            assert (await sb.run_shell(FETCH)).exit_code == 1
            with pytest.raises(InvalidArgumentError, match="10.0.0.0/33") as wrong:
                await sb.update_network({"10.0.0.0/33": True})
            assert wrong.value.field == "network_rules"
            await sb.stop()

    asyncio.run(main())


def test_forks_keep_the_rules() -> None:
    async def main() -> None:
        async with (
            DSecClient() as client,
            await client.run_sandbox(
                DSecRunArgs(backend="gvisor", image=IMAGE, cpu_cores_limit=1, network_rules={"pypi": True})
            ) as sb,
        ):
            copies = await sb.fork(2)
            for copy in copies:
                assert (await copy.run_shell(FETCH)).stdout == "200\n"
            await copies[0].update_network({})
            assert (await copies[0].run_shell(FETCH)).exit_code == 1
            assert (await copies[1].run_shell(FETCH)).stdout == "200\n"
            for copy in copies:
                await copy.stop()

    asyncio.run(main())


@pytest.mark.parametrize(("backend", "memory"), [("gvisor", True), ("gvisor", False), ("container", False)])
def test_starts_have_the_rules_of_their_source(backend: str, memory: bool) -> None:
    """What was made of a sandbox reaches what that could then, nothing else, and nothing when that is said."""
    files = FETCH.replace("pypi.org/simple", "files.pythonhosted.org")
    other = FETCH.replace("pypi.org/simple", "example.com")

    async def main() -> None:
        async with DSecClient() as client:
            rules = {"pypi.org:443": True}
            source = DSecRunArgs(backend=backend, image=IMAGE, cpu_cores_limit=1, network_rules=rules)
            image = name("rules")
            async with await client.run_sandbox(source) as sb:
                made = await sb.create_snapshot(image, memory=memory)
                assert made.network_rules == rules
                await sb.update_network({})
            args = {"backend": backend, "image": image, "cpu_cores_limit": 1}
            started, closed, own = [
                await client.run_sandbox(DSecRunArgs(**args, **given))  # type: ignore[arg-type]
                for given in ({}, {"network_rules": {}}, {"network_rules": {"example.org": True}})
            ]
            async with ended(started, closed, own):
                assert (await client.get(started.id)).network_rules == rules
                r = await started.run_shell(FETCH)
                assert r.stdout == "200\n", r.stderr
                for command in (files, other):
                    assert (await started.run_shell(command)).exit_code == 1
                assert {d.name for d in await started.denied_egress()} == {
                    "files.pythonhosted.org",
                    "example.com",
                }
                assert closed.network_rules == {}
                assert own.network_rules == {"example.org": True}
                for sb in (closed, own):
                    assert (await sb.run_shell(FETCH)).exit_code == 1
                    assert not await sb.explain_network("pypi.org:443")
                await client.images.delete(image)

    asyncio.run(main())
