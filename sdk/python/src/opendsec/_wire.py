"""Between the plain values of this package and the messages on the wire.

This is the one place where generated types become ours, and where an error
of the transport or of the server becomes one of :mod:`opendsec.errors`.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import builtins
import json
from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Any

from connectrpc.code import Code
from connectrpc.errors import ConnectError, ErrorDetail
from protobuf.wkt import Any as WireAny
from protobuf.wkt import Duration, Timestamp

from . import errors
from ._args import DSecRunArgs
from ._gen.filesystem import filesystem_pb
from ._gen.opendsec.v1 import image_pb, network_pb, sandbox_pb
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
    SnapshotInfo,
)

_ERROR_INFO = "opendsec.v1.ErrorInfo"

_LONGEST = 1000  # characters of a message

_STATES: dict[int, SandboxState] = {
    int(getattr(sandbox_pb.State, state.name)): state for state in SandboxState
}
_DOMAINS: dict[int, Domain] = {int(getattr(sandbox_pb.Domain, d.name)): d for d in Domain}
_FILE_TYPES: dict[int, FileType] = {
    int(filesystem_pb.FileType.FILE): FileType.FILE,
    int(filesystem_pb.FileType.DIRECTORY): FileType.DIRECTORY,
    int(filesystem_pb.FileType.SYMLINK): FileType.SYMLINK,
}

# What each kind of error is here. The kinds are those of the server's table.
_KINDS: dict[str, type[errors.DSecError]] = {
    "invalid_argument": errors.InvalidArgumentError,
    "unauthenticated": errors.UnauthenticatedError,
    "permission_denied": errors.PermissionDeniedError,
    "not_found": errors.NotFoundError,
    "already_exists": errors.AlreadyExistsError,
    "wrong_state": errors.WrongStateError,
    "unsupported": errors.UnsupportedError,
    "quota_exceeded": errors.QuotaExceededError,
    "capacity": errors.CapacityError,
    "timeout": errors.TimeoutError,
    "unavailable": errors.ConnectionError,
    "sandbox_ended": errors.SandboxEndedError,
}

# What an error without our detail is, such as one of the agent in a sandbox.
_CODES: dict[Code, type[errors.DSecError]] = {
    Code.INVALID_ARGUMENT: errors.InvalidArgumentError,
    Code.OUT_OF_RANGE: errors.InvalidArgumentError,
    Code.UNAUTHENTICATED: errors.UnauthenticatedError,
    Code.PERMISSION_DENIED: errors.PermissionDeniedError,
    Code.NOT_FOUND: errors.NotFoundError,
    Code.ALREADY_EXISTS: errors.AlreadyExistsError,
    Code.FAILED_PRECONDITION: errors.WrongStateError,
    Code.UNIMPLEMENTED: errors.UnsupportedError,
    Code.RESOURCE_EXHAUSTED: errors.QuotaExceededError,
    Code.DEADLINE_EXCEEDED: errors.TimeoutError,
    Code.UNAVAILABLE: errors.ConnectionError,
}

_HTTP_CODES: dict[int, Code] = {
    400: Code.INVALID_ARGUMENT,
    401: Code.UNAUTHENTICATED,
    403: Code.PERMISSION_DENIED,
    404: Code.NOT_FOUND,
    409: Code.ALREADY_EXISTS,
    413: Code.RESOURCE_EXHAUSTED,
    429: Code.RESOURCE_EXHAUSTED,
    501: Code.UNIMPLEMENTED,
    502: Code.UNAVAILABLE,
    503: Code.UNAVAILABLE,
    504: Code.UNAVAILABLE,
    507: Code.RESOURCE_EXHAUSTED,
}


def spec(args: DSecRunArgs) -> sandbox_pb.SandboxSpec:
    """Return what is asked for as the API's message."""
    on_idle = sandbox_pb.OnIdle.PAUSE if args.on_idle == "pause" else sandbox_pb.OnIdle.STOP
    return sandbox_pb.SandboxSpec(
        image=args.image,
        backend=args.backend,
        cpu_cores_limit=float(args.cpu_cores_limit or 0),  # 0 means the default
        memory_limit_mb=args.memory_limit_mb or 0,
        disk_limit_mb=args.disk_limit_mb or 0,
        pids_limit=args.pids_limit or 0,
        ttl_running_stop=duration(args.ttl_running_stop),
        ttl_lifetime=duration(args.ttl_lifetime),
        on_idle=on_idle,
        env=dict(args.env or {}),
        workdir=args.workdir or "",
        user=args.user or "",
        hostname=args.hostname or "",
        labels=dict(args.labels or {}),
        metadata=dict(args.metadata or {}),
        network_rules=rules(args.network_rules),
        auto_resume=args.auto_resume,
    )


def rules(value: Mapping[str, bool] | None) -> network_pb.NetworkRules | None:
    """Return network rules as a message; None stays absent."""
    return None if value is None else network_pb.NetworkRules(rules=dict(value))


