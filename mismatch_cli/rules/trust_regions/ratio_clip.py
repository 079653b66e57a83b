"""Ratio clipping, with Clip-Higher's wider upper side.

Source: PPO, arXiv 1707.06347 eq. 7; Clip-Higher of DAPO, arXiv 2503.14476.
"""

from mismatch_cli.base.arrays import Array
from mismatch_cli.rules.decisions import not_negative, one_sided, shares
from mismatch_cli.rules.policies import Compared
from mismatch_cli.rules.trust_regions import Decision

FORMULA = "A > 0 and {r} > 1 + {ratio_high}, or A < 0 and {r} < 1 − {ratio_low}"
SYMBOLS = {"ratio_low": "ε_low", "ratio_high": "ε_high"}
NOT_ONE_SIDED = ""


def trust_region(
    compared: Compared, advantage_T: Array, *, ratio_low: float = 0.2, ratio_high: float = 0.28
) -> Decision:
    """Block A > 0 with p/q > 1 + ratio_high, and A < 0 with p/q < 1 − ratio_low, where PPO's
    min/clip has no gradient.

    The statistic is p/q − 1, dimensionless.
    """
    shares(ε_low=ratio_low)
    not_negative(ε_high=ratio_high)
    return one_sided(compared.ratio_less_1_T, advantage_T, low=ratio_low, high=ratio_high)
