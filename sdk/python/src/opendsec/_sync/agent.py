# Made by tools/generate_sync.py from opendsec/_async/agent.py. DO NOT EDIT.
"""What can be done inside one sandbox: calls to its agent, and what they raise.

The agent's services lie under ``ADDRESS/sandboxes/ID``. The clients are made
once for each sandbox, so that a command costs no setup.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Callable, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar
from urllib.parse import urlencode

from connectrpc.code import Code
from connectrpc.errors import ConnectError
from pyqwest import SyncResponse

from .. import _wire
from .._args import invalid
from .._fetch import Fetch, Report
from .._gen.agent.v1.agent_connect import AgentClientSync
from .._gen.filesystem.filesystem_connect import FilesystemClientSync
from .._gen.opendsec.v1 import sandbox_pb
from .._gen.opendsec.v1.sandbox_connect import SandboxServiceClientSync
from .._gen.process.process_connect import ProcessClientSync
from .._relay import Relay
from ..errors import ConnectionError, DSecError, SandboxEndedError, UnauthenticatedError
from ._concurrent import next_within, reraise_cancelled, sleep
from .connection import Connection, Unary

REQ = TypeVar("REQ")
T = TypeVar("T")

# Milliseconds to find out whether a sandbox that does not answer has ended.
_ASK_MS = 5000

# Seconds between looks at a sandbox that is paused: at first, and at most. A
# look does not wake it.
_FIRST_LOOK = 0.05
_LOOK = 1.0


class Agent:
    """The agent of one sandbox."""

    def __init__(self, conn: Connection, api: SandboxServiceClientSync, sandbox_id: str) -> None:
        self.conn = conn
        self.id = sandbox_id
        self._api = api
        self._addr = f"{conn.addr}/sandboxes/{sandbox_id}"
        self.process = self._service(ProcessClientSync)
        self.filesystem = self._service(FilesystemClientSync)
        self.agent = self._service(AgentClientSync)

    def _service(self, client: Callable[..., T]) -> T:
        return client(self._addr, http_client=self.conn.http, send_compression=None, accept_compression=())

    def headers(self, user: str | None = None, timeout: float | None = None) -> Mapping[str, str]:
        """Return the headers of a call as a user, which the server ends after timeout seconds."""
        if user is None and timeout is None:
            return self.conn.headers
        headers = dict(self.conn.headers)
        if user is not None:
            headers["opendsec-user"] = user
        if timeout is not None:
            headers["connect-timeout-ms"] = str(max(1, round(timeout * 1000)))
        return headers

    def call(
        self,
        method: Unary[REQ, T],
        request: REQ,
        *,
        user: str | None = None,
        once: bool = False,
        timeout_ms: int | None = None,
    ) -> T:
        """Make a call; the arguments are those of Connection.call."""
        headers = self.headers(user)
        try:
            return self.conn.call(method, request, headers=headers, once=once, timeout_ms=timeout_ms)
        except (ConnectionError, UnauthenticatedError) as err:
            raise self._why(err) from err

    def running(self, until: float | None = None) -> bool:
        """Wait until the sandbox, which may be paused, runs.

        Args:
            until: when to give up, by ``time.monotonic``; None for never.

        Returns:
            False when it was given up.

        Raises:
            SandboxEndedError: it has ended.
        """
        wait = _FIRST_LOOK
        while until is None or time.monotonic() < until:
            # The first look waits too: what the API knows of a pause may come a moment after it.
            sleep(wait if until is None else max(0.0, min(wait, until - time.monotonic())))
            wait = min(_LOOK, wait * 1.5)
            request = sandbox_pb.GetSandboxRequest(id=self.id)
            answer = self.conn.call(self._api.get_sandbox, request)
            record = answer.sandbox or sandbox_pb.Sandbox()
            if record.end is not None:
                raise self._ended(record.end)
            if record.state == sandbox_pb.State.RUNNING:
                return True
        return False

    def failed(self, err: ConnectError) -> DSecError:
        """Return what a failed call is to raise."""
        return self._why(self.conn.error(err))

    def _why(self, err: DSecError) -> DSecError:
        """Return err, or that the sandbox has ended or is paused if that is why it does not answer."""
        if isinstance(err, UnauthenticatedError) and err.request_id is None:
            # The token was good, or the call had not got to the agent; it is the user it does not know.
            return invalid("user", err.message)
        if not isinstance(err, ConnectionError):
            return err
        try:
            answer = self._api.get_sandbox(
                sandbox_pb.GetSandboxRequest(id=self.id), headers=self.conn.headers, timeout_ms=_ASK_MS
            )
        except ConnectError as why:
            reraise_cancelled(why)
            return err
        record = answer.sandbox or sandbox_pb.Sandbox()
        if record.end is not None:
            return self._ended(record.end)
        if record.state == sandbox_pb.State.PAUSED and "paused" not in err.message:
            text = f"{err.message}: sandbox {self.id} was paused meanwhile; resume it and try again"
            return ConnectionError(
                text, request_id=err.request_id, domain=err.domain, retryable=err.retryable
            )
        return err

    def _ended(self, record: sandbox_pb.End) -> SandboxEndedError:
        end = _wire.end(record)
        err = SandboxEndedError(f"sandbox {self.id} has ended: {record.detail or record.reason}")
        if end is not None:
            err.domain, err.end = end.domain, end
        return err

    def transfer(
        self,
        method: str,
        path: str,
        query: Mapping[str, str],
        *,
        user: str | None = None,
        content: bytes | None = None,
    ) -> bytes:
        """Make a plain HTTP call that may be repeated, and return the answer's body."""

        def attempt(request: None, *, headers: Any = None, timeout_ms: Any = None) -> bytes:
            with self.stream(method, path, query, headers=headers, content=content) as response:
                return self.whole(response)

        try:
            return self.conn.call(attempt, None, headers=self._body_headers(user, content is not None))
        except (ConnectionError, UnauthenticatedError) as err:
            raise self._why(err) from err

    def _body_headers(self, user: str | None, body: bool) -> Mapping[str, str]:
        headers = dict(self.headers(user))
        if body:
            headers["content-type"] = "application/octet-stream"
        return headers

    @contextmanager
    def stream(
        self,
        method: str,
        path: str,
        query: Mapping[str, str],
        *,
        headers: Mapping[str, str],
        content: bytes | Iterator[bytes] | None = None,
    ) -> Iterator[SyncResponse]:
        """Make a plain HTTP call and give its answer to read; raise ConnectError if it fails, also later."""
        opening = self.conn.http.stream(
            method, f"{self._addr}{path}?{urlencode(query)}", headers=headers, content=content
        )
        try:
            response = opening.__enter__()
        except Exception as err:
            raise ConnectError(Code.UNAVAILABLE, str(err)) from err
        try:
            if response.status >= 400:
                raise _wire.http_error(response.status, self.whole(response))
            yield response
        finally:
            opening.__exit__(None, None, None)

    def fetch(self, path: str, query: Mapping[str, str], user: str | None, report: Report | None) -> Fetch:
        """Return a large answer to be read."""
        url = f"{self._addr}{path}?{urlencode(query)}"
        return Fetch(self.conn.bulk().client, url, self.headers(user), report)

    def relay(self, port: int, failed: Callable[[ConnectError], Callable[[], None]]) -> Relay:
        """Return a way from a local port to a port of the sandbox; for failed see Relay."""
        url = f"{self._addr}/tunnel/{port}"
        return Relay(lambda: self.conn.tunnels().client, url, self.conn.headers, failed)

    def pieces(self, response: SyncResponse) -> Iterator[bytes]:
        """Read an answer's body piece by piece; raise ConnectError when it breaks off."""
        wanted = response.headers.get("content-length")
        got = 0
        body = iter(response.content)
        while True:
            try:
                piece = bytes(next_within(body, self.conn.timeout))
            except StopIteration:
                break
            except Exception as err:
                raise ConnectError(Code.UNAVAILABLE, str(err) or "the answer stopped coming") from err
            got += len(piece)
            yield piece
        if wanted is not None and got != int(wanted):
            raise ConnectError(Code.UNAVAILABLE, f"the answer broke off after {got} of {wanted} bytes")

    def whole(self, response: SyncResponse) -> bytes:
        """Read an answer's body."""
        return b"".join([piece for piece in self.pieces(response)])
