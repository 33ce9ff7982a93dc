"""The same as :mod:`opendsec` without async, made from the same source.

from opendsec.sync import DSecClient, DSecRunArgs

with DSecClient() as client, client.run_sandbox(DSecRunArgs(image="root/py:3.12")) as sb:
    print(sb.run_shell("python3 -V").stdout)
"""

from . import (
    UNCHANGED,
    AlreadyExistsError,
    CapacityError,
    ConnectionError,
    Decision,
    Denial,
    Domain,
    DSecError,
    DSecRunArgs,
    DSecWarning,
    End,
    FileInfo,
    FileType,
    Image,
    InvalidArgumentError,
    Metrics,
    NotFoundError,
    PermissionDeniedError,
    Progress,
    QuotaExceededError,
    SandboxEndedError,
    SandboxState,
    ShellBytesResult,
    ShellChunk,
    ShellError,
    ShellLogs,
    ShellResult,
    SnapshotInfo,
    TimeoutError,
    UnauthenticatedError,
    UnsupportedError,
    WrongStateError,
    __version__,
)
from ._sync.client import DSecClient
from ._sync.images import Images
from ._sync.ports import Forward
from ._sync.sandbox import Sandbox, SandboxList
from ._sync.shells import BackgroundShell

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
