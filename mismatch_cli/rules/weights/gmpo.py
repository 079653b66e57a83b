"""GMPO: the response's geometric mean of ratios clipped in log space.

The clip is one-sided, by the sign of the advantage, as in the authors' code, verl (`geo_mean`) and
TRL: for A > 0 log r is at most ε, for A < 0 at least −ε. A clipped token learns nothing
(`log-ratio-clip`) but counts in the mean. The 1/|y| of its gradient is the scale of
`sequence-mean`: with `train`'s default aggregation the gradient is not the published one.

Source: GMPO, arXiv 2507.20673; verl `geo_mean`, TRL.
"""

from math import inf

from mismatch_cli.base.arrays import Array, clamp, namespace, select
from mismatch_cli.rules.policies import Compared, Level

FORMULA = (
    "(Π clipped {r})^(1/|y|), with log {r} at most {log_high} for A > 0, and at least −{log_low} "
    "for A < 0"
)
SYMBOLS = {"log_low": "ε_low", "log_high": "ε_high"}
OF_MEANS = True


def weight(
    compared: Compared,
    level: Level,
    advantage_T: Array,
    *,
    log_low: float = 0.4,
    log_high: float = 0.4,
) -> Array:
    """exp(mean of the clipped log r) over the response; tokens without an advantage add 0."""
    xp = namespace(advantage_T)
    d_T = compared.log_ratio_T
    at_most_T = clamp(d_T, -inf, log_high)
    at_least_T = clamp(d_T, -log_low, inf)
    clipped_T = select(advantage_T > 0, at_most_T, at_least_T)
    clipped_T = xp.where(advantage_T == 0, xp.zeros_like(d_T), clipped_T)
    return xp.exp(compared.responses.per_token(compared.responses.mean(clipped_T)))
