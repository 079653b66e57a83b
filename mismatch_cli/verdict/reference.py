"""The table of what others call healthy and what others measured, from `reference.toml`."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

Family = Literal["dense", "moe", ""]


@dataclass(frozen=True)
class Bar:
    """A published limit: up to `healthy` is healthy, above `broken` is not."""

    who: str
    source: str
    name: str  # of the metric, in their words
    metric: str  # ours, a key of metrics/catalog.py
    pair: str
    says: str  # what they conclude above it
    healthy: float = float("nan")
    broken: float = float("nan")
    family: Family = ""
    absolute: bool = False
    note: str = ""

    @property
    def bounds(self) -> tuple[float, float]:
        """`healthy` and `broken`; where only one of them was published, it is both."""
        healthy = self.broken if self.healthy != self.healthy else self.healthy
        return healthy, healthy if self.broken != self.broken else self.broken


@dataclass(frozen=True)
class Measured:
    """What somebody measured, as a range; a single value is a range of its own."""

    model: str
    setup: str
    metric: str
    source: str
    low: float
    high: float
    family: Family = ""
    precision: str = ""
    state: str = ""
    derived: str = ""


@dataclass(frozen=True)
class Usual:
    """The mean |Δlog p| that a precision makes without any mistake, nats; `precision` is empty where it is unknown."""

    precision: str
    who: str
    low: float
    high: float
    source: str


@dataclass(frozen=True)
class Reference:
    bars: tuple[Bar, ...]
    measured: tuple[Measured, ...]
    usual: tuple[Usual, ...]


@cache
def reference() -> Reference:
    """The packaged table."""
    content = tomllib.loads((Path(__file__).parent / "reference.toml").read_text(encoding="utf-8"))
    return Reference(
        tuple(Bar(**row) for row in content["bar"]),
        tuple(_measured(row) for row in content["measured"]),
        tuple(Usual(**row) for row in content["usual"]),
    )


def _measured(row: dict[str, Any]) -> Measured:
    value = row.pop("value", None)
    return Measured(**row) if value is None else Measured(**row, low=value, high=value)
