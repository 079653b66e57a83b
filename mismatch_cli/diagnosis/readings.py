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
_EXACT = 0.1  # of the gap: a side that the model reproduces is not at fault
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
        self._sample, self._model, self._d_T = sample, model, sample.logp_T - sample.logq_T
        self._searches: dict[str, Survey] = {}

    @cached_property
    def distances(self) -> dict[str, float]:
        """How far each side is from the model on the recorded tokens: mean nats per token."""
        sides = {"rollout": self._sample.logq_T, "trainer": self._sample.logp_T}
        return {side: self._mean(own_T - self._model.logp_T()) for side, own_T in sides.items()}

    @cached_property
    def side(self) -> str | None:
        """The side that differs from the model, if the other one agrees with it."""
        far = max(self.distances, key=lambda side: self.distances[side])
        near = min(self.distances.values())
        return (
            far if near < _AGREES * self._mean(self._d_T) and near < self.distances[far] else None
        )

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
        return Reading("as recorded", "trainer", left_T, self._mean(left_T) / self._mean(self._d_T))

    @cached_property
    def off_T(self) -> np.ndarray:
        """The trainer's log π less the model's on the recorded tokens, nats; NaN = not scored."""
        return np.where(self._sample.counts_T, self._sample.logp_T - self._model.logp_T(), np.nan)

    def search(self, kind: str) -> Survey:
        """Try one kind of hypotheses, once."""
        if kind not in self._searches:
            hypotheses = self._hypotheses[kind]()
            self._searches[kind] = self._best(hypotheses, KINDS[kind])
        return self._searches[kind]

    @property
    def _hypotheses(self) -> dict[str, Callable[[], Iterable[Hypothesis]]]:
        """What may have been misread, by the kinds of `KINDS`."""
        return {
            "prompt": self._prompt,
            "positions": self._positions,
            "padding": self._padding,
            "tensors": self._tensors,
            "adapter": self._adapter,
            "neighbours": self._neighbours,
        }

    def named(self) -> list[Reading]:
        """The misreadings that fit, of all kinds that were searched."""
        return [search.reading for search in self._searches.values() if search.reading]

    def _prompt(self) -> Iterable[Hypothesis]:
        """A prompt token that is missing or duplicated, or a run of one token."""
        return other_prompts(self._model.config)

    def _positions(self) -> Iterable[Hypothesis]:
        """Another base or scaling of RoPE, with a search between the usual factors where one of
        them helps.
        """
        yield from positions_of(self._model.config)
        for make, factors in ((scaled_positions, FACTORS), (scaled_base, BASE_FACTORS)):
            yield from self.factor_between(make, factors)

    def _padding(self) -> Iterable[Hypothesis]:
        """Left padding that attention sees: the same number of tokens everywhere, or prompts padded
        to one length. Where some padding makes the gap larger, more of it is not tried.
        """
        tokens = padding_tokens(self._model.config)
        for token in tokens:
            lengths = padded_lengths(self._model.longest_prompt)
            yield from self._while_helping(padded_to(length, token) for length in lengths)
        counts = [padded(count, tokens[0]) for count in PADDINGS]
        yield from self._while_helping(counts)
        lefts = [self._few_left(h)[0] if self._is_read(h) else np.inf for h in counts]
        at = int(np.argmin(lefts))
        if lefts[at] < 1:
            low, high = (PADDINGS[max(0, at - 1)], PADDINGS[min(len(PADDINGS) - 1, at + 1)])
            yield from (padded(count, tokens[0]) for count in range(low, high + 1))

    def _tensors(self) -> Iterable[Hypothesis]:
        return missing_tensors(self._model.loaded)

    def _adapter(self) -> Iterable[Hypothesis]:
        return adapter_scales(self._model.loaded)

    def _neighbours(self) -> Iterable[Hypothesis]:
        return after_neighbours(self._model, self._sample, lambda h: self._few_left(h)[0])

    def _while_helping(self, hypotheses: Iterable[Hypothesis]) -> Iterator[Hypothesis]:
        for hypothesis in hypotheses:
            yield hypothesis
            if self._model.tried_on(hypothesis) and self._few_left(hypothesis)[0] >= 1:
                return

    def _is_read(self, hypothesis: Hypothesis) -> bool:
        return (hypothesis.name, True) in self._model.scored

    def factor_between(
        self, make: Callable[[float], Hypothesis], factors: Sequence[float]
    ) -> Iterator[Hypothesis]:
        """A ternary search on the logarithm between the neighbours of the best of these factors;
        none if it does not help.
        """
        lefts = [self._few_left(make(factor))[0] for factor in factors]
        at = int(np.argmin(lefts))
        if lefts[at] >= 1:
            return
        low, high = (np.log(factors[i]) for i in (max(0, at - 1), min(len(factors) - 1, at + 1)))
        for _ in range(STEPS):
            left, right = low + (high - low) / 3, high - (high - low) / 3
            pair = [make(float(np.exp(third))) for third in (left, right)]
            yield from pair
            if self._few_left(pair[0])[0] < self._few_left(pair[1])[0]:
                high = right
            else:
                low = left
        yield make(float(np.exp((low + high) / 2)))

    def _best(self, hypotheses: Iterable[Hypothesis], share: float) -> Survey:
        """The hypothesis that fits a few responses best, of those that a share of the budget
        allows, if it fits them well enough, and then all.
        """
        search, best = Survey(), None
        until = self._model.spent + share * self._model.budget
        try:
            for hypothesis in hypotheses:
                if self._model.spent + self._model.cost_of_few(hypothesis) > until:
                    raise SkippedReading(self._model.budget_spent)
                rows = self._model.tried_on(hypothesis)
                if not rows:
                    continue
                left, side = self._few_left(hypothesis)
                search.hypotheses += 1
                search.responses = max(search.responses, len(rows))
                if left < search.left:
                    best, search.left = (hypothesis, side), left
        except SkippedReading as reason:
            search.unread = str(reason)
        if best is not None and search.left <= _PROMISES:
            search.reading = self._confirmed(*best)
        return search

    def _confirmed(self, hypothesis: Hypothesis, side: str) -> Reading | None:
        """The hypothesis on all responses (on the few, if no others can be read), if it fits."""
        try:
            logp_T = self._model.logp_T(hypothesis)
        except SkippedReading:
            logp_T = self._model.logp_T(hypothesis, few=True)
        left_T = self._left_T(logp_T, side)
        left = self._share(left_T)
        clearly = left < _LESS and self._z(left_T) > _Z
        return Reading(hypothesis.name, side, left_T, left) if left < _FITS or clearly else None

    def _left_T(self, logp_T: np.ndarray, side: str) -> np.ndarray:
        """log π − log μ with one side moved from what a hypothesis gives to the recorded tokens;
        NaN where that was not scored.
        """
        moved_T = self._model.logp_T() - logp_T
        return self._d_T + (moved_T if side == "trainer" else -moved_T)

    def _few_left(self, hypothesis: Hypothesis) -> tuple[float, str]:
        """The share of the gap that undoing a hypothesis leaves on a few responses, and the side
        on which it leaves less.
        """
        logp_T = self._model.logp_T(hypothesis, few=True)
        return min((self._share(self._left_T(logp_T, side)), side) for side in self._sides)

    def _share(self, left_T: np.ndarray) -> float:
        """Of Σ|d| over the tokens that count and were scored; 1 if there is no gap."""
        scored_T = self._sample.counts_T & np.isfinite(left_T)
        gap = float(np.abs(self._d_T[scored_T]).sum())
        return float(np.abs(left_T[scored_T]).sum()) / gap if gap else 1.0

    def _z(self, left_T: np.ndarray) -> float:
        """By how many standard errors the gap shrinks: over prompts, or over responses if there
        are too few.
        """
        left_N, sample = left_T[self._sample.index_N], self._sample
        scored = np.isfinite(left_N)
        shrunk_M = np.abs(self._d_T[sample.index_N][scored]) - np.abs(left_N[scored])
        group_M = sample.group_N[scored]
        if len(np.unique(group_M)) < _FEWEST_GROUPS:
            group_M = sample.response_N[scored] % GROUPS
        return mean_over_prompts(shrunk_M, group_M).z_from(0.0)

    def _mean(self, d_T: np.ndarray) -> float:
        """The mean |d| over the tokens that count and were scored, nats."""
        scored_T = self._sample.counts_T & np.isfinite(self._model.logp_T()) & np.isfinite(d_T)
        return float(np.abs(d_T[scored_T]).mean()) if scored_T.any() else np.inf
