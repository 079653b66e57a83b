"""MinPRO: the token's ratio times the smallest earlier one, a proxy for the prefix's ratio.

weight = sg[clip(m_t r_t, 1 − ε_low, 1 + ε_high)] with m_t = min over earlier tokens, 1 for the
first. The paper's bounds were not available; these are DAPO's.

Source: MinPRO, arXiv 2601.22718; bounds of DAPO.
"""

from mismatch_cli.base.arrays import Array, clamp, namespace
from mismatch_cli.base.errors import UsageError
from mismatch_cli.rules.policies import Compared, Level

FORMULA = (
    "m {r} between 1 − {ratio_low} and 1 + {ratio_high}, with m the smallest {r} before it in "
    "the response"
)
SYMBOLS = {"ratio_low": "ε_low", "ratio_high": "ε_high"}


def weight(
    compared: Compared,
    level: Level,
    advantage_T: Array,
    *,
    ratio_low: float = 0.2,
    ratio_high: float = 0.28,
) -> Array:
    """exp(d_t + min_{s<t} d_s), clamped to the bounds."""
    if not (0 <= ratio_low <= 1 and ratio_high >= 0):
        raise UsageError(
            f"ε={ratio_low:g} / {ratio_high:g} is out of range: choose ε_low from 0 to 1, ε_high "
            "≥ 0."
        )
    d_T, responses = compared.log_ratio_T, compared.responses
    before_T = responses.behind(responses.running_smallest(d_T), 1, 0.0)
    return clamp(namespace(d_T).exp(d_T + before_T), 1 - ratio_low, 1 + ratio_high)
