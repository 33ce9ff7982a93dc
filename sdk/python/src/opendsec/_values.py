"""The plain values that calls return. None of them does anything."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import Enum

__all__ = [
    "Decision",
    "Denial",
    "Domain",
    "End",
    "FileInfo",
    "FileType",
    "Image",
    "Metrics",
    "Progress",
    "SandboxState",
    "ShellBytesResult",
    "ShellChunk",
    "ShellLogs",
    "ShellResult",
    "SnapshotInfo",
]


class _Word(str, Enum):
    """A string with a fixed set of values; prints as the bare string."""

    def __str__(self) -> str:
        return str(self.value)

    def __format__(self, spec: str) -> str:
        return format(str(self.value), spec)


class SandboxState(_Word):
    """Where a sandbox is in its life."""

    PENDING = "PENDING"
    STARTING = "STARTING"
    RUNNING = "RUNNING"
    PAUSED = "PAUSED"
    STOPPING = "STOPPING"
    STOPPED = "STOPPED"
    FAILED = "FAILED"

    @property
    def alive(self) -> bool:
        """Whether a sandbox in this state still holds resources."""
        return self not in (SandboxState.STOPPED, SandboxState.FAILED)


class Domain(_Word):
    """Whose doing an end or an error is."""

    INFRA = "infra"
    USER = "user"
    POLICY = "policy"
    QUOTA = "quota"


class FileType(_Word):
    """What an entry of the file tree is itself; a link is a link wherever it leads."""

    FILE = "file"
    DIRECTORY = "directory"
    SYMLINK = "symlink"
    OTHER = "other"


@dataclass(frozen=True)
class End:
    """How and why a sandbox ended.

    Attributes:
        reason: one word: ``stopped``, ``idle``, ``lifetime``, ``exited``, ``out_of_memory``,
            ``lost``, ``start_failed``.
        domain: whose doing it was; None when the server did not say.
        detail: a sentence for a person.
        time: when, in UTC; None when the server did not say.
    """

    reason: str
    domain: Domain | None
    detail: str
    time: datetime | None = None


@dataclass(frozen=True)
class ShellResult:
    """How a command went.

    Attributes:
        stdout, stderr: its output; bytes that are not UTF-8 show as U+FFFD.
        exit_code: its exit code, -1 when a signal or its timeout ended it.
        signal: the number of the signal that ended it, such as 9; None when none did.
        duration: seconds from the call to its end, as measured here.
        timed_out: whether its timeout ended it.
        dropped: bytes of its earliest output that the sandbox no longer held; only a
            background command that wrote much can have any.
    """

    stdout: str
    stderr: str
    exit_code: int
    signal: int | None = None
    duration: float = 0.0
    timed_out: bool = False
    dropped: int = 0

    @property
    def ok(self) -> bool:
        """Whether it ended by itself with exit code 0."""
        return self.exit_code == 0

    def __repr__(self) -> str:
        return _describe(self, len(self.stdout), len(self.stderr), "characters")


@dataclass(frozen=True)
class ShellBytesResult:
    """How a command went, with its output as bytes. See :class:`ShellResult`."""

    stdout: bytes
    stderr: bytes
    exit_code: int
    signal: int | None = None
    duration: float = 0.0
    timed_out: bool = False
    dropped: int = 0

    @property
    def ok(self) -> bool:
        """Whether it ended by itself with exit code 0."""
        return self.exit_code == 0

    def __repr__(self) -> str:
        return _describe(self, len(self.stdout), len(self.stderr), "bytes")

    def text(self) -> ShellResult:
        """Return the same result with its output decoded as UTF-8."""
        return ShellResult(
            stdout=self.stdout.decode("utf-8", "replace"),
            stderr=self.stderr.decode("utf-8", "replace"),
            exit_code=self.exit_code,
            signal=self.signal,
            duration=self.duration,
            timed_out=self.timed_out,
            dropped=self.dropped,
        )


def _describe(r: ShellResult | ShellBytesResult, out: int, err: int, unit: str) -> str:
    ending = f"exit_code={r.exit_code}"
    if r.signal is not None:
        ending += f", signal={r.signal}"
    if r.timed_out:
        ending += ", timed_out=True"
    return (
        f"{type(r).__name__}({ending}, stdout={out} {unit}, stderr={err} {unit}, duration={r.duration:.3f})"
    )


@dataclass(frozen=True)
class ShellChunk:
    """A piece of a command's output.

    Attributes:
        stream: ``stdout`` or ``stderr``.
        text: the piece; a character is never split between two pieces.
    """

    stream: str
    text: str


@dataclass(frozen=True)
class ShellLogs:
    """The output of a background command that the sandbox holds.

    Attributes:
        stdout, stderr: the output, decoded as UTF-8.
        dropped: bytes of the earliest output that are no longer held.
    """

    stdout: str
    stderr: str
    dropped: int = 0

    def __repr__(self) -> str:
        return f"ShellLogs(stdout={len(self.stdout)} characters, stderr={len(self.stderr)} characters)"


@dataclass(frozen=True)
class FileInfo:
    """An entry of a sandbox's file tree.

    Attributes:
        name: the last element of the path.
        path: the absolute path.
        type: what it is.
        size: bytes; for a link that leads somewhere, those of what it leads to.
        mode: permission bits, such as ``0o644``.
        owner, group: names, or numbers in digits where there is no name.
        modified: when the contents changed last, in UTC.
        link_target: where a link leads, fully resolved; None for anything else.
    """

    name: str
    path: str
    type: FileType
    size: int
    mode: int
    owner: str
    group: str
    modified: datetime
    link_target: str | None = None


@dataclass(frozen=True)
class SnapshotInfo:
    """What a snapshot with memory was taken of, and so what a node and a start must be like.

    Attributes:
        backend: the one that can start it.
        virtualization: how that backend makes its machines, such as ``systrap``.
        runtime: version of the kernel or monitor, with its patches.
        kernel: the host's where it was taken; for information.
        cpu_features: those that a node must have.
        agent: the agent in it.
        cpu_cores_limit: of its machine in cores; a start has it too, like the following.
        memory_limit_mb: MiB of memory.
        disk_limit_mb: MiB that may be written to the file system.
        pids_limit: processes and threads.
        nodes: those that have it; it starts on these only.
    """

    backend: str
    virtualization: str = ""
    runtime: str = ""
    kernel: str = ""
    cpu_features: tuple[str, ...] = field(default=(), repr=False)
    agent: str = field(default="", repr=False)
    cpu_cores_limit: float = 0
    memory_limit_mb: int = 0
    disk_limit_mb: int = 0
    pids_limit: int = 0
    nodes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Image:
    """A named image.

    Attributes:
        name: ``project/name:tag``.
        digest: of its content, ``sha256:…``.
        kind: ``oci`` for a plain image, ``files`` for one made of a sandbox's files, ``memory`` for a
            snapshot with memory, which runs on one backend only.
        size: of the artifact on a node, in bytes.
        created_at: when the name was given, in UTC.
        source: where it came from, without credentials.
        architecture: such as ``amd64``.
        labels: those of its configuration.
        snapshot: what a start of it needs; None unless ``kind`` is ``memory``.
        network_rules: what the sandbox that it was made of could reach then; a start in that one's
            project has it unless it gives rules. None for a plain image, and for who does not see
            the project.
    """

    name: str
    digest: str
    kind: str
    size: int
    created_at: datetime | None = None
    source: str = ""
    architecture: str = ""
    labels: Mapping[str, str] = field(default_factory=dict, repr=False)
    snapshot: SnapshotInfo | None = field(default=None, repr=False)
    network_rules: Mapping[str, bool] | None = field(default=None, repr=False)


@dataclass(frozen=True)
class Progress:
    """How far a long piece of work is.

    Attributes:
        step: what is being done: ``pull``, ``unpack``, ``build``, ``done``.
        detail: a line for a person.
        done: bytes done of this step.
        total: bytes in all; 0 when unknown.
    """

    step: str
    detail: str
    done: int
    total: int


@dataclass(frozen=True)
class Metrics:
    """What a sandbox uses, measured on the host.

    Attributes:
        time: when it was measured, in UTC.
        cpu_seconds: CPU time used since it started.
        cpu_cores_limit: its CPU limit in cores.
        memory_bytes: memory of its own in use, what a kernel or VMM around it needs included.
        memory_limit_bytes, disk_limit_bytes: its limits.
        disk_bytes: space that its written files take.
        pids: processes or threads on the host.
        shared_memory_bytes: memory that it has in common with its source, forks and starts of one
            snapshot, and that is not in ``memory_bytes``; what it writes to becomes its own.
        network_sent_bytes, network_received_bytes: what it sent to the outside and got from there.
        network_flows: connections and UDP flows to the outside that are open.
        network_denied: how often it was denied something on the network.
    """

    time: datetime | None
    cpu_seconds: float
    cpu_cores_limit: float
    memory_bytes: int
    memory_limit_bytes: int
    disk_bytes: int
    disk_limit_bytes: int
    pids: int
    shared_memory_bytes: int = 0
    network_sent_bytes: int = 0
    network_received_bytes: int = 0
    network_flows: int = 0
    network_denied: int = 0


@dataclass(frozen=True)
class Decision:
    """Whether a sandbox may reach something. It is true when it may.

    Attributes:
        allow: whether it may.
        rule: the rule that decided, as it was written; None when none did.
        why: a sentence for a person.
    """

    allow: bool
    rule: str | None
    why: str

    def __bool__(self) -> bool:
        return self.allow


@dataclass(frozen=True)
class Denial:
    """Something that a sandbox was denied on the network.

    Attributes:
        time: the last time, in UTC.
        count: how often, one time after another.
        kind: ``name`` (not resolved), ``answer`` (an address or alias that a name led to), ``query``
            (over the limits of DNS), ``address`` (a connection or datagram), ``host`` (a connection
            by name that asked for another name), ``limit`` (over the limits of connections),
            ``change`` (an open connection, by a change of the rules).
        name, address, port, protocol: what it was; None for what does not apply.
        rule: the rule that decided; None when none did.
        why: a sentence for a person.
    """

    time: datetime | None
    count: int
    kind: str
    name: str | None
    address: str | None
    port: int | None
    protocol: str | None
    rule: str | None
    why: str