def duration(value: float | None) -> Duration | None:
    """Return seconds as a message; None stays absent."""
    return None if value is None else Duration.from_nanos(round(value * 1e9))


def moment(value: Timestamp | None) -> datetime | None:
    """Return a time in UTC; None when absent."""
    if value is None:
        return None
    return value.to_datetime().astimezone(timezone.utc)


def state(value: int) -> SandboxState | None:
    """Return a state; None for one that is unknown here."""
    return _STATES.get(int(value))


def state_to_wire(value: SandboxState | str) -> sandbox_pb.State:
    """Return a state's number; the names may be written in lower case."""
    try:
        known = SandboxState(str(value).upper())
    except ValueError:
        names = ", ".join(s.value for s in SandboxState)
        err = errors.InvalidArgumentError(f"state: {value!r} is not a state; there are {names}")
        err.field = "state"
        raise err from None
    return sandbox_pb.State[known.name]


def end(value: sandbox_pb.End | None) -> End | None:
    """Return how a sandbox ended; None when it lives."""
    if value is None:
        return None
    return End(
        reason=value.reason,
        domain=_DOMAINS.get(int(value.domain)),
        detail=value.detail,
        time=moment(value.time),
    )


def image(value: image_pb.Image) -> Image:
    """Return an image."""
    return Image(
        name=value.name,
        digest=value.digest,
        kind=value.kind,
        size=value.size,
        created_at=moment(value.created_at),
        source=value.source,
        architecture=value.architecture,
        labels=dict(value.config.labels) if value.config is not None else {},
        snapshot=snapshot_info(value.snapshot),
        network_rules=dict(value.network_rules.rules) if value.network_rules is not None else None,
    )


def snapshot_info(value: image_pb.SnapshotInfo | None) -> SnapshotInfo | None:
    """Return what a snapshot with memory was taken of; None for a plain image."""
    if value is None:
        return None
    return SnapshotInfo(
        backend=value.backend,
        virtualization=value.virtualization,
        runtime=value.runtime,
        kernel=value.kernel,
        cpu_features=tuple(value.cpu_features),
        agent=value.agent,
        cpu_cores_limit=value.cpu_cores_limit,
        memory_limit_mb=value.memory_limit_mb,
        disk_limit_mb=value.disk_limit_mb,
        pids_limit=value.pids_limit,
        nodes=tuple(value.nodes),
    )


def progress(value: image_pb.ImportImageResponse) -> Progress:
    """Return how far an import is."""
    return Progress(step=value.step, detail=value.detail, done=value.done, total=value.total)


def metrics(value: sandbox_pb.Metrics) -> Metrics:
    """Return what a sandbox uses."""
    return Metrics(
        time=moment(value.time),
        cpu_seconds=value.cpu_time.to_seconds() if value.cpu_time is not None else 0.0,
        cpu_cores_limit=value.cpu_cores_limit,
        memory_bytes=value.memory_bytes,
        memory_limit_bytes=value.memory_limit_bytes,
        disk_bytes=value.disk_bytes,
        disk_limit_bytes=value.disk_limit_bytes,
        pids=value.pids,
        shared_memory_bytes=value.shared_memory_bytes,
        network_sent_bytes=value.network_sent_bytes,
        network_received_bytes=value.network_received_bytes,
        network_flows=value.network_flows,
        network_denied=value.network_denied,
    )


def decision(value: sandbox_pb.NetworkDecision) -> Decision:
    """Return whether something may be reached."""
    return Decision(allow=value.allow, rule=value.rule or None, why=value.why)


def denial(value: sandbox_pb.Denial) -> Denial:
    """Return something that was denied."""
    return Denial(
        time=moment(value.time),
        count=value.count,
        kind=value.kind,
        name=value.name or None,
        address=value.address or None,
        port=value.port or None,
        protocol=value.protocol or None,
        rule=value.rule or None,
        why=value.why,
    )


def file_info(value: filesystem_pb.EntryInfo) -> FileInfo:
    """Return an entry of the file tree."""
    link = value.is_symlink or int(value.type) == int(filesystem_pb.FileType.SYMLINK)
    kind = FileType.SYMLINK if link else _FILE_TYPES.get(int(value.type), FileType.OTHER)
    return FileInfo(
        name=value.name,
        path=value.path,
        type=kind,
        size=value.size,
        mode=value.mode,
        owner=value.owner,
        group=value.group,
        modified=moment(value.modified_time) or datetime.fromtimestamp(0, timezone.utc),
        link_target=value.symlink_target or None,
    )


