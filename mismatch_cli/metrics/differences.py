"""The difference of two traces in a metric, with an interval that accounts for what they share.

It is computed without each group of prompts in turn. The same prompts are left out of both traces,
so the effect of a hard or easy prompt cancels; a prompt in only one of them is left out of that
one. So the same formula serves traces that share all of their prompts, some, or none.
"""

from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from mismatch_cli.metrics.estimate import (
    EXTREME,
    FEW_DECIDE,
    FEW_PROMPTS,
    FLOOR_RESOLUTION,
    LOG_FACTOR,
    NO_SPREAD,
    Estimate,
    Jackknife,
    Scale,
    jackknife_values,
    point_estimate,
)
from mismatch_cli.metrics.gap_table import METRICS, Metric
from mismatch_cli.metrics.summary import MismatchSummary

NO_DIFFERENCE = "no difference for any prompt"
AT_AGREEMENT = "one of them may be in agreement: no interval"
# The first and the other trace, each without one group of prompts at a time
Sides = tuple[np.ndarray, np.ndarray]
_ANGLES = np.linspace(0, 2 * np.pi, 361)
_ROUNDING = 1e-9  # relative to the larger value: less comes from the order of additions


@dataclass(frozen=True)
class MetricDifference:
    """How another trace differs from the first in a metric.

    `difference` is the other − the first; `factor` is the other's distance from agreement over the
    first's, without a value for a signed metric or if the first is below resolution.
    `more_than_noise`: whether the interval of the difference excludes 0; None without an interval.
    """

    difference: Estimate
    factor: Estimate
    more_than_noise: bool | None

    @classmethod
    def of(cls, difference: Estimate, factor: Estimate) -> Self:
        low, high = difference.low, difference.high
        if low is None or high is None:
            return cls(difference, factor, None)
        return cls(difference, factor, low > 0 or high < 0)


class SummaryEstimates:
    """Every metric of one summary: its estimate, and the values behind its interval."""

    def __init__(self, summary: MismatchSummary) -> None:
        self.prompts = summary.exact.prompts.result()
        self.jackknife = summary.jackknife() | {"spearman": summary.exact.spearman.jackknife()}
        self.estimates = summary.estimates()
        self.estimates["spearman"] = self.jackknife["spearman"].estimate(self.prompts)


def differences(
    first: SummaryEstimates, other: SummaryEstimates, *, same_tokens: bool = False
) -> dict[str, MetricDifference]:
    """Every metric of the catalog, the other compared with the first.

    On the same tokens the mean gaps are compared from four prompts on.
    """
    return {
        key: _difference(metric, first, other, same_tokens and key in GAP)
        for key, metric in METRICS.items()
    }


GAP = ("abs_d_mean", "tv_binary_mean")  # their difference decides whether the gap differs


def _difference(
    metric: Metric, first: SummaryEstimates, other: SummaryEstimates, paired: bool
) -> MetricDifference:
    x, y = first.estimates[metric.key].value, other.estimates[metric.key].value
    if x is None or y is None:
        nothing = Estimate(None, note=(first if x is None else other).estimates[metric.key].note)
        return MetricDifference.of(nothing, nothing)
    if metric.key not in first.jackknife:
        return MetricDifference.of(
            point_estimate(_settled(x, y) - x, EXTREME), _factor(metric, x, y)
        )
    prompts = min(first.prompts, other.prompts)
    a, b = (side.jackknife[metric.key] for side in (first, other))
    x_G, y_G = _aligned(a, b)
    y, y_G = _settled(x, y), _settled(x_G, y_G)
    known_G = ~(np.isnan(x_G) | np.isnan(y_G))
    with np.errstate(invalid="ignore"):
        difference_G = jackknife_values(y_G - x_G, known_G)
    same = y == x and not np.any(difference_G[np.isfinite(difference_G)])
    unsure = a.why_no_interval or b.why_no_interval
    jackknife = Jackknife(y - x, difference_G, why_no_interval=unsure)
    change = jackknife.estimate(prompts)
    if same:
        change = Estimate(0.0, note=NO_DIFFERENCE)
    elif paired and change.note == FEW_PROMPTS:
        change = jackknife.paired()
    elif change.low is not None:
        change = change_between(
            a.estimate(prompts), b.estimate(prompts), _correlation(a.scale, x_G, y_G), y - x
        )
    if any(_holds_agreement(metric, side.estimates[metric.key]) for side in (first, other)):
        unsure = AT_AGREEMENT  # the distance may have any size and either sign
    return MetricDifference.of(change, _factor(metric, x, y, (x_G, y_G), prompts, unsure))


