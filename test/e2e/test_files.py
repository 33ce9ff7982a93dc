from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import opendsec
import pytest
from opendsec import DSecClient, FileType, Sandbox

GIGABYTE = 1_000_000_000

# What may one process hold when it moves a gigabyte.
FLAT = 160 << 20


def test_files_and_the_tree(use: Any) -> None:
    async def work(client: DSecClient, sb: Sandbox) -> None:
        await sb.write_file("/tmp/deep/ä b?&.txt", "hellö\n", mode=0o750)
        assert await sb.read_file("/tmp/deep/ä b?&.txt") == "hellö\n"
        assert (await sb.run_shell("cat '/tmp/deep/ä b?&.txt'")).stdout == "hellö\n"
        info = await sb.stat("/tmp/deep/ä b?&.txt")
        assert (info.name, info.type, info.size, info.mode, info.owner) == (
            "ä b?&.txt", FileType.FILE, 7, 0o750, "root",
        )  # fmt: skip
        await sb.write_file("/tmp/mine", b"", user="nobody")
        assert (await sb.stat("/tmp/mine")).owner == "nobody"
        assert await sb.read_bytes("/tmp/mine") == b""
        await sb.run_shell("ln -s deep /tmp/link; mkdir -p /tmp/a/b; echo 1 > /tmp/a/b/c", check=True)
        assert (await sb.stat("/tmp/link")).type is FileType.SYMLINK
        assert [i.path for i in await sb.list_dir("/tmp/a", depth=2)] == ["/tmp/a/b", "/tmp/a/b/c"]
        assert not await sb.make_dir("/tmp/a")
        assert await sb.make_dir("/tmp/n/m")
        assert (await sb.move("/tmp/a/b/c", "/tmp/n/c")).path == "/tmp/n/c"
        with pytest.raises(opendsec.InvalidArgumentError, match="give recursive=True"):
            await sb.remove("/tmp/n")
        await sb.remove("/tmp/n", recursive=True)
        assert not await sb.exists("/tmp/n")
        await sb.remove("/tmp/link")
        assert await sb.exists("/tmp/deep")
        assert (await sb.read_file("/proc/sys/kernel/ostype")).strip() == "Linux"
        with pytest.raises(opendsec.NotFoundError, match="/no"):
            await sb.read_file("/no")
        with pytest.raises(opendsec.InvalidArgumentError, match="directory"):
            await sb.write_file("/tmp", "x")
        with pytest.raises(opendsec.NotFoundError):
            await sb.remove("/no")

    use(work)


def test_trees(use: Any, tmp_path: Path) -> None:
    async def work(client: DSecClient, sb: Sandbox) -> None:
        source = tmp_path / "tree"
        (source / "sub" / "deep").mkdir(parents=True)
        (source / "empty").mkdir()
        (source / "a.bin").write_bytes(os.urandom(20_000_001))
        (source / "sub" / ("n" * 200)).write_text("long name")
        (source / "sub" / "run").write_text("#!/bin/sh\necho ran\n")
        (source / "sub" / "run").chmod(0o755)
        os.link(source / "a.bin", source / "z.bin")
        os.symlink("../a.bin", source / "sub" / "link")
        await sb.upload(source, "/up/tree")
        assert (await sb.run_shell("/up/tree/sub/run; stat -c %h /up/tree/z.bin")).stdout == "ran\n2\n"
        await sb.download("/up/tree", tmp_path / "back")
        assert _diff(source, tmp_path / "back") == ""
        assert (tmp_path / "back" / "sub" / "run").stat().st_mode & 0o777 == 0o755

    use(work)


def _diff(a: Path, b: Path) -> str:
    found = subprocess.run(
        ["diff", "-r", "--no-dereference", a, b], check=False, capture_output=True, text=True
    )
    return found.stdout + found.stderr


PROGRAM = """
import asyncio, os, sys
from opendsec import DSecClient

async def main(sandbox, verb, local, path):
    async with DSecClient() as client:
        sb = await client.get(sandbox)
        if verb == "upload":
            await sb.upload(local, path)
        else:
            await sb.download(path, local)

asyncio.run(main(*sys.argv[1:]))
for line in open("/proc/self/status"):
    if line.startswith("VmHWM"):
        print(int(line.split()[1]) * 1024)
"""


def test_a_gigabyte_each_way_with_flat_memory(use: Any, tmp_path: Path) -> None:
    async def work(client: DSecClient, sb: Sandbox) -> None:
        source = tmp_path / "big"
        digest = hashlib.sha256()
        block = os.urandom(1_000_000)
        with open(source, "wb") as file:
            for i in range(GIGABYTE // len(block)):
                piece = i.to_bytes(8, "big") + block[8:]
                digest.update(piece)
                file.write(piece)
        up = _run(sb, "upload", source)
        r = await sb.run_shell("sha256sum < /big; stat -c %s /big", check=True)
        assert r.stdout.split() == [digest.hexdigest(), "-", str(GIGABYTE)]
        source.unlink()
        down = _run(sb, "download", source)
        back = hashlib.sha256()
        with open(source, "rb") as file:
            while piece := file.read(1 << 20):
                back.update(piece)
        source.unlink()
        assert back.hexdigest() == digest.hexdigest()
        assert max(up, down) < FLAT

    use(work)


def _run(sb: Sandbox, verb: str, local: Path) -> int:
    """Move a file in a process of its own and return the most memory that it had."""
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM, sb.id, verb, str(local), "/big"],
        check=True,
        capture_output=True,
        text=True,
    )
    return int(ran.stdout)
