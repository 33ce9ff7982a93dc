"""What network rules cost a create, and how fast sandboxes send and receive under them."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator

from opendsec import DSecRunArgs
from opendsec.sync import DSecClient
from series import Comparison, Series

# Of every kind: a preset, a name, names below one, a network, and one that denies.
RULES = {
    "pypi": True,
    "example.com:443": True,
    "*.example.org": True,
    "10.1.0.0/16:5432": True,
    "evil.example.org": False,
}

SERVER, CLIENT = "198.51.100.2", "198.51.100.6"
"""Addresses of a server outside, and of a client beside it that no rules are for."""

# On port 4567 it takes bytes and says how many there were; on 4568 it sends without end.
SERVE = f"""
import socket, threading
taking, giving = (socket.create_server(("{SERVER}", port)) for port in (4567, 4568))

def give():
    buf = bytes(1 << 20)
    while True:
        c, _ = giving.accept()
        with c:
            try:
                while True:
                    c.sendall(buf)
            except OSError:
                pass

threading.Thread(target=give, daemon=True).start()
print("ready", flush=True)
buf = bytearray(1 << 20)
while True:
    c, _ = taking.accept()
    with c:
        n = 0
        while m := c.recv_into(buf):
            n += m
        c.sendall(str(n).encode())
"""

# It prints the bytes a second that it sent, or received, for a while.
MOVE = f"""
import socket, sys, time
buf = bytearray(1 << 20)
c = socket.create_connection(("{SERVER}", 4567 if sys.argv[1] == "out" else 4568), 10)
begin, n = time.monotonic(), 0
while (took := time.monotonic() - begin) < 2:
    n += c.send(buf) if sys.argv[1] == "out" else c.recv_into(buf)
if sys.argv[1] == "out":
    c.shutdown(socket.SHUT_WR)
    assert int(c.recv(100)) == n
    took = time.monotonic() - begin
print(n / took)
"""


def measure_network(client: DSecClient, rounds: int) -> tuple[list[Comparison], list[tuple[str, float]]]:
    """Creates with rules against creates without, one of each in turn, and the rates of connections in MB/s."""
    comparisons = []
    for backend in ("gvisor", "container"):
        closed = Series(f"{backend}: run_sandbox")
        ruled = Series(f"{backend}: run_sandbox with network rules")
        for i in range(rounds + 2):
            for series, rules in ((closed, None), (ruled, RULES)):
                args = DSecRunArgs(backend=backend, image="root/py:latest", network_rules=rules)
                series.time(lambda args=args: client.run_sandbox(args)).stop()  # type: ignore[misc]
            if i == 1:  # the first two warm caches and pools
                closed.samples.clear()
                ruled.samples.clear()
        comparisons.append(Comparison(ruled, closed))
    with outside() as bare:
        return comparisons, measure_rates(client, bare)


Mover = Callable[[str], float]


def measure_rates(client: DSecClient, bare: Mover) -> list[tuple[str, float]]:
    """How fast the same program sends and receives: where nothing is in its way, and in sandboxes.

    Each is the best of three, in turn, since whatever else the machine does makes it worse.
    """
    with contextlib.ExitStack() as stack:
        movers: dict[str, Mover] = {"a namespace and a veth, no rules": bare}
        for backend in ("container", "gvisor"):
            args = DSecRunArgs(
                backend=backend,
                image="root/py:latest",
                cpu_cores_limit=os.cpu_count(),
                network_rules={f"{SERVER}:4567-4568": True},
            )
            sb = stack.enter_context(client.run_sandbox(args))
            sb.write_file("/tmp/move.py", MOVE)

            def move(way: str, sb=sb) -> float:  # type: ignore[no-untyped-def]
                ran = sb.run_shell(f"python3 /tmp/move.py {way}")
                if ran.exit_code != 0:
                    raise RuntimeError(f"{sb.backend}, {way}: {ran.stderr}")
                return float(ran.stdout)

            movers[f"{backend}, through the gate"] = move
        best = {(name, way): 0.0 for name in movers for way in ("out", "in")}
        for _ in range(3):
            for name, way in best:
                best[name, way] = max(best[name, way], movers[name](way) / 1e6)
    return [(f"{name}: {way}", rate) for (name, way), rate in best.items()]


@contextlib.contextmanager
def outside() -> Iterator[Mover]:
    """A server in a namespace beside the host, and a client in one that has a link to it and nothing else."""

    def ip(*args: str) -> None:
        subprocess.run(["ip", *args], check=True, timeout=30)

    def inside(name: str, code: str, *args: str) -> list[str]:
        return ["ip", "netns", "exec", name, sys.executable, "-c", code, *args]

    there, client = f"bench-server-{os.getpid()}", f"bench-client-{os.getpid()}"
    with contextlib.ExitStack() as stack:
        for name in (there, client):
            ip("netns", "add", name)
            stack.callback(ip, "netns", "delete", name)
        ip("link", "add", "bench0", "type", "veth", "peer", "name", "eth0", "netns", there)
        stack.callback(ip, "link", "delete", "bench0")
        ip("-n", there, "link", "add", "eth1", "type", "veth", "peer", "name", "eth0", "netns", client)
        for name, link, address in (
            (None, "bench0", "198.51.100.1/30"),
            (there, "eth0", f"{SERVER}/30"),
            (there, "eth1", "198.51.100.5/30"),
            (client, "eth0", f"{CLIENT}/30"),
        ):
            at = () if name is None else ("-n", name)
            ip(*at, "address", "add", address, "dev", link)
            ip(*at, "link", "set", link, "up")
        ip("-n", client, "route", "add", f"{SERVER}/32", "via", "198.51.100.5")
        server = subprocess.Popen(inside(there, SERVE), stdout=subprocess.PIPE, text=True)
        stack.callback(server.wait)
        stack.callback(server.kill)
        assert server.stdout is not None
        assert server.stdout.readline() == "ready\n"

        def move(way: str) -> float:
            return float(subprocess.check_output(inside(client, MOVE, way), text=True, timeout=60))

        yield move
