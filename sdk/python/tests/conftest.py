from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
from fake import PROJECT, TOKEN, Server

from opendsec import DSecClient, DSecRunArgs, Sandbox

ARGS = DSecRunArgs(image="root/py:latest", backend="gvisor")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with Server(tmp_path) as running:
        yield running


@pytest.fixture
def use(server: Server) -> Callable[[Callable[[DSecClient, Sandbox], Awaitable[None]]], None]:
    """Runs a piece of a test with a client and a sandbox."""

    def run(work: Callable[[DSecClient, Sandbox], Awaitable[None]]) -> None:
        async def main() -> None:
            async with DSecClient(server.addr, TOKEN, PROJECT, server.ca) as client:
                await work(client, await client.run_sandbox(ARGS))

        asyncio.run(main())

    return run
