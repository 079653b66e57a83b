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
        d_T = np.where(counts_T, d_T, 0.0)
        columns = (np.abs(d_T), phi(d_T), np.abs(d_T) > FAR, counts_T)
        sums_S4 = np.add.reduceat(
            np.stack(columns, axis=1).astype(np.float64), tokens.offset_S1[:-1], axis=0
        )
        return cls(sums_S4[:, :3], sums_S4[:, 3])

    def mean(self, measure: str = "abs_d") -> float:
        """Over all tokens."""
        return float(self.sums_S3[:, MEASURES.index(measure)].sum() / max(self.tokens_S.sum(), 1.0))


class Effects:
    """Estimates over the prompts of the fixed tokens; `weight_S` reweights responses, as a
    resample does.
    """

    def __init__(self, tokens: FixedTokens, weight_S: np.ndarray | None = None) -> None:
        self._tokens = tokens
        self._weight_S = np.ones(tokens.num_responses) if weight_S is None else weight_S

    def gap(self, pair: GapSums, measure: str = "abs_d") -> Estimate:
        """The mean of a measure over tokens."""
        part_G, whole_G, prompts = self._grouped(
            pair.sums_S3[:, MEASURES.index(measure)], pair.tokens_S, pair.tokens_S
        )
        return (grouped_share if measure == "beyond_ln2" else _positive)(part_G, whole_G, prompts)

    def change(self, before: GapSums, after: GapSums, measure: str = "abs_d") -> Estimate:
        """after − before on the tokens that both have; below 0 the gap shrinks."""
        n = MEASURES.index(measure)
        both_S = np.minimum(before.tokens_S, after.tokens_S)
        part_S = after.sums_S3[:, n] - before.sums_S3[:, n]
        return grouped_ratio(*self._grouped(part_S, both_S, both_S), SIGNED)

    def share(self, recorded: GapSums, before: GapSums, after: GapSums) -> Estimate:
        """How much of the recorded gap a change removes: (Σ|d| before − after) / Σ|d| as
        recorded, same responses.
        """
        known_S = np.minimum(before.tokens_S, after.tokens_S)
        part_S = before.sums_S3[:, 0] - after.sums_S3[:, 0]
        part_G, whole_G, prompts = self._grouped(part_S, recorded.sums_S3[:, 0], known_S)
        return grouped_ratio(part_G, whole_G, prompts, SIGNED)

    def left(self, recorded: GapSums, after: GapSums) -> Estimate:
        """How much of the recorded gap is left: Σ|d| after / Σ|d| as recorded, on the same
        responses.
        """
        return _positive(
            *self._grouped(after.sums_S3[:, 0], recorded.sums_S3[:, 0], after.tokens_S)
        )

    def _grouped(
        self, part_S: np.ndarray, whole_S: np.ndarray, known_S: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, int]:
        """Both sums by group of prompts over the known responses, and the number of their
        prompts.
        """
        weight_S = self._weight_S * (known_S > 0)
        sums_G2 = sum_by_group(
            self._tokens.group_S, np.stack([part_S, whole_S], axis=1) * weight_S[:, None]
        )
        return sums_G2[:, 0], sums_G2[:, 1], len(np.unique(self._tokens.prompt_id_S[weight_S > 0]))


def _positive(part_G: np.ndarray, whole_G: np.ndarray, prompts: int) -> Estimate:
    return grouped_ratio(part_G, whole_G, prompts, POSITIVE)
