"""Dual clip: blocks negative samples with a large ratio.

Source: arXiv 1912.09729; verl `clip_ratio_c`.
"""

from mismatch_cli.base.arrays import Array
from mismatch_cli.base.errors import UsageError
from mismatch_cli.rules.policies import Compared
from mismatch_cli.rules.trust_regions import Decision

FORMULA = "A < 0 and {r} > {max_ratio}"
SYMBOLS = {"max_ratio": "c"}
NOT_ONE_SIDED = (
    "It blocks negative samples whose p is far above q, although the update would bring p back, "
    "because the weight p/q makes that update very large."
)


def trust_region(compared: Compared, advantage_T: Array, *, max_ratio: float = 3.0) -> Decision:
    """Block A < 0 with p/q > max_ratio, where the dual clip's max(·, c·A) has no gradient. The
    statistic is p/q − 1.

    This is only the outer clip: combined with `ratio-clip` it is the published objective.
    """
    if not max_ratio >= 1:
        raise UsageError(f"c={max_ratio:g} is out of range: choose a number of at least 1.")
    blocked_T = (advantage_T < 0) & (compared.ratio_less_1_T > max_ratio - 1)
    return Decision(~blocked_T, compared.ratio_less_1_T)
