"""The quality of binary and top-K divergences: compared with full ones if the trace has them,
else as a bracket.
"""

from collections.abc import Iterable, Iterator, Sequence
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
        self.partitions = [0, *(k for k in _SMALLER_K if k < top_k), *([top_k] if top_k else [])]
        rows = list(product(THRESHOLDS, self.partitions))
        self.sums = {row: {name: np.zeros(GROUPS) for name in _COLUMNS} for row in rows}
        self.ranks = {row: SampledSpearman() for row in rows if full}
        self.bracket = {k: {name: np.zeros(GROUPS) for name in _BRACKET} for k in self.partitions}

    def update(self, cases: list[MaskedSlice]) -> None:
        """Add a slice; without advantages it comes once per sign, and only masks are counted
        twice.
        """
        first, *_ = cases
        compared = first.policies.compare(TRAINER_ROLLOUT)
        for k, slack_N in zip(self.partitions, _slacks(first, self.partitions), strict=True):
            tv, kl = (
                compared.topk(k) if k else (np.abs(compared.difference_T), compared.binary_kl_T)
            )
            self._add_bracket(k, first, tv, slack_N)
            for divergence, value_N in (("tv", tv), ("kl", kl)):
                self._add_values((divergence, k), cases, value_N)

    def _add_values(
        self, row: tuple[str, int], cases: list[MaskedSlice], value_N: np.ndarray
    ) -> None:
        """Both masks use the side of the sampled token; they differ if only one divergence is
        above δ.
        """
        first, sums = cases[0], self.sums[row]
        # NaN where not measured
        full_N = first.gaps.column(f"{row[0]}_full_T") if self.full else None
        counts_N = np.ones(len(value_N), dtype=bool)
        if self.full:  # perhaps only for a few responses: all columns of a row use the same tokens
            counts_N &= False if full_N is None else ~np.isnan(full_N)
        finite_N = counts_N & np.isfinite(value_N)
        first.add_by_group(sums["n"], counts_N)
        first.add_by_group(sums["infinite"], counts_N & ~finite_N)
        first.add_by_group(sums["mean"], np.where(finite_N, value_N, 0))
        if full_N is None:
            return
        finite_N &= np.isfinite(full_N)
        bias_N = np.subtract(
            value_N, full_N, out=np.zeros(len(value_N)), where=finite_N, dtype=np.float64
        )
        first.add_by_group(sums["compared"], finite_N)
        first.add_by_group(sums["bias"], bias_N)
        self.ranks[row].update_values(first.gaps, value_N, full_N)
        for judged in cases:
            known_N = judged.judged_N & ~np.isnan(full_N)
            kept, kept_by_full = (
                _keeps(judged, row[0], divergence_N) for divergence_N in (value_N, full_N)
            )
            judged.add_by_group(sums["judged"], known_N)
            judged.add_by_group(sums["wrong"], known_N & (kept != kept_by_full))

    def _add_bracket(
        self, k: int, judged: MaskedSlice, low_N: np.ndarray, slack_N: np.ndarray
    ) -> None:
        high_N = np.minimum(low_N + slack_N, 1)
        threshold = np.float32(THRESHOLDS["tv"])
        decided_N = (low_N > threshold) | (high_N <= threshold)
        for name, values_N in zip(
            _BRACKET, (np.ones_like(decided_N), low_N, high_N, decided_N), strict=True
        ):
            judged.add_by_group(self.bracket[k][name], values_N)

    def result(self, prompts: int) -> Approximations:
        return Approximations(
            truth="full" if self.full else None,
            tokens=int(self.sums["tv", 0]["n"].sum()),
            rows=[self._row(*row, prompts) for row in self.sums],
            bracket=[self._bracket_row(k, prompts) for k in self.bracket],
        )

    def _bracket_row(self, k: int, prompts: int) -> BracketRow:
        tokens, *sums = (self.bracket[k][name] for name in _BRACKET)
        low, high, decided = (grouped_share(part, tokens, prompts) for part in sums)
        return BracketRow(k, THRESHOLDS["tv"], low, high, decided)

    def _row(self, divergence: str, k: int, prompts: int) -> ApproximationRow:
        sums = self.sums[divergence, k]
        mean = grouped_ratio(sums["mean"], sums["n"], prompts)
        if infinite := int(sums["infinite"].sum()):
            mean = Estimate(None, note=f"infinite on {infinite:,} tokens")
        bias = rank_correlation = wrong_mask = Estimate(None, note=NOT_MEASURED)
        if self.full:
            bias = grouped_ratio(sums["bias"], sums["compared"], prompts, SIGNED)
            rank_correlation = self.ranks[divergence, k].result(prompts)
            wrong_mask = grouped_share(sums["wrong"], sums["judged"], prompts)
        return ApproximationRow(
            divergence, k, THRESHOLDS[divergence], mean, bias, rank_correlation, wrong_mask
        )


def _keeps(judged: MaskedSlice, divergence: str, divergence_N: np.ndarray) -> np.ndarray:
    """What a mask on this divergence would keep, at the paper's δ for binary masks."""
    delta = THRESHOLDS[divergence]
    outward_N = signed(divergence_N, judged.policies.compare(TRAINER_ROLLOUT).log_ratio_T)
    kept_N: np.ndarray = one_sided(outward_N, judged.advantage_N, low=delta, high=delta).keep_T
    return kept_N


def _slacks(judged: MaskedSlice, ks: Sequence[int]) -> Iterator[np.ndarray]:
    """How far the full TV can exceed that of a partition: Σ min(μ, π) over its parts with
    several tokens.
    """
    policies, topk = judged.policies, judged.policies.topk
    sides = (
        () if topk is None else ((policies.rollout, topk.rollout), (policies.trainer, topk.trainer))
    )
    columns = [(logp_N, np.exp(logp_NK)) for logp_N, logp_NK in sides]
    for k in ks:
        rests: Iterable[np.ndarray] = policies.compare(TRAINER_ROLLOUT).rest_T
        if k and topk is not None:
            rests = (
                divergences.mass_beyond_topk(x_T, p_TK[:, :k], topk.sampled_in(k))
                for x_T, p_TK in columns
            )
        yield np.minimum(*rests)
