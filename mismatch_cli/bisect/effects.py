"""What a change does to the gap, from two pairs of legs on the same tokens: paired differences
and shares.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mismatch_cli.base.hashing import sum_by_group
from mismatch_cli.bisect.fixed_tokens import FixedTokens
from mismatch_cli.metrics.estimate import POSITIVE, SIGNED, Estimate, grouped_ratio, grouped_share
from mismatch_cli.rules.divergences import phi

FAR = float(np.log(2))  # nats
MEASURES = ("abs_d", "k3", "beyond_ln2")


@dataclass(frozen=True)
class GapSums:
    """Sums over the tokens of each response for one pair of legs: Σ|d|, Σ k3, tokens with |d| > ln
    2, and tokens.

    d = log π − log μ and k3 = e^d − 1 − d, nats. A response that either leg has not read has no
    tokens.
    """

    sums_S3: np.ndarray
    tokens_S: np.ndarray

    @classmethod
    def between(
        cls, tokens: FixedTokens, logp_rollout_T: np.ndarray, logp_trainer_T: np.ndarray
    ) -> GapSums:
        """From both legs' log-probabilities of all tokens, NaN where not read."""
        d_T = logp_trainer_T - logp_rollout_T
        counts_T = tokens.counts_T & np.isfinite(d_T)
        # 0 × NaN is NaN, so tokens that do not count are zeroed, not multiplied away.
        d_T = np.where(counts_T, d_T, 0.0)
        columns = (np.abs(d_T), phi(d_T), np.abs(d_T) > FAR, counts_T)
        values_T4 = np.stack(columns, axis=1).astype(np.float64)
        sums_S4 = np.add.reduceat(values_T4, tokens.offset_S1[:-1], axis=0)
        return cls(sums_S4[:, :3], sums_S4[:, 3])

    def mean(self, measure: str = "abs_d") -> float:
        """The mean of a measure over all tokens; 0 without any."""
        total = self.of(measure).sum()
        return float(total / max(self.tokens_S.sum(), 1.0))

    def of(self, measure: str) -> np.ndarray:
        """The sum of one measure over each response."""
        return self.sums_S3[:, MEASURES.index(measure)]


class Effects:
    """Estimates over the prompts of the fixed tokens; `weight_S` reweights responses, as a
    resample does.
    """

    def __init__(self, tokens: FixedTokens, weight_S: np.ndarray | None = None) -> None:
        self._tokens = tokens
        self._weight_S = np.ones(tokens.num_responses) if weight_S is None else weight_S

    def gap(self, pair: GapSums, measure: str = "abs_d") -> Estimate:
        """The mean of a measure over tokens."""
        sums = self._grouped(pair.of(measure), pair.tokens_S, pair.tokens_S)
        if measure == "beyond_ln2":
            return grouped_share(*sums)
        return grouped_ratio(*sums, POSITIVE)

    def change(self, before: GapSums, after: GapSums, measure: str = "abs_d") -> Estimate:
        """after − before on the tokens that both have; below 0 the gap shrinks."""
        both_S = np.minimum(before.tokens_S, after.tokens_S)
        part_S = after.of(measure) - before.of(measure)
        return grouped_ratio(*self._grouped(part_S, both_S, both_S), SIGNED)

    def share(self, recorded: GapSums, before: GapSums, after: GapSums) -> Estimate:
        """How much of the recorded gap a change removes: (Σ|d| before − after) / Σ|d| as
        recorded, same responses.
        """
        read_S = np.minimum(before.tokens_S, after.tokens_S)
        part_S = before.of("abs_d") - after.of("abs_d")
        return grouped_ratio(*self._grouped(part_S, recorded.of("abs_d"), read_S), SIGNED)

    def left(self, recorded: GapSums, after: GapSums) -> Estimate:
        """How much of the recorded gap is left: Σ|d| after / Σ|d| as recorded, on the same
        responses.
        """
        sums = self._grouped(after.of("abs_d"), recorded.of("abs_d"), after.tokens_S)
        return grouped_ratio(*sums, POSITIVE)

    def _grouped(
        self, part_S: np.ndarray, whole_S: np.ndarray, read_S: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, int]:
        """Both sums by group of prompts over the responses with tokens that were read, and the
        number of their prompts.
        """
        weight_S = self._weight_S * (read_S > 0)
        weighted_S2 = np.stack([part_S, whole_S], axis=1) * weight_S[:, None]
        sums_G2 = sum_by_group(self._tokens.group_S, weighted_S2)
        prompts = np.unique(self._tokens.prompt_id_S[weight_S > 0])
        return sums_G2[:, 0], sums_G2[:, 1], len(prompts)
