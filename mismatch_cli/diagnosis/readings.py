"""Which misreading of the responses reproduces one side.

The model reads the recorded tokens, and a few responses under each hypothesis. A hypothesis moves
log π of the model by some δ; where one side misread in that way, log π − log μ is that δ, with the
sign of the side, and taking it away leaves less. The hypothesis that leaves least is read on all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from mismatch_cli.base.hashing import GROUPS
from mismatch_cli.diagnosis.group_estimates import mean_over_prompts
from mismatch_cli.diagnosis.hypotheses import (
    BASE_FACTORS,
    FACTORS,
    other_prompts,
    padded,
    padded_lengths,
    padded_to,
    padding_tokens,
    positions_of,
    scaled_base,
    scaled_positions,
)
from mismatch_cli.diagnosis.model import Hypothesis, ModelAtHand, SkippedReading
from mismatch_cli.diagnosis.other_weights import adapter_scales, missing_tensors
from mismatch_cli.diagnosis.packs import after_neighbours
from mismatch_cli.diagnosis.sample import Sample

_AGREES = 0.5  # of the gap: how far the correct side may be from the model
_EXACT = 0.1  # of the gap: a side that the model reproduces, or a reading that is right
_PROMISES = 0.9  # of the gap that may be left on a few responses
# Of the gap that may be left on all: in any case, and if that is clear from prompt to prompt
_FITS, _LESS, _Z = 0.5, 0.8, 5.0
_FEWEST_GROUPS = 4  # of prompts; with fewer, responses are compared
STEPS = 7  # of the search between two factors
PADDINGS = (1, 2, 4, 8, 16, 32, 64)  # tokens, tried first
SIDES = ("trainer", "rollout")


@dataclass(frozen=True)
class Reading:
    """A hypothesis that fits one side; `left_T` is what undoing it leaves of log π − log μ, NaN
    where not scored.
    """

    name: str
    side: str
    left_T: np.ndarray
    left: float  # of the scored tokens' Σ|d|

    def left_N(self, sample: Sample) -> np.ndarray:
        """The gap without the misreading; tokens that were not scored shrink by the same factor
        as those that were.
        """
        left_N = self.left_T[sample.index_N]
        return np.where(np.isfinite(left_N), left_N, sample.d_N * min(1.0, self.left))


@dataclass
class Survey:
    """What a search through one kind of hypotheses did; `unread` says why it ended early."""

    hypotheses: int = 0
    responses: int = 0
    left: float = 1.0  # of the gap, by the best hypothesis on a few responses
    unread: str = ""
    reading: Reading | None = None


# Of the budget, for one kind of misreading: a part where readings are long or many
KINDS = {
    "prompt": 1.0,
    "padding": 0.15,
    "tensors": 1.0,
    "adapter": 1.0,
    "neighbours": 0.15,
    "positions": 0.35,
}


class Readings:
    """The search through kinds of hypotheses, on one sample with a model."""

    def __init__(self, sample: Sample, model: ModelAtHand) -> None:
        self._sample = sample
        self._model = model
        self._d_T = sample.logp_T - sample.logq_T
        self._surveys: dict[str, Survey] = {}

    @cached_property
    def distances(self) -> dict[str, float]:
        """How far each side is from the model on the recorded tokens: mean nats per token."""
        model_T = self._model.logp_T()
        return {
            "rollout": self._mean(self._sample.logq_T - model_T),
            "trainer": self._mean(self._sample.logp_T - model_T),
        }

    @cached_property
    def side(self) -> str | None:
        """The side that differs from the model, if the other one agrees with it."""
        near, far = sorted(self.distances.values())
        if near >= far or near >= _AGREES * self._mean(self._d_T):
            return None
        return max(self.distances, key=lambda side: self.distances[side])

    @cached_property
    def _sides(self) -> Sequence[str]:
        """The sides that may be at fault: not the one that the model reproduces."""
        if self.side and min(self.distances.values()) < _EXACT * self._mean(self._d_T):
            return (self.side,)
        return SIDES

    @property
    def as_recorded(self) -> Reading | None:
        """The model's own numbers instead of the trainer's, if those do not match the model."""
        if self.side != "trainer":
            return None
        left_T = self._model.logp_T() - self._sample.logq_T
        left = self._mean(left_T) / self._mean(self._d_T)
        return Reading("as recorded", "trainer", left_T, left)

    @cached_property
    def off_T(self) -> np.ndarray:
        """The trainer's log π less the model's on the recorded tokens, nats; NaN = not scored."""
        return np.where(self._sample.counts_T, self._sample.logp_T - self._model.logp_T(), np.nan)

    def search(self, kind: str) -> Survey:
        """Try one kind of hypotheses, once."""
        if kind not in self._surveys:
            self._surveys[kind] = self._survey(self._hypotheses(kind), KINDS[kind])
        return self._surveys[kind]

    def _hypotheses(self, kind: str) -> Iterable[Hypothesis]:
        """What may have been misread, of one of the `KINDS`."""
        model = self._model
        match kind:
            case "prompt":
                return other_prompts(model.config)
            case "positions":
                return self._positions()
            case "padding":
                return self._padding()
            case "tensors":
                return missing_tensors(model.loaded)
            case "adapter":
                return adapter_scales(model.loaded)
            case "neighbours":
                return after_neighbours(model, self._sample, self._left_on_few)
        raise KeyError(kind)

    def _positions(self) -> Iterable[Hypothesis]:
        """Another base or scaling of RoPE, with a search between the usual factors where one of
        them helps.
        """
        yield from positions_of(self._model.config)
        for make, factors in ((scaled_positions, FACTORS), (scaled_base, BASE_FACTORS)):
            yield from self.factor_between(make, factors)

    def _padding(self) -> Iterable[Hypothesis]:
        """Left padding that attention sees: the same number of tokens everywhere, or prompts padded
        to one length, up to the first that makes the gap larger. The shortest come first, since
        long ones exhaust the budget.
        """
        tokens = padding_tokens(self._model.config)
        paddings = [padded(count, tokens[0]) for count in PADDINGS]
        yield from paddings
        # Some may not have been tried
        lefts = [np.inf] * len(paddings)
        for i, padding in enumerate(paddings):
            if (padding.name, True) in self._model.scored:
                lefts[i] = self._left_on_few(padding)
        best = int(np.argmin(lefts))
        if lefts[best] < _EXACT:
            return
        lengths = padded_lengths(self._model.longest_prompt)
        for token in tokens:
            yield from self._while_helping(padded_to(length, token) for length in lengths)
        if lefts[best] < 1:
            below, above = _around(best, len(PADDINGS))
            for count in range(PADDINGS[below], PADDINGS[above] + 1):
                yield padded(count, tokens[0])

    def _while_helping(self, hypotheses: Iterable[Hypothesis]) -> Iterator[Hypothesis]:
        """Hypotheses up to the first that makes the gap larger, which is read in between."""
        for hypothesis in hypotheses:
            yield hypothesis
            if self._model.tried_on(hypothesis) and self._left_on_few(hypothesis) >= 1:
                return

    def factor_between(
        self, make: Callable[[float], Hypothesis], factors: Sequence[float]
    ) -> Iterator[Hypothesis]:
        """A ternary search on the logarithm between the neighbours of the best of these factors;
        nothing if none helps.
        """
        lefts = [self._left_on_few(make(factor)) for factor in factors]
        best = int(np.argmin(lefts))
        if lefts[best] >= 1:
            return
        below, above = _around(best, len(factors))
        low, high = np.log(factors[below]), np.log(factors[above])
        for _ in range(STEPS):
            third = (high - low) / 3
            smaller, larger = make(float(np.exp(low + third))), make(float(np.exp(high - third)))
            yield smaller
            yield larger
            if self._left_on_few(smaller) < self._left_on_few(larger):
                high = high - third
            else:
                low = low + third
        yield make(float(np.exp((low + high) / 2)))

    def _survey(self, hypotheses: Iterable[Hypothesis], share: float) -> Survey:
        """Try hypotheses on a few responses, as far as a share of the budget allows; the best one,
        if it fits them well enough, is read on all.
        """
        survey, best = Survey(), None
        until = self._model.spent + share * self._model.budget
        try:
            for hypothesis in hypotheses:
                if self._model.spent + self._model.cost_of_few(hypothesis) > until:
                    raise SkippedReading(self._model.budget_spent)
                responses = self._model.tried_on(hypothesis)
                if not responses:
                    continue
                left, side = self._best_side(hypothesis)
                survey.hypotheses += 1
                survey.responses = max(survey.responses, len(responses))
                if left < survey.left:
                    survey.left = left
                    best = hypothesis, side
        except SkippedReading as reason:
            survey.unread = str(reason)
        if best is not None and survey.left <= _PROMISES:
            survey.reading = self._confirm(*best)
        return survey

    def _confirm(self, hypothesis: Hypothesis, side: str) -> Reading | None:
        """The hypothesis on all responses (on the few, if no others can be read), if it fits."""
        try:
            logp_T = self._model.logp_T(hypothesis)
        except SkippedReading:
            logp_T = self._model.logp_T(hypothesis, few=True)
        left_T = self._left_T(logp_T, side)
        left = self._share(left_T)
        fits = left < _FITS or (left < _LESS and self._z(left_T) > _Z)
        return Reading(hypothesis.name, side, left_T, left) if fits else None

    def _left_T(self, logp_T: np.ndarray, side: str) -> np.ndarray:
        """log π − log μ with one side moved from what a hypothesis gives to the recorded tokens;
        NaN where that was not scored.
        """
        moved_T = self._model.logp_T() - logp_T
        return self._d_T + (moved_T if side == "trainer" else -moved_T)

    def _left_on_few(self, hypothesis: Hypothesis) -> float:
        """The share of the gap that undoing a hypothesis leaves on a few responses."""
        left, _ = self._best_side(hypothesis)
        return left

    def _best_side(self, hypothesis: Hypothesis) -> tuple[float, str]:
        """The share of the gap that undoing a hypothesis leaves on a few responses, on the side on
        which it leaves less.
        """
        logp_T = self._model.logp_T(hypothesis, few=True)
        return min((self._share(self._left_T(logp_T, side)), side) for side in self._sides)

    def _share(self, left_T: np.ndarray) -> float:
        """What is left of Σ|d| over the tokens that count and were scored; 1 if there is no gap."""
        scored_T = self._sample.counts_T & np.isfinite(left_T)
        gap = float(np.abs(self._d_T[scored_T]).sum())
        return float(np.abs(left_T[scored_T]).sum()) / gap if gap else 1.0

    def _z(self, left_T: np.ndarray) -> float:
        """By how many standard errors the gap shrinks: over prompts, or over responses if there
        are too few.
        """
        sample = self._sample
        left_N = left_T[sample.index_N]
        scored_N = np.isfinite(left_N)
        shrunk_M = np.abs(sample.d_N[scored_N]) - np.abs(left_N[scored_N])
        group_M = sample.group_N[scored_N]
        if len(np.unique(group_M)) < _FEWEST_GROUPS:
            group_M = sample.response_N[scored_N] % GROUPS
        return mean_over_prompts(shrunk_M, group_M).z_from(0.0)

    def _mean(self, d_T: np.ndarray) -> float:
        """The mean |d| over the tokens that count and were scored, nats."""
        scored_T = self._sample.counts_T & np.isfinite(self._model.logp_T()) & np.isfinite(d_T)
        return float(np.abs(d_T[scored_T]).mean()) if scored_T.any() else np.inf


def _around(best: int, count: int) -> tuple[int, int]:
    """The indices on both sides of the best of so many values, or its own at an end."""
    return max(0, best - 1), min(count - 1, best + 1)
