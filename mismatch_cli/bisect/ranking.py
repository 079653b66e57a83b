"""From legs to causes: what each experiment takes of the recorded gap, which of them count, and in which order.

Reads what was recorded and runs nothing: the same ranking under other weights of the responses is that of a resample.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from mismatch_cli.bisect.effects import MEASURES, Effects, GapSums
from mismatch_cli.bisect.experiments import AS_RECORDED, ROLLOUT, TRAINER, Experiment, Pair, Search
from mismatch_cli.bisect.fixed_tokens import FixedTokens
from mismatch_cli.metrics.estimate import NO_SPREAD, Estimate

NO_GAP = 2e-5  # nats on an average token: the rounding of float32, of which there is nothing to explain
LEAST = 0.05  # of the gap: what takes less is not a cause of it
LARGE = 0.2  # of the gap: what takes so much is a cause also where there are too few prompts for an interval
EXPLAINED = 0.1  # of the gap: where less is left, nothing more is looked for
ALL_MODULES = "all"
RECORDED: Pair = (AS_RECORDED, AS_RECORDED)


class Measured:
    """The sums of every pair of legs that is asked for, each formed once."""

    def __init__(self, tokens: FixedTokens, column: Callable[[str, str], np.ndarray]) -> None:
        """`column(leg, side)` is log μ or log π of all tokens by a leg."""
        self.tokens = tokens
        self._column = column
        self._columns: dict[tuple[str, str], np.ndarray] = {}
        self._sums: dict[Pair, GapSums] = {}

    def logp_T(self, leg: str, side: str) -> np.ndarray:
        """log μ or log π of all tokens by a leg, float64; NaN = not read."""
        if (leg, side) not in self._columns:
            self._columns[leg, side] = self._column(leg, side)
        return self._columns[leg, side]

    def sums(self, pair: Pair) -> GapSums:
        """Of the gap between a leg of the rollout and one of the trainer."""
        if pair not in self._sums:
            legs = self.logp_T(pair[0], ROLLOUT), self.logp_T(pair[1], TRAINER)
            self._sums[pair] = GapSums.between(self.tokens, *legs)
        return self._sums[pair]

    def apart(self, side: str, first: str, other: str) -> GapSums:
        """Of the difference of two legs of one side."""
        return GapSums.between(self.tokens, self.logp_T(first, side), self.logp_T(other, side))


def measured_in(tokens: FixedTokens, legs: Iterable[str], column: Callable[[str, str], np.ndarray]) -> Measured:
    """All legs, on the tokens that every one of them knows of the responses that it has read."""
    return Measured(tokens.known_to(column(leg, side) for leg in legs for side in (ROLLOUT, TRAINER)), column)


@dataclass(frozen=True)
class Row:
    """An experiment with what it changes: paired differences, its share of the recorded gap, and what is left, nats."""

    experiment: Experiment
    share: Estimate
    change: dict[str, Estimate] = field(default_factory=dict)
    left: float = 0.0

    @property
    def is_cause(self) -> bool:
        """Whether it surely takes a part of the gap that is worth a word; without an interval, a large one."""
        value, low = self.share.value or 0.0, self.share.low
        if low is None and self.share.note != NO_SPREAD:
            return value >= LARGE
        return value >= LEAST and (low is None or low > 0)


@dataclass(frozen=True)
class Ranking:
    """Causes, the largest share first, precisions that both sides share last; and what was tried and is not a cause."""

    causes: tuple[Row, ...]
    tested: tuple[Row, ...]

    @property
    def named(self) -> tuple[Row, ...]:
        """The causes that lie on one side or between both; what a precision makes on both alike is not among them."""
        return tuple(row for row in self.causes if not row.experiment.floor)


def rank(measured: Measured, search: Search, weight_S: np.ndarray | None = None, details: bool = True) -> Ranking:
    """Every experiment with its share, one a setting: on both sides only where that takes surely more than on one.

    `weight_S` counts responses otherwise, as a resample of the prompts does; without `details` only shares are formed.
    """
    recorded = measured.sums(RECORDED)
    if recorded.mean() < NO_GAP:
        return Ranking((), ())
    effects = Effects(measured.tokens, weight_S)
    rows = [_row(effects, measured, e, details) for e in search.experiments if e.setting != ALL_MODULES]
    best = [_best([row for row in rows if row.experiment.setting == name]) for name in _settings(rows)]
    others = [row for row in rows if row not in best]
    order = sorted(best, key=lambda row: (row.experiment.floor, -(row.share.value or 0.0)))
    return Ranking(tuple(row for row in order if row.is_cause), (*(row for row in order if not row.is_cause), *others))


def _settings(rows: Iterable[Row]) -> list[str]:
    return list(dict.fromkeys(row.experiment.setting for row in rows))


def _best(rows: Sequence[Row]) -> Row:
    """Of one setting: the side that takes most, and both together only where that is more by what counts."""
    one = [row for row in rows if row.experiment.side != "both" or row.experiment.floor]
    both = [row for row in rows if row not in one]
    strongest = [max(some, key=lambda row: row.share.value or 0.0) for some in (one, both) if some]
    if len(strongest) == 2 and (strongest[1].share.value or 0.0) >= (strongest[0].share.value or 0.0) + LEAST:
        return strongest[1]
    return strongest[0]


def _row(effects: Effects, measured: Measured, experiment: Experiment, details: bool) -> Row:
    before, after = measured.sums(experiment.before), measured.sums(experiment.after)
    recorded = measured.sums(RECORDED)
    share = effects.share(recorded, before, after)
    if not details:
        return Row(experiment, share)
    change = {measure: effects.change(before, after, measure) for measure in MEASURES}
    left = effects.left(recorded, after).value or 0.0  # of the responses that were read, which may be a few
    return Row(experiment, share, change, left * recorded.mean())


def is_explained(measured: Measured, left: Pair) -> bool:
    """Whether so little of the gap is left between two legs that nothing more is to be looked for."""
    after, recorded = measured.sums(left), measured.sums(RECORDED)
    known_S = after.tokens_S > 0
    whole = recorded.sums_S3[known_S, 0].sum()
    return after.mean() < NO_GAP or after.sums_S3[:, 0].sum() < EXPLAINED * whole
