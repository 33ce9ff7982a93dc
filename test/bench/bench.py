"""Measures OpenDsec against runsc and runc, side by side in one run.

Each round takes one sample of each thing, so that a busy moment of the machine
hits all alike. Times are in milliseconds. A ratio is median over median.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from opendsec import DSecRunArgs
from opendsec.sync import DSecClient

GIB = 1 << 30


@dataclass
class Series:
    """Samples of one thing."""

    name: str
    samples: list[float] = field(default_factory=list)

    def time(self, work: Callable[[], object]) -> None:
        """Adds how long the work takes."""
        start = time.perf_counter()
        work()
        self.samples.append((time.perf_counter() - start) * 1000)

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    def row(self) -> dict[str, object]:
        return {
            "name": self.name,
            "n": len(self.samples),
            "median_ms": round(self.median, 2),
            "min_ms": round(min(self.samples), 2),
            "max_ms": round(max(self.samples), 2),
        }


def call(*args: str) -> None:
    """Runs a tool; its failure ends the benchmark with the tool's own words."""
    done = subprocess.run(args, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(args)}: exit {done.returncode}: {done.stderr.decode()[-2000:]}")


class RawTool:
    """runsc or runc as a person would call it, on the same image."""

    def __init__(self, binary: str, work: Path, tree: Path) -> None:
        self.binary, self.work = binary, work
        self.bundle, self.root = work / "bundle", work / "root"
        self.rootfs = self.bundle / "rootfs"
        self.rootfs.mkdir(parents=True)
        (work / "upper").mkdir()
        (work / "work").mkdir()
        call(
            "mount", "-t", "overlay", "overlay", "-o",
            f"lowerdir={tree},upperdir={work}/upper,workdir={work}/work", str(self.rootfs),
        )  # fmt: skip
        call("runc", "spec", "--bundle", str(self.bundle))
        spec = json.loads((self.bundle / "config.json").read_text())
        spec["process"]["terminal"] = False
        spec["process"]["args"] = ["sleep", "100000"]
        spec["root"] = {"path": "rootfs", "readonly": False}
        (self.bundle / "config.json").write_text(json.dumps(spec))

    def base(self) -> list[str]:
        return [self.binary, "--root", str(self.root)]

    def run_and_exec(self, name: str) -> None:
        # The output of a detached container must not be our pipe: it stays open.
        with open(os.devnull, "r+b") as null:
            args = [*self.base(), "run", "--detach", "--bundle", str(self.bundle), name]
            if subprocess.run(args, stdin=null, stdout=null, stderr=null, check=False).returncode:
                raise SystemExit(f"{' '.join(args)} failed")
        self.exec_true(name)

    def exec_true(self, name: str) -> None:
        call(*self.base(), "exec", name, "true")

    def delete(self, name: str) -> None:
        call(*self.base(), "delete", "--force", name)

    def close(self) -> None:
        # The file tree, and what the tool itself keeps mounted in its root.
        mounted = [line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()]
        for where in reversed([m for m in mounted if m.startswith(f"{self.work}/")]):
            call("umount", where)


def find_tree(state: Path) -> Path:
    """The image's file tree, as the kernel has it mounted."""
    for line in Path("/proc/self/mounts").read_text().splitlines():
        where = line.split()[1]
        if (
            where.startswith(str(state))
            and line.split()[2] == "erofs"
            and (Path(where) / "usr/bin/env").exists()
        ):
            return Path(where)
    raise SystemExit(f"no image is mounted below {state}")


def measure_starts(client: DSecClient, tool: RawTool, backend: str, rounds: int) -> tuple[Series, Series]:
    """Create to first command answered, ours and the raw tool's."""
    ours = Series(f"{backend}: run_sandbox + run_shell('true')")
    raw = Series(f"{Path(tool.binary).name} run + exec true")
    args = DSecRunArgs(backend=backend, image="root/py:latest")

    def create() -> None:
        sandboxes.append(client.run_sandbox(args))
        sandboxes[-1].run_shell("true", check=True)

    for i in range(rounds + 2):
        sandboxes: list = []
        name = f"bench-{backend}-{i}"
        ours.time(create)
        sandboxes[0].stop()
        raw.time(lambda name=name: tool.run_and_exec(name))
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
            ours.time(lambda: sandbox.run_shell("true", check=True))
            raw.time(lambda: tool.exec_true(name))
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
    parser.add_argument("--out", type=Path, default=Path("bench.json"), help="file for the figures")
    return parser.parse_args()


def main() -> None:
    opts = parse()
    series: list[Series] = []
    ratios: list[dict[str, object]] = []
    rates: list[tuple[str, float]] = []

    def compare(ours: Series, raw: Series, target: float | None) -> None:
        series.extend([ours, raw])
        ratio = ours.median / raw.median
        ratios.append({"what": f"{ours.name} / {raw.name}", "ratio": round(ratio, 2), "target": target})

    with tempfile.TemporaryDirectory(prefix="bench", dir="/var/tmp") as tmp, DSecClient() as client:
        client.run_sandbox(DSecRunArgs(backend="container", image="root/py:latest")).stop()
        tree = find_tree(opts.state)
        for backend, binary, target in (("gvisor", opts.runsc, 0.4), ("container", opts.runc, 1.1)):
            work = Path(tmp) / backend
            work.mkdir()
            tool = RawTool(binary, work, tree)
            try:
                compare(*measure_starts(client, tool, backend, opts.rounds), target)
                compare(*measure_commands(client, tool, backend, opts.rounds), None)
            finally:
                tool.close()
            rates += measure_files(client, backend, work)

    print(f"{'':58} {'median':>9} {'min':>9} {'max':>9}  ms")
    for row in (s.row() for s in series):
        print(f"{row['name']:58} {row['median_ms']:9.1f} {row['min_ms']:9.1f} {row['max_ms']:9.1f}")
    print()
    for r in ratios:
        bound = f"  (wanted: at most {r['target']})" if r["target"] else ""
        print(f"{r['what']:78} {r['ratio']:6.2f}{bound}")
    print()
    for name, rate in rates:
        print(f"{name:58} {rate:9.0f}  MB/s")
    machine = {
        "processors": os.cpu_count(),
        "kernel": platform.release(),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    figures = {
        "machine": machine,
        "series": [s.row() for s in series],
        "ratios": ratios,
        "rates_mb_per_s": {name: round(rate, 1) for name, rate in rates},
    }
    opts.out.write_text(json.dumps(figures, indent=2) + "\n")
    print(f"\nwritten to {opts.out}", file=sys.stderr)


if __name__ == "__main__":
    main()
