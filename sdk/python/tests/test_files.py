from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path
from typing import Any

import pytest
from fake import Server

import opendsec
from opendsec import DSecClient, FileType, Sandbox
from opendsec._tar import Packer, unpack


def test_whole_files(server: Server, use: Any) -> None:
    async def work(client: DSecClient, sb: Sandbox) -> None:
        await sb.write_file("/tmp/deep/ä b?&.txt", "hellö\n", mode=0o750, user="nobody")
        assert server.sandboxes[sb.id].users[-1] == "nobody"
        assert await sb.read_file("/tmp/deep/ä b?&.txt") == "hellö\n"
        data = os.urandom(3 << 20)
        await sb.write_file("/tmp/x.bin", data)
        assert await sb.read_bytes("/tmp/x.bin") == data
        await sb.write_file("/tmp/empty", b"")
        assert await sb.read_bytes("/tmp/empty") == b""
        info = await sb.stat("/tmp/deep/ä b?&.txt")
        assert (info.name, info.type, info.size, info.mode) == ("ä b?&.txt", FileType.FILE, 7, 0o750)
        assert info.modified.tzinfo is not None
        with pytest.raises(opendsec.NotFoundError, match="'/no' does not exist"):
            await sb.read_file("/no")
        with pytest.raises(opendsec.InvalidArgumentError, match="is a directory"):
            await sb.read_file("/tmp")
        with pytest.raises(opendsec.InvalidArgumentError, match="is a directory"):
            await sb.write_file("/tmp", "x")
        with pytest.raises(opendsec.InvalidArgumentError, match="read_bytes"):
            await sb.read_file("/tmp/x.bin")

    use(work)


def test_the_tree(server: Server, use: Any) -> None:
    async def work(client: DSecClient, sb: Sandbox) -> None:
        assert await sb.make_dir("/a/b")
        assert not await sb.make_dir("/a/b")
        await sb.write_file("/a/b/c", "1")
        os.symlink("b", server.sandboxes[sb.id].path("/a/link"))
        assert [(i.path, i.type) for i in await sb.list_dir("/a")] == [
            ("/a/b", "directory"),
            ("/a/link", "symlink"),
        ]
        assert [i.path for i in await sb.list_dir("/a", depth=2)][:2] == ["/a/b", "/a/b/c"]
        assert (await sb.stat("/a/link")).link_target == "/a/b"
        assert await sb.exists("/a/b/c")
        assert not await sb.exists("/a/b/d")
        assert (await sb.move("/a/b/c", "/n/c")).path == "/n/c"
        with pytest.raises(
            opendsec.InvalidArgumentError, match="directory with 2 entries; give recursive=True"
        ):
            await sb.remove("/a")
        await sb.remove("/a/link")
        assert await sb.exists("/a/b")
        await sb.remove("/a/b")
        await sb.remove("/a", recursive=True)
        with pytest.raises(opendsec.NotFoundError):
            await sb.remove("/a")
        with pytest.raises(opendsec.InvalidArgumentError, match="depth"):
            await sb.list_dir("/", depth=0)

    use(work)


