"""Sums over the trace and over B Poisson resamples of its prompts."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from mismatch_cli.metrics.estimate import Estimate, Replicates
from mismatch_cli.metrics.hashing import Prompts, resample

REPLICATES = 200


class ResampledSums:
    """Σ of M per-response sums: once as they are, and B times with the Poisson weight of each response's prompt."""

    def __init__(self, width: int, replicates: int = REPLICATES) -> None:
        self.total_M = np.zeros(width)
        self.replicate_BM = np.zeros((replicates, width))

    def update(self, prompts: Prompts, sums_SM: np.ndarray) -> None:
        sums_PM = prompts.sum_by_prompt(sums_SM)
        self.total_M += sums_PM.sum(axis=0)
        with np.errstate(invalid="ignore"):  # 0 · ∞ where a broken recording overflowed
            self.replicate_BM += resample(prompts.weight_BP, sums_PM)

    def merge(self, other: ResampledSums) -> None:
        self.total_M += other.total_M
        self.replicate_BM += other.replicate_BM

    def result(self, evaluate: Callable[[np.ndarray], Mapping[str, np.ndarray]], prompts: int) -> dict[str, Estimate]:
        """Whatever `evaluate` makes of sums [..., M], with its interval over prompts."""
        return {name: found.estimate(prompts) for name, found in self.replicates(evaluate).items()}

    def replicates(self, evaluate: Callable[[np.ndarray], Mapping[str, np.ndarray]]) -> dict[str, Replicates]:
        """The same with its bootstrap replicates."""
        values, replicates = evaluate(self.total_M), evaluate(self.replicate_BM)
        return {name: Replicates(float(values[name]), replicates[name]) for name in values}


class SequenceWeights:
    """χ² and effective sample size of whole responses, whose weights w = exp(Σd) may overflow any float.

    The sums hold w / e^shift, with the largest Σd seen as the shift; a response with a token out of support weighs 0.
    Row 0 is the trace itself, rows 1…B its resamples; columns: Σ1, Σw, Σw².
    """

    def __init__(self, replicates: int = REPLICATES) -> None:
        self.shift = -np.inf
        self.sums_R3 = np.zeros((1 + replicates, 3))

    def update(self, prompts: Prompts, log_weight_S: np.ndarray) -> None:
        """`log_weight_S` is Σd of each sequence, −inf out of support; NaN for a response that is no sequence."""
        real_S = ~np.isnan(log_weight_S)
        shift = float(np.max(log_weight_S, where=real_S, initial=-np.inf))
        weight_S = np.zeros(len(real_S))
        positive_S = np.flatnonzero(log_weight_S > -np.inf)
        weight_S[positive_S] = np.exp(log_weight_S[positive_S] - shift)
        sums_P3 = prompts.sum_by_prompt(np.stack([real_S, weight_S, weight_S * weight_S], axis=1).astype(np.float64))
        self._add(shift, np.vstack([sums_P3.sum(axis=0), resample(prompts.weight_BP, sums_P3)]))

    def merge(self, other: SequenceWeights) -> None:
        self._add(other.shift, other.sums_R3)

    def _add(self, shift: float, sums_R3: np.ndarray) -> None:
        largest = max(self.shift, shift)
        self.sums_R3 = self.sums_R3 * _rescale(self.shift, largest) + sums_R3 * _rescale(shift, largest)
        self.shift = largest

    def result(self, prompts: int) -> dict[str, Estimate]:
        """Both with their intervals over prompts."""
        return {name: found.estimate(prompts) for name, found in self.replicates().items()}

    def replicates(self) -> dict[str, Replicates]:
        """χ² = E w² − 1; ESS = 1 / E[(w / mean w)²], a fraction of the responses."""
        count_R, w_R, w2_R = self.sums_R3.T
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            chi2_R = np.expm1(np.log(w2_R / count_R) + 2 * self.shift)
            ess_R = w_R * w_R / (count_R * w2_R)
        return {
            "chi2_sequence": Replicates(float(chi2_R[0]), chi2_R[1:]),
            "ess_sequence": Replicates(float(ess_R[0]), ess_R[1:]),
        }


def _rescale(shift: float, largest: float) -> np.ndarray:
    factor = np.exp(shift - largest) if shift > -np.inf else 0.0
    return np.array([1.0, factor, factor * factor])
