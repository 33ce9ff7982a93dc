from __future__ import annotations

import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from fake import PROJECT, TOKEN, Server

import opendsec
from opendsec.sync import DSecClient, DSecRunArgs, SandboxEndedError, SandboxState

ARGS = DSecRunArgs(image="root/py:latest", backend="gvisor")
TOOL = Path(__file__).parent.parent / "tools" / "generate_sync.py"


def test_it_is_fresh() -> None:
    assert subprocess.run([sys.executable, TOOL, "--check"], check=False).returncode == 0


def test_names_are_the_same() -> None:
    import opendsec.sync

    assert opendsec.sync.__all__ == opendsec.__all__
    assert all(hasattr(opendsec.sync, name) for name in opendsec.__all__)


def test_a_whole_life(server: Server, tmp_path: Path) -> None:
    with DSecClient(server.addr, TOKEN, PROJECT, server.ca) as client, client.run_sandbox(ARGS) as sb:
        pieces: list[str] = []
        r = sb.run_shell("seq 20000; exit 3", on_stdout=pieces.append)
        assert "".join(pieces) == r.stdout == "".join(f"{i}\n" for i in range(1, 20001))
        assert r.exit_code == 3
        assert sb.run_shell("echo a; sleep 60", timeout=0.3).timed_out
        data = os.urandom(3 << 20)
        assert sb.run_shell_bytes("cat", stdin=data).stdout == data
        server.break_after = 3000
        assert sb.run_shell("seq 20000").stdout == r.stdout
        shell = sb.run_shell_background("read x; echo $x")
        shell.write("hello\n")
        assert [c.text for c in sb.shell(shell.id).output()] == ["hello\n"]
        assert shell.wait(5).exit_code == 0
        sb.write_file("/a/b", data)
        assert sb.read_bytes("/a/b") == data
        sb.download("/a", tmp_path / "a")
        sb.upload(tmp_path / "a", "/c")
        assert sb.read_bytes("/c/b") == data
        assert [s.id for s in client.list()] == [sb.id]
        assert client.images.list()[0].name == "root/py:latest"
        with pytest.raises(opendsec.ShellError):
            sb.run_shell("false", check=True)
    assert sb.state is SandboxState.STOPPED
    with DSecClient(server.addr, TOKEN, PROJECT, server.ca) as client, pytest.raises(SandboxEndedError):
        client.get(sb.id).run_shell("true")


def test_one_client_for_many_threads(server: Server) -> None:
    with DSecClient(server.addr, TOKEN, PROJECT, server.ca) as client, client.run_sandbox(ARGS) as sb:
        with ThreadPoolExecutor(16) as pool:
            results = list(pool.map(lambda i: sb.run_shell(f"echo {i}").stdout, range(64)))
        assert results == [f"{i}\n" for i in range(64)]


def test_a_callback_that_raises_kills_the_command(server: Server) -> None:
    with DSecClient(server.addr, TOKEN, PROJECT, server.ca) as client, client.run_sandbox(ARGS) as sb:

        def fail(text: str) -> None:
            raise ValueError(text)

        with pytest.raises(ValueError, match="x"):
            sb.run_shell("echo x; sleep 60", on_stdout=fail)
        ended = threading.Event()
        process = next(iter(server.sandboxes[sb.id].processes.values()))
        while process.end is None and not ended.wait(0.01):
            pass
        assert process.end is not None
        assert process.end.signal == 9
