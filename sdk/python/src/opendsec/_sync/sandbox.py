# Made by tools/generate_sync.py from opendsec/_async/sandbox.py. DO NOT EDIT.
"""A sandbox as its caller sees it."""

from __future__ import annotations

import uuid
import warnings
from collections.abc import Iterable, Mapping
from datetime import datetime
from types import TracebackType
from typing import Final

from .. import _wire
from .._args import check_rules, invalid, seconds
from .._gen.opendsec.v1 import sandbox_pb
from .._gen.opendsec.v1.sandbox_connect import SandboxServiceClientSync
from .._values import Decision, Denial, End, Image, Metrics, SandboxState
from ..errors import DSecError, DSecWarning, NotFoundError, SandboxEndedError
from .agent import Agent
from .connection import Connection
from .files import Files
from .images import image_name, image_of
from .ports import Ports
from .shells import Shells


class _Unchanged:
    """What a deadline is that is not to be changed."""

    def __repr__(self) -> str:
        return "UNCHANGED"


UNCHANGED: Final = _Unchanged()

_MOST = 100  # sandboxes in one call


class Sandbox(Shells, Files, Ports):
    """A sandbox.

    It comes from ``DSecClient.run_sandbox``, ``get`` and ``list``. Used with
    ``with`` it is stopped at the end of the block. What it knows about
    itself is from the last call that told it; ``refresh`` asks again.

    Attributes:
        id: names it for its whole life; also its host name.
        project: the project it belongs to.
        backend: the kind of machine it is, as chosen.
        image: its image, ``project/name:tag``.
        image_digest: digest of that image's content.
        state: where it is in its life.
        created_at: when it was asked for, in UTC.
        started_at: when it could first run commands; None before.
        labels, metadata: the caller's.
        node: the machine it is on.
        end: how it ended; None while it lives.
        network_rules: what it may reach, as in :class:`DSecRunArgs`.
        warnings: what its caller should know, such as a network rule that is not in force.
        parent: id of the sandbox that it was forked from; None for none.
        paused_at: when it was paused, in UTC; None while it is not.
    """

    id: str
    project: str
    backend: str
    image: str
    image_digest: str
    state: SandboxState
    created_at: datetime | None
    started_at: datetime | None
    labels: dict[str, str]
    metadata: dict[str, str]
    node: str
    end: End | None
    network_rules: dict[str, bool]
    warnings: tuple[str, ...]
    parent: str | None
    paused_at: datetime | None

    def __init__(self, conn: Connection, api: SandboxServiceClientSync, record: sandbox_pb.Sandbox) -> None:
        self._conn = conn
        self._api = api
        self._agent = Agent(conn, api, record.id)
        self._take(record)

    def _take(self, record: sandbox_pb.Sandbox) -> None:
        spec = record.spec or sandbox_pb.SandboxSpec()
        self.id = record.id
        self.project = record.project
        self.backend = spec.backend
        self.image = spec.image
        self.image_digest = record.image_digest
        self.state = _wire.state(record.state) or SandboxState.PENDING
        self.created_at = _wire.moment(record.created_at)
        self.started_at = _wire.moment(record.started_at)
        self.labels = dict(spec.labels)
        self.metadata = dict(spec.metadata)
        self.node = record.node
        self.end = _wire.end(record.end)
        self.network_rules = dict(spec.network_rules.rules) if spec.network_rules is not None else {}
        self.warnings = tuple(record.warnings)
        self.parent = record.parent or None
        self.paused_at = _wire.moment(record.paused_at)

    def __repr__(self) -> str:
        return f"Sandbox({self.id}, {self.backend}, {self.state})"

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """End the sandbox and delete what belongs to it.

        It works from every state, may be repeated, and does not raise for a
        sandbox that is gone already.
        """
        request = sandbox_pb.StopSandboxRequest(id=self.id)
        try:
            answer = self._conn.call(self._api.stop_sandbox, request)
        except SandboxEndedError as err:
            self._ended(err.end)
        except NotFoundError:
            self._ended(None)
        else:
            if answer.sandbox is not None:
                self._take(answer.sandbox)

    def _ended(self, end: End | None) -> None:
        self.end = self.end or end
        if self.state.alive:
            self.state = SandboxState.STOPPED

    def pause(self) -> None:
        """Stop all that runs in the sandbox and keep it, until ``resume``.

        On ``gvisor`` its memory goes to the disk and it holds neither processors
        nor memory; on ``container`` it is frozen as it is. Time in which it is
        paused counts to no deadline. A command goes on where it was after the
        resume, and a ``run_shell`` that waits for it waits on. May be repeated;
        one that fails leaves the sandbox running.

        Raises:
            UnsupportedError: its backend cannot; ``backends`` are those that can.
            QuotaExceededError, CapacityError: there is no room on the disk for its memory.
            SandboxEndedError: it has ended.
        """
        request = sandbox_pb.PauseSandboxRequest(id=self.id)
        answer = self._conn.call(self._api.pause_sandbox, request)
        if answer.sandbox is not None:
            self._take(answer.sandbox)

    def resume(self) -> None:
        """Let a paused sandbox go on where it was, and return when it can run commands.

        May be repeated; one that fails leaves the sandbox paused.

        Raises:
            QuotaExceededError, CapacityError: the project, or its node, has no room for it now.
            SandboxEndedError: it has ended.
        """
        request = sandbox_pb.ResumeSandboxRequest(id=self.id)
        answer = self._conn.call(self._api.resume_sandbox, request)
        if answer.sandbox is not None:
            self._take(answer.sandbox)

    def fork(
        self,
        count: int = 1,
        memory: bool = True,
        *,
        all_or_none: bool = True,
        idempotency_key: str | None = None,
    ) -> SandboxList:
        """Make copies of the sandbox with its memory, files and processes; each goes its own way from there.

        The sandbox, running or paused, stands still only while its state is
        captured. Image, limits, network rules and labels of a copy are those of
        the sandbox; its id, host name, machine id and random numbers are its own.

        Args:
            count: how many, 1 to 100.
            memory: False for copies of the files only, in which nothing runs yet.
            all_or_none: whether one failure undoes them all and raises. With False the result holds
                those that were made, and the reasons for the others in its ``errors``.
            idempotency_key: a call repeated with the same key within a day returns the sandboxes that
                the first made. None takes a fresh one.

        Raises:
            UnsupportedError: its backend cannot; ``backends`` are those that can.
            QuotaExceededError, CapacityError: the project, or the node, has no room.
            SandboxEndedError: it has ended.
            DSecError: with ``all_or_none=False`` only when none was made.
        """
        request = sandbox_pb.ForkSandboxRequest(
            id=self.id,
            count=check_count(count),
            files_only=not check_flag("memory", memory),
            all_or_none=check_flag("all_or_none", all_or_none),
            idempotency_key=key(idempotency_key),
        )
        answer = self._conn.call(self._api.fork_sandbox, request)
        made = together(self._conn, self._api, answer.results)
        warn(made[0], 2)
        return made

    def create_snapshot(self, name: str, memory: bool = True) -> Image:
        """Make an image of the sandbox that others can start from.

        The sandbox stands still only while its state is captured. The image is
        visible once it is whole, and goes with ``images.delete``. Sandboxes of
        one with memory begin in the middle, with its processes and limits; they
        start only on a node like the one it was taken on.

        Args:
            name: ``project/name:tag``; taken from another image if need be.
            memory: False for the files only, which starts on every backend.

        Raises:
            UnsupportedError: its backend cannot; ``backends`` are those that can.
            QuotaExceededError, CapacityError: there is no room on the disk.
            SandboxEndedError: it has ended.
        """
        request = sandbox_pb.CreateSnapshotRequest(
            id=self.id, name=image_name(name), files_only=not check_flag("memory", memory)
        )
        answer = self._conn.call(self._api.create_snapshot, request)
        return image_of(answer.image, name)

    def pack_diff(self, name: str) -> Image:
        """Make an image of the sandbox's image and the files that were changed since, for every backend.

        Args:
            name: ``project/name:tag``; taken from another image if need be.

        Raises:
            UnsupportedError: its backend cannot; ``backends`` are those that can.
            QuotaExceededError, CapacityError: there is no room on the disk.
            SandboxEndedError: it has ended.
        """
        request = sandbox_pb.PackDiffRequest(id=self.id, name=image_name(name))
        answer = self._conn.call(self._api.pack_diff, request)
        return image_of(answer.image, name)

    def set_ttl(
        self,
        ttl_running_stop: float | _Unchanged | None = UNCHANGED,
        ttl_lifetime: float | _Unchanged | None = UNCHANGED,
    ) -> None:
        """Change the sandbox's deadlines; what is left out stays as it is.

        Args:
            ttl_running_stop: idle seconds; None for never.
            ttl_lifetime: seconds from its creation; None for never.

        Raises:
            SandboxEndedError: it has ended.
        """
        request = sandbox_pb.SetTTLRequest(id=self.id)
        if not isinstance(ttl_running_stop, _Unchanged):
            request.ttl_running_stop = _wire.duration(seconds("ttl_running_stop", ttl_running_stop) or 0)
        if not isinstance(ttl_lifetime, _Unchanged):
            request.ttl_lifetime = _wire.duration(seconds("ttl_lifetime", ttl_lifetime) or 0)
        if request.ttl_running_stop is None and request.ttl_lifetime is None:
            raise invalid("ttl_running_stop", "nothing to change; give ttl_running_stop or ttl_lifetime")
        answer = self._conn.call(self._api.set_ttl, request)
        if answer.sandbox is not None:
            self._take(answer.sandbox)

    def update_network(self, rules: Mapping[str, bool]) -> None:
        """Replace the sandbox's network rules, also while it is paused.

        When it returns, the new rules are in force, and connections that they do not allow are cut.

        Args:
            rules: all of the new rules, as ``network_rules`` in :class:`DSecRunArgs`; empty closes all.

        Raises:
            InvalidArgumentError: a rule is wrong; it is named, and ``field`` is ``network_rules``.
            SandboxEndedError: it has ended.
        """
        request = sandbox_pb.UpdateNetworkRequest(
            id=self.id, network_rules=check_rules("network_rules", rules)
        )
        answer = self._conn.call(self._api.update_network, request)
        if answer.sandbox is not None:
            self._take(answer.sandbox)

    def explain_network(self, target: str) -> Decision:
        """Say whether the sandbox may reach something now, and why, by the code that enforces it.

        Args:
            target: ``host``, ``host:port`` or ``host:port/udp``; a name or an address, one of IPv6 in
                brackets if a port follows. Without a port: whether any is open.

        Raises:
            InvalidArgumentError: the target has another form.
            SandboxEndedError: it has ended.
        """
        if not isinstance(target, str):
            raise invalid("target", f"{target!r} is not a text, such as 'github.com:443'")
        request = sandbox_pb.ExplainNetworkRequest(id=self.id, target=target)
        answer = self._conn.call(self._api.explain_network, request)
        if answer.decision is None:
            raise DSecError(f"the server said nothing about what sandbox {self.id} may reach")
        return _wire.decision(answer.decision)

    def denied_egress(self) -> list[Denial]:
        """Return what the sandbox was denied on the network lately, the newest last.

        The newest 256 are kept, as long as the node's edge runs.

        Raises:
            SandboxEndedError: it has ended.
        """
        answer = self._conn.call(self._api.list_denied, sandbox_pb.ListDeniedRequest(id=self.id))
        return [_wire.denial(d) for d in answer.denials]

    def refresh(self) -> None:
        """Count as a use of the sandbox, so that its idle time starts anew, and read how it is now.

        For a sandbox that has ended it reads only that.
        """
        try:
            self._conn.call(self._api.refresh_sandbox, sandbox_pb.RefreshSandboxRequest(id=self.id))
        except SandboxEndedError as err:
            self._ended(err.end)
        answer = self._conn.call(self._api.get_sandbox, sandbox_pb.GetSandboxRequest(id=self.id))
        if answer.sandbox is not None:
            self._take(answer.sandbox)

    def metrics(self) -> Metrics:
        """Return what the sandbox uses now.

        Raises:
            SandboxEndedError: it has ended.
        """
        answer = self._conn.call(self._api.get_metrics, sandbox_pb.GetMetricsRequest(id=self.id))
        if answer.metrics is None:
            raise DSecError(f"the server said nothing about what sandbox {self.id} uses")
        return _wire.metrics(answer.metrics)


