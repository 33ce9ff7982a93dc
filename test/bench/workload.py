"""What runs in the sandboxes that are measured: a small HTTP server with state.

    workload.py MEMORY_MB FILES

It touches so much memory, writes so many files of 1 KiB below /var/tmp/files,
then serves on port 8000 and makes /var/tmp/ready. It runs the same way as the
first process of a raw tool's container.
"""

from __future__ import annotations

import hashlib
import http.server
import os
import sys
from pathlib import Path

WHERE = Path("/var/tmp")


def main() -> None:
    megabytes, files = int(sys.argv[1]), int(sys.argv[2])
    # Random, so that no part of it is stored as zeros or twice.
    memory = b"".join(os.urandom(1 << 20) for _ in range(megabytes))
    for i in range(files):
        path = WHERE / "files" / str(i // 1000) / str(i)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(os.urandom(1024))

    class Handler(http.server.BaseHTTPRequestHandler):
        """Answers with what the memory and the files hold."""

        def do_GET(self) -> None:
            found = sum(len(names) for _, _, names in os.walk(WHERE / "files"))
            body = f"{hashlib.sha256(memory).hexdigest()} {found}".encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            """Say nothing."""

    server = http.server.ThreadingHTTPServer(("0.0.0.0", 8000), Handler)
    (WHERE / "ready").touch()
    server.serve_forever()


if __name__ == "__main__":
    main()