def test_upload_and_download_a_file(use: Any, tmp_path: Path) -> None:
    async def work(client: DSecClient, sb: Sandbox) -> None:
        source = tmp_path / "big.bin"
        source.write_bytes(os.urandom(5 << 20) + b"end")
        source.chmod(0o640)
        told: list[tuple[int, int | None]] = []
        await sb.upload(source, "/in/", progress=lambda done, total: told.append((done, total)))
        assert told[-1] == (source.stat().st_size, source.stat().st_size)
        assert (await sb.stat("/in/big.bin")).mode == 0o640
        here = tmp_path / "here"
        here.mkdir()
        told.clear()
        with pytest.raises(ZeroDivisionError):
            await sb.download("/in/big.bin", here, progress=lambda done, total: 1 // 0)
        assert list(here.iterdir()) == []
        await sb.download("/in/big.bin", here, progress=lambda done, total: told.append((done, total)))
        assert (here / "big.bin").read_bytes() == source.read_bytes()
        assert told[-1] == (source.stat().st_size, source.stat().st_size)
        with pytest.raises(opendsec.NotFoundError):
            await sb.download("/in/none", here / "none")
        with pytest.raises(FileNotFoundError):
            await sb.upload(tmp_path / "none", "/x")
        assert [p.name for p in here.iterdir()] == ["big.bin"]

    use(work)


def test_a_broken_download_leaves_nothing(server: Server, use: Any, tmp_path: Path) -> None:
    async def work(client: DSecClient, sb: Sandbox) -> None:
        await sb.write_file("/x", os.urandom(4 << 20))
        here = tmp_path / "out"
        here.mkdir()
        server.break_after = 2 << 20
        with pytest.raises(opendsec.ConnectionError):
            await sb.download("/x", here / "x")
        assert list(here.iterdir()) == []

    use(work)


def test_upload_and_download_a_tree(use: Any, tmp_path: Path) -> None:
    async def work(client: DSecClient, sb: Sandbox) -> None:
        source = tmp_path / "tree"
        (source / "sub" / "deep").mkdir(parents=True)
        (source / "empty").mkdir()
        (source / "a.bin").write_bytes(os.urandom(2_000_001))
        (source / "sub" / ("n" * 200)).write_text("long name")
        (source / "sub" / "deep" / "ü").write_text("x")
        (source / "sub" / "run").write_text("#!/bin/sh\n")
        (source / "sub" / "run").chmod(0o755)
        os.link(source / "a.bin", source / "z.bin")
        os.symlink("../a.bin", source / "sub" / "link")
        told: list[tuple[int, int | None]] = []
        await sb.upload(source, "/up/tree", progress=lambda done, total: told.append((done, total)))
        assert told[-1][0] == told[-1][1] == sum(f.lstat().st_size for f in _files(source))
        await sb.download("/up/tree", tmp_path / "back")
        assert _picture(tmp_path / "back") == _picture(source)

    use(work)


def _files(root: Path) -> list[Path]:
    return [p for p in root.rglob("*") if p.is_file() and not p.is_symlink()]


def _picture(root: Path) -> dict[str, Any]:
    picture: dict[str, Any] = {}
    for path in sorted(root.rglob("*")):
        name = str(path.relative_to(root))
        if path.is_symlink():
            picture[name] = os.readlink(path)
        elif path.is_dir():
            picture[name] = oct(path.stat().st_mode)
        else:
            picture[name] = (path.read_bytes(), oct(path.stat().st_mode), int(path.stat().st_mtime))
    return picture


def _archive(*entries: tuple[tarfile.TarInfo, bytes]) -> bytes:
    whole = io.BytesIO()
    with tarfile.open(fileobj=whole, mode="w") as archive:
        for info, data in entries:
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return whole.getvalue()


def _entry(name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, link
    return info


def _unpack(root: Path, data: bytes) -> None:
    unpack(root, (data[at : at + 700] for at in range(0, len(data), 700)))


@pytest.mark.parametrize(
    "entries",
    [[_entry("../evil")], [_entry("a/../../evil")], [_entry("h", tarfile.LNKTYPE, "../secret")]],
)
def test_an_archive_never_leaves_its_directory(tmp_path: Path, entries: list[tarfile.TarInfo]) -> None:
    (tmp_path / "secret").write_text("s")
    with pytest.raises(ValueError, match="leads out of"):
        _unpack(tmp_path / "in", _archive(*((e, b"") for e in entries)))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in", "secret"]


def test_nothing_is_written_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    data = _archive((_entry("l", tarfile.SYMTYPE, "../out"), b""), (_entry("l/evil"), b"x"))
    with pytest.raises(ValueError, match="is a directory"):
        _unpack(tmp_path / "in", data)
    assert list((tmp_path / "out").iterdir()) == []


def test_an_existing_link_on_the_way_is_refused(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "in").mkdir()
    os.symlink("../out", tmp_path / "in" / "l")
    with pytest.raises(ValueError, match="is a symbolic link"):
        _unpack(tmp_path / "in", _archive((_entry("l/evil"), b"x")))
    assert list((tmp_path / "out").iterdir()) == []


def test_a_truncated_archive_is_an_error(tmp_path: Path) -> None:
    data = _archive((_entry("a"), b"x" * 5000))
    with pytest.raises(tarfile.ReadError):
        _unpack(tmp_path / "in", data[:3000])


def test_packed_trees_are_read_by_others(tmp_path: Path) -> None:
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / "f").write_bytes(b"x" * 1000)
    whole = b"".join(Packer(tmp_path / "t"))
    with tarfile.open(fileobj=io.BytesIO(whole)) as archive:
        assert archive.getnames() == ["f"]
    assert len(whole) % 512 == 0
