"""GSPO: ratio clipping by the geometric mean ratio of the whole response.

Source: GSPO, arXiv 2507.18071 eq. 5 to 7.
"""

from mismatch_cli.base.arrays import Array
from mismatch_cli.rules.decisions import not_negative, one_sided, shares
from mismatch_cli.rules.policies import Compared
from mismatch_cli.rules.trust_regions import Decision

FORMULA = (
    "A > 0 and s > 1 + {ratio_high}, or A < 0 and s < 1 − {ratio_low}, with s = (Π{r})^(1/|y|)"
)
SYMBOLS = {"ratio_low": "ε_low", "ratio_high": "ε_high"}
NOT_ONE_SIDED = (
    "It is one-sided for the response as a whole; a token that moved the other way is blocked "
    "with the rest."
)


def trust_region(
    compared: Compared, advantage_T: Array, *, ratio_low: float = 3e-4, ratio_high: float = 4e-4
) -> Decision:
    """Block responses with A > 0 and s > 1 + ratio_high, or A < 0 and s < 1 − ratio_low.

    The statistic is s − 1.
    """
    shares(ε_low=ratio_low)
    not_negative(ε_high=ratio_high)
    return one_sided(
        compared.level_ratio_less_1_T("mean"), advantage_T, low=ratio_low, high=ratio_high
    )