def unreachable(err: ConnectError) -> bool:
    """Report whether the far end could not be reached or the connection broke."""
    info = _info(err)
    if info is not None:
        return info.kind == "unavailable"
    cause = err.__cause__
    if isinstance(cause, builtins.ConnectionError):
        return True
    if isinstance(cause, (asyncio.CancelledError, builtins.TimeoutError, asyncio.TimeoutError)):
        return False
    # A server that cancels a call of ours is going down.
    ended_early = err.message.startswith("protocol error: ") or err.code is Code.CANCELED
    return cause is not None or err.code is Code.UNAVAILABLE or ended_early


def never_sent(err: ConnectError) -> bool:
    """Report whether err happened before anything reached the server."""
    return isinstance(err.__cause__, builtins.ConnectionError)


def paused(err: ConnectError) -> bool:
    """Report whether err says that the sandbox is paused."""
    info = _info(err)
    return info is not None and info.kind == "wrong_state" and info.state == sandbox_pb.State.PAUSED


def distrusted(err: ConnectError) -> bool:
    """Report whether the server's certificate was refused, which no further attempt changes."""
    return err.__cause__ is not None and "certificate" in str(err.__cause__).lower()


def error(err: ConnectError, where: str = "") -> errors.DSecError:
    """Turn an error of a call into one of ours.

    Args:
        err: what the call raised.
        where: the server's address, to be named when it could not be reached.
    """
    info = _info(err)
    if info is not None:
        return error_from_info(info, err.message)
    if unreachable(err):
        return _lost(err, where)
    if err.code is Code.DEADLINE_EXCEEDED and err.__cause__ is not None:
        return errors.TimeoutError(f"no answer from {where or 'the server'} in time", retryable=True)
    return _CODES.get(err.code, errors.DSecError)(_one_line(err.message or err.code.value))


def error_from_info(info: sandbox_pb.ErrorInfo, message: str = "") -> errors.DSecError:
    """Turn the detail that each of the API's errors carries into an error."""
    kind = _KINDS.get(info.kind, errors.DSecError)
    text = _one_line(message or info.message or info.kind)
    if kind is errors.WrongStateError and info.state == sandbox_pb.State.PAUSED and "resume" not in text:
        text += "; resume it first"
    out = kind(
        text,
        request_id=info.request_id or None,
        domain=_DOMAINS.get(int(info.domain)),
        retryable=info.retryable,
    )
    if isinstance(out, errors.InvalidArgumentError):
        out.field = info.field.removeprefix("spec.") or None
    elif isinstance(out, errors.WrongStateError):
        out.state = state(info.state)
    elif isinstance(out, errors.UnsupportedError):
        out.backends = tuple(info.backends)
    elif isinstance(out, errors.SandboxEndedError):
        out.end = end(info.end)
    return out


def _one_line(text: str) -> str:
    """Return a message without line ends, and without the middle of one that is very long."""
    text = " ".join(text.split())
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST // 2]} … {text[-_LONGEST // 3 :]}"


def http_error(status: int, body: bytes) -> ConnectError:
    """Read the error of a plain HTTP call in either of the two forms it comes in.

    The API answers ``{"code": "not_found", "message": …, "details": […]}``, the
    agent in a sandbox ``{"code": 404, "message": …}``.
    """
    try:
        data = json.loads(body)
    except ValueError:
        data = None
    if not isinstance(data, Mapping):
        data = {}
    code = _HTTP_CODES.get(status, Code.INTERNAL)
    if isinstance(data.get("code"), str):
        try:
            code = Code(data["code"])
        except ValueError:
            code = Code.UNKNOWN
    message = data.get("message")
    if not isinstance(message, str) or not message:
        message = f"HTTP status {status}"
    return ConnectError(code, message, details=_details(data.get("details")))


def _details(raw: Any) -> list[ErrorDetail]:
    out: list[ErrorDetail] = []
    for item in raw if isinstance(raw, list) else []:
        if not isinstance(item, Mapping) or item.get("type") != _ERROR_INFO:
            continue
        try:
            value = base64.b64decode(str(item.get("value", "")) + "===")
        except binascii.Error:
            continue
        out.append(ErrorDetail(WireAny(type_url=f"type.googleapis.com/{_ERROR_INFO}", value=value)))
    return out


def _info(err: ConnectError) -> sandbox_pb.ErrorInfo | None:
    for detail in err.details:
        if detail.type_name == _ERROR_INFO:
            return detail.value(sandbox_pb.ErrorInfo)
    return None


def _lost(err: ConnectError, where: str) -> errors.ConnectionError:
    why = (str(err.__cause__) if err.__cause__ is not None else "") or err.message or "no reason given"
    why = why.rpartition("client error (Connect): ")[2]  # the rest names the request again
    where = where or "the server"
    if distrusted(err):
        text = f"{where} is not trusted: {why}; OPENDSEC_CA must name the CA that the server was set up with"
    elif never_sent(err):
        text = f"cannot reach {where}: {why}; check OPENDSEC_ADDR and that the server runs"
    else:
        text = f"the connection to {where} broke: {why}"
    return errors.ConnectionError(_one_line(text), domain=Domain.INFRA, retryable=True)
