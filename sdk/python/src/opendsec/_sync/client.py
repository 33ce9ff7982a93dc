# Made by tools/generate_sync.py from opendsec/_async/client.py. DO NOT EDIT.
"""The entry: a client of one OpenDsec server."""

from __future__ import annotations

import builtins
import os
from collections.abc import Iterator, Iterable, Mapping
from types import TracebackType

from .. import _wire
from .._args import DSecRunArgs, invalid, seconds
from .._gen.opendsec.v1 import sandbox_pb
from .._gen.opendsec.v1.image_connect import ImageServiceClientSync
from .._gen.opendsec.v1.sandbox_connect import SandboxServiceClientSync
from .._values import SandboxState
from ..errors import DSecError
from .connection import Connection
from .images import Images
from .sandbox import Sandbox, SandboxList, check_count, key, together, warn

_PAGE = 200  # sandboxes in one answer of a list


class DSecClient:
    """A client of an OpenDsec server.

    Each argument that is left out comes from the environment. Use it with
    ``with``, or call ``close`` at the end. One client serves any number
    of concurrent calls over one connection.

    Args:
        addr: ``https://host:port``; from ``OPENDSEC_ADDR``.
        token: the bearer token; from ``OPENDSEC_TOKEN``.
        project: the project of new sandboxes, such as ``root/demo``; from ``OPENDSEC_PROJECT``.
        ca: PEM file, or PEM text, of the authority that signed the server's certificate; from
            ``OPENDSEC_CA``; without one the system's authorities are trusted.
        timeout: seconds to wait for one answer of the API. It does not bound commands and transfers.

    Raises:
        InvalidArgumentError: an argument is wrong or missing; ``field`` names it.
    """

    images: Images

    def __init__(
        self,
        addr: str | None = None,
        token: str | None = None,
        project: str | None = None,
        ca: str | bytes | None = None,
        *,
        timeout: float = 120.0,
    ) -> None:
        self.project = project or os.environ.get("OPENDSEC_PROJECT") or ""
        if not self.project:
            raise invalid("project", "no project; set OPENDSEC_PROJECT or give project=")
        self._conn = Connection(addr, token, ca, seconds("timeout", timeout) or 120.0)
        self._api = SandboxServiceClientSync(
            self._conn.addr, http_client=self._conn.http, send_compression=None, accept_compression=()
        )
        images = ImageServiceClientSync(
            self._conn.addr, http_client=self._conn.http, send_compression=None, accept_compression=()
        )
        self.images = Images(self._conn, images, self.project)

    def __repr__(self) -> str:
        return f"DSecClient({self._conn.addr}, {self.project})"

    def __enter__(self) -> DSecClient:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection. Sandboxes go on."""
        self._conn.close()

    def run_sandbox(self, args: DSecRunArgs, idempotency_key: str | None = None) -> Sandbox:
        """Make a sandbox and return when it can run commands.

        Args:
            args: what is wanted.
            idempotency_key: a call repeated with the same key within a day returns the sandbox that
                the first made. None takes a fresh one, so that the call's own repeats make one sandbox.

        Raises:
            InvalidArgumentError: ``field`` names what is wrong with ``args``.
            NotFoundError: there is no such image or project.
            UnsupportedError: no node can do what is asked; ``backends`` are those that can.
            QuotaExceededError, CapacityError: the project, or the nodes, have no room.
        """
        request = sandbox_pb.CreateSandboxRequest(
            project=self.project, spec=_spec(args), idempotency_key=key(idempotency_key)
        )
        answer = self._conn.call(self._api.create_sandbox, request)
        sandbox = self._sandbox(answer.sandbox)
        warn(sandbox, 2)
        return sandbox

    def run_sandboxes(
        self,
        args: DSecRunArgs,
        count: int,
        all_or_none: bool = True,
        idempotency_key: str | None = None,
    ) -> SandboxList:
        """Make several sandboxes alike, side by side.

        Args:
            args: what is wanted of each.
            count: how many, 1 to 100.
            all_or_none: whether one failure undoes them all and raises. With False the result holds
                those that were made, and the reasons for the others in its ``errors``.
            idempotency_key: as for ``run_sandbox``, for the whole set.

        Raises:
            the errors of ``run_sandbox``; with ``all_or_none=False`` only when none was made.
        """
        request = sandbox_pb.CreateSandboxesRequest(
            project=self.project,
            spec=_spec(args),
            count=check_count(count),
            all_or_none=all_or_none,
            idempotency_key=key(idempotency_key),
        )
        answer = self._conn.call(self._api.create_sandboxes, request)
        made = together(self._conn, self._api, answer.results)
        warn(made[0], 2)
        return made

    def get(self, sandbox_id: str) -> Sandbox:
        """Return a sandbox by its id, also one that another process made, or that ended up to a day ago.

        Raises:
            NotFoundError: there is none, or it is not to be seen with this token.
        """
        if not isinstance(sandbox_id, str) or not sandbox_id:
            raise invalid("sandbox_id", f"{sandbox_id!r} is not the id of a sandbox")
        answer = self._conn.call(self._api.get_sandbox, sandbox_pb.GetSandboxRequest(id=sandbox_id))
        return self._sandbox(answer.sandbox)

    def list(
        self,
        state: SandboxState | str | Iterable[SandboxState | str] | None = None,
        labels: Mapping[str, str] | None = None,
        ended: bool = False,
    ) -> Iterator[Sandbox]:
        """Yield the sandboxes of the project and of those below it, newest first.

        Args:
            state: only those in this state, or in one of these; None for all that live.
            labels: only those with all of these labels.
            ended: whether those that have ended are included.
        """
        request = sandbox_pb.ListSandboxesRequest(
            project=self.project,
            states=[_wire.state_to_wire(s) for s in _states(state)],
            labels=dict(labels or {}),
            ended=ended,
            page_size=_PAGE,
        )
        while True:
            answer = self._conn.call(self._api.list_sandboxes, request)
            for record in answer.sandboxes:
                yield self._sandbox(record)
            if not answer.next_page_token:
                return
            request.page_token = answer.next_page_token

    def _sandbox(self, record: sandbox_pb.Sandbox | None) -> Sandbox:
        if record is None:
            raise DSecError("the server's answer holds no sandbox")
        return Sandbox(self._conn, self._api, record)


def _states(
    state: SandboxState | str | Iterable[SandboxState | str] | None,
) -> builtins.list[SandboxState | str]:
    if state is None:
        return []
    if isinstance(state, str):
        return [state]
    return builtins.list(state)


def _spec(args: DSecRunArgs) -> sandbox_pb.SandboxSpec:
    if not isinstance(args, DSecRunArgs):
        raise invalid("args", f"{type(args).__name__} is not DSecRunArgs")
    return _wire.spec(args)
