"""From legs to causes: how much of the recorded gap each experiment removes, which of them count,
in which order.

It reads what was recorded and runs nothing; with other response weights it gives the ranking of a
resample.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

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
            legs = self.logp_T(pair[0], ROLLOUT), self.logp_T(pair[1], TRAINER)
            self._sums[pair] = GapSums.between(self.tokens, *legs)
        return self._sums[pair]

    def apart(self, side: str, first: str, other: str) -> GapSums:
        """Sums of the difference between two legs of one side."""
        return GapSums.between(self.tokens, self.logp_T(first, side), self.logp_T(other, side))


def measured_in(
    tokens: FixedTokens, legs: Iterable[str], column: Callable[[str, str], np.ndarray]
) -> LegDifferences:
    """All legs, on the tokens that are known to every leg that read them."""
    legs = tuple(legs)
    return LegDifferences(
        tokens.known_to(column(leg, side) for leg in legs for side in (ROLLOUT, TRAINER)),
        column,
        legs,
    )


def noise_of(measured: LegDifferences) -> list[Estimate]:
    """How far each side is from itself in other batches, as a share of the recorded gap; of the
    sides that were read twice.
    """
    effects, recorded = Effects(measured.tokens), measured.sums(RECORDED)
    sides = ((ROLLOUT, DECODED.name, ALONE.name), (TRAINER, SCORED.name, OTHER_SHAPE.name))
    return [
        effects.left(recorded, measured.apart(*side))
        for side in sides
        if measured.legs.issuperset(side[1:])
    ]


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
        value, low = self.share.value or 0.0, self.share.low
        if low is None and self.share.note != NO_SPREAD:
            return value >= LARGE + self.noise
        return value >= LEAST and (low is None or low > 0)


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
    rows = [
        replace(_row(effects, measured, e, details), noise=noise)
        for e in search.experiments
        if e.setting != ALL_MODULES
    ]
    best = [
        _best([row for row in rows if row.experiment.setting == name]) for name in _settings(rows)
    ]
    others = [row for row in rows if row not in best]
    order = sorted(best, key=lambda row: (row.experiment.floor, -(row.share.value or 0.0)))
    return Ranking(
        tuple(row for row in order if row.is_cause),
        (*(row for row in order if not row.is_cause), *others),
    )


def _settings(rows: Iterable[ExperimentEffects]) -> list[str]:
    return list(dict.fromkeys(row.experiment.setting for row in rows))


def _best(rows: Sequence[ExperimentEffects]) -> ExperimentEffects:
    """The row of one setting that removes most; both sides together only if that removes notably
    more.
    """
    single = [row for row in rows if row.experiment.side != "both" or row.experiment.floor]
    double = [row for row in rows if row not in single]
    strongest = [
        max(group, key=lambda row: row.share.value or 0.0) for group in (single, double) if group
    ]
    if (
        len(strongest) == 2
        and (strongest[1].share.value or 0.0) >= (strongest[0].share.value or 0.0) + LEAST
    ):
        return strongest[1]
    return strongest[0]


def _row(
    effects: Effects, measured: LegDifferences, experiment: Experiment, details: bool
) -> ExperimentEffects:
    before, after = measured.sums(experiment.before), measured.sums(experiment.after)
    recorded = measured.sums(RECORDED)
    share = effects.share(recorded, before, after)
    if not details:
        return ExperimentEffects(experiment, share)
    change = {measure: effects.change(before, after, measure) for measure in MEASURES}
    # Of the responses that were read, perhaps a few
    left = effects.left(recorded, after).value or 0.0
    return ExperimentEffects(experiment, share, change, left * recorded.mean())


def is_explained(measured: LegDifferences, left: Pair) -> bool:
    """Whether so little of the gap is left between two legs that the search can end."""
    after, recorded = measured.sums(left), measured.sums(RECORDED)
    known_S = after.tokens_S > 0
    whole = recorded.sums_S3[known_S, 0].sum()
    return after.mean() < NO_GAP or after.sums_S3[:, 0].sum() < EXPLAINED * whole
