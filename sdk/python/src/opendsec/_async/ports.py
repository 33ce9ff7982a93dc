"""Servers in a sandbox, reached from outside."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any

from connectrpc.errors import ConnectError

from .. import _wire
from .._args import invalid, seconds
from .._gen.opendsec.v1 import sandbox_pb
from .._gen.opendsec.v1.sandbox_connect import SandboxServiceClient
from .._relay import Relay
from ..errors import DSecError
from ._concurrent import from_thread, to_thread
from .agent import Agent
from .connection import Connection

ErrorCallback = Callable[[DSecError], Any]


class Ports:
    """The part of a sandbox that leads to servers in it."""

    _agent: Agent
    _conn: Connection
    _api: SandboxServiceClient

    async def get_url(self, port: int, *, ttl: float = 86400.0) -> str:
        """Return an address by which anything reaches an HTTP server in the sandbox, such as a browser.

        It ends with a slash, so that a path can be added to it, and serves
        WebSockets too, as ``wss://``. It is a secret: whoever has it may use the
        port, without a token, until it expires or the sandbox ends. Pages that
        need cookies, storage or links from the root want a server with a domain
        for sandboxes; for all else, and for other than HTTP, there is ``forward``.

        Args:
            port: the server's, 1 to 65535. Nothing needs to listen there yet.
            ttl: seconds for which the address is good, up to 30 days.

        Raises:
            InvalidArgumentError: port is no port, or ttl is too long.
            SandboxEndedError: it has ended.
        """
        check_port("port", port, 1)
        if ttl is None:
            raise invalid("ttl", "None is no time; give seconds, up to 30 days")
        request = sandbox_pb.GetURLRequest(
            id=self._agent.id, port=port, ttl=_wire.duration(seconds("ttl", ttl))
        )
        answer = await self._conn.call(self._api.get_url, request)
        return answer.url

    async def revoke_url(self, url: str) -> None:
        """Take back an address of ``get_url``, and no other. It may be repeated.

        Requests that begin afterwards are refused, within a second on all
        servers of the installation; those that are open, and WebSockets, go on.

        Raises:
            InvalidArgumentError: url is no address of this sandbox.
        """
        if not isinstance(url, str):
            raise invalid("url", f"{type(url).__name__} is no address; give what get_url returned")
        request = sandbox_pb.RevokeURLRequest(id=self._agent.id, url=url)
        await self._conn.call(self._api.revoke_url, request)

    def forward(
        self,
        port: int,
        *,
        host: str = "127.0.0.1",
        local_port: int = 0,
        on_error: ErrorCallback | None = None,
    ) -> Forward:
        """Lead a local port to a port of the sandbox, inside ``async with``.

        Each connection to the local port becomes one to the server in the
        sandbox, whichever of its addresses that listens on; bytes pass as they
        are, and half-closes too. One that fails is broken off, and only that.
        An open one counts as use of the sandbox; a pause breaks it, and with
        ``auto_resume`` a new one wakes the sandbox.

        Args:
            port: the server's, 1 to 65535. Nothing needs to listen there yet.
            host: local address to listen on.
            local_port: local port to listen on; 0 for one that is free.
            on_error: told of each connection that failed, such as by NotFoundError when
                nothing listens; may be async.

        Raises:
            InvalidArgumentError: port is no port, or the local one cannot be listened on.
        """
        check_port("port", port, 1)
        check_port("local_port", local_port, 0)
        return Forward(self._agent, port, (host, local_port), on_error)


class Forward:
    """A local port that leads to a port of a sandbox; made by ``Sandbox.forward``.

    Attributes:
        host: the local address that it listens on.
        port: the local port that it listens on.
        remote_port: the port of the sandbox.
        last_error: why the last connection that failed did; None for none.
    """

    def __init__(
        self, agent: Agent, port: int, local: tuple[str, int], on_error: ErrorCallback | None
    ) -> None:
        self.host, self.port = local
        self.remote_port = port
        self.last_error: DSecError | None = None
        self._agent = agent
        self._on_error = on_error
        self._relay: Relay | None = None

    @property
    def address(self) -> str:
        """``host:port``, to connect to."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def __repr__(self) -> str:
        return f"Forward({self.address} to port {self.remote_port} of {self._agent.id})"

    async def __aenter__(self) -> Forward:
        if self._relay is not None:
            raise invalid("port", "this was opened before; call forward again")
        tell = from_thread(self._on_error)

        def failed(err: ConnectError) -> Callable[[], None]:
            why = self.last_error = self._agent.conn.error(err)
            return lambda: None if tell is None else tell(why)

        relay = self._agent.relay(self.remote_port, failed)
        try:
            await to_thread(relay.open, self.host, self.port)
        except OSError as err:
            raise invalid("local_port", f"cannot listen on {self.address}: {err}") from err
        self._relay = relay
        self.host, self.port = relay.host, relay.port
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Stop listening, and break the connections that are open. May be repeated."""
        if self._relay is not None:
            await to_thread(self._relay.close)


def check_port(field: str, port: int, least: int) -> None:
    """Check a TCP port."""
    if isinstance(port, bool) or not isinstance(port, int) or not least <= port <= 65535:
        raise invalid(field, f"{port!r} is not a port, a whole number from {least} to 65535")
