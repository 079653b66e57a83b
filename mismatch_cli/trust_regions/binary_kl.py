"""DPPO-Binary-KL: a limit on KL(q‖p) over {sampled token, any other} (arXiv 2602.04879 eq. 12 and 14)."""

from mismatch_cli.arrays import Array
from mismatch_cli.policies import Compared
from mismatch_cli.trust_regions import Decision
from mismatch_cli.trust_regions._rules import not_negative, one_sided, signed

FORMULA = "binary KL({q}‖{p}) > {max_kl} and A · ({p} − {q}) > 0"
SYMBOLS = {"max_kl": "δ"}
NOT_ONE_SIDED = ""


def trust_region(compared: Compared, advantage_T: Array, *, max_kl: float = 0.05) -> Decision:
    """Block A > 0 with p > q, and A < 0 with p < q, where KL > max_kl. The statistic is KL (nats), signed as p − q."""
    not_negative(δ=max_kl)
    statistic_T = signed(compared.binary_kl_T, compared.log_ratio_T)
    return one_sided(statistic_T, advantage_T, low=max_kl, high=max_kl)
