"""DPPO-Binary-TV: a limit on the change of the sampled token's probability.

The paper has one δ; verl, SkyRL, Stable-RL and prime-rl (until August 2026) have one for rises and
one for falls.

Source: DPPO-Binary-TV, arXiv 2602.04879 eq. 12 and 13.
"""

from mismatch_cli.base.arrays import Array
from mismatch_cli.rules.decisions import one_sided, shares, sides
from mismatch_cli.rules.policies import Compared
from mismatch_cli.rules.trust_regions import Decision

FORMULA = "A > 0 and {p} − {q} > {tv_high}, or A < 0 and {q} − {p} > {tv_low}"
SYMBOLS = {"tv_low": "δ_low", "tv_high": "δ_high"}
BOTH_SIDES = "max_tv"
NOT_ONE_SIDED = ""


def trust_region(
    compared: Compared, advantage_T: Array, *, tv_low: float = 0.15, tv_high: float = 0.15
) -> Decision:
    """Block A > 0 with p − q > tv_high, and A < 0 with q − p > tv_low.

    The statistic is p − q, a probability.
    """
    shares(**sides("δ", tv_low, tv_high))
    return one_sided(compared.difference_T, advantage_T, low=tv_low, high=tv_high)
