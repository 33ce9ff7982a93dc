"""The network of sandboxes, with the package index of the machine that the tests run on."""

from __future__ import annotations

import asyncio

import pytest
from conftest import IMAGE
from opendsec import DSecClient, DSecRunArgs, InvalidArgumentError, SandboxState

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
