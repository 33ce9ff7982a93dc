"""End-to-end tests: the Python SDK against the installation that OPENDSEC_* name.

OPENDSEC_TEST_BACKENDS says which backends must work; all that are built without KVM unless given.
OPENDSEC_TEST_OPS is the directory with the admin's environment, for tests that need its rights.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import warnings
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from opendsec import DSecClient, DSecRunArgs, DSecWarning, Sandbox

IMAGE = os.environ.get("OPENDSEC_IMAGE", "root/py:latest")
BACKENDS = os.environ.get("OPENDSEC_TEST_BACKENDS", "gvisor container").split()

Work = Callable[[DSecClient, Sandbox], Awaitable[None]]


def pytest_configure(config: pytest.Config) -> None:
    missing = [n for n in ("ADDR", "TOKEN", "PROJECT", "CA") if not os.environ.get(f"OPENDSEC_{n}")]
    if missing:
        names = ", ".join(f"OPENDSEC_{n}" for n in missing)
        raise pytest.UsageError(f"{names} are not set; source demo.env of an installation first")


def args(backend: str, **more: object) -> DSecRunArgs:
    """A sandbox that ends by itself if a test does not end it."""
    return DSecRunArgs(IMAGE, backend=backend, ttl_lifetime=900, **more)  # type: ignore[arg-type]


def admin_env() -> dict[str, str]:
    """The admin's OPENDSEC_* variables."""
    ops = os.environ.get("OPENDSEC_TEST_OPS")
    if not ops:
        raise RuntimeError("OPENDSEC_TEST_OPS is not set; it must name the installation's ops directory")
    out: dict[str, str] = {}
    for line in (Path(ops) / "env").read_text().splitlines():
        if line.startswith("export "):
            name, _, value = line.removeprefix("export ").partition("=")
            out[name] = "".join(shlex.split(value))
    return out


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def use(backend: str) -> Callable[[Work], None]:
    """Runs a piece of a test with a client and a sandbox of the backend."""

    def run(work: Work) -> None:
        async def main() -> None:
            async with DSecClient() as client, await client.run_sandbox(args(backend)) as sb:
                await work(client, sb)

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DSecWarning)
            asyncio.run(main())

    return run
