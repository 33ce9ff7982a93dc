"""What network rules cost a create, on both backends."""

from __future__ import annotations

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


def measure_network(client: DSecClient, rounds: int) -> list[Comparison]:
    """Creates with rules against creates without, one of each in turn."""
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
    return comparisons
