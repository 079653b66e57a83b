"""DPPO-Binary-KL: a limit on KL(q‖p) over {sampled token, any other}.

Source: DPPO-Binary-KL, arXiv 2602.04879 eq. 12 and 14.
"""

from mismatch_cli.base.arrays import Array
from mismatch_cli.rules.decisions import not_negative, one_sided, sides, signed
from mismatch_cli.rules.policies import Compared
from mismatch_cli.rules.trust_regions import Decision

FORMULA = (
    "binary KL({q}‖{p}) > {kl_high} and A > 0 and {p} > {q}, or > {kl_low} and A < 0 and {p} < {q}"
)
SYMBOLS = {"kl_low": "δ_low", "kl_high": "δ_high"}
BOTH_SIDES = "max_kl"
NOT_ONE_SIDED = ""


def trust_region(
    compared: Compared, advantage_T: Array, *, kl_low: float = 0.05, kl_high: float = 0.05
) -> Decision:
    """Block A > 0 with p > q and KL > kl_high, and A < 0 with p < q and KL > kl_low.

    The statistic is KL (nats), signed as p − q.
    """
    not_negative(**sides("δ", kl_low, kl_high))
    statistic_T = signed(compared.binary_kl_T, compared.log_ratio_T)
    return one_sided(statistic_T, advantage_T, low=kl_low, high=kl_high)
