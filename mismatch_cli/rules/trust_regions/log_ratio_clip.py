"""Ratio clipping in log space, as in GMPO: one-sided, per token.

Source: GMPO, arXiv 2507.20673.
"""

from mismatch_cli.base.arrays import Array
from mismatch_cli.rules.decisions import not_negative, one_sided
from mismatch_cli.rules.policies import Compared
from mismatch_cli.rules.trust_regions import Decision

FORMULA = "A > 0 and log {r} > {log_high}, or A < 0 and log {r} < −{log_low}"
SYMBOLS = {"log_low": "ε_low", "log_high": "ε_high"}
NOT_ONE_SIDED = ""


def trust_region(
    compared: Compared, advantage_T: Array, *, log_low: float = 0.4, log_high: float = 0.4
) -> Decision:
    """Block A > 0 with d = log p − log q above log_high, and A < 0 with d below −log_low.

    The statistic is d, nats.
    """
    not_negative(ε_low=log_low, ε_high=log_high)
    return one_sided(compared.log_ratio_T, advantage_T, low=log_low, high=log_high)
