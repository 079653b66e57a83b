"""VESPO: a gamma density of the whole response's ratio, 1 where the policies agree.

As in TRL's `get_gamma_weights`, which first clamps each token's log ratio to ±20 and the response's
to [log 1e-8, 20]: beyond, the weight is below 1e-14 either way, unless other tokens offset one
beyond 20 nats; at an infinite ratio it is 0.

With vLLM's correction, its default, TRL's w is Π r′ · Π min(ρ, 3), which `token_truncate` bounds
(the row `vespo-trl`; `token_mask` takes 1e-8 for a ρ above 3). The authors' main recipe leaves the
correction off and recomputes: w = Π r′ (`anchor=recomputed`); only their asynchronous script
measures from μ.

Source: VESPO, arXiv 2602.10693; TRL.
"""

from math import inf

from mismatch_cli.base.arrays import Array, fill_where, namespace, select
from mismatch_cli.base.errors import UsageError
from mismatch_cli.rules.policies import Compared, Level

FORMULA = (
    "e^λ w^k e^(−λw) with w = {r}, k = {k_pos} and λ = {lambda_pos} for A ≥ 0, "
    "k = {k_neg} and λ = {lambda_neg} otherwise"
)
SYMBOLS = {"k_pos": "k_pos", "lambda_pos": "λ_pos", "k_neg": "k_neg", "lambda_neg": "λ_neg"}


def weight(
    compared: Compared,
    level: Level,
    advantage_T: Array,
    *,
    k_pos: float = 2.0,
    lambda_pos: float = 3.0,
    k_neg: float = 3.0,
    lambda_neg: float = 2.0,
) -> Array:
    """exp(k log w − λ (w − 1))."""
    for name, value in (
        ("k_pos", k_pos),
        ("lambda_pos", lambda_pos),
        ("k_neg", k_neg),
        ("lambda_neg", lambda_neg),
    ):
        if not value > 0:
            raise UsageError(f"{name}={value:g} is out of range: choose a number above 0.")
    log_T = compared.level_log_ratio_T(level)
    less_1_T = compared.level_ratio_less_1_T(level)
    positive_T = k_pos * log_T - lambda_pos * less_1_T
    negative_T = k_neg * log_T - lambda_neg * less_1_T
    xp = namespace(advantage_T)
    weight_T = xp.exp(select(advantage_T >= 0, positive_T, negative_T))
    # 0 is the limit of w^k e^(−λw) at an infinite w, where the exponent is ∞ − ∞
    return fill_where(weight_T, less_1_T == inf, 0.0)
