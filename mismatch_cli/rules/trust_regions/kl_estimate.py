"""Trust region masking: drops tokens or responses with a large KL estimate.

The estimates of KL(q‖p) from one token sampled from q are k2 = d²/2 and k3 = e^d − 1 − d with d =
log p − log q, which verl first clamps to ±20. Its options are `{token, seq_sum, seq_mean,
seq_max}_{k2, k3}`; TRM-Max is the maximum, TRM-Avg the mean. Its `_k1` bands are `icepop`,
`sequence-product` and `sequence-mean` here.

Source: TRM, arXiv 2512.23075; verl `rollout_rs`.
"""

from mismatch_cli.base.arrays import Array, clamp
from mismatch_cli.base.errors import UsageError
from mismatch_cli.rules import divergences
from mismatch_cli.rules.decisions import not_negative
from mismatch_cli.rules.policies import Compared
from mismatch_cli.rules.trust_regions import Decision

FORMULA = "{estimator} of KL({q}‖{p}), the {over} over the response, > {max_kl}"
SYMBOLS = {"max_kl": "δ"}
NOT_ONE_SIDED = (
    "A KL estimate has no sign; a response is dropped whatever the advantage of its tokens."
)
_LARGEST_GAP = 20.0  # nats, as in verl


def trust_region(
    compared: Compared,
    advantage_T: Array,
    *,
    max_kl: float = 0.01,
    estimator: str = "k3",
    over: str = "mean",
) -> Decision:
    """Block where k2 or k3, of a token or as mean, max or sum over the response, exceeds max_kl,
    in nats.
    """
    not_negative(δ=max_kl)
    if estimator not in ("k2", "k3"):
        raise UsageError(f"estimator={estimator} is unknown. Choose one of: k2, k3.")
    d_T = clamp(compared.log_ratio_T, -_LARGEST_GAP, _LARGEST_GAP)
    estimate_T = d_T * d_T / 2 if estimator == "k2" else divergences.phi(d_T)
    if over == "token":
        return Decision(estimate_T <= max_kl, estimate_T)
    responses = compared.responses
    reductions = {"mean": responses.mean, "sum": responses.sum, "max": responses.largest}
    if over not in reductions:
        raise UsageError(f"over={over} is unknown. Choose one of: token, mean, max, sum.")
    statistic_T = responses.per_token(reductions[over](estimate_T))
    return Decision(statistic_T <= max_kl, statistic_T)
