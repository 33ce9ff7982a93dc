"""Pause, resume, fork, snapshot and start from one, against runsc's checkpoint and restore.

Both sides run the same workload on the same image; see workload.py. The raw
tool has no limits, so ours gets all processors too.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from opendsec import DSecRunArgs, ShellResult
from opendsec.sync import DSecClient, Sandbox
from rawtool import Image, RawTool
from series import Comparison, Series

WORKLOAD = Path(__file__).with_name("workload.py")
IMAGE = "root/py:latest"
SNAPSHOT = "root/demo/bench:state"
READY = "until [ -e /var/tmp/ready ]; do sleep 0.05; done"
ASK = "python3 -c 'import urllib.request as u; print(u.urlopen(\"http://127.0.0.1:8000\").read().decode())'"
COPIES = 3
AHEAD = 1.0  # seconds, in which a copy of a snapshot in use is made ahead


@dataclass(frozen=True)
class Case:
    """A size of the workload."""

    name: str
    memory_mb: int
    files: int
    share: float  # of the rounds that it gets

    @property
    def args(self) -> DSecRunArgs:
        return DSecRunArgs(
            backend="gvisor",
            image=IMAGE,
            cpu_cores_limit=os.cpu_count() or 1,
            memory_limit_mb=512 + 2 * self.memory_mb,  # it is random numbers twice while it is made
        )

    @property
    def command(self) -> list[str]:
        return ["python3", "/workload.py", str(self.memory_mb), str(self.files)]


CASES = (
    Case("small", 0, 0, 1),
    Case("100 MB", 100, 0, 0.25),
    Case("500 MB", 500, 0, 0.25),
    Case("1,000 files", 0, 1000, 0.25),
    Case("20,000 files", 0, 20000, 0.25),
)


class StateBench:
    """One case on both sides."""

    def __init__(self, client: DSecClient, tool: RawTool, case: Case) -> None:
        self.client, self.tool, self.case = client, tool, case
        self.pool = ThreadPoolExecutor(COPIES)
        self.snapshot_bytes = 0
        self._count = 0
        name = Path(tool.binary).name
        self.pause = Series(f"{case.name}: pause")
        self.resume = Series(f"{case.name}: resume + run_shell('true')")
        self.fork = Series(f"{case.name}: fork x{COPIES} + run_shell('true') in each")
        self.snapshot = Series(f"{case.name}: create_snapshot")
        self.start = Series(f"{case.name}: first start from a snapshot + run_shell('true')")
        self.again = Series(f"{case.name}: start from a snapshot in use + run_shell('true')")
        self.raw_checkpoint = Series(f"{case.name}: {name} checkpoint")
        self.raw_restore = Series(f"{case.name}: {name} restore + exec true")
        self.raw_leave = Series(f"{case.name}: {name} checkpoint --leave-running")
        self.raw_fork = Series(f"{case.name}: the same + {COPIES} restores + exec true in each")
        self.write = Series(f"{case.name}: a file of a snapshot's size, written")
        self.sync = Series(f"{case.name}: the same file, written and synced")

    def comparisons(self) -> list[Comparison]:
        return [
            Comparison(self.pause, self.raw_checkpoint, 1.3),
            Comparison(self.resume, self.raw_restore, 0.8),
            Comparison(self.fork, self.raw_fork, 0.5),
            Comparison(self.start, self.raw_restore, 0.5),
            Comparison(self.again, self.raw_restore, 0.5),
            Comparison(self.snapshot, self.raw_leave, 1.3),
        ]

    def measure(self, rounds: int) -> None:
        """Takes so many samples of each thing, after one that does not count."""
        with self.client.run_sandbox(self.case.args) as sandbox:
            sandbox.write_file("/workload.py", WORKLOAD.read_bytes())
            sandbox.run_shell_background(" ".join(self.case.command), stdin=False)
            sandbox.run_shell(READY, timeout=300, check=True)
            says = self._ask(sandbox)
            raw = self._next("main")
            self.tool.run(raw)
            self.tool.exec(raw, "sh", "-c", READY)
            try:
                for i in range(rounds + 1):
                    self._pause_and_resume(sandbox)
                    raw = self._raw_pause_and_resume(raw)
                    self._fork(sandbox, says)
                    self._raw_fork(raw)
                    self._snapshot(sandbox, says)
                    self._write()
                    if i == 0:
                        self._forget()
                if self._ask(sandbox) != says:
                    raise SystemExit(f"{self.case.name}: the sandbox is not what it was")
            finally:
                self.tool.delete(raw)
                self.pool.shutdown()

    def _forget(self) -> None:
        for series in vars(self).values():
            if isinstance(series, Series):
                series.samples.clear()

    def _ask(self, sandbox: Sandbox) -> str:
        """What the workload's server says of its memory and files."""
        return sandbox.run_shell(ASK, timeout=60, check=True).stdout

    def _pause_and_resume(self, sandbox: Sandbox) -> None:
        self.pause.time(sandbox.pause)

        def resume() -> None:
            sandbox.resume()
            answers(sandbox)

        self.resume.time(resume)

    def _fork(self, sandbox: Sandbox, says: str) -> None:
        def fork() -> list[Sandbox]:
            made = sandbox.fork(count=COPIES)
            list(self.pool.map(answers, made))
            return made

        copies = self.fork.time(fork)
        try:
            if any(self._ask(copy) != says for copy in copies):
                raise SystemExit(f"{self.case.name}: a copy is not what its source is")
        finally:
            for copy in copies:
                copy.stop()

    def _snapshot(self, sandbox: Sandbox, says: str) -> None:
        image = self.snapshot.time(lambda: sandbox.create_snapshot(SNAPSHOT))
        self.snapshot_bytes = image.size

        def start() -> Sandbox:
            made = self.client.run_sandbox(DSecRunArgs(backend="gvisor", image=SNAPSHOT))
            answers(made)
            return made

        for series in (self.start, self.again):
            with series.time(start) as made:
                if self._ask(made) != says:
                    raise SystemExit(f"{self.case.name}: what starts from the snapshot is not what was")
            time.sleep(AHEAD)
        self.client.images.delete(SNAPSHOT)

    def _raw_pause_and_resume(self, name: str) -> str:
        """Returns the name of the container that goes on."""
        with self._image() as image:
            self.raw_checkpoint.time(lambda: self.tool.checkpoint(name, image.path, False))
            self.tool.delete(name)
            after = self._next("main")
            self.raw_restore.time(lambda: self.tool.restore_and_exec(after, image.path))
        return after

    def _raw_fork(self, name: str) -> None:
        copies = [self._next("copy") for _ in range(COPIES)]
        with self._image() as image:

            def fork() -> None:
                self.raw_leave.time(lambda: self.tool.checkpoint(name, image.path, True))
                list(self.pool.map(lambda copy: self.tool.restore_and_exec(copy, image.path), copies))

            self.raw_fork.time(fork)
        for copy in copies:
            self.tool.delete(copy)

    def _write(self) -> None:
        """What the disk alone takes; pauses and snapshots are synced, the raw tool's are not."""
        block = os.urandom(1 << 20)
        with self._image() as image:
            image.path.mkdir()

            def write() -> None:
                for _ in range(-(-self.snapshot_bytes // len(block))):
                    file.write(block)

            with (image.path / "file").open("wb", buffering=0) as file:

                def write_and_sync() -> None:
                    self.write.time(write)
                    os.fsync(file.fileno())

                self.sync.time(write_and_sync)

    def _next(self, what: str) -> str:
        self._count += 1
        return f"{what}-{self._count}"

    def _image(self) -> Image:
        return Image(self.tool.work / self._next("image"))


def answers(sandbox: Sandbox) -> ShellResult:
    """Runs a command in a sandbox."""
    return sandbox.run_shell("true", check=True)


def measure_state(
    client: DSecClient, make_tool: Callable[[Case], RawTool], rounds: int
) -> tuple[list[Comparison], list[Series], dict[str, int]]:
    """All cases: their comparisons, what the disk takes, and the sizes of their snapshots in bytes."""
    comparisons: list[Comparison] = []
    disk: list[Series] = []
    sizes: dict[str, int] = {}
    for case in CASES:
        tool = make_tool(case)
        try:
            bench = StateBench(client, tool, case)
            bench.measure(max(3, round(rounds * case.share)))
        finally:
            tool.close()
        comparisons += bench.comparisons()
        disk += [bench.write, bench.sync]
        sizes[case.name] = bench.snapshot_bytes
    return comparisons, disk, sizes
