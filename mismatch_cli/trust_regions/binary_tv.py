"""DPPO-Binary-TV: a limit on the change of the sampled token's probability (arXiv 2602.04879 eq. 12 and 13)."""

from mismatch_cli.arrays import Array
from mismatch_cli.policies import Compared
from mismatch_cli.trust_regions import Decision
from mismatch_cli.trust_regions._rules import one_sided, shares

FORMULA = "A > 0 and {p} − {q} > {max_tv}, or A < 0 and {q} − {p} > {max_tv}"
SYMBOLS = {"max_tv": "δ"}
NOT_ONE_SIDED = ""


def trust_region(compared: Compared, advantage_T: Array, *, max_tv: float = 0.15) -> Decision:
    """Block A > 0 with p − q > max_tv, and A < 0 with q − p > max_tv. The statistic is p − q, a probability."""
    shares(δ=max_tv)
    return one_sided(compared.difference_T, advantage_T, low=max_tv, high=max_tv)
