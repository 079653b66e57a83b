"""The difference of two traces in a metric, with an interval that accounts for what they share.

It is computed without each group of prompts in turn. The same prompts are left out of both traces,
so the effect of a hard or easy prompt cancels; a prompt in only one of them is left out of that
one. So the same formula serves traces that share all of their prompts, some, or none.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple, Self

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
    key = metric.key
    x, y = first.estimates[key], other.estimates[key]
    if x.value is None or y.value is None:
        nothing = Estimate(None, note=x.note if x.value is None else y.note)
        return MetricDifference.of(nothing, nothing)
    if key not in first.jackknife:
        change = point_estimate(_settled(x.value, y.value) - x.value, EXTREME)
        return MetricDifference.of(change, _factor(metric, x.value, y.value))
    a = first.jackknife[key]
    b = other.jackknife[key]
    values = _Aligned.of(x.value, y.value, a, b)
    prompts = min(first.prompts, other.prompts)
    change = _change(a, b, values, prompts, paired)
    why_no_factor = a.why_no_interval or b.why_no_interval
    # A value that may be in agreement has a distance of any size from it, and of either sign.
    if _may_agree(metric, x) or _may_agree(metric, y):
        why_no_factor = AT_AGREEMENT
    return MetricDifference.of(
        change, _factor(metric, values.x, values.y, values, prompts, why_no_factor)
    )


class _Aligned(NamedTuple):
    """The values of the first and the other trace, and both without the same groups of prompts;
    values that differ only by rounding are equal.
    """

    x: float
    y: float
    x_G: np.ndarray
    y_G: np.ndarray

    @classmethod
    def of(cls, x: float, y: float, a: Jackknife, b: Jackknife) -> Self:
        """A group in only one of the traces leaves the value of the other unchanged."""
        lacks_a, lacks_b = np.isnan(a.without_G), np.isnan(b.without_G)
        x_G = np.where(lacks_a & ~lacks_b, a.value, a.without_G)
        y_G = np.where(lacks_b & ~lacks_a, b.value, b.without_G)
        return cls(x, _settled(x, y), x_G, _settled(x_G, y_G))

    @property
    def occupied_G(self) -> np.ndarray:
        return ~(np.isnan(self.x_G) | np.isnan(self.y_G))


def _change(a: Jackknife, b: Jackknife, values: _Aligned, prompts: int, paired: bool) -> Estimate:
    """The other value minus the first, with its interval."""
    x, y, x_G, y_G = values
    with np.errstate(invalid="ignore"):
        change_G = jackknife_values(y_G - x_G, values.occupied_G)
    if y == x and not np.any(change_G[np.isfinite(change_G)]):
        return Estimate(0.0, note=NO_DIFFERENCE)
    why_no_interval = a.why_no_interval or b.why_no_interval
    jackknife = Jackknife(y - x, change_G, why_no_interval=why_no_interval)
    change = jackknife.estimate(prompts)
    if paired and change.note == FEW_PROMPTS:
        return jackknife.paired()
    if change.low is None:
        return change
    correlation = _correlation(a.scale, x_G, y_G)
    return change_between(a.estimate(prompts), b.estimate(prompts), correlation, y - x)


def _may_agree(metric: Metric, estimate: Estimate) -> bool:
    """Whether the interval holds the value of agreement."""
    if estimate.low is None or estimate.high is None:
        return False
    return estimate.low <= (metric.agreement or 0.0) <= estimate.high


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
    for estimate in (first, other):
        if estimate.low is None and estimate.note != NO_SPREAD:
            return point_estimate(change, estimate.note)
    # A point on the ellipse is a part of each value's reach; `x` and `y` run around it once.
    x = np.cos(_ANGLES)
    y = correlation * x + np.sqrt(1 - correlation**2) * np.sin(_ANGLES)
    moved = _moved(other, y) - _moved(first, x)
    note = FEW_DECIDE if FEW_DECIDE in (first.note, other.note) else None
    return Estimate(float(change), float(change + moved.min()), float(change + moved.max()), note)


def _moved(estimate: Estimate, reaches: np.ndarray) -> np.ndarray:
    """How far a value moves for a part of its reach, from −1 (the lower end) to 1 (the upper)."""
    if estimate.value is None or estimate.low is None or estimate.high is None:  # without spread
        return np.zeros(len(reaches))
    below, above = estimate.value - estimate.low, estimate.high - estimate.value
    return np.where(reaches > 0, above, below) * reaches


def _settled(x: Any, y: Any) -> Any:
    """`y`, or `x` where the two differ only by rounding."""
    with np.errstate(invalid="ignore"):
        close = np.abs(y - x) <= _ROUNDING * np.maximum(np.abs(x), np.abs(y))
    if isinstance(x, np.ndarray):
        return np.where(close, x, y)
    return x if close else y


def _factor(
    metric: Metric,
    x: float,
    y: float,
    without: _Aligned | None = None,
    prompts: int = 0,
    why_no_interval: str | None = None,
) -> Estimate:
    """The ratio of the distances from agreement, with an interval computed on the logarithm."""
    if metric.signed:
        return Estimate(None, note="signed: near zero by chance, no factor")
    first, other = _distance(metric, x), _distance(metric, y)
    if first < FLOOR_RESOLUTION:
        return Estimate(None, note="the first is below resolution: no factor")
    factor = float(other / first)
    if without is None:
        return point_estimate(factor, EXTREME)
    if other == 0:
        return point_estimate(factor, "no gap: no interval")
    with np.errstate(divide="ignore", invalid="ignore"):
        log_G = np.log(_distance(metric, without.y_G)) - np.log(_distance(metric, without.x_G))
    log_G = jackknife_values(log_G, without.occupied_G)
    log = Jackknife(float(np.log(factor)), log_G, LOG_FACTOR, why_no_interval).estimate(prompts)
    if log.low is None or log.high is None:
        return Estimate(factor, note=log.note)
    return Estimate(factor, float(np.exp(log.low)), float(np.exp(log.high)), log.note)


def _distance(metric: Metric, value: Any) -> Any:
    """The distance of a value from agreement; the value itself for a metric that does not
    describe a gap.
    """
    return np.abs(value - (metric.agreement or 0.0))
