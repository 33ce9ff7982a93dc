"""Tunnels of the fake server: to TCP servers of this machine, which stand for a sandbox's."""

from __future__ import annotations

import asyncio
import socket
import struct
from typing import Any

TUNNEL = b"application/x-opendsec-tunnel"


def frame(kind: int, payload: bytes = b"") -> bytes:
    """A frame of an answer."""
    return struct.pack(">BI", kind, len(payload)) + payload


class Tunnels:
    """Those of one sandbox."""

    def __init__(self) -> None:
        self.why: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.slivers = False  # answers are sent byte by byte

    def cut(self, why: str) -> None:
        """Cut those that are open; why is the error's JSON, "" to cut without a word."""
        before, self.why = self.why, asyncio.get_running_loop().create_future()
        before.set_result(why)

    async def open(self, port: int, receive: Any, send: Any) -> bool:
        """Answer a request with a tunnel; False when nothing listens."""
        why = self.why
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            return False
        headers = [(b"content-type", TUNNEL)]
        await send({"type": "http.response.start", "status": 200, "headers": headers})

        async def say(data: bytes) -> None:
            for piece in [data[i : i + 1] for i in range(len(data))] if self.slivers else [data]:
                await send({"type": "http.response.body", "body": piece, "more_body": True})

        def break_off() -> None:
            raw = writer.get_extra_info("socket")
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()

        async def up() -> None:
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    break_off()
                    return
                writer.write(message.get("body", b""))
                await writer.drain()
                if not message.get("more_body"):
                    writer.write_eof()
                    return

        async def down() -> None:
            while data := await reader.read(64 << 10):
                await say(frame(0, data))
            await say(frame(1))

        await say(b"")
        both: asyncio.Future[Any] = asyncio.gather(up(), down())
        waited: list[asyncio.Future[Any]] = [both, why]
        await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        if why.done() and not both.done():
            both.cancel()
            break_off()
            if why.result():
                await say(frame(2, why.result().encode()))
        elif both.exception() is None:
            await say(frame(2))
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        writer.close()
        return True
