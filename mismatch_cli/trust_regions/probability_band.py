"""Symmetric probability difference (the IPO loss of prime-rl): drop what moved far, whatever its advantage."""

from mismatch_cli.arrays import Array
from mismatch_cli.policies import Compared
from mismatch_cli.trust_regions import Decision
from mismatch_cli.trust_regions._rules import shares

FORMULA = "|{p} − {q}| > {max_tv}"
SYMBOLS = {"max_tv": "δ"}
NOT_ONE_SIDED = (
    "It does not look at the advantage: a token far from q is dropped even where the update would bring it back."
)


def trust_region(compared: Compared, advantage_T: Array, *, max_tv: float = 0.1) -> Decision:
    """Block |p − q| > max_tv, a probability. The statistic is p − q."""
    shares(δ=max_tv)
    return Decision(abs(compared.difference_T) <= max_tv, compared.difference_T)
