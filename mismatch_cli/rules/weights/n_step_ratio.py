"""NFPO: the token's ratio times those of the next N − 1 tokens.

N = 1 is r, N = |y| the ratio of the rest of the response. The paper's N and mask were not
available; `steps` sets N.

Source: NFPO, arXiv 2605.20865, by its abstract, without N.
"""

from mismatch_cli.base.arrays import Array, namespace
from mismatch_cli.base.errors import UsageError
from mismatch_cli.rules.policies import Compared, Level

FORMULA = "Π{r} over {steps} tokens from this one on"
SYMBOLS = {"steps": "N"}
_MOST_STEPS = 64  # each is a pass over the tokens


def weight(compared: Compared, level: Level, advantage_T: Array, *, steps: int = 2) -> Array:
    """exp(Σ d) over the token and those after it, N in all, or to the end of the response."""
    if not 1 <= steps <= _MOST_STEPS:
        raise UsageError(
            f"steps={steps} is out of range: choose a number of tokens from 1 to {_MOST_STEPS}."
        )
    d_T = compared.log_ratio_T
    sum_T = d_T
    for ahead in range(1, steps):
        sum_T = sum_T + compared.responses.ahead(d_T, ahead, 0.0)
    return namespace(d_T).exp(sum_T)
