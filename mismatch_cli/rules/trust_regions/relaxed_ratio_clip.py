"""Ratio clipping that exempts improbable tokens: the α relaxation.

Source: DPPO, arXiv 2602.04879, figures 6 and 7.
"""

from math import log

from mismatch_cli.base.arrays import Array
from mismatch_cli.base.errors import UsageError
from mismatch_cli.rules.decisions import shares
from mismatch_cli.rules.policies import Compared
from mismatch_cli.rules.trust_regions import Decision, ratio_clip

FORMULA = (
    "as ratio-clip ({r} > 1 + {ratio_high}, {r} < 1 − {ratio_low}), except where {q} < {alpha}; "
    "side relaxed: {relax}"
)
SYMBOLS = {"ratio_low": "ε_low", "ratio_high": "ε_high", "alpha": "α"}
NOT_ONE_SIDED = ""
_SIDES = ("both", "high", "low")


def trust_region(
    compared: Compared,
    advantage_T: Array,
    *,
    ratio_low: float = 0.2,
    ratio_high: float = 0.28,
    alpha: float = 0.1,
    relax: str = "both",
) -> Decision:
    """Ratio clipping that keeps tokens with q < alpha: those with A > 0 (relax=high), A < 0 (low),
    or both.

    The statistic is p/q − 1, dimensionless; alpha is a probability, and alpha = 0 is plain ratio
    clipping.
    """
    shares(α=alpha)
    if relax not in _SIDES:
        raise UsageError(f"relax={relax} is unknown. Choose one of: {', '.join(_SIDES)}.")
    clipped = ratio_clip.trust_region(
        compared, advantage_T, ratio_low=ratio_low, ratio_high=ratio_high
    )
    if alpha == 0:
        return clipped
    relaxed_T = compared.logp_anchor_T < log(alpha)
    if relax == "high":
        relaxed_T &= advantage_T > 0
    elif relax == "low":
        relaxed_T &= advantage_T < 0
    return Decision(clipped.keep_T | relaxed_T, clipped.statistic_T)
