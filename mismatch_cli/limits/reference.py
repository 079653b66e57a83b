"""What others call healthy and what others measured, read from `reference.toml`."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from mismatch_cli.limits.both_sides import Family, family, precision, sides_of_gap


@dataclass(frozen=True, kw_only=True)
class Bar:
    """A published limit: values up to `healthy` are healthy, values above `broken` are not."""

    who: str
    source: str
    name: str  # of the metric, as the source has it
    metric: str  # ours, a key of metrics/gap_table.py
    absolute: bool = False
    pair: str
    healthy: float = float("nan")
    broken: float = float("nan")
    says: str  # what the source concludes above it
    note: str = ""
    family: Family = ""

    @property
    def bounds(self) -> tuple[float, float]:
        """`healthy` and `broken`; if only one was published, it is both."""
        healthy = self.broken if self.healthy != self.healthy else self.healthy
        return healthy, healthy if self.broken != self.broken else self.broken


@dataclass(frozen=True)
class Measured:
    """What somebody measured, as a range; a single value is both ends."""

    model: str
    setup: str
    metric: str
    source: str
    low: float
    high: float
    family: Family = ""
    precision: str = ""
    name: str = ""  # of the framework's own metric, where it averages differently
    state: str = ""
    derived: str = ""


@dataclass(frozen=True)
class Usual:
    """The mean |Δlog p|, in nats, of models measured so far without a fault.

    `precision` is the coarsest of both sides, empty if it is unknown; `other`, the dtype of one
    side, and `family` are empty where the row is for all.
    """

    precision: str
    who: str
    low: float
    high: float
    source: str
    other: str = ""
    family: Family = ""


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


def usual_gap(about: Mapping[str, Any]) -> Usual:
    """The row for the precisions and the family of both sides: the one that says most of those
    that fit.
    """
    narrowest, finest = precision(about), {side.dtype for side in sides_of_gap(about)}
    fitting = [
        row
        for row in reference().usual
        if row.precision == narrowest
        and (not row.other or row.other in finest)
        and row.family in ("", family(about))
    ]
    # Experts before the other side's dtype
    return max(fitting, key=lambda row: (bool(row.family), bool(row.other)))
