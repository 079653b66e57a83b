"""Limits derived from good runs: as far beyond the measured values as another run with the same
settings may be.

With v a run's value and e the end of its 95 % interval away from agreement, both on the scale of
that interval (or as they are where it is in errors), the limit is v + MARGIN · (e − v). The value
of another such run differs from v by √2 standard errors, and v and e are 2 standard errors apart:
with MARGIN = 1, one run in twelve would be beyond a single limit by chance.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal
from math import isfinite

import numpy as np

from mismatch_cli.base.errors import MismatchError
from mismatch_cli.limits.limit_sets import Limit
from mismatch_cli.metrics.estimate import FEW_DECIDE, NOT_MEASURED, SIGNED, Estimate
from mismatch_cli.metrics.gap_table import METRICS, Metric
from mismatch_cli.metrics.pair_summary import PairSummary

MARGIN = 3.0
_DIGITS = 3  # of a limit, rounded away from the run
# One for each way in which a gap grows: at the sampled token, in the top K, in logs, outside a clip
# range, in its tail, in a direction, in the weights. Others are redundant, or depend on a few
# responses more than their intervals show: with correlation, p95 and the SD of Σd, a run of 24
# prompts fails its own limits in 10 of 100 resamples instead of 2.
GATED = (
    "tv_binary_mean",
    "tv_topk_mean",
    "abs_d_mean",
    "ratio_outside_0.8_1.28",
    "k3",
    "k1",
    "ess_token",
)
Metrics = Mapping[str, Estimate]


@dataclass(frozen=True)
class DerivedLimit:
    """A limit, and the run and estimate it was derived from."""

    limit: Limit
    run: int
    estimate: Estimate


@dataclass(frozen=True)
class FromRuns:
    """The limits for later runs."""

    pair: str
    drawn: tuple[DerivedLimit, ...]
    left_out: Mapping[str, str]  # why a metric has no limit


def limits_from(runs_pairs: Sequence[Mapping[str, PairSummary]]) -> FromRuns:
    """The limits of good runs, each measured separately, from the pairs of each: the widest one
    counts.
    """
    shared = set(runs_pairs[0]).intersection(*runs_pairs)
    pairs = [name for name in runs_pairs[0] if name in shared]
    if not pairs:
        recorded = "; ".join(map(", ".join, runs_pairs))
        raise MismatchError(
            f"The runs have no pair in common ({recorded}). Name runs recorded in the same way."
        )
    pair = pairs[0]
    runs: list[Metrics] = [run[pair].metrics for run in runs_pairs]
    drawn: list[DerivedLimit] = []
    left_out: dict[str, str] = {}
    for key in GATED:
        reasons = list(filter(None, (_why_unsure(metrics[key]) for metrics in runs)))
        if reasons:
            left_out[key] = reasons[0]
        else:
            drawn += _widest(METRICS[key], pair, runs)
    if not drawn:
        raise MismatchError(
            f"No metric has an interval to draw a limit from: {_reasons(left_out)}. Name a run "
            "with more prompts."
        )
    return FromRuns(pair, tuple(drawn), left_out)


def _reasons(left_out: Mapping[str, str]) -> str:
    """Why metrics have no limit; that some are not measured is said only if nothing else is."""
    reasons = {why.removesuffix(": no interval") for why in left_out.values()}
    better = reasons - {NOT_MEASURED}
    return "; ".join(sorted(better or reasons))


def _why_unsure(estimate: Estimate) -> str:
    """Why no limit follows from an estimate; empty if one does."""
    missing = None in (estimate.value, estimate.low, estimate.high)
    # Where a few prompts decide the value, the end of its interval says little of another run.
    if missing or estimate.note == FEW_DECIDE:
        return estimate.note or NOT_MEASURED
    return ""


def _widest(metric: Metric, pair: str, runs: Sequence[Metrics]) -> list[DerivedLimit]:
    """The loosest bound over all runs, on each side on which the metric leaves agreement."""
    agreement = metric.agreement or 0.0
    estimates = [metrics[metric.key] for metrics in runs]
    bounds = ["min", "max"]
    if not metric.signed:
        values = [estimate.value for estimate in estimates]
        above = any(value is not None and value > agreement for value in values)
        bounds = ["max"] if above else ["min"]
    drawn = []
    for bound in bounds:
        ends = [_beyond(metric, estimate, bound) for estimate in estimates]
        loosest = max(ends) if bound == "max" else min(ends)
        run = ends.index(loosest)
        limit = Limit(metric.key, bound, _rounded(loosest, agreement, bound), pair=pair)
        drawn.append(DerivedLimit(limit, run, estimates[run]))
    return drawn


def _beyond(metric: Metric, estimate: Estimate, bound: str) -> float:
    """The value, moved beyond the end of its interval by the formula of the module."""
    value = np.array(estimate.value)
    end = np.array(estimate.high if bound == "max" else estimate.low)
    # On the scale of the metric, a value at the border of its range is infinite.
    # There, and where the scale is in errors, the value moves on the plain scale instead.
    for scale in (SIGNED,) if metric.scale.errors else (metric.scale, SIGNED):
        with np.errstate(all="ignore"):
            start = scale.to(value)
            moved = float(scale.back(start + MARGIN * (scale.to(end) - start)))
        if isfinite(moved):
            break
    return moved


def _rounded(threshold: float, agreement: float, bound: str) -> float:
    """Round to three digits of the distance from agreement, never towards the run."""
    distance = Decimal(threshold) - Decimal(agreement)
    if not distance:
        return threshold
    # Decimals hold the digits exactly: a float rounded in binary might end on the run's side.
    step = Decimal(1).scaleb(distance.adjusted() - _DIGITS + 1)
    away_from_run = ROUND_CEILING if bound == "max" else ROUND_FLOOR
    steps = (distance / step).to_integral_value(away_from_run)
    return float(Decimal(agreement) + steps * step)
