"""DPPO-TopK-TV: a limit on the TV over {top-K of μ} ∪ {sampled token} ∪ {others} (arXiv 2602.04879 eq. 12 and 15)."""

from mismatch_cli.arrays import Array
from mismatch_cli.policies import Compared
from mismatch_cli.trust_regions import Decision
from mismatch_cli.trust_regions._rules import one_sided, ranks, shares, signed

FORMULA = "top-{k} TV({q}, {p}) > {max_tv} and A · ({p} − {q}) > 0"
SYMBOLS = {"max_tv": "δ"}
NOT_ONE_SIDED = ""
READS_TOP_K = True


def trust_region(
    compared: Compared, advantage_T: Array, *, max_tv: float = 0.2, k: int = 20, replace_last: bool = False
) -> Decision:
    """Block A > 0 with p > q, and A < 0 with p < q, where TV > max_tv. The statistic is TV with the sign of p − q.

    With `replace_last` a sampled token outside the top-K takes the place of the K-th, as in the published code.
    """
    shares(δ=max_tv)
    ranks(k=k)
    tv_T, _ = compared.topk(k, replace_last)
    return one_sided(signed(tv_T, compared.log_ratio_T), advantage_T, low=max_tv, high=max_tv)
