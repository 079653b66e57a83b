"""What a plot of `clipstats` may draw: the numbers of its JSON, and a sample of tokens under two algorithms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from mismatch_cli.algorithms.algorithm import Algorithm

_NONE = np.zeros(0, dtype=np.float32)


@dataclass(frozen=True)
class ClippingPlotData:
    """`_N` the tokens of the sample, `_NA` the same × the compared algorithms; log-probabilities in nats."""

    STUDY: ClassVar[str] = "clipping"

    result: Mapping[str, Any]  # what docs/clipstats.md describes
    subject: str = ""  # who is compared, in one line
    compared: tuple[Algorithm, ...] = ()  # at most two: the columns of the mask regions
    logp_rollout_N: np.ndarray = field(default_factory=lambda: _NONE)
    logp_trainer_N: np.ndarray = field(default_factory=lambda: _NONE)  # -inf: out of the trainer's support
    logp_recomputed_N: np.ndarray | None = None
    advantage_N: np.ndarray | None = None  # None: the trace has no advantages, every token stands for both signs
    blocked_NA: np.ndarray = field(default_factory=lambda: np.zeros((0, 0), dtype=bool))

    @property
    def rows(self) -> Sequence[Mapping[str, Any]]:
        """The algorithms of the result, in the order of the table."""
        rows: Sequence[Mapping[str, Any]] = self.result.get("algorithms", ())
        return rows

    @property
    def blocking(self) -> list[Mapping[str, Any]]:
        """Those that block at least one token."""
        return [row for row in self.rows if any(part and part["value"] for part in row["blocked"].values())]

    @property
    def has_advantages(self) -> bool:
        return bool(self.result.get("has", {}).get("advantages"))

    def when(self, sign: str) -> str:
        """How the tokens of a sign (`>` or `<`) are called: without advantages the question is hypothetical."""
        return f"A {sign} 0" if self.has_advantages else f"if A {sign} 0"
