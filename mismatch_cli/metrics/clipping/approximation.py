"""The quality of binary and top-K divergences: compared with full ones if the trace has them,
else as a bracket.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from mismatch_cli.base.hashing import GROUPS
from mismatch_cli.metrics.accumulator import Accumulator
from mismatch_cli.metrics.clipping.masked_slice import MaskedSlice
from mismatch_cli.metrics.correlation import SampledSpearman
from mismatch_cli.metrics.estimate import (
    NOT_MEASURED,
    SIGNED,
    Estimate,
    grouped_ratio,
    grouped_share,
)
from mismatch_cli.rules import divergences
from mismatch_cli.rules.decisions import one_sided, signed
from mismatch_cli.rules.policies import TRAINER_ROLLOUT

THRESHOLDS = {"tv": 0.15, "kl": 0.05}  # the paper's δ for the binary masks
_SMALLER_K = (1, 5, 10)
_COLUMNS = ("n", "mean", "infinite", "compared", "bias", "judged", "wrong")
_BRACKET = ("n", "low", "high", "decided")


@dataclass(frozen=True)
class ApproximationRow:
    """A divergence over the first `k` ranks, the sampled token and the rest; KL in nats.

    What is compared with the full divergence has no value without one.
    """

    divergence: str  # tv or kl
    k: int  # 0: binary
    threshold: float  # δ of the mask that is wrong or right
    mean: Estimate
    bias: Estimate  # approximation − full
    rank_correlation: Estimate
    wrong_mask: Estimate  # a share of the judged tokens


@dataclass(frozen=True)
class BracketRow:
    """Bounds on the mean full TV from a partition, and the share of tokens that they decide."""

    k: int
    threshold: float
    low: Estimate
    high: Estimate
    decided: Estimate


@dataclass(frozen=True)
class Approximations:
    """How good binary and top-K divergences are."""

    truth: str | None  # "full", or None without a full divergence
    tokens: int  # in `rows`
    rows: Sequence[ApproximationRow]
    bracket: Sequence[BracketRow]


class ApproximationQuality(Accumulator):
    """Sums by prompt group for every partition that the trace allows, over all counted tokens.

    A row is a divergence (tv or kl) and k: 0 is binary, k ≥ 1 the first k ranks, the sampled token,
    and the rest.
    """

    SETTINGS = ("full", "partitions")

    def __init__(self, top_k: int, full: bool) -> None:
        self.full = full
        self.partitions = [0]
        if top_k:
            self.partitions += [*(k for k in _SMALLER_K if k < top_k), top_k]
        rows = list(product(THRESHOLDS, self.partitions))
        self.sums = {row: _group_sums(_COLUMNS) for row in rows}
        self.ranks = {row: SampledSpearman() for row in rows if full}
        self.bracket = {k: _group_sums(_BRACKET) for k in self.partitions}

    def update(self, cases: list[MaskedSlice]) -> None:
        """Add a slice; without advantages it comes once per sign, and only masks are counted
        twice.
        """
        first = cases[0]
        compared = first.policies.compare(TRAINER_ROLLOUT)
        for k, slack_N in zip(self.partitions, _slacks(first, self.partitions), strict=True):
            if k == 0:
                tv_N, kl_N = np.abs(compared.difference_T), compared.binary_kl_T
            else:
                tv_N, kl_N = compared.topk(k)
            self._add_bracket(k, first, tv_N, slack_N)
            self._add_values(("tv", k), cases, tv_N)
            self._add_values(("kl", k), cases, kl_N)

    def _add_values(
        self, row: tuple[str, int], cases: list[MaskedSlice], value_N: np.ndarray
    ) -> None:
        """Add one divergence of a partition, with its mean over the tokens where it is finite."""
        divergence, _ = row
        first, sums = cases[0], self.sums[row]
        full_N = first.gaps.column(f"{divergence}_full_T") if self.full else None
        # The full divergence may be measured for a few responses only, and is NaN elsewhere.
        # All columns of a row are about the same tokens, so the others do not count at all.
        counts_N = np.full(len(value_N), not self.full)
        if full_N is not None:
            counts_N = ~np.isnan(full_N)
        finite_N = counts_N & np.isfinite(value_N)
        first.add_by_group(sums["n"], counts_N)
        first.add_by_group(sums["infinite"], counts_N & ~finite_N)
        first.add_by_group(sums["mean"], np.where(finite_N, value_N, 0))
        if full_N is not None:
            self._compare_with_full(row, cases, value_N, full_N)

    def _compare_with_full(
        self,
        row: tuple[str, int],
        cases: list[MaskedSlice],
        value_N: np.ndarray,
        full_N: np.ndarray,
    ) -> None:
        """Both masks use the side of the sampled token; they differ if only one divergence is
        above δ.
        """
        divergence, _ = row
        first, sums = cases[0], self.sums[row]
        finite_N = np.isfinite(value_N) & np.isfinite(full_N)
        bias_N = np.subtract(
            value_N, full_N, out=np.zeros(len(value_N)), where=finite_N, dtype=np.float64
        )
        first.add_by_group(sums["compared"], finite_N)
        first.add_by_group(sums["bias"], bias_N)
        self.ranks[row].update_values(first.gaps, value_N, full_N)
        for judged in cases:
            judged_N = judged.judged_N & ~np.isnan(full_N)
            keep_N = _keep(judged, divergence, value_N)
            keep_by_full_N = _keep(judged, divergence, full_N)
            judged.add_by_group(sums["judged"], judged_N)
            judged.add_by_group(sums["wrong"], judged_N & (keep_N != keep_by_full_N))

    def _add_bracket(
        self, k: int, judged: MaskedSlice, low_N: np.ndarray, slack_N: np.ndarray
    ) -> None:
        high_N = np.minimum(low_N + slack_N, 1)
        threshold = np.float32(THRESHOLDS["tv"])
        decided_N = (low_N > threshold) | (high_N <= threshold)
        sums = self.bracket[k]
        judged.add_by_group(sums["n"], np.ones_like(decided_N))
        judged.add_by_group(sums["low"], low_N)
        judged.add_by_group(sums["high"], high_N)
        judged.add_by_group(sums["decided"], decided_N)

    def result(self, prompts: int) -> Approximations:
        return Approximations(
            truth="full" if self.full else None,
            tokens=int(self.sums["tv", 0]["n"].sum()),
            rows=[self._row(*row, prompts) for row in self.sums],
            bracket=[self._bracket_row(k, prompts) for k in self.bracket],
        )

    def _bracket_row(self, k: int, prompts: int) -> BracketRow:
        sums = self.bracket[k]
        return BracketRow(
            k,
            THRESHOLDS["tv"],
            low=grouped_share(sums["low"], sums["n"], prompts),
            high=grouped_share(sums["high"], sums["n"], prompts),
            decided=grouped_share(sums["decided"], sums["n"], prompts),
        )

    def _row(self, divergence: str, k: int, prompts: int) -> ApproximationRow:
        sums = self.sums[divergence, k]
        mean = grouped_ratio(sums["mean"], sums["n"], prompts)
        infinite = int(sums["infinite"].sum())
        if infinite:
            mean = Estimate(None, note=f"infinite on {infinite:,} tokens")
        bias = rank_correlation = wrong_mask = Estimate(None, note=NOT_MEASURED)
        if self.full:
            bias = grouped_ratio(sums["bias"], sums["compared"], prompts, SIGNED)
            rank_correlation = self.ranks[divergence, k].result(prompts)
            wrong_mask = grouped_share(sums["wrong"], sums["judged"], prompts)
        return ApproximationRow(
            divergence, k, THRESHOLDS[divergence], mean, bias, rank_correlation, wrong_mask
        )


def _group_sums(names: Sequence[str]) -> dict[str, np.ndarray]:
    return {name: np.zeros(GROUPS) for name in names}


def _keep(judged: MaskedSlice, divergence: str, divergence_N: np.ndarray) -> np.ndarray:
    """What a mask on this divergence would keep, at the paper's δ for binary masks."""
    delta = THRESHOLDS[divergence]
    outward_N = signed(divergence_N, judged.policies.compare(TRAINER_ROLLOUT).log_ratio_T)
    keep_N: np.ndarray = one_sided(outward_N, judged.advantage_N, low=delta, high=delta).keep_T
    return keep_N


def _slacks(judged: MaskedSlice, ks: Sequence[int]) -> Iterator[np.ndarray]:
    """How far the full TV can exceed that of a partition: Σ min(μ, π) over its parts with
    several tokens.
    """
    policies, topk = judged.policies, judged.policies.topk
    if topk is not None:
        mu_NK, pi_NK = np.exp(topk.rollout), np.exp(topk.trainer)
    for k in ks:
        if k == 0 or topk is None:
            mu_N, pi_N = policies.compare(TRAINER_ROLLOUT).rest_T
        else:
            in_topk_N = topk.sampled_in(k)
            mu_N = divergences.mass_beyond_topk(policies.rollout, mu_NK[:, :k], in_topk_N)
            pi_N = divergences.mass_beyond_topk(policies.trainer, pi_NK[:, :k], in_topk_N)
        yield np.minimum(mu_N, pi_N)
