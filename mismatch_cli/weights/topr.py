"""TOPR: positive samples count whole, negative ones by the ratio of their response, at most 1 (arXiv 2503.14286 eq. 8).

ROLL takes the token's ratio, and the sign of the episode's score for that of A; verl's PR 6986 the geometric mean.
"""

from mismatch_cli.arrays import Array, namespace
from mismatch_cli.policies import Compared, Level

FORMULA = "1 for A > 0 and min({r}, 1) else"
SYMBOLS: dict[str, str] = {}


def weight(compared: Compared, level: Level, advantage_T: Array) -> Array:
    """1 where A > 0, else the ratio at its level, held at 1."""
    xp, d_T = namespace(advantage_T), compared.level_log_ratio_T(level)
    return xp.where(advantage_T > 0, xp.ones_like(d_T), xp.exp(xp.minimum(d_T, xp.zeros_like(d_T))))
