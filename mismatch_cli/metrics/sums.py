"""Sums over the trace, kept apart by prompt group: what every mean, share and ratio is made of, and its interval."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from mismatch_cli.metrics.estimate import LARGEST_WEIGHTS, Estimate
from mismatch_cli.metrics.hashing import GROUPS, sum_by_group
from mismatch_cli.metrics.jackknife import ABOVE_MINUS_1, SAMPLE_SIZE, SIGNED, Jackknife, Scale, left_out

Evaluate = Callable[[np.ndarray], Mapping[str, np.ndarray]]


class GroupSums:
    """Σ of M per-response sums in each group of prompts."""

    def __init__(self, width: int) -> None:
        self.sums_GM = np.zeros((GROUPS, width))

    def update(self, group_S: np.ndarray, sums_SM: np.ndarray) -> None:
        self.sums_GM += sum_by_group(group_S, sums_SM)

    def merge(self, other: GroupSums) -> None:
        self.sums_GM += other.sums_GM

    def result(self, evaluate: Evaluate, prompts: int, scales: Mapping[str, Scale]) -> dict[str, Estimate]:
        """Whatever `evaluate` makes of sums [..., M], with its interval over prompts."""
        return {name: found.estimate(prompts) for name, found in self.jackknife(evaluate, scales).items()}

    def jackknife(self, evaluate: Evaluate, scales: Mapping[str, Scale]) -> dict[str, Jackknife]:
        """The same with the values that each interval is made of; what has no scale of its own is `SIGNED`."""
        total_M = self.sums_GM.sum(axis=0)
        occupied_G = np.any(self.sums_GM, axis=1)
        with np.errstate(invalid="ignore"):  # ∞ − ∞ where a broken recording overflowed
            values, without_G = evaluate(total_M), evaluate(total_M - self.sums_GM)
        return {
            name: Jackknife(float(value), left_out(without_G[name], occupied_G), scales.get(name, SIGNED))
            for name, value in values.items()
        }


class SequenceWeights:
    """χ² and effective sample size of whole responses, whose weights w = exp(Σd) may overflow any float.

    The sums hold w / e^shift, with the largest Σd seen as the shift; a response with a token out of support weighs 0.
    Columns: Σ1, Σw, Σw².
    """

    def __init__(self) -> None:
        self.shift = -np.inf
        self.sums_G3 = np.zeros((GROUPS, 3))

    def update(self, group_S: np.ndarray, log_weight_S: np.ndarray) -> None:
        """`log_weight_S` is Σd of each sequence, −inf out of support; NaN for a response that is no sequence."""
        real_S = ~np.isnan(log_weight_S)
        shift = float(np.max(log_weight_S, where=real_S, initial=-np.inf))
        weight_S = np.zeros(len(real_S))
        positive_S = np.flatnonzero(log_weight_S > -np.inf)
        weight_S[positive_S] = np.exp(log_weight_S[positive_S] - shift)
        sums_S3 = np.stack([real_S, weight_S, weight_S * weight_S], axis=1).astype(np.float64)
        self._add(shift, sum_by_group(group_S, sums_S3))

    def merge(self, other: SequenceWeights) -> None:
        self._add(other.shift, other.sums_G3)

    def _add(self, shift: float, sums_G3: np.ndarray) -> None:
        largest = max(self.shift, shift)
        self.sums_G3 = self.sums_G3 * _rescale(self.shift, largest) + sums_G3 * _rescale(shift, largest)
        self.shift = largest

    def result(self, prompts: int) -> dict[str, Estimate]:
        """Both without an interval: benchmarks/coverage.py found none that holds."""
        return {name: found.estimate(prompts) for name, found in self.jackknife().items()}

    def jackknife(self) -> dict[str, Jackknife]:
        """χ² = E w² − 1; ESS = 1 / E[(w / mean w)²], a fraction of the responses.

        Neither has an interval: what decides are a few responses of large weight, most of them not in the trace.
        """
        total_3 = self.sums_G3.sum(axis=0)
        values, without_G = self._evaluate(total_3), self._evaluate(total_3 - self.sums_G3)
        occupied_G, scales = self.sums_G3[:, 0] > 0, {"chi2_sequence": ABOVE_MINUS_1, "ess_sequence": SAMPLE_SIZE}
        return {
            name: Jackknife(float(values[name]), left_out(without_G[name], occupied_G), scale, LARGEST_WEIGHTS)
            for name, scale in scales.items()
        }

    def _evaluate(self, sums_x3: np.ndarray) -> dict[str, np.ndarray]:
        count, w, w2 = np.moveaxis(sums_x3, -1, 0)
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            return {
                "chi2_sequence": np.expm1(np.log(w2 / count) + 2 * self.shift),
                "ess_sequence": w * w / (count * w2),
            }


def _rescale(shift: float, largest: float) -> np.ndarray:
    factor = np.exp(shift - largest) if shift > -np.inf else 0.0
    return np.array([1.0, factor, factor * factor])