class SandboxList(list[Sandbox]):
    """Sandboxes made together.

    Attributes:
        errors: why the others were not made; empty unless ``all_or_none=False`` was given.
    """

    errors: list[DSecError]


def together(
    conn: Connection, api: SandboxServiceClientSync, results: Iterable[sandbox_pb.CreateResult]
) -> SandboxList:
    """Return sandboxes that were made together; raise when none was."""
    made = SandboxList()
    made.errors = []
    for item in results:
        if item.result is None:
            continue
        if item.result.field == "sandbox":
            made.append(Sandbox(conn, api, item.result.value))
        else:
            made.errors.append(_wire.error_from_info(item.result.value))
    if not made:
        raise made.errors[0] if made.errors else DSecError("the server's answer holds no sandbox")
    return made


def check_count(count: int) -> int:
    """Check how many sandboxes are wanted."""
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= _MOST:
        raise invalid("count", f"{count!r} is not a whole number from 1 to {_MOST}")
    return count


def check_flag(field: str, value: bool) -> bool:
    """Check an argument that is True or False."""
    if not isinstance(value, bool):
        raise invalid(field, f"{value!r} is neither True nor False")
    return value


def key(given: str | None) -> str:
    """Return the idempotency key of a call: the caller's, or a fresh one."""
    if given is None:
        return uuid.uuid4().hex
    if not isinstance(given, str) or not 1 <= len(given) <= 128:
        raise invalid("idempotency_key", f"{given!r} is not a text of 1 to 128 characters")
    return given


def warn(sandbox: Sandbox, stacklevel: int) -> None:
    """Show what the caller of a new sandbox should know."""
    for text in sandbox.warnings:
        warnings.warn(f"{sandbox.id}: {text}", DSecWarning, stacklevel=stacklevel + 1)
