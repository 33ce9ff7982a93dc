"""Measures OpenDsec against runsc and runc, side by side in one run.

Starts, commands and files are measured here, what keeps and copies the state
of sandboxes in state.py, and forks of much memory in forks.py.

Each round takes one sample of each thing, so that a busy moment of the machine
hits all alike. Times are in milliseconds. A ratio is median over median.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

from forks import measure_forks
from network import measure_network
from opendsec import DSecRunArgs
from opendsec.sync import DSecClient, Sandbox
from rawtool import RawTool, call, find_tree
from series import Comparison, Series
from state import WORKLOAD, Case, answers, measure_state

GIB = 1 << 30


def measure_starts(client: DSecClient, tool: RawTool, backend: str, rounds: int) -> tuple[Series, Series]:
    """Create to first command answered, ours and the raw tool's."""
    ours = Series(f"{backend}: run_sandbox + run_shell('true')")
    raw = Series(f"{Path(tool.binary).name} run + exec true")
    args = DSecRunArgs(backend=backend, image="root/py:latest")

    def create() -> Sandbox:
        sandbox = client.run_sandbox(args)
        answers(sandbox)
        return sandbox

    for i in range(rounds + 2):
        name = f"bench-{backend}-{i}"
        ours.time(create).stop()
        raw.time(partial(tool.run_and_exec, name))
        tool.delete(name)
        if i == 1:  # the first two warm caches and pools
            ours.samples.clear()
            raw.samples.clear()
    return ours, raw


def measure_commands(client: DSecClient, tool: RawTool, backend: str, rounds: int) -> tuple[Series, Series]:
    """run_shell('true') in a running sandbox, and the raw tool's exec."""
    ours = Series(f"{backend}: run_shell('true')")
    raw = Series(f"{Path(tool.binary).name} exec true")
    name = f"bench-exec-{backend}"
    with client.run_sandbox(DSecRunArgs(backend=backend, image="root/py:latest")) as sandbox:
        tool.run_and_exec(name)
        for i in range(rounds * 3):
            ours.time(partial(answers, sandbox))
            raw.time(partial(tool.exec, name, "true"))
            if i == 1:
                ours.samples.clear()
                raw.samples.clear()
        tool.delete(name)
    return ours, raw


def measure_files(client: DSecClient, backend: str, work: Path) -> list[tuple[str, float]]:
    """Bytes per second of one file of 1 GiB each way."""
    source, back = work / "up.bin", work / "down.bin"
    block = os.urandom(1 << 20)
    with source.open("wb") as f:
        for _ in range(GIB // len(block)):
            f.write(block)
    results = []
    args = DSecRunArgs(backend=backend, image="root/py:latest", memory_limit_mb=2048, disk_limit_mb=4096)
    with client.run_sandbox(args) as sandbox:
        for way, move in (
            ("upload", lambda: sandbox.upload(source, "/var/tmp/file.bin")),
            ("download", lambda: sandbox.download("/var/tmp/file.bin", back)),
        ):
            start = time.perf_counter()
            move()
            results.append((f"{backend}: {way} of 1 GiB", GIB / (time.perf_counter() - start) / 1e6))
    call("cmp", str(source), str(back))
    source.unlink()
    back.unlink()
    return results


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runsc", required=True, help="stock runsc of the pinned module")
    parser.add_argument("--runc", default=shutil.which("runc"), help="runc")
    parser.add_argument("--state", type=Path, required=True, help="state directory of the installation")
    parser.add_argument("--rounds", type=int, default=20, help="samples of each thing")
    parser.add_argument(
        "--part", choices=("all", "jobs", "state", "forks", "network"), default="all", help="what to measure"
    )
    parser.add_argument("--out", type=Path, default=Path("bench.json"), help="file for the figures")
    return parser.parse_args()


def measure_jobs(
    client: DSecClient, opts: argparse.Namespace, tmp: Path, tree: Path
) -> tuple[list[Comparison], list[tuple[str, float]]]:
    """Starts, commands and files on both backends."""
    comparisons: list[Comparison] = []
    rates: list[tuple[str, float]] = []
    for backend, binary, target in (("gvisor", opts.runsc, 0.4), ("container", opts.runc, 1.1)):
        work = tmp / backend
        work.mkdir()
        tool = RawTool(binary, work, tree)
        try:
            comparisons.append(Comparison(*measure_starts(client, tool, backend, opts.rounds), target))
            comparisons.append(Comparison(*measure_commands(client, tool, backend, opts.rounds)))
        finally:
            tool.close()
        rates += measure_files(client, backend, work)
    return comparisons, rates


def show(
    series: list[Series],
    comparisons: list[Comparison],
    rates: list[tuple[str, float]],
) -> None:
    """Prints the tables."""
    print(f"{'':64} {'median':>9} {'min':>9} {'max':>9}  ms")
    for row in (s.row() for s in series):
        print(f"{row['name']:64} {row['median_ms']:9.1f} {row['min_ms']:9.1f} {row['max_ms']:9.1f}")
    print()
    for c in comparisons:
        bound = f"  (wanted: at most {c.target})" if c.target else ""
        print(f"{c.row()['what']:110} {c.ratio:6.2f}{bound}")
    print()
    for name, rate in rates:
        print(f"{name:64} {rate:9.0f}  MB/s")


def main() -> None:
    opts = parse()
    comparisons: list[Comparison] = []
    disk: list[Series] = []
    rates: list[tuple[str, float]] = []
    sizes: dict[str, int] = {}
    owned: dict[str, int] = {}
    with tempfile.TemporaryDirectory(prefix="bench", dir="/var/tmp") as tmp, DSecClient() as client:
        client.run_sandbox(DSecRunArgs(backend="container", image="root/py:latest")).stop()
        tree = find_tree(opts.state)

        def raw_runsc(case: Case) -> RawTool:
            work = Path(tempfile.mkdtemp(prefix="state-", dir=tmp))
            tool = RawTool(opts.runsc, work, tree, case.command)
            shutil.copy(WORKLOAD, tool.rootfs / WORKLOAD.name)
            return tool

        if opts.part in ("all", "jobs"):
            comparisons, rates = measure_jobs(client, opts, Path(tmp), tree)
        if opts.part in ("all", "state"):
            more, disk, sizes = measure_state(client, raw_runsc, opts.rounds)
            comparisons += more
        if opts.part in ("all", "network"):
            more, faster = measure_network(client, opts.rounds)
            comparisons += more
            rates += faster
        if opts.part in ("all", "forks"):
            more, owned = measure_forks(client, raw_runsc, max(3, opts.rounds // 4))
            comparisons += more
    # By name: a series that is held against two things is there once.
    series = list({s.name: s for c in comparisons for s in (c.ours, c.raw)}.values()) + disk
    show(series, comparisons, rates)
    for name, size in sizes.items():
        print(f"{name + ': size of its snapshot':64} {size / 1e6:9.1f}  MB")
    for name, size in owned.items():
        print(f"{name + ': memory of its own that a new copy has':64} {size / 1e6:9.1f}  MB")
    machine = {
        "processors": os.cpu_count(),
        "kernel": platform.release(),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    figures = {
        "machine": machine,
        "series": [s.row() for s in series],
        "ratios": [c.row() for c in comparisons],
        "rates_mb_per_s": {name: round(rate, 1) for name, rate in rates},
        "snapshot_bytes": sizes,
        "memory_of_a_new_copy_bytes": owned,
    }
    opts.out.write_text(json.dumps(figures, indent=2) + "\n")
    print(f"\nwritten to {opts.out}", file=sys.stderr)


if __name__ == "__main__":
    main()
