"""Samples of one thing, and how two of them compare."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

T = TypeVar("T")


@dataclass
class Series:
    """Samples of one thing, in milliseconds."""

    name: str
    samples: list[float] = field(default_factory=list)

    def time(self, work: Callable[[], T]) -> T:
        """Adds how long the work takes, and returns what it gives."""
        start = time.perf_counter()
        result = work()
        self.add((time.perf_counter() - start) * 1000)
        return result

    def add(self, sample: float) -> None:
        self.samples.append(sample)

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    def row(self) -> dict[str, object]:
        return {
            "name": self.name,
            "n": len(self.samples),
            "median_ms": round(self.median, 2),
            "min_ms": round(min(self.samples), 2),
            "max_ms": round(max(self.samples), 2),
        }


@dataclass
class Comparison:
    """A thing of ours and what it is held against; target is the ratio that is wanted at most, if any."""

    ours: Series
    raw: Series
    target: float | None = None

    @property
    def ratio(self) -> float:
        return self.ours.median / self.raw.median

    def row(self) -> dict[str, object]:
        return {
            "what": f"{self.ours.name} / {self.raw.name}",
            "ratio": round(self.ratio, 2),
            "target": self.target,
        }
