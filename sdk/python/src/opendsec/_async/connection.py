"""One connection to the API: where it is, who calls, and how a call is made.

It knows nothing of sandboxes; it makes calls, repeats those that may be
repeated, and turns every failure into one of :mod:`opendsec.errors`.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Mapping
from typing import Protocol, TypeVar
from urllib.parse import urlsplit

from connectrpc.errors import ConnectError
from pyqwest import Client, HTTPTransport, HTTPVersion

from .. import _wire
from .._args import invalid
from .._fetch import Bulk
from .._version import USER_AGENT
from ..errors import ConnectionError, DSecError
from ._concurrent import reraise_cancelled, settle_at_exit, sleep

REQ = TypeVar("REQ", contravariant=True)
RES = TypeVar("RES", covariant=True)
T = TypeVar("T")

# Seconds between the attempts to reach a server: one that was never reached is
# probably not there, one that was is probably being restarted.
_PAUSES_FIRST = (0.1, 0.4, 1.2)
PAUSES = (0.0, 0.1, 0.3, 1.0, 2.0, 4.0, 4.0)


class Unary(Protocol[REQ, RES]):
    """A method of a generated client."""

    def __call__(
        self, request: REQ, *, headers: Mapping[str, str] | None = None, timeout_ms: int | None = None
    ) -> Awaitable[RES]:
        """Make the call."""


class Connection:
    """See the module. Its arguments are those of DSecClient."""

    def __init__(self, addr: str | None, token: str | None, ca: str | bytes | None, timeout: float) -> None:
        self.addr = _address(addr or os.environ.get("OPENDSEC_ADDR"))
        self.timeout = timeout
        self.timeout_ms = max(1, int(timeout * 1000))
        self.headers = {"authorization": f"Bearer {_token(token)}", "user-agent": USER_AGENT}
        secure = self.addr.startswith("https://")
        pem = _certificates(ca or os.environ.get("OPENDSEC_CA")) if secure else None
        self._transport = HTTPTransport(
            tls_ca_cert=pem,
            tls_include_system_certs=secure and pem is None,
            # One connection carries all calls; cleartext can do so only where it is agreed before.
            http_version=HTTPVersion.HTTP2 if secure else None,
            # Bytes are exact: nothing is decoded on the way.
            enable_gzip=False,
            enable_brotli=False,
            enable_zstd=False,
            follow_redirects=False,
        )
        self.http = Client(self._transport)
        self._certificates = pem
        self._bulk: Bulk | None = None
        self._tunnels: Bulk | None = None
        self._reached = False
        self._closed = False
        settle_at_exit()

    async def close(self) -> None:
        """Close what is open."""
        self._closed = True
        for apart in (self._bulk, self._tunnels):
            if apart is not None:
                apart.close()
        await self._transport.aclose()

    def bulk(self) -> Bulk:
        """Return the connections for large answers."""
        if self._bulk is None:
            self._bulk = Bulk(self.addr.startswith("https://"), self._certificates, self.timeout)
        return self._bulk

    def tunnels(self) -> Bulk:
        """Return the connections for tunnels, which may be silent for as long as they like."""
        if self._tunnels is None:
            self._tunnels = Bulk(self.addr.startswith("https://"), self._certificates, None)
        return self._tunnels

    async def call(
        self,
        method: Unary[REQ, T],
        request: REQ,
        *,
        headers: Mapping[str, str] | None = None,
        once: bool = False,
        timeout_ms: int | None = None,
    ) -> T:
        """Make a call, again if the server was not reached.

        Args:
            method: the generated client's method.
            request: its argument.
            headers: instead of the connection's own.
            once: True for a call that must not happen twice: it is repeated
                only when it was surely not sent.
            timeout_ms: for the answer; None for the connection's own, 0 for no limit.
        """
        may_repeat = _wire.never_sent if once else _wire.unreachable
        if timeout_ms is None:
            timeout_ms = self.timeout_ms
        pauses = iter(PAUSES if self._reached else _PAUSES_FIRST)
        while True:
            try:
                answer = await method(request, headers=headers or self.headers, timeout_ms=timeout_ms or None)
                self._reached = True
                return answer
            except ConnectError as err:
                reraise_cancelled(err)
                pause = next(pauses, None)
                self._reached = self._reached or not _wire.unreachable(err)
                if not may_repeat(err):
                    raise self.error(err) from None  # what the server said is all there is
                if pause is None or self.hopeless(err):
                    raise self.error(err) from err
            await sleep(pause)

    def hopeless(self, err: ConnectError) -> bool:
        """Report whether a further attempt to reach the server would fail the same way."""
        return self._closed or _wire.distrusted(err)

    def error(self, err: ConnectError) -> DSecError:
        """Turn a call's failure into one of our errors."""
        if self._closed and _wire.unreachable(err):
            return ConnectionError("this client is closed; make a new one")
        return _wire.error(err, self.addr)


def _address(addr: str | None) -> str:
    if not addr:
        raise invalid("addr", "no address; set OPENDSEC_ADDR (https://host:port) or give addr=")
    parts = urlsplit(addr)
    try:
        whole = parts.scheme in ("https", "http") and parts.hostname and (parts.port or True)
    except ValueError:
        whole = False
    if not whole or parts.path.strip("/") or parts.query or parts.username:
        raise invalid("addr", f"{addr!r} is not an address of the form https://host:port")
    if parts.scheme == "http" and parts.hostname not in ("127.0.0.1", "::1", "localhost"):
        raise invalid("addr", f"{addr!r} would send the token in the clear; use https://")
    return addr.rstrip("/")


def _token(token: str | None) -> str:
    token = token or os.environ.get("OPENDSEC_TOKEN")
    if not token:
        raise invalid("token", "no token; set OPENDSEC_TOKEN or give token=")
    token = token.strip()
    if not token.isascii() or not token.isprintable() or " " in token:
        raise invalid("token", "the token holds characters that no token has")
    return token


def _certificates(ca: str | bytes | None) -> bytes | None:
    """Return the PEM text of the authorities to trust; None for the system's."""
    if not ca:
        return None
    text = ca.encode() if isinstance(ca, str) else ca
    if b"-----BEGIN CERTIFICATE-----" in text:
        return text
    try:
        with open(ca, "rb") as file:
            pem = file.read()
    except OSError as err:
        raise invalid("ca", f"cannot read {ca!r}: {err.strerror}; OPENDSEC_CA must name a PEM file") from err
    if b"-----BEGIN CERTIFICATE-----" not in pem:
        raise invalid("ca", f"{ca!r} holds no certificate in PEM form")
    return pem
