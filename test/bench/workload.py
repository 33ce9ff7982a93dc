"""What runs in the sandboxes that are measured: a small HTTP server with state.

    workload.py MEMORY_MB FILES

It touches so much memory, writes so many files of 1 KiB below /var/tmp/files,
then serves on port 8000 and on /var/tmp/socket, and makes /var/tmp/ready. It runs the same way as the
first process of a raw tool's container.

    /          what the memory and the files hold
    /sample    what one byte of each page holds, which is quicker
    /rewrite   the same, after writing to each page
    /stopped   for how many milliseconds at most it did not run since it was asked last
"""

from __future__ import annotations

import hashlib
import http.server
import os
import socketserver
import sys
import threading
import time
from pathlib import Path

PAGE = 4096
WHERE = Path("/var/tmp")


class Pulse(threading.Thread):
    """Finds out for how long at most the machine stood still."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._longest = 0.0

    def run(self) -> None:
        last = time.time()  # not monotonic, which may leave a standstill out
        while True:
            time.sleep(0.001)
            now = time.time()
            self._longest = max(self._longest, now - last)
            last = now

    def longest(self) -> float:
        """Returns it in milliseconds, and begins again."""
        longest, self._longest = self._longest, 0.0
        return longest * 1000


def main() -> None:
    megabytes, files = int(sys.argv[1]), int(sys.argv[2])
    # Random, so that no part of it is stored as zeros or twice.
    memory = bytearray(megabytes << 20)
    for at in range(0, len(memory), 1 << 20):
        memory[at : at + (1 << 20)] = os.urandom(1 << 20)
    pulse = Pulse()
    pulse.start()
    for i in range(files):
        path = WHERE / "files" / str(i // 1000) / str(i)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(os.urandom(1024))

    def answer(what: str) -> bytes:
        if what == "stopped":
            return f"{pulse.longest():.3f}".encode()
        if what == "":
            found = sum(len(names) for _, _, names in os.walk(WHERE / "files"))
            return f"{hashlib.sha256(memory).hexdigest()} {found}".encode()
        if what == "rewrite":
            memory[::PAGE] = os.urandom(len(memory[::PAGE]))
        return hashlib.sha256(memory[::PAGE]).hexdigest().encode()

    class OverTCP(http.server.BaseHTTPRequestHandler):
        """Answers a path."""

        def do_GET(self) -> None:
            body = answer(self.path.strip("/"))
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            """Say nothing."""

    class OverUnix(socketserver.StreamRequestHandler):
        """Answers a line, where there is no network."""

        def handle(self) -> None:
            self.wfile.write(answer(self.rfile.readline().decode().strip()))

    near = socketserver.ThreadingUnixStreamServer(str(WHERE / "socket"), OverUnix)
    threading.Thread(target=near.serve_forever, daemon=True).start()
    server = http.server.ThreadingHTTPServer(("0.0.0.0", 8000), OverTCP)
    (WHERE / "ready").touch()
    server.serve_forever()


if __name__ == "__main__":
    main()
