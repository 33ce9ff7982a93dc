"""The errors of this package: one class for each thing a caller may act on.

Every one is a :class:`DSecError`, its text is one line of plain English that
says what was tried and what to do. Two of them carry the name of a builtin
(:class:`TimeoutError`, :class:`ConnectionError`) and are also that builtin.
"""

from __future__ import annotations

import builtins
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ._values import Domain, End, SandboxState, ShellBytesResult, ShellResult

__all__ = [
    "AlreadyExistsError",
    "CapacityError",
    "ConnectionError",
    "DSecError",
    "DSecWarning",
    "InvalidArgumentError",
    "NotFoundError",
    "PermissionDeniedError",
    "QuotaExceededError",
    "SandboxEndedError",
    "ShellError",
    "TimeoutError",
    "UnauthenticatedError",
    "UnsupportedError",
    "WrongStateError",
]


class DSecWarning(UserWarning):
    """What the caller of a sandbox should know, such as a network rule that is not in force."""


class DSecError(Exception):
    """Something failed.

    Attributes:
        message: what was tried, with which value, and what to do.
        request_id: under this id the server's log has more; None when no server answered.
        domain: whose doing it is (``infra``, ``user``, ``policy``, ``quota``); None when unknown.
            Trainers leave ``infra`` out of a batch.
        retryable: whether the same call may succeed later.
    """

    def __init__(
        self,
        message: str,
        *,
        request_id: str | None = None,
        domain: Domain | None = None,
        retryable: bool = False,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.request_id = request_id
        self.domain = domain
        self.retryable = retryable

    def __str__(self) -> str:
        return self.message


class InvalidArgumentError(DSecError):
    """An argument is wrong. ``field`` names it where one argument is to blame."""

    field: str | None = None


class UnauthenticatedError(DSecError):
    """The token is missing, unknown, malformed or ended."""


class PermissionDeniedError(DSecError):
    """The caller may not do this."""


class NotFoundError(DSecError):
    """There is no such sandbox, image, shell or path, or the caller may not see it."""


class AlreadyExistsError(DSecError):
    """A thing of that name is there already."""


class WrongStateError(DSecError):
    """The sandbox is not in a state that allows this. ``state`` is the one it is in."""

    state: SandboxState | None = None


class UnsupportedError(DSecError):
    """The backend cannot do this. ``backends`` are those that can."""

    backends: tuple[str, ...] = ()


class QuotaExceededError(DSecError):
    """A quota or a limit of the sandbox is used up."""


class CapacityError(DSecError):
    """No node has room for this at the moment."""


class TimeoutError(DSecError, builtins.TimeoutError):
    """Time ran out. ``result`` keeps the output that a command made until then."""

    result: ShellResult | ShellBytesResult | None = None


class ConnectionError(DSecError, builtins.ConnectionError):
    """The server, or the sandbox, could not be reached or the connection broke.

    Whether the call had an effect is unknown, unless its documentation says
    that it may be repeated.
    """


class SandboxEndedError(DSecError):
    """The sandbox has ended. ``end`` says how and why, where that is known."""

    end: End | None = None


class ShellError(DSecError):
    """A command failed and ``check=True`` was given. ``result`` is its result."""

    result: ShellResult | ShellBytesResult

    def __init__(self, message: str, result: ShellResult | ShellBytesResult) -> None:
        super().__init__(message)
        self.result = result

    def __reduce__(self) -> tuple[type[ShellError], tuple[str, ShellResult | ShellBytesResult]]:
        return type(self), (self.message, self.result)
