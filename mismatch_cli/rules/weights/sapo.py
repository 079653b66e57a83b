"""SAPO: a soft gate instead of a clip, narrower for negative advantages.

The objective is f(r) · A with f(r) = 4/τ · σ(τ (r − 1)), whose gradient has the weight 4 σ (1 − σ)
r: 1 where the policies agree, falling on both sides, to 0 at an infinite r. verl and TRL first
clamp log r to ±20, where the weight is already 0 or 2e-9.

Source: SAPO, arXiv 2511.20347 eq. 5, 6 and 10; objective 4/τ · σ(τ (r − 1)) · A.
"""

from mismatch_cli.base.arrays import Array, fill_where, namespace, select
from mismatch_cli.base.errors import UsageError
from mismatch_cli.rules.policies import Compared, Level

FORMULA = "4 σ (1 − σ) {r} with σ = σ(τ ({r} − 1)), τ = {tau_pos} for A > 0 and {tau_neg} otherwise"
SYMBOLS = {"tau_pos": "τ_pos", "tau_neg": "τ_neg"}


def weight(
    compared: Compared,
    level: Level,
    advantage_T: Array,
    *,
    tau_pos: float = 1.0,
    tau_neg: float = 1.05,
) -> Array:
    """4 σ(τ(r − 1)) (1 − σ(τ(r − 1))) r, as exp(d − |x|) · 4 / (1 + exp(−|x|))² with x = τ(r −
    1).
    """
    for name, tau in (("tau_pos", tau_pos), ("tau_neg", tau_neg)):
        if not tau > 0:
            raise UsageError(f"{name}={tau:g} is out of range: choose a temperature above 0.")
    xp = namespace(advantage_T)
    size_T = xp.abs(compared.level_ratio_less_1_T(level))
    # `where(flags, 0.3, 0.1)` of Python numbers is float64 in numpy and float32 in torch.
    # Products with a column keep its dtype, so analysis and training give the same weights.
    size_T = select(advantage_T > 0, size_T * tau_pos, size_T * tau_neg)
    weight_T = xp.exp(compared.level_log_ratio_T(level) - size_T) * 4 / (1 + xp.exp(-size_T)) ** 2
    return fill_where(weight_T, xp.isinf(size_T), 0.0)
