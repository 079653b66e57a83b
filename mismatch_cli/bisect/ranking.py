"""From legs to causes: how much of the recorded gap each experiment removes, which of them count,
in which order.

It reads what was recorded and runs nothing; with other response weights it gives the ranking of a
resample.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import product

import numpy as np

from mismatch_cli.bisect.effects import MEASURES, Effects, GapSums
from mismatch_cli.bisect.experiments import (
    ALONE,
    AS_RECORDED,
    DECODED,
    OTHER_SHAPE,
    ROLLOUT,
    SCORED,
    TRAINER,
    Experiment,
    Pair,
    Search,
)
from mismatch_cli.bisect.fixed_tokens import FixedTokens
from mismatch_cli.metrics.estimate import NO_SPREAD, Estimate

NO_GAP = 2e-5  # mean nats per token: float32 rounding, with nothing to explain
LEAST = 0.05  # of the gap: what removes less is not a cause
# Of the gap: what removes this much is a cause even with too few prompts for an interval
LARGE = 0.2
EXPLAINED = 0.1  # of the gap: if less is left, the search ends
ALL_MODULES = "all"
RECORDED: Pair = (AS_RECORDED, AS_RECORDED)


class LegDifferences:
    """The sums of every pair of legs, each computed once, on demand."""

    def __init__(
        self,
        tokens: FixedTokens,
        column: Callable[[str, str], np.ndarray],
        legs: Iterable[str] = (),
    ) -> None:
        """`column(leg, side)` returns a leg's log μ or log π of all tokens; `legs` were read."""
        self.tokens, self.legs = tokens, frozenset(legs)
        self._column = column
        self._columns: dict[tuple[str, str], np.ndarray] = {}
        self._sums: dict[Pair, GapSums] = {}

    def logp_T(self, leg: str, side: str) -> np.ndarray:
        """A leg's log μ or log π of all tokens, float64; NaN = not read."""
        if (leg, side) not in self._columns:
            self._columns[leg, side] = self._column(leg, side)
        return self._columns[leg, side]

    def sums(self, pair: Pair) -> GapSums:
        """Sums of the gap between a leg of the rollout and one of the trainer."""
        if pair not in self._sums:
            rollout, trainer = pair
            self._sums[pair] = GapSums.between(
                self.tokens, self.logp_T(rollout, ROLLOUT), self.logp_T(trainer, TRAINER)
            )
        return self._sums[pair]

    def apart(self, side: str, first: str, other: str) -> GapSums:
        """Sums of the difference between two legs of one side."""
        return GapSums.between(self.tokens, self.logp_T(first, side), self.logp_T(other, side))


def measured_in(
    tokens: FixedTokens, legs: Iterable[str], column: Callable[[str, str], np.ndarray]
) -> LegDifferences:
    """All legs, on the tokens that are known to every leg that read them."""
    legs = tuple(legs)
    columns = (column(*key) for key in product(legs, (ROLLOUT, TRAINER)))
    return LegDifferences(tokens.known_to(columns), column, legs)


def noise_of(measured: LegDifferences) -> list[Estimate]:
    """How far each side is from itself in other batches, as a share of the recorded gap; of the
    sides that were read twice.
    """
    effects, recorded = Effects(measured.tokens), measured.sums(RECORDED)
    again = ((ROLLOUT, DECODED.name, ALONE.name), (TRAINER, SCORED.name, OTHER_SHAPE.name))
    shares = []
    for side, first, other in again:
        if measured.legs >= {first, other}:
            shares.append(effects.left(recorded, measured.apart(side, first, other)))
    return shares


