"""DPPO-TopK-KL: a limit on KL over {top-K of μ} ∪ {sampled token} ∪ {others}.

Source: DPPO-TopK-KL, arXiv 2602.04879 eq. 12 and 16.
"""

from mismatch_cli.base.arrays import Array
from mismatch_cli.rules.decisions import not_negative, one_sided, ranks, sides, signed
from mismatch_cli.rules.policies import Compared
from mismatch_cli.rules.trust_regions import Decision

FORMULA = (
    "top-{k} KL({q}‖{p}) > {kl_high} and A > 0 and {p} > {q}, or > {kl_low} and A < 0 and {p} < {q}"
)
SYMBOLS = {"kl_low": "δ_low", "kl_high": "δ_high"}
BOTH_SIDES = "max_kl"
NOT_ONE_SIDED = ""
READS_TOP_K = True


def trust_region(
    compared: Compared,
    advantage_T: Array,
    *,
    kl_low: float = 0.05,
    kl_high: float = 0.05,
    k: int = 20,
    replace_last: bool = False,
) -> Decision:
    """Block A > 0 with p > q and KL > kl_high, and A < 0 with p < q and KL > kl_low.

    The statistic is KL (nats), signed as p − q. With `replace_last`, a sampled token outside the
    top-K replaces the K-th, as in the published code.
    """
    not_negative(**sides("δ", kl_low, kl_high))
    ranks(k=k)
    _, kl_T = compared.topk(k, replace_last)
    return one_sided(signed(kl_T, compared.log_ratio_T), advantage_T, low=kl_low, high=kl_high)
