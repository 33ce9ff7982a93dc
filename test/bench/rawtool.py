"""runsc and runc as a person would call them, with nothing but their own defaults."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path


def call(*args: str) -> str:
    """Runs a tool and returns its output; its failure ends the benchmark with the tool's own words."""
    done = subprocess.run(args, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(args)}: exit {done.returncode}: {done.stderr.decode()[-2000:]}")
    return done.stdout.decode()


class RawTool:
    """One of the tools with a bundle on an image's file tree.

    Args:
        binary: the tool.
        work: an empty directory for what it keeps.
        tree: the file tree.
        args: the first process of its containers.
    """

    def __init__(
        self, binary: str, work: Path, tree: Path, args: Sequence[str] = ("sleep", "100000")
    ) -> None:
        self.binary, self.work = binary, work
        self.bundle, self.root = work / "bundle", work / "root"
        self.containers: set[str] = set()
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
        spec["process"]["args"] = list(args)
        spec["root"] = {"path": "rootfs", "readonly": False}
        (self.bundle / "config.json").write_text(json.dumps(spec))

    def base(self) -> list[str]:
        return [self.binary, "--root", str(self.root)]

    def run(self, name: str) -> None:
        self._detached("run", "--detach", "--bundle", str(self.bundle), name)

    def run_and_exec(self, name: str) -> None:
        self.run(name)
        self.exec(name, "true")

    def exec(self, name: str, *args: str) -> str:
        return call(*self.base(), "exec", name, *args)

    def checkpoint(self, name: str, image: Path, leave_running: bool) -> None:
        """Writes a container's state; without leave_running that ends it."""
        how = ["--leave-running"] if leave_running else []
        call(*self.base(), "checkpoint", *how, "--image-path", str(image), name)

    def restore_and_exec(self, name: str, image: Path) -> None:
        self._detached("restore", "--detach", "--image-path", str(image), "--bundle", str(self.bundle), name)
        self.exec(name, "true")

    def delete(self, name: str) -> None:
        call(*self.base(), "delete", "--force", name)
        self.containers.discard(name)

    def close(self) -> None:
        for name in sorted(self.containers):  # those that a failure left
            self.delete(name)
        # The file tree, and what the tool itself keeps mounted in its root.
        mounted = [line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()]
        for where in reversed([m for m in mounted if m.startswith(f"{self.work}/")]):
            call("umount", where)

    def _detached(self, *args: str) -> None:
        self.containers.add(args[-1])
        # The output of a detached container must not be our pipe: it stays open.
        log = self.work / f"{args[-1]}.log"
        with open(os.devnull, "rb") as null, log.open("wb") as out:
            done = subprocess.run([*self.base(), *args], stdin=null, stdout=out, stderr=out, check=False)
        if done.returncode:
            raise SystemExit(f"{' '.join([*self.base(), *args])} failed: {log.read_text()[-2000:]}")
        log.unlink()


class Image:
    """A directory for a checkpoint, removed at the end of a block."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __enter__(self) -> Image:
        return self

    def __exit__(self, *exc: object) -> None:
        shutil.rmtree(self.path)


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
