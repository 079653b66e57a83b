"""Off-policy sequence masking: drops negative responses that the policy has left.

Source: DeepSeek-V3.2; slime.
"""

from mismatch_cli.base.arrays import Array
from mismatch_cli.rules.decisions import not_negative
from mismatch_cli.rules.policies import Compared
from mismatch_cli.rules.trust_regions import Decision

FORMULA = "A < 0 and mean(log {q} − log {p}) > {max_kl}, over the response"
SYMBOLS = {"max_kl": "δ"}
NOT_ONE_SIDED = (
    "It decides for the response as a whole; a token whose p rose above q is dropped with the rest."
)


def trust_region(compared: Compared, advantage_T: Array, *, max_kl: float = 1e-4) -> Decision:
    """Block A < 0 in responses whose mean log q − log p exceeds max_kl, nats per token.

    The statistic is mean d.
    """
    not_negative(δ=max_kl)
    statistic_T = compared.level_log_ratio_T("mean")
    blocked_T = (advantage_T < 0) & (statistic_T < -max_kl)
    return Decision(~blocked_T, statistic_T)
