"""DPPO-TopK-TV: a limit on the TV over {top-K of μ} ∪ {sampled token} ∪ {others}.

Source: DPPO-TopK-TV, arXiv 2602.04879 eq. 12 and 15.
"""

from mismatch_cli.base.arrays import Array
from mismatch_cli.rules.decisions import one_sided, ranks, shares, sides, signed
from mismatch_cli.rules.policies import Compared
from mismatch_cli.rules.trust_regions import Decision

FORMULA = (
    "top-{k} TV({q}, {p}) > {tv_high} and A > 0 and {p} > {q}, or > {tv_low} and A < 0 and {p} < "
    "{q}"
)
SYMBOLS = {"tv_low": "δ_low", "tv_high": "δ_high"}
BOTH_SIDES = "max_tv"
NOT_ONE_SIDED = ""
READS_TOP_K = True


def trust_region(
    compared: Compared,
    advantage_T: Array,
    *,
    tv_low: float = 0.2,
    tv_high: float = 0.2,
    k: int = 20,
    replace_last: bool = False,
) -> Decision:
    """Block A > 0 with p > q and TV > tv_high, and A < 0 with p < q and TV > tv_low.

    The statistic is TV with the sign of p − q. With `replace_last`, a sampled token outside the
    top-K replaces the K-th, as in the published code.
    """
    shares(**sides("δ", tv_low, tv_high))
    ranks(k=k)
    tv_T, _ = compared.topk(k, replace_last)
    return one_sided(signed(tv_T, compared.log_ratio_T), advantage_T, low=tv_low, high=tv_high)
