"""The difference of two traces in a metric, with an interval that knows what the two share.

It is formed without each group of prompts in turn. The same prompts are left out of both traces, so what comes from a
prompt being hard or easy cancels; a prompt that only one of them holds is left out of that one. The same formula
therefore serves pairs of traces that share all of their prompts, some, or none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from mismatch_cli.metrics.catalog import METRICS, Metric
from mismatch_cli.metrics.estimate import EXTREME, FLOOR_RESOLUTION, Estimate, point
from mismatch_cli.metrics.jackknife import Jackknife, left_out
from mismatch_cli.metrics.summary import MismatchSummary

NO_DIFFERENCE = "no difference for any prompt"
_ROUNDING = 1e-9  # relative to the larger value: less comes from the order of additions


@dataclass(frozen=True)
class Difference:
    """How another trace differs from the first one in a metric.

    `difference` is theirs − ours; `factor` is their distance from agreement over ours, and has no value for a signed
    metric, nor where ours is below resolution.
    """

    difference: Estimate
    factor: Estimate

    @property
    def more_than_noise(self) -> bool | None:
        """Whether the interval of the difference excludes 0; None where there is no interval."""
        low, high = self.difference.low, self.difference.high
        return None if low is None or high is None else low > 0 or high < 0

    def to_dict(self) -> dict[str, Any]:
        return {
            "difference": self.difference.to_dict(),
            "factor": self.factor.to_dict(),
            "more_than_noise": self.more_than_noise,
        }


class Measured:
    """Every metric of one summary, as estimates and as what their intervals are made of."""

    def __init__(self, summary: MismatchSummary) -> None:
        self.prompts = summary.exact.prompts.result()
        self.jackknife = summary.jackknife() | {"spearman": summary.exact.spearman.jackknife()}
        self.estimates = summary.estimates()
        self.estimates["spearman"] = self.jackknife["spearman"].estimate(self.prompts)


def differences(ours: Measured, theirs: Measured) -> dict[str, Difference]:
    """Every metric of the catalog, theirs against ours."""
    return {key: _difference(metric, ours, theirs) for key, metric in METRICS.items()}


def _difference(metric: Metric, ours: Measured, theirs: Measured) -> Difference:
    x, y = ours.estimates[metric.key].value, theirs.estimates[metric.key].value
    if x is None or y is None:
        nothing = Estimate(None, note=(ours if x is None else theirs).estimates[metric.key].note)
        return Difference(nothing, nothing)
    if metric.key not in ours.jackknife:
        return Difference(point(_settled(x, y) - x, EXTREME), _factor(metric, x, y, None, 0))
    prompts = min(ours.prompts, theirs.prompts)
    x_G, y_G = _aligned(ours.jackknife[metric.key], theirs.jackknife[metric.key])
    y, y_G = _settled(x, y), _settled(x_G, y_G)
    known_G = ~(np.isnan(x_G) | np.isnan(y_G))
    with np.errstate(invalid="ignore"):
        difference_G = left_out(y_G - x_G, known_G)
    same = y == x and not np.any(difference_G[np.isfinite(difference_G)])
    unsure = ours.jackknife[metric.key].unsure or theirs.jackknife[metric.key].unsure
    change = Jackknife(y - x, difference_G, unsure=unsure)
    found = Estimate(0.0, note=NO_DIFFERENCE) if same else change.estimate(prompts)
    return Difference(found, _factor(metric, x, y, (x_G, y_G), prompts))


def _aligned(a: Jackknife, b: Jackknife) -> tuple[np.ndarray, np.ndarray]:
    """Both without each group of prompts; a group that only one of them holds leaves the other as it is."""
    lacks_a, lacks_b = np.isnan(a.without_G), np.isnan(b.without_G)
    return np.where(lacks_a & ~lacks_b, a.value, a.without_G), np.where(lacks_b & ~lacks_a, b.value, b.without_G)


def _settled(x: Any, y: Any) -> Any:
    """`y`, but `x` where the two differ by no more than rounding."""
    with np.errstate(invalid="ignore"):
        close = np.abs(y - x) <= _ROUNDING * np.maximum(np.abs(x), np.abs(y))
    return np.where(close, x, y) if isinstance(x, np.ndarray) else x if close else y


def _factor(
    metric: Metric, x: float, y: float, without: tuple[np.ndarray, np.ndarray] | None, prompts: int
) -> Estimate:
    """The interval is formed on the logarithm: a factor has no negative values."""
    if metric.signed:
        return Estimate(None, note="signed: near zero by chance, no factor")
    ours, theirs = _distance(metric, x), _distance(metric, y)
    if ours < FLOOR_RESOLUTION:
        return Estimate(None, note="the first is below resolution: no factor")
    if without is None or theirs == 0:
        return point(theirs / ours, EXTREME if without is None else "no gap: no interval")
    x_G, y_G = without
    with np.errstate(divide="ignore", invalid="ignore"):
        log_G = np.log(_distance(metric, y_G)) - np.log(_distance(metric, x_G))
    log_G = left_out(log_G, ~(np.isnan(x_G) | np.isnan(y_G)))
    log = Jackknife(float(np.log(theirs / ours)), log_G).estimate(prompts)
    low, high = (None if end is None else float(np.exp(end)) for end in (log.low, log.high))
    return Estimate(float(theirs / ours), low, high, log.note)


def _distance(metric: Metric, value: Any) -> Any:
    """How far a value is from agreement; what describes no gap is taken as it is."""
    return np.abs(value - (metric.agreement or 0.0))
