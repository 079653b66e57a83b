"""The minimal mask: blocks only bad updates, negative samples of tokens that already lost much
probability.

Source: DPPO, arXiv 2602.04879, figure 5.
"""

from mismatch_cli.base.arrays import Array
from mismatch_cli.base.errors import UsageError
from mismatch_cli.rules.decisions import shares
from mismatch_cli.rules.policies import Compared
from mismatch_cli.rules.trust_regions import Decision

FORMULA = "A < 0 and {q} − {p} ≥ {max_drop}"
SYMBOLS = {"max_drop": "δ"}
NOT_ONE_SIDED = ""


def trust_region(compared: Compared, advantage_T: Array, *, max_drop: float = 0.5) -> Decision:
    """Block A < 0 with q − p ≥ max_drop, a probability. The statistic is p − q."""
    if not max_drop > 0:
        raise UsageError(f"δ={max_drop:g} is out of range: choose a number above 0.")
    shares(δ=max_drop)
    blocked_T = (advantage_T < 0) & (compared.difference_T <= -max_drop)
    return Decision(~blocked_T, compared.difference_T)
