"""CPPO: limits binary TV with weights that decrease along the response, and their sum.

The sums cover all earlier tokens, including blocked ones, as in its algorithm 1 and in the authors'
code (UniRL), which clamps log r to ±20 for the weight of the update; here r has no bound.

UniRL also counts the untrained tokens of a segment (a tool's, between turns) in the sums, the place
and the percentile; here only trained ones count: of responses in one turn both decide alike. In
float32 UniRL keeps a token whose ratio rounds to 1 (|d| up to 6e-8); here the sign of d decides.

Source: CPPO, arXiv 2606.10968 eq. 8 to 10; UniRL.
"""

from mismatch_cli.base.arrays import Array, clamp, namespace
from mismatch_cli.rules.decisions import not_negative, outward, shares
from mismatch_cli.rules.policies import Compared
from mismatch_cli.rules.trust_regions import Decision

FORMULA = (
    "A · ({p} − {q}) > 0 and w |{p} − {q}| > min({max_tv}, {max_tv} + b Σ w − Σ w |{p} − {q}|), "
    "sums over the tokens before, w from 1 to {least_weight} along the response, b the 90th "
    "percentile of |{p} − {q}| in it, from {budget} to 2 · {budget}"
)
SYMBOLS = {"max_tv": "δ"}
NOT_ONE_SIDED = ""
_QUANTILE = 0.9


def trust_region(
    compared: Compared,
    advantage_T: Array,
    *,
    max_tv: float = 0.15,
    budget: float = 0.02,
    least_weight: float = 0.8,
) -> Decision:
    """Block updates that move p further away where w·|p − q|, a probability, exceeds the remaining
    budget.

    The statistic is w·|p − q| minus that budget of at most δ; where it is negative, the token is
    always kept.
    """
    shares(δ=max_tv, least_weight=least_weight)
    not_negative(budget=budget)
    responses = compared.responses
    tv_T = abs(compared.difference_T)
    xp = namespace(tv_T)
    position_T = xp.astype(responses.position_T, xp.float64)
    last_T = xp.astype(responses.per_token(responses.length_S) - 1, xp.float64)
    # The weight falls linearly from 1 at the first token to `least_weight` at the last one
    fall_T = (1 - least_weight) / xp.where(last_T > 0, last_T, 1 + 0 * last_T)
    weight_T = 1 - fall_T * position_T
    spent_T = weight_T * tv_T
    spent_before_T = responses.running_sum(spent_T) - spent_T
    budget_S = clamp(responses.quantile(tv_T, _QUANTILE), budget, 2 * budget)
    # Σ of the weights before position t: t − fall · t (t − 1) / 2
    weights_before_T = position_T - fall_T * position_T * (position_T - 1) / 2
    left_T = responses.per_token(budget_S) * weights_before_T - spent_before_T
    over_T = spent_T - max_tv - xp.where(left_T < 0, left_T, 0 * left_T)
    return Decision(~(outward(compared.log_ratio_T, advantage_T) & (over_T > 0)), over_T)
