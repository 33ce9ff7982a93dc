"""A search over a tree of forks: each node goes on where the one before it was, and the rest is let go of."""

from __future__ import annotations

import asyncio
import json
import random

from opendsec import DSecClient, Sandbox
from stateful import small
from test_restart import kill_and_start, leaks

WIDTH, DEPTH, LOADED_MB = 8, 4, 300

AGENT = f"""
import hashlib, json, os, socketserver

loaded = bytearray({LOADED_MB} << 20)
for at in range(0, len(loaded), 1 << 20):
    loaded[at : at + (1 << 20)] = os.urandom(1 << 20)
thought = bytearray(4 << 20)  # what it makes of its way
way = []

def think():
    one = hashlib.sha256(json.dumps(way).encode()).digest()
    return one * (len(thought) // len(one))

class Answer(socketserver.StreamRequestHandler):
    def handle(self):
        step = json.loads(self.rfile.readline())
        if step is not None:
            way.append(step)
            thought[:] = think()
        right = not way or thought == think()
        self.wfile.write(json.dumps([hashlib.sha256(loaded).hexdigest(), way, right]).encode())

server = socketserver.UnixStreamServer("/var/tmp/agent", Answer)
open("/var/tmp/ready", "w").close()
server.serve_forever()
"""

ASK = """python3 -c 'import socket
s = socket.socket(socket.AF_UNIX)
s.connect("/var/tmp/agent")
s.sendall(b"{step}\\n")
print(s.makefile().read())'"""


async def ask(sb: Sandbox, step: int | None = None) -> list[object]:
    """Has the agent take a step, or none, and returns what it holds."""
    said = await sb.run_shell(ASK.format(step=json.dumps(step)), timeout=120, check=True)
    answer: list[object] = json.loads(said.stdout)
    return answer


async def grow(ids: list[str], loaded: str, way: list[int], depth: int) -> tuple[list[str], list[int]]:
    """Forks the last of the nodes, has each copy take a step of its own, and goes on with one of them."""
    async with DSecClient() as client:
        for _ in range(depth):
            copies = await (await client.get(ids[-1])).fork(count=WIDTH)
            said = await asyncio.gather(*(ask(copy, step) for step, copy in enumerate(copies)))
            assert said == [[loaded, [*way, step], True] for step in range(WIDTH)]
            chosen = random.randrange(WIDTH)
            way = [*way, chosen]
            ids = [*ids, *(copy.id for copy in copies if copy is not copies[chosen]), copies[chosen].id]
    return ids, way


async def begin() -> tuple[str, str]:
    async with DSecClient() as client:
        sb = await client.run_sandbox(small("gvisor", memory_limit_mb=512, cpu_cores_limit=0.4))
        await sb.write_file("/agent.py", AGENT)
        await sb.run_shell_background("python3 /agent.py", stdin=False)
        await sb.run_shell("until [ -e /var/tmp/ready ]; do sleep 0.05; done", timeout=120, check=True)
        loaded, way, right = await ask(sb)
        assert (way, right) == ([], True)
        return sb.id, str(loaded)


async def let_go(ids: list[str], loaded: str) -> None:
    """Ends the nodes in any order; those that are left hold what they held."""
    async with DSecClient() as client:
        left = [await client.get(one) for one in ids]
        ways = {sb.id: (await ask(sb))[1] for sb in left}
        used = [(await sb.metrics()).memory_bytes for sb in left]
        assert sum(used) < len(left) * LOADED_MB / 3 * 1e6, used  # they have it in common
        random.shuffle(left)
        while left:
            await left.pop().stop()
            if left:
                assert await ask(left[0]) == [loaded, ways[left[0].id], True]


def test_tree_search() -> None:
    first, loaded = asyncio.run(begin())
    ids, way = asyncio.run(grow([first], loaded, [], DEPTH // 2))
    kill_and_start()
    ids, way = asyncio.run(grow(ids, loaded, way, DEPTH - DEPTH // 2))
    assert (len(ids), len(way)) == (1 + WIDTH * DEPTH, DEPTH)
    kill_and_start()
    asyncio.run(let_go(ids, loaded))
    assert leaks() == ""