def _holds_agreement(metric: Metric, found: Estimate) -> bool:
    return (
        found.low is not None
        and found.high is not None
        and found.low <= (metric.agreement or 0.0) <= found.high
    )


def _correlation(scale: Scale, x_G: np.ndarray, y_G: np.ndarray) -> float:
    """The correlation of the errors of two values with the same prompts, on their scale."""
    with np.errstate(all="ignore"):
        on_scale_2G = scale.to(np.stack([x_G, y_G]))
    on_scale_2G = on_scale_2G[:, np.isfinite(on_scale_2G).all(axis=0)]
    if not on_scale_2G.size:  # all means are 0, which has no logarithm
        return 0.0
    u_2G = on_scale_2G - on_scale_2G.mean(axis=1, keepdims=True)
    norms = float(np.prod(np.linalg.norm(u_2G, axis=1)))
    return float(np.clip(u_2G[0] @ u_2G[1] / norms, -1, 1)) if norms > 0 else 0.0


def change_between(first: Estimate, other: Estimate, correlation: float, change: float) -> Estimate:
    """The interval of a difference from those of both values, each with its own reach below and
    above.

    The ends are the smallest and largest difference as both values move within their intervals, on
    the ellipse given by their correlation (without correlation: Zou and Donner 2008). A value
    without spread does not move.
    """
    reaches = []
    for side in (first, other):
        if side.low is None and side.note != NO_SPREAD:
            return point_estimate(change, side.note)
        low, high = (side.value if end is None else end for end in (side.low, side.high))
        reaches.append((side.value - low, high - side.value))  # type: ignore[operator]
    x = np.cos(_ANGLES)
    y = correlation * x + np.sqrt(1 - correlation**2) * np.sin(_ANGLES)
    x_moved, y_moved = (
        np.where(z > 0, above, below) * z for z, (below, above) in zip((x, y), reaches, strict=True)
    )
    moved = y_moved - x_moved
    note = FEW_DECIDE if FEW_DECIDE in (first.note, other.note) else None
    return Estimate(float(change), float(change + moved.min()), float(change + moved.max()), note)


def _aligned(a: Jackknife, b: Jackknife) -> Sides:
    """Both without each group of prompts; a group in only one of them leaves the other
    unchanged.
    """
    lacks_a, lacks_b = np.isnan(a.without_G), np.isnan(b.without_G)
    return np.where(lacks_a & ~lacks_b, a.value, a.without_G), np.where(
        lacks_b & ~lacks_a, b.value, b.without_G
    )


def _settled(x: Any, y: Any) -> Any:
    """`y`, or `x` where the two differ only by rounding."""
    with np.errstate(invalid="ignore"):
        close = np.abs(y - x) <= _ROUNDING * np.maximum(np.abs(x), np.abs(y))
    return np.where(close, x, y) if isinstance(x, np.ndarray) else x if close else y


def _factor(
    metric: Metric,
    x: float,
    y: float,
    without: Sides | None = None,
    prompts: int = 0,
    unsure: str | None = None,
) -> Estimate:
    """The ratio of the distances from agreement, with an interval computed on the logarithm."""
    if metric.signed:
        return Estimate(None, note="signed: near zero by chance, no factor")
    first, other = _distance(metric, x), _distance(metric, y)
    if first < FLOOR_RESOLUTION:
        return Estimate(None, note="the first is below resolution: no factor")
    if without is None or other == 0:
        return point_estimate(other / first, EXTREME if without is None else "no gap: no interval")
    x_G, y_G = without
    with np.errstate(divide="ignore", invalid="ignore"):
        log_G = np.log(_distance(metric, y_G)) - np.log(_distance(metric, x_G))
    log_G = jackknife_values(log_G, ~(np.isnan(x_G) | np.isnan(y_G)))
    log = Jackknife(float(np.log(other / first)), log_G, LOG_FACTOR, unsure).estimate(prompts)
    low, high = (None if end is None else float(np.exp(end)) for end in (log.low, log.high))
    return Estimate(float(other / first), low, high, log.note)


def _distance(metric: Metric, value: Any) -> Any:
    """The distance of a value from agreement; the value itself for a metric that does not
    describe a gap.
    """
    return np.abs(value - (metric.agreement or 0.0))
