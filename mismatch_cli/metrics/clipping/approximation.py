"""How good binary and top-K divergences are: against the full ones where the trace holds them, else by a bracket."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from mismatch_cli import divergences
from mismatch_cli.metrics.accumulator import Accumulator
from mismatch_cli.metrics.clipping.masked import Masked
from mismatch_cli.metrics.correlation import SampledSpearman
from mismatch_cli.metrics.estimate import NOT_MEASURED, SIGNED, Estimate, grouped_ratio, grouped_share
from mismatch_cli.metrics.hashing import GROUPS
from mismatch_cli.policies import TRAINER_ROLLOUT
from mismatch_cli.trust_regions._rules import one_sided, signed

THRESHOLDS = {"tv": 0.15, "kl": 0.05}  # the paper's δ for the binary masks
_SMALLER_K = (1, 5, 10)
_COLUMNS = ("n", "mean", "infinite", "compared", "bias", "judged", "wrong")
_BRACKET = ("n", "low", "high", "decided")


@dataclass(frozen=True)
class Approximation:
    """One divergence over one partition: k = 0 binary, k ≥ 1 the first k ranks, the sampled token, the rest."""

    divergence: str  # tv or kl
    k: int


class ApproximationQuality(Accumulator):
    """Sums by prompt group for every partition that the trace allows, over all counted tokens."""

    SETTINGS = ("top_k", "full", "partitions")

    def __init__(self, top_k: int, full: bool) -> None:
        self.top_k, self.full = top_k, full
        self.partitions = [0, *(k for k in _SMALLER_K if k < top_k), *([top_k] if top_k else [])]
        rows = [Approximation(name, k) for name in THRESHOLDS for k in self.partitions]
        self.sums = {row: np.zeros((len(_COLUMNS), GROUPS)) for row in rows}
        self.ranks = {row: SampledSpearman() for row in rows if full}
        self.bracket = {k: np.zeros((len(_BRACKET), GROUPS)) for k in self.partitions}

    def update(self, cases: list[Masked]) -> None:
        """Add a slice; where there are no advantages it comes once for each sign, and only masks are counted twice."""
        first, *_ = cases
        slacks = _slacks(first, self.partitions)
        for k, divergence, value_N in self._divergences(first):
            row = Approximation(divergence, k)
            full_N = first.gaps.column(f"{divergence}_full_T") if self.full else None  # NaN where not measured
            self._add_means(row, first, value_N, full_N)
            if full_N is not None:
                for judged in cases:
                    self._add_masks(row, judged, value_N, full_N)
            if divergence == "tv":
                self._add_bracket(k, first, value_N, next(slacks))

    def _divergences(self, judged: Masked) -> Iterator[tuple[int, str, np.ndarray]]:
        compared = judged.policies.compare(TRAINER_ROLLOUT)
        for k in self.partitions:
            tv, kl = compared.topk(k) if k else (compared.difference_T.abs(), compared.binary_kl_T)
            yield k, "tv", tv.numpy()
            yield k, "kl", kl.numpy()

    def _add_means(self, row: Approximation, judged: Masked, value_N: np.ndarray, full_N: np.ndarray | None) -> None:
        finite_N, counts_N = np.isfinite(value_N), np.ones(len(value_N), dtype=bool)
        if self.full:  # perhaps of a few responses only: all columns of a row are over the same tokens
            counts_N &= False if full_N is None else ~np.isnan(full_N)
            finite_N &= counts_N
        self._add(row, judged, "n", counts_N)
        self._add(row, judged, "infinite", counts_N & ~finite_N)
        self._add(row, judged, "mean", np.where(finite_N, value_N, 0))
        if full_N is not None:
            both_N = finite_N & np.isfinite(full_N)
            self._add(row, judged, "compared", both_N)
            bias_N = np.zeros(len(value_N))
            self._add(row, judged, "bias", np.subtract(value_N, full_N, out=bias_N, where=both_N, dtype=np.float64))
            self.ranks[row].update_values(judged.gaps, value_N, full_N)

    def _add_masks(self, row: Approximation, judged: Masked, value_N: np.ndarray, full_N: np.ndarray) -> None:
        """Both masks look at the side of the sampled token; they differ where only one divergence is above δ."""
        known_N = judged.judged_N & ~np.isnan(full_N)
        kept, kept_by_full = (_keeps(judged, row.divergence, divergence_N) for divergence_N in (value_N, full_N))
        self._add(row, judged, "judged", known_N)
        self._add(row, judged, "wrong", known_N & (kept != kept_by_full))

    def _add_bracket(self, k: int, judged: Masked, low_N: np.ndarray, slack_N: np.ndarray) -> None:
        high_N = np.minimum(low_N + slack_N, 1)
        threshold = np.float32(THRESHOLDS["tv"])
        decided_N = (low_N > threshold) | (high_N <= threshold)
        for row, values_N in enumerate((np.ones_like(decided_N), low_N, high_N, decided_N)):
            np.add.at(self.bracket[k][row], judged.gaps.group_S, judged.gaps.responses.sum(values_N))

    def _add(self, row: Approximation, judged: Masked, column: str, values_N: np.ndarray) -> None:
        sums_G = self.sums[row][_COLUMNS.index(column)]
        np.add.at(sums_G, judged.gaps.group_S, judged.gaps.responses.sum(values_N))

    def result(self, prompts: int) -> dict[str, Any]:
        return {
            "truth": "full" if self.full else None,
            "tokens": int(self.sums[Approximation("tv", 0)][_COLUMNS.index("n")].sum()),
            "rows": [self._row(row, prompts) for row in self.sums],
            "bracket": [
                {"k": k, "threshold": THRESHOLDS["tv"]}
                | {name: grouped_share(sums[i], sums[0], prompts).to_dict() for i, name in enumerate(_BRACKET) if i}
                for k, sums in self.bracket.items()
            ],
        }

    def _row(self, row: Approximation, prompts: int) -> dict[str, Any]:
        sums = dict(zip(_COLUMNS, self.sums[row], strict=True))
        missing = Estimate(None, note=NOT_MEASURED)
        infinite = Estimate(None, note=f"infinite on {int(sums['infinite'].sum()):,} tokens")
        estimates = {
            "mean": grouped_ratio(sums["mean"], sums["n"], prompts) if not sums["infinite"].any() else infinite,
            "bias": grouped_ratio(sums["bias"], sums["compared"], prompts, SIGNED) if self.full else missing,
            "rank_correlation": self.ranks[row].result(prompts) if self.full else missing,
            "wrong_mask": grouped_share(sums["wrong"], sums["judged"], prompts) if self.full else missing,
        }
        head = {"divergence": row.divergence, "k": row.k, "threshold": THRESHOLDS[row.divergence]}
        return head | {name: estimate.to_dict() for name, estimate in estimates.items()}


def _keeps(judged: Masked, divergence: str, divergence_N: np.ndarray) -> np.ndarray:
    """What a mask on this divergence would keep, at the paper's δ for the binary ones."""
    delta = THRESHOLDS[divergence]
    outward = signed(torch.from_numpy(divergence_N), judged.policies.compare(TRAINER_ROLLOUT).log_ratio_T)
    return one_sided(outward, torch.from_numpy(judged.advantage_N), low=delta, high=delta).keep_T.numpy()


def _slacks(judged: Masked, ks: Sequence[int]) -> Iterator[np.ndarray]:
    """How far the full TV can be above that of a partition: Σ min(μ, π) over its parts of several tokens."""
    policies, topk = judged.policies, judged.policies.topk
    columns = () if topk is None else ((policies.rollout, topk.rollout.exp()), (policies.trainer, topk.trainer.exp()))
    for k in ks:
        rests: Iterable[torch.Tensor] = policies.compare(TRAINER_ROLLOUT).rest_T
        if k and topk is not None:
            rests = (divergences.mass_beyond_topk(x_T, p_TK[:, :k], topk.sampled_in(k)) for x_T, p_TK in columns)
        yield torch.minimum(*rests).numpy()
