"""What the tests of pauses, copies and snapshots have in common: a program with state, and how it is asked.

The program keeps a value, a counter and a table in memory, appends to two files, and holds a TCP
connection to itself open. It is started once; nothing of it is ever started again.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shlex
import time
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

from conftest import IMAGE
from opendsec import DSecClient, DSecRunArgs, DSecWarning, Sandbox

DOC = Path(__file__).parents[2] / "docs" / "concepts" / "state.md"

WORKER = '''
import hashlib, http.server, json, os, random, socket, threading, time, uuid
exec(open("/srv/hook.py").read())

value = os.urandom(16).hex()  # made once
table = bytearray(8 << 20)
counter = 0
lock = threading.Lock()
lines, blocks = open("/var/tmp/lines", "ab", 0), open("/var/tmp/blocks", "ab", 0)

def block(i):
    return hashlib.sha256(b"%d" % i).digest() * 8

def work():
    global counter
    while True:
        with lock:
            counter += 1
            at = counter * 4099 % len(table)
            table[at] = (table[at] + 1) % 256
            lines.write(b"%d\\n" % counter)
            blocks.write(block(counter))
        time.sleep(0.005)

def check():
    """Everything that was written, against what it must be."""
    want = bytearray(len(table))
    for i in range(1, counter + 1):
        at = i * 4099 % len(want)
        want[at] = (want[at] + 1) % 256
    if want != table:
        return "the table in memory is wrong"
    if open("/var/tmp/lines", "rb").read() != b"".join(b"%d\\n" % i for i in range(1, counter + 1)):
        return "/var/tmp/lines is wrong"
    with open("/var/tmp/blocks", "rb") as file:
        for i in range(1, counter + 1):
            if file.read(256) != block(i):
                return f"/var/tmp/blocks is wrong at block {i}"
        if file.read(1):
            return "/var/tmp/blocks is too long"
    return "right"

loop = socket.create_server(("127.0.0.1", 0))
near = socket.create_connection(loop.getsockname())
far, _ = loop.accept()

def looped():
    near.sendall(b"ping")
    return far.recv(4).decode()

def look():
    with lock:
        return {"value": value, "counter": counter, "pid": os.getpid(), "loop": looped(),
                "wall": time.time(), "mono": time.monotonic()}

def chance():
    return {"plain": random.getrandbits(128), "hooked": fresh().getrandbits(128), "uuid4": str(uuid.uuid4())}

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == "/check":
            with lock:
                body = check()
        else:
            body = {"/look": look, "/chance": chance}[self.path]()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, *a):
        pass

threading.Thread(target=work, daemon=True).start()
http.server.ThreadingHTTPServer(("127.0.0.1", 8000), Handler).serve_forever()
'''

ASK = "import json,sys,urllib.request as u; print(u.urlopen('http://127.0.0.1:8000/' + sys.argv[1]).read().decode())"


def hook() -> str:
    """The example in the documentation of a program that notices a new life."""
    text = DOC.read_text()
    return text.split("```python\n", 1)[1].split("```", 1)[0]


async def begin(sb: Sandbox) -> dict[str, Any]:
    """Start the program and wait until it answers."""
    await sb.write_file("/srv/hook.py", hook())
    await sb.write_file("/srv/worker.py", WORKER)
    await sb.write_file("/srv/ask.py", ASK)
    await sb.run_shell("nohup python3 /srv/worker.py >/var/tmp/worker.log 2>&1 &", check=True)
    await sb.run_shell(
        "until python3 /srv/ask.py look >/dev/null 2>&1; do sleep 0.05; done", timeout=60, check=True
    )
    return await look(sb)


async def ask(sb: Sandbox, what: str) -> Any:
    r = await sb.run_shell(f"python3 /srv/ask.py {shlex.quote(what)}", timeout=120, check=True)
    return json.loads(r.stdout)


async def look(sb: Sandbox) -> dict[str, Any]:
    found: dict[str, Any] = await ask(sb, "look")
    assert found["loop"] == "ping"
    return found


async def same_program(sb: Sandbox, before: dict[str, Any]) -> dict[str, Any]:
    """Check that it is the program that it was, further on."""
    now = await look(sb)
    assert (now["value"], now["pid"]) == (before["value"], before["pid"])
    assert now["counter"] > before["counter"]
    return now


async def all_right(sb: Sandbox) -> None:
    assert await ask(sb, "check") == "right"


async def out(sb: Sandbox, cmd: str) -> str:
    return (await sb.run_shell(cmd, timeout=60, check=True)).stdout.strip()


@contextlib.asynccontextmanager
async def ended(*sandboxes: Sandbox) -> AsyncIterator[None]:
    """Stops the sandboxes in the end."""
    try:
        yield
    finally:
        await asyncio.gather(*(sb.stop() for sb in sandboxes))


def small(backend: str, image: str = IMAGE, **more: Any) -> DSecRunArgs:
    """A sandbox that ends by itself if a test does not end it."""
    return DSecRunArgs(image, backend=backend, **({"memory_limit_mb": 192, "ttl_lifetime": 900} | more))


def run(work: Callable[[DSecClient], Awaitable[None]]) -> None:
    """Runs a test with a client."""

    async def main() -> None:
        async with DSecClient() as client:
            await work(client)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DSecWarning)
        asyncio.run(main())


def name(what: str) -> str:
    """A name for an image that no other test has."""
    return f"root/demo/{what}:{time.time_ns()}"


async def until(what: str, true: Callable[[], Awaitable[bool]], within: float = 30) -> None:
    """Waits until something is so."""
    limit = time.monotonic() + within
    while not await true():
        assert time.monotonic() < limit, f"it did not come true in {within} s: {what}"
        await asyncio.sleep(0.05)
