"""TOPR: weight 1 for positive samples, min(response's ratio, 1) for negative ones.

ROLL uses the token's ratio to the recomputed policy (the row `topr-roll`), and the sign of the
episode's score instead of A's; verl's PR 6986 the geometric mean.

Source: TOPR, arXiv 2503.14286 eq. 8, of the response's ratio; verl's PR 6986 of its geometric mean.
"""

from mismatch_cli.base.arrays import Array, namespace
from mismatch_cli.rules.policies import Compared, Level

FORMULA = "1 for A > 0 and min({r}, 1) otherwise"
SYMBOLS: dict[str, str] = {}


def weight(compared: Compared, level: Level, advantage_T: Array) -> Array:
    """1 where A > 0, else the ratio at its level, at most 1."""
    xp = namespace(advantage_T)
    log_T = compared.level_log_ratio_T(level)
    ratio_T = xp.exp(xp.minimum(log_T, xp.zeros_like(log_T)))
    return xp.where(advantage_T > 0, xp.ones_like(log_T), ratio_T)
