"""What a plot may draw: the summary of one pair of policies, and a sample of its tokens and responses."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

_NONE = np.zeros(0, dtype=np.float32)


@dataclass(frozen=True)
class PlotData:
    """`_N` the tokens of the sample, `_S` the responses of the sample; log-probabilities in nats.

    The reference policy stands in the place of μ, the current one in the place of π: `logq_N` and `logp_N`.
    """

    STUDY: ClassVar[str] = "mismatch"

    summary: Mapping[str, Any]  # what `MismatchSummary.result()` gives
    subject: str = (
        ""  # who is compared, in one line: printed below each figure, so that a copied picture says what it is
    )
    logq_N: np.ndarray = field(default_factory=lambda: _NONE)
    logp_N: np.ndarray = field(default_factory=lambda: _NONE)  # -inf: out of the current policy's support
    tv_topk_N: np.ndarray | None = None  # NaN: not measured
    length_S: np.ndarray = field(default_factory=lambda: _NONE)  # tokens
    sequence_d_S: np.ndarray = field(default_factory=lambda: _NONE)  # Σ (log π − log μ), nats
    lattice_steps: tuple[float, ...] = ()  # the logit rounding steps δ that the data shows, in nats

    @classmethod
    def of(
        cls,
        summary: Mapping[str, Any],
        sample: Mapping[str, Mapping[str, Sequence[float]]],
        lattice_steps: Iterable[float] = (),
        subject: str = "",
    ) -> PlotData:
        """From what `MismatchSummary`, `ScatterSample` and `Lattice` give as their results."""
        tokens, responses = sample["tokens"], sample["responses"]
        tv_topk_N = np.asarray(tokens["tv_topk"], dtype=np.float32)
        return cls(
            summary=summary,
            subject=subject,
            logq_N=np.asarray(tokens["logp_reference"], dtype=np.float32),
            logp_N=np.asarray(tokens["logp_current"], dtype=np.float32),
            tv_topk_N=None if np.isnan(tv_topk_N).all() else tv_topk_N,
            length_S=np.asarray(responses["length"], dtype=np.int64),
            sequence_d_S=np.asarray(responses["d_sum"], dtype=np.float64),
            lattice_steps=tuple(lattice_steps),
        )

    def metric(self, key: str) -> Mapping[str, Any]:
        """An estimate of the summary: value, low, high, note; all None where it is missing."""
        missing = {"value": None, "low": None, "high": None, "note": None}
        return self.summary.get("metrics", {}).get(key) or missing
