"""What a check answers: found, clear, or not tested and why; with its effect and the figures that show it."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal

import numpy as np

Status = Literal["found", "clear", "untested"]


@dataclass(frozen=True)
class Finding:
    """The answer of one check.

    `effect` is how large the fault is, in the words of `measure`. `left_N` is what undoing the fault leaves of
    log π − log μ on each token that counts, nats (NaN where nothing can be put right and the token goes); from it comes
    `explains`, the share of the sample's Σ|log π − log μ| that goes: on equal terms for every check, so no check fills
    it in. `evidence` are figures with their labels, `reason` why a check was not possible or does not count, `needs`
    what to type to make it possible.
    """

    check: str
    status: Status
    effect: float | None = None
    measure: str = ""
    sentence: str = ""
    evidence: tuple[tuple[str, float | int | str | None], ...] = ()
    reason: str = ""
    needs: str = ""
    cause: str = ""
    change: str = ""
    left_N: np.ndarray | None = None
    explains: float | None = None

    def to_dict(self) -> dict[str, Any]:
        values = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "left_N"}
        return values | {"evidence": [{"label": label, "value": value} for label, value in self.evidence]}


def untested(check: str, reason: str, needs: str = "") -> Finding:
    return Finding(check, "untested", reason=reason, needs=needs)
