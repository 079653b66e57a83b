"""What others measured and what is usual, read from `reference.toml`."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from mismatch_cli.base import registry
from mismatch_cli.limits.manifest_sides import Family, family, precision, sides_of_gap


@dataclass(frozen=True)
class MeasuredRange:
    """What somebody measured, as a range; a single value is both ends."""

    model: str
    setup: str
    metric: str
    source: str
    low: float
    high: float
    family: Family = ""
    precision: str = ""
    pair: str = "mismatch"  # or total, or floor: the trainer against itself
    state: str = ""
    derived: str = ""
    date: str = ""


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
    """All measured values and usual gaps, in the order of the table."""

    measured: tuple[MeasuredRange, ...]
    usual: tuple[Usual, ...]


@cache
def reference() -> Reference:
    """The packaged table."""
    content = registry.table_of(__file__)
    return Reference(
        tuple(map(_measured_range, content["measured"])),
        tuple(Usual(**row) for row in content["usual"]),
    )


def _measured_range(row: Mapping[str, Any]) -> MeasuredRange:
    """A row of the table, in which a `value` abbreviates a range with equal ends."""
    ends = dict(row)
    if "value" in ends:
        ends["low"] = ends["high"] = ends.pop("value")
    return MeasuredRange(**ends)


def usual_gap(about: Mapping[str, Any]) -> Usual:
    """The usual gap for the precisions and the family of both sides: of the rows that fit, the most
    specific one.
    """
    coarsest = precision(about)
    families = ("", family(about))
    dtypes = {"", *(side.dtype for side in sides_of_gap(about))}
    fitting = []
    for row in reference().usual:
        if row.precision == coarsest and row.other in dtypes and row.family in families:
            fitting.append(row)
    # Experts before the other side's dtype
    return max(fitting, key=lambda row: (bool(row.family), bool(row.other)))
