"""The shape that most masks share: a token is blocked when its update moves p further away, beyond a threshold."""

from __future__ import annotations

from torch import Tensor

from mismatch_cli.trust_regions import Decision


def one_sided(statistic_T: Tensor, advantage_T: Tensor, *, low: float, high: float) -> Decision:
    """Block A > 0 where the statistic is above `high`, and A < 0 where it is below −`low`; equality is kept.

    The statistic has the sign of p − q. Thresholds are rounded to its dtype.
    """
    up_T = (advantage_T > 0) & (statistic_T > high)
    down_T = (advantage_T < 0) & (statistic_T < -low)
    return Decision(~(up_T | down_T), statistic_T)
