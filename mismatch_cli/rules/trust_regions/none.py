"""No mask: keeps every token."""

from mismatch_cli.base.arrays import Array, namespace
from mismatch_cli.rules.policies import Compared
from mismatch_cli.rules.trust_regions import Decision

FORMULA = "never"
NOT_ONE_SIDED = ""


def trust_region(compared: Compared, advantage_T: Array) -> Decision:
    """Keep every token; the statistic is p/q − 1."""
    xp = namespace(advantage_T)
    return Decision(xp.ones_like(advantage_T, dtype=xp.bool), compared.ratio_less_1_T)