@dataclass(frozen=True)
class ExperimentEffects:
    """An experiment's effects: paired differences, its share of the recorded gap, and what is
    left, in nats; `noise` is that of the noisier side, as a share of the gap.
    """

    experiment: Experiment
    share: Estimate
    change: dict[str, Estimate] = field(default_factory=dict)
    left: float = 0.0
    noise: float = 0.0

    @property
    def is_cause(self) -> bool:
        """Whether it removes a notable part of the gap with 95 % confidence; without an
        interval, a large part beyond what noise may remove.
        """
        # An effect that is the same for all prompts has no interval and needs none.
        if self.share.low is None and self.share.note != NO_SPREAD:
            return self.removes >= LARGE + self.noise
        is_clear = self.share.low is None or self.share.low > 0
        return self.removes >= LEAST and is_clear

    @property
    def removes(self) -> float:
        """Its share of the gap, 0 where that is unknown."""
        return self.share.value or 0.0


@dataclass(frozen=True)
class Ranking:
    """Causes, largest share first, a precision of both sides last; and what was tried and is not
    a cause.
    """

    causes: tuple[ExperimentEffects, ...]
    tested: tuple[ExperimentEffects, ...]

    @property
    def named(self) -> tuple[ExperimentEffects, ...]:
        """The causes on one side or between both, without the rounding of a precision that both
        sides share.
        """
        return tuple(row for row in self.causes if not row.experiment.floor)


def rank(
    measured: LegDifferences,
    search: Search,
    weight_S: np.ndarray | None = None,
    details: bool = True,
) -> Ranking:
    """Every experiment with its share, one per setting: on both sides only if that removes clearly
    more than on one.

    `weight_S` reweights responses, as a resample of the prompts does; without `details` only shares
    are computed.
    """
    recorded = measured.sums(RECORDED)
    if recorded.mean() < NO_GAP:
        return Ranking((), ())
    effects = Effects(measured.tokens, weight_S)
    noise = max((share.value or 0.0 for share in noise_of(measured)), default=0.0)
    rows = []
    by_setting = defaultdict[str, list[ExperimentEffects]](list)
    for experiment in search.experiments:
        if experiment.setting != ALL_MODULES:
            row = replace(_row(effects, measured, experiment, details), noise=noise)
            rows.append(row)
            by_setting[experiment.setting].append(row)
    best = [_best(of_setting) for of_setting in by_setting.values()]
    best.sort(key=lambda row: (row.experiment.floor, -row.removes))
    causes = [row for row in best if row.is_cause]
    others = [row for row in best if not row.is_cause]
    others += [row for row in rows if row not in best]
    return Ranking(tuple(causes), tuple(others))


def _best(rows: Sequence[ExperimentEffects]) -> ExperimentEffects:
    """The row of one setting that removes most; both sides together only if that removes notably
    more.
    """
    single, double = [], []
    for row in rows:
        # A shared precision belongs to both sides, but has no one-sided row to be compared with.
        if row.experiment.side == "both" and not row.experiment.floor:
            double.append(row)
        else:
            single.append(row)
    if not (single and double):
        return max(rows, key=lambda row: row.removes)
    strongest = max(single, key=lambda row: row.removes)
    of_both = max(double, key=lambda row: row.removes)
    return of_both if of_both.removes >= strongest.removes + LEAST else strongest


def _row(
    effects: Effects, measured: LegDifferences, experiment: Experiment, details: bool
) -> ExperimentEffects:
    before, after = measured.sums(experiment.before), measured.sums(experiment.after)
    recorded = measured.sums(RECORDED)
    share = effects.share(recorded, before, after)
    if not details:
        return ExperimentEffects(experiment, share)
    change = {measure: effects.change(before, after, measure) for measure in MEASURES}
    # The leg may have read a few responses only: its share is taken for that of all.
    left = effects.left(recorded, after).value or 0.0
    return ExperimentEffects(experiment, share, change, left * recorded.mean())


def is_explained(measured: LegDifferences, left: Pair) -> bool:
    """Whether so little of the gap is left between two legs that the search can end."""
    after, recorded = measured.sums(left), measured.sums(RECORDED)
    if not after.tokens_S.any():
        return False  # without any number, as from an overflow, nothing is known to be left
    # A leg may have read some of the responses only: the whole gap is that of the same ones.
    whole = recorded.of("abs_d")[after.tokens_S > 0].sum()
    return after.mean() < NO_GAP or after.of("abs_d").sum() < EXPLAINED * whole
