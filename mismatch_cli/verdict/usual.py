"""How large a gap the precision of a trace usually makes without any mistake."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mismatch_cli.verdict.kind import precision
from mismatch_cli.verdict.reference import Usual, reference

_FAR = 2.0  # times the upper end: what is usual was seen on few models


@dataclass(frozen=True)
class UsualGap:
    """The mean |log π − log μ| that is usual, nats; `who` says of which precision."""

    who: str
    low: float
    high: float

    @property
    def text(self) -> str:
        return f"{self.low:g}–{self.high:g}"

    @property
    def far_above(self) -> float:
        """From here on, nats, no precision of the trace makes the gap alone."""
        return _FAR * self.high


def usual_gap(about: Mapping[str, Any]) -> UsualGap:
    """What is usual for the coarsest precision in play; where the manifest names none, for the coarsest in use."""
    rows = {row.precision: row for row in reference().usual}
    row: Usual = rows.get(precision(about)) or rows[""]
    return UsualGap(row.who, row.low, row.high)
