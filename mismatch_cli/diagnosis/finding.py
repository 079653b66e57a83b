"""What a check answers: found, clear, or not tested and why; with its effect and the figures that show it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Status = Literal["found", "clear", "untested"]


@dataclass(frozen=True)
class Finding:
    """The answer of one check.

    `effect` is how large the fault is, in the words of `measure`; `explains` the share of Σ|log π − log μ| that would
    go if it were undone, from 0 to 1. `evidence` are figures with their labels, `reason` why a check was not possible.
    """

    check: str
    status: Status
    effect: float | None = None
    measure: str = ""
    explains: float | None = None
    sentence: str = ""
    evidence: tuple[tuple[str, float | int | str | None], ...] = ()
    reason: str = ""

    def to_dict(self) -> dict[str, Any]:
        return vars(self) | {"evidence": [{"label": label, "value": value} for label, value in self.evidence]}


def untested(check: str, reason: str) -> Finding:
    return Finding(check, "untested", reason=reason)
