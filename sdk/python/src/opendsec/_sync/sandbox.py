# Made by tools/generate_sync.py from opendsec/_async/sandbox.py. DO NOT EDIT.
"""A sandbox as its caller sees it."""

from __future__ import annotations

import warnings
from datetime import datetime
from types import TracebackType
from typing import Final

from .. import _wire
from .._args import invalid, seconds
from .._gen.opendsec.v1 import sandbox_pb
from .._gen.opendsec.v1.sandbox_connect import SandboxServiceClientSync
from .._values import End, Metrics, SandboxState
from ..errors import DSecError, DSecWarning, NotFoundError, SandboxEndedError
from .agent import Agent
from .connection import Connection
from .files import Files
from .shells import Shells


class _Unchanged:
    """What a deadline is that is not to be changed."""

    def __repr__(self) -> str:
        return "UNCHANGED"


UNCHANGED: Final = _Unchanged()


class Sandbox(Shells, Files):
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
        warnings: what its caller should know, such as a network rule that is not in force.
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
    warnings: tuple[str, ...]

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
        self.warnings = tuple(record.warnings)

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


def warn(sandbox: Sandbox, stacklevel: int) -> None:
    """Show what the caller of a new sandbox should know."""
    for text in sandbox.warnings:
        warnings.warn(f"{sandbox.id}: {text}", DSecWarning, stacklevel=stacklevel + 1)
