"""What the fake server says and how: errors as the API sends them, and plain HTTP."""

from __future__ import annotations

import base64
import json
from typing import Any

from connectrpc.code import Code
from connectrpc.errors import ConnectError
from connectrpc.request import RequestContext

from opendsec._gen.opendsec.v1 import sandbox_pb

Context = RequestContext[Any, Any]

_CODES = {"not_found": Code.NOT_FOUND, "invalid_argument": Code.INVALID_ARGUMENT, "unauthenticated": Code.UNAUTHENTICATED,
          "sandbox_ended": Code.FAILED_PRECONDITION, "capacity": Code.RESOURCE_EXHAUSTED,
          "wrong_state": Code.FAILED_PRECONDITION, "unavailable": Code.UNAVAILABLE, "unsupported": Code.UNIMPLEMENTED}  # fmt: skip


def fault(kind: str, message: str, **detail: Any) -> ConnectError:
    """An error as the API sends it."""
    info = sandbox_pb.ErrorInfo(kind=kind, request_id="req-1", message=message, **detail)
    return ConnectError(_CODES[kind], message, details=[info])


def error_json(error: ConnectError) -> str:
    """An error as it is the body of an answer."""
    info = error.details[0]
    value = base64.b64encode(info.message_bytes).decode().rstrip("=")
    detail = {"type": info.type_name, "value": value}
    return json.dumps({"code": error.code.value, "message": error.message, "details": [detail]})


def unanswered() -> ConnectError:
    """The error of a call that a pause cut off before its answer."""
    return fault("unavailable", "the sandbox was paused before the call was answered", retryable=True)


async def read_body(receive: Any) -> bytes:
    """The whole body of a request."""
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ConnectionError("the client went away")
        body += message.get("body", b"")
        if not message.get("more_body"):
            return bytes(body)


async def answer(send: Any, status: int, body: str | bytes, sized: bool = True) -> None:
    """Answer a request; a text is JSON."""
    data = body.encode() if isinstance(body, str) else body
    headers = [
        (b"content-type", b"application/json" if isinstance(body, str) else b"application/octet-stream")
    ]
    if sized:
        headers.append((b"content-length", str(len(data)).encode()))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    for at in range(0, len(data), 1 << 20):
        await send({"type": "http.response.body", "body": data[at : at + (1 << 20)], "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})
