"""Symmetric probability difference: drops tokens that moved far, whatever their advantage.

Source: prime-rl's IPO loss.
"""

from mismatch_cli.base.arrays import Array
from mismatch_cli.rules.decisions import shares
from mismatch_cli.rules.policies import Compared
from mismatch_cli.rules.trust_regions import Decision

FORMULA = "|{p} − {q}| > {max_tv}"
SYMBOLS = {"max_tv": "δ"}
NOT_ONE_SIDED = (
    "It ignores the advantage: a token far from q is dropped even if the update would bring it "
    "back."
)


def trust_region(compared: Compared, advantage_T: Array, *, max_tv: float = 0.1) -> Decision:
    """Block |p − q| > max_tv, a probability. The statistic is p − q."""
    shares(δ=max_tv)
    return Decision(abs(compared.difference_T) <= max_tv, compared.difference_T)
