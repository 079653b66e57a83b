"""The difference of two traces in a metric, with an interval that knows what the two share.

It is formed replicate by replicate. A prompt that both traces hold weighs the same in replicate r of both, so what
comes from that prompt being hard or easy cancels; a prompt that only one of them holds is drawn for itself. The same
formula therefore serves pairs of traces that share all of their prompts, some, or none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from mismatch_cli.metrics.catalog import METRICS, Metric
from mismatch_cli.metrics.estimate import EXTREME, FLOOR_RESOLUTION, Estimate, Replicates, point
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
    """Every metric of one summary, as estimates and as replicates."""

    def __init__(self, summary: MismatchSummary) -> None:
        self.prompts = summary.exact.prompts.result()
        self.replicates = summary.replicates() | {"spearman": summary.exact.spearman.replicates()}
        self.estimates = summary.estimates()
        self.estimates["spearman"] = self.replicates["spearman"].estimate(self.prompts)


def differences(ours: Measured, theirs: Measured) -> dict[str, Difference]:
    """Every metric of the catalog, theirs against ours."""
    return {key: _difference(metric, ours, theirs) for key, metric in METRICS.items()}


def _difference(metric: Metric, ours: Measured, theirs: Measured) -> Difference:
    x, y = ours.estimates[metric.key].value, theirs.estimates[metric.key].value
    if x is None or y is None:
        nothing = Estimate(None, note=(ours if x is None else theirs).estimates[metric.key].note)
        return Difference(nothing, nothing)
    if metric.key not in ours.replicates:
        return Difference(point(_settled(x, y) - x, EXTREME), _factor(metric, x, y, None, 0))
    a, b = ours.replicates[metric.key], theirs.replicates[metric.key]
    prompts = min(ours.prompts, theirs.prompts)
    x_R, y_R = _aligned(a, b)
    y, y_R = _settled(x, y), _settled(x_R, y_R)
    difference = Replicates(y - x, y_R - x_R, a.deleted)
    same = y == x and not np.any(difference.other_R[np.isfinite(difference.other_R)])
    found = Estimate(0.0, note=NO_DIFFERENCE) if same else difference.estimate(prompts)
    return Difference(found, _factor(metric, x, y, (x_R, y_R, a.deleted), prompts))


def _aligned(a: Replicates, b: Replicates) -> tuple[np.ndarray, np.ndarray]:
    """Replicates of both; deleting a group of prompts that only one of them holds leaves the other as it is."""
    x_R, y_R = a.other_R, b.other_R
    if a.deleted:
        x_R, y_R = (
            np.where(np.isnan(mine_R) & ~np.isnan(other_R), value, mine_R)
            for mine_R, other_R, value in ((x_R, y_R, a.value), (y_R, x_R, b.value))
        )
    return x_R, y_R


def _settled(x: Any, y: Any) -> Any:
    """`y`, but `x` where the two differ by no more than rounding."""
    with np.errstate(invalid="ignore"):
        close = np.abs(y - x) <= _ROUNDING * np.maximum(np.abs(x), np.abs(y))
    return np.where(close, x, y) if isinstance(x, np.ndarray) else x if close else y


def _factor(
    metric: Metric, x: float, y: float, replicates: tuple[np.ndarray, np.ndarray, bool] | None, prompts: int
) -> Estimate:
    """The interval is formed on the logarithm: a factor has no negative values."""
    if metric.signed:
        return Estimate(None, note="signed: near zero by chance, no factor")
    ours, theirs = _distance(metric, x), _distance(metric, y)
    if ours < FLOOR_RESOLUTION:
        return Estimate(None, note="the first is below resolution: no factor")
    if replicates is None or theirs == 0:
        return point(theirs / ours, EXTREME if replicates is None else "no gap: no interval")
    x_R, y_R, deleted = replicates
    with np.errstate(divide="ignore", invalid="ignore"):
        log_R = np.log(_distance(metric, y_R) / _distance(metric, x_R))
    log = Replicates(float(np.log(theirs / ours)), log_R, deleted).estimate(prompts)
    low, high = (None if end is None else float(np.exp(end)) for end in (log.low, log.high))
    return Estimate(float(theirs / ours), low, high, log.note)


def _distance(metric: Metric, value: Any) -> Any:
    """How far a value is from agreement; what describes no gap is taken as it is."""
    return np.abs(value - (metric.agreement or 0.0))
