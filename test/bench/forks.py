"""Forks that share the memory of a source which changes all of it before each, against runsc.

The raw tool's fork is a checkpoint that leaves the source running and as many
restores at once. A sample is done when each copy has run a command.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from opendsec import DSecRunArgs
from opendsec.sync import DSecClient, Sandbox
from rawtool import Image, RawTool
from series import Comparison, Series
from state import READY, WORKLOAD, Case, answers


@dataclass(frozen=True)
class Forks:
    """A size of the workload, and how often it is copied at once, with the ratios that are wanted."""

    case: Case
    counts: dict[int, float | None]
    stopped: float | None = None  # ratio of the times in which the source stands still

    @property
    def args(self) -> DSecRunArgs:
        """As many cores for each as a node that gives out eight times its own has for all of them."""
        cores = os.cpu_count() or 1
        return replace(self.case.args, cpu_cores_limit=min(cores, cores * 8 / (1 + max(self.counts))))


FORKS = (
    Forks(Case("small", 0, 0, 1), {1: None}),
    Forks(Case("500 MB", 500, 0, 1), {1: None, 3: 0.15, 8: 0.12}),
    Forks(Case("1,000 MB", 1000, 0, 1), {1: None}),
    Forks(Case("20,000 files", 0, 20000, 1), {1: 0.3}, stopped=0.2),
)


class ForkBench:
    """One size on both sides."""

    def __init__(self, client: DSecClient, tool: RawTool, forks: Forks) -> None:
        self.client, self.tool, self.forks = client, tool, forks
        name, raw = forks.case.name, Path(tool.binary).name
        self.pool = ThreadPoolExecutor(max(forks.counts))
        self.ours = {
            n: Series(f"{name}, rewritten: fork x{n} + run_shell('true') in each") for n in forks.counts
        }
        self.raw = {
            n: Series(f"{name}, rewritten: {raw} checkpoint + {n} restores + exec true") for n in forks.counts
        }
        self.stopped = Series(f"{name}, rewritten: the source stands still for a fork")
        self.raw_stopped = Series(f"{name}, rewritten: the source stands still for {raw} checkpoint")
        self.owned = 0  # bytes of memory of a new copy's own, the most

    def comparisons(self) -> list[Comparison]:
        pairs = [Comparison(self.ours[n], self.raw[n], wanted) for n, wanted in self.forks.counts.items()]
        return [*pairs, Comparison(self.stopped, self.raw_stopped, self.forks.stopped)]

    def measure(self, rounds: int) -> None:
        """Takes so many samples of each thing, after one that does not count."""
        with self.client.run_sandbox(self.forks.args) as sandbox:
            sandbox.write_file("/workload.py", WORKLOAD.read_bytes())
            sandbox.run_shell_background(" ".join(self.forks.case.command), stdin=False)
            sandbox.run_shell(READY, timeout=300, check=True)
            self.tool.run("source")
            self.tool.exec("source", "sh", "-c", READY)
            try:
                for i in range(rounds + 1):
                    for n in self.forks.counts:
                        self._fork(sandbox, n)
                        self._raw_fork(n)
                    if i == 0:
                        self._forget()
            finally:
                self.tool.delete("source")
                self.pool.shutdown()

    def _forget(self) -> None:
        for series in (*self.ours.values(), *self.raw.values(), self.stopped, self.raw_stopped):
            series.samples.clear()

    def _fork(self, sandbox: Sandbox, count: int) -> None:
        def fork() -> list[Sandbox]:
            made = sandbox.fork(count=count)
            list(self.pool.map(answers, made))
            return made

        says = ask(sandbox, "rewrite")
        ask(sandbox, "stopped")
        copies = self.ours[count].time(fork)
        try:
            self.stopped.add(float(ask(sandbox, "stopped")))
            self.owned = max(self.owned, *(copy.metrics().memory_bytes for copy in copies))
            if any(ask(copy, "sample") != says for copy in copies):
                raise SystemExit(f"{self.forks.case.name}: a copy is not what its source is")
        finally:
            for copy in copies:
                copy.stop()

    def _raw_fork(self, count: int) -> None:
        copies = [f"copy-{i}" for i in range(count)]
        self._raw_ask("rewrite")
        self._raw_ask("stopped")
        with Image(self.tool.work / "image") as image:

            def fork() -> None:
                self.tool.checkpoint("source", image.path, leave_running=True)
                list(self.pool.map(partial(self.tool.restore_and_exec, image=image.path), copies))

            self.raw[count].time(fork)
            self.raw_stopped.add(float(self._raw_ask("stopped")))
        for copy in copies:
            self.tool.delete(copy)

    def _raw_ask(self, what: str) -> str:
        return self.tool.exec("source", "python3", "-c", question(what)).strip()


def question(what: str) -> str:
    """A program that asks the workload."""
    return (
        'import socket; s = socket.socket(socket.AF_UNIX); s.connect("/var/tmp/socket"); '
        f's.sendall(b"{what}\\n"); print(s.makefile().read())'
    )


def ask(sandbox: Sandbox, what: str) -> str:
    return sandbox.run_shell(f"python3 -c '{question(what)}'", timeout=60, check=True).stdout.strip()


def measure_forks(
    client: DSecClient, make_tool: Callable[[Case], RawTool], rounds: int
) -> tuple[list[Comparison], dict[str, int]]:
    """All sizes: their comparisons, and what memory a new copy has of its own, in bytes."""
    comparisons: list[Comparison] = []
    owned: dict[str, int] = {}
    once: dict[str, Series] = {}
    for forks in FORKS:
        tool = make_tool(forks.case)
        try:
            bench = ForkBench(client, tool, forks)
            bench.measure(rounds)
        finally:
            tool.close()
        comparisons += bench.comparisons()
        owned[forks.case.name] = bench.owned
        once[forks.case.name] = bench.ours[1]
    comparisons.append(Comparison(once["1,000 MB"], once["small"], 2))
    return comparisons, owned
