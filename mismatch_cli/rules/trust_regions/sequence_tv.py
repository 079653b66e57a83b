"""VACO's filter: in responses that moved too far, drops tokens that would move further.

As in open-instruct's `rho_mask_tv_divergence` on the engine gap: the mean of |r − 1| over the
response, without the ½ of a total variation. The paper's δ is 0.2 (by its reviews); until its PR
1755, open-instruct accepts no bound below 1.

Source: VACO, arXiv 2603.01365; open-instruct `rho_mask_tv_divergence`.
"""

from mismatch_cli.base.arrays import Array
from mismatch_cli.rules.decisions import not_negative, outward
from mismatch_cli.rules.policies import Compared
from mismatch_cli.rules.trust_regions import Decision

FORMULA = "mean |{r} − 1| over the response > {max_tv} and A · log {r} > 0"
SYMBOLS = {"max_tv": "δ"}
NOT_ONE_SIDED = ""


def trust_region(compared: Compared, advantage_T: Array, *, max_tv: float = 0.2) -> Decision:
    """Block A · (log p − log q) > 0 in responses whose mean |p/q − 1|, the statistic, exceeds
    max_tv.
    """
    not_negative(δ=max_tv)
    responses = compared.responses
    statistic_T = responses.per_token(responses.mean(abs(compared.ratio_less_1_T)))
    blocked_T = outward(compared.log_ratio_T, advantage_T) & (statistic_T > max_tv)
    return Decision(~blocked_T, statistic_T)
