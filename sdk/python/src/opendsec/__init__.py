"""OpenDsec's SDK: make sandboxes, run commands and move files in them.

The client is async; :mod:`opendsec.sync` has the same without async::

    import asyncio
    from opendsec import DSecClient, DSecRunArgs

    async def main():
        async with DSecClient() as client:  # reads the OPENDSEC_* variables
            async with await client.run_sandbox(DSecRunArgs(image="root/py:3.12")) as sb:
                print((await sb.run_shell("python3 -V")).stdout)

    asyncio.run(main())

All times are in seconds, all sizes in the unit of their name. All errors are
:class:`DSecError`.
"""

from ._args import DSecRunArgs
from ._async.client import DSecClient
from ._async.images import Images
from ._async.ports import Forward
from ._async.sandbox import UNCHANGED, Sandbox, SandboxList
from ._async.shells import BackgroundShell
from ._values import (
    Decision,
    Denial,
    Domain,
    End,
    FileInfo,
    FileType,
    Image,
    Metrics,
    Progress,
    SandboxState,
    ShellBytesResult,
    ShellChunk,
    ShellLogs,
    ShellResult,
    SnapshotInfo,
)
from ._version import __version__
from .errors import (
    AlreadyExistsError,
    CapacityError,
    ConnectionError,
    DSecError,
    DSecWarning,
    InvalidArgumentError,
    NotFoundError,
    PermissionDeniedError,
    QuotaExceededError,
    SandboxEndedError,
    ShellError,
    TimeoutError,
    UnauthenticatedError,
    UnsupportedError,
    WrongStateError,
)

__all__ = [
    "UNCHANGED",
    "AlreadyExistsError",
    "BackgroundShell",
    "CapacityError",
    "ConnectionError",
    "DSecClient",
    "DSecError",
    "DSecRunArgs",
    "DSecWarning",
    "Decision",
    "Denial",
    "Domain",
    "End",
    "FileInfo",
    "FileType",
    "Forward",
    "Image",
    "Images",
    "InvalidArgumentError",
    "Metrics",
    "NotFoundError",
    "PermissionDeniedError",
    "Progress",
    "QuotaExceededError",
    "Sandbox",
    "SandboxEndedError",
    "SandboxList",
    "SandboxState",
    "ShellBytesResult",
    "ShellChunk",
    "ShellError",
    "ShellLogs",
    "ShellResult",
    "SnapshotInfo",
    "TimeoutError",
    "UnauthenticatedError",
    "UnsupportedError",
    "WrongStateError",
    "__version__",
]
