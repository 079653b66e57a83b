"""DRPO: DPPO's binary TV as a smooth pull, which turns round where |p − q| > ε (arXiv 2606.09821 §3, eq. 9).

That never happens with the published ε of 12.5, since |p − q| is at most 1: the weight stays within 8 % of r.

The objective is A r − |A| q (r − 1)² / (2 ε), in the authors' code (UniRL `drpo.py`) as here; it holds log r within ±20
first, beyond which its gradient is 0 and this one pulls back with all its weight.
"""

from mismatch_cli.arrays import Array, namespace
from mismatch_cli.errors import UsageError
from mismatch_cli.policies import Compared, Level

FORMULA = "{r} (1 − sign(A) ({p} − {q}) / {epsilon})"
SYMBOLS = {"epsilon": "ε"}


def weight(compared: Compared, level: Level, advantage_T: Array, *, epsilon: float = 12.5) -> Array:
    """r (1 − sign(A)(p − q) / ε): less than r where the update moves p further away, more where it moves it back."""
    if not epsilon > 0:
        raise UsageError(f"epsilon={epsilon:g} makes no sense: choose a number above 0.")
    sign_T = namespace(advantage_T).sign(advantage_T)
    return compared.level_ratio_T(level) * (1 - sign_T * compared.difference_T / epsilon)
