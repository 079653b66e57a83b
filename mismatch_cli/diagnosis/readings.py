"""Which reading of the responses makes one side's numbers, while the other side has what the model gives as recorded.

The model at hand reads the recorded tokens; one side agrees with it, the other does not. Then the model reads them
under each hypothesis, a few responses first, and the one that fits the other side is scored on all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from mismatch_cli.diagnosis import hypotheses
from mismatch_cli.diagnosis.model import AS_RECORDED, Hypothesis, ModelAtHand
from mismatch_cli.diagnosis.sample import Sample

_AGREES = 0.5  # of the gap: how far the side that read what is recorded may be from the model
_PROMISES, _FITS = 0.8, 0.5  # of a few responses' gap, of all responses' gap, that may be left
_STEPS = 7  # of a search between two factors
_MOST_PADDING = 64  # tokens, that are tried one by one
_ROUND = (8, 64, 128, 256, 512, 1024, 2048)  # lengths to which people fill up


@dataclass(frozen=True)
class Reading:
    """A hypothesis that fits one side: what undoing it leaves of log π − log μ, NaN where it was not scored."""

    name: str
    side: str
    left_T: np.ndarray
    left: float  # of the scored tokens' Σ|d|


class Readings:
    """The search, by kinds of hypotheses, on one sample with a model."""

    def __init__(self, sample: Sample, model: ModelAtHand) -> None:
        self._sample, self._model = sample, model

    @cached_property
    def side(self) -> str | None:
        """Which side differs from the model, where the other one agrees with it."""
        costs = {side: self._cost(own_T - self._model.logp_T()) for side, own_T in self._sides.items()}
        far = max(costs, key=lambda side: costs[side])
        near = min(costs.values())
        return far if near < _AGREES * self._cost(self._d_T) and near < costs[far] else None

    @property
    def as_recorded(self) -> Reading | None:
        """The model's own numbers in the place of the trainer's, where these are not what the model gives."""
        if self.side != "trainer":
            return None
        left_T = self._model.logp_T() - self._sample.logq_T
        return Reading("as recorded", "trainer", left_T, self._cost(left_T) / self._cost(self._d_T))

    @cached_property
    def positions(self) -> Reading | None:
        """Another base or scaling of RoPE; factors in between are searched for."""
        if self.side is None:
            return None
        costs = {h: self._few_cost(h) for h in hypotheses.positions_of(self._model.config)}
        best = min(costs, key=lambda h: costs[h])
        for make, factors in (
            (hypotheses.scaled_positions, hypotheses.FACTORS),
            (hypotheses.scaled_base, hypotheses.BASE_FACTORS),
        ):
            between = self._between(make, factors)
            best = min((best, between), key=self._few_cost)
        return self._confirmed(best)

    @cached_property
    def padding(self) -> Reading | None:
        """Padding on the left that attention sees: as many tokens everywhere, or prompts filled up to one length."""
        if self.side is None:
            return None
        longest = self._model.longest_prompt
        lengths = sorted({longest, *(-(-longest // n) * n for n in _ROUND)})
        found = []
        for token in self._padding_ids():
            found += [hypotheses.padded_to(length, token) for length in lengths]
        found += [hypotheses.padded(count, self._padding_ids()[0]) for count in range(1, _MOST_PADDING + 1)]
        return self._confirmed(min(found, key=self._few_cost))

    @cached_property
    def prompt(self) -> Reading | None:
        """A token of the prompt that is missing, or stands there once more."""
        if self.side is None:
            return None
        return self._confirmed(min(hypotheses.other_prompts(self._model.config), key=self._few_cost))

    @property
    def _sides(self) -> dict[str, np.ndarray]:
        return {"rollout": self._sample.logq_T, "trainer": self._sample.logp_T}

    @property
    def _d_T(self) -> np.ndarray:
        return self._sample.logp_T - self._sample.logq_T

    def _padding_ids(self) -> list[int]:
        """What people fill up with: the padding token, else the end of sequence, else 0."""
        named = [getattr(self._model.config, f"{name}_token_id", None) for name in ("pad", "eos")]
        flat = [value[0] if isinstance(value, list) else value for value in named]
        return list(dict.fromkeys(int(value) for value in (*flat, 0) if value is not None))

    def _cost(self, d_T: np.ndarray, few: bool = False) -> float:
        """The mean of |d| over the tokens that count and are scored, nats."""
        known_T = self._sample.counts_T & np.isfinite(self._model.logp_T(AS_RECORDED, few)) & np.isfinite(d_T)
        return float(np.abs(d_T[known_T]).mean()) if known_T.any() else np.inf

    def _left_T(self, hypothesis: Hypothesis, few: bool) -> np.ndarray:
        """log π − log μ where the side that differs is moved back from the hypothesis to what is recorded."""
        moved_T = self._model.logp_T(AS_RECORDED, few) - self._model.logp_T(hypothesis, few)
        return self._d_T + (moved_T if self.side == "trainer" else -moved_T)

    def _few_cost(self, hypothesis: Hypothesis) -> float:
        return self._cost(self._left_T(hypothesis, few=True), few=True)

    def _between(self, make: Callable[[float], Hypothesis], factors: Sequence[float]) -> Hypothesis:
        """The best factor near the best of some: thirds of the logarithm between its neighbours are given up."""
        costs = [self._few_cost(make(factor)) for factor in factors]
        at = int(np.argmin(costs))
        low, high = (np.log(factors[i]) for i in (max(0, at - 1), min(len(factors) - 1, at + 1)))
        for _ in range(_STEPS):
            left, right = low + (high - low) / 3, high - (high - low) / 3
            if self._few_cost(make(float(np.exp(left)))) < self._few_cost(make(float(np.exp(right)))):
                high = right
            else:
                low = left
        return min((make(factors[at]), make(float(np.exp((low + high) / 2)))), key=self._few_cost)

    def _confirmed(self, best: Hypothesis) -> Reading | None:
        """The hypothesis on all responses, if it holds on the few."""
        if self._few_cost(best) > _PROMISES * self._cost(self._d_T, few=True):
            return None
        left_T = self._left_T(best, few=False)
        left = self._cost(left_T) / self._cost(self._d_T)
        return Reading(best.name, str(self.side), left_T, left) if left < _FITS else None
