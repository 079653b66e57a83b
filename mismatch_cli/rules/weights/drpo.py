"""DRPO: DPPO's binary TV as a smooth weight, which reverses where |p − q| > ε.

That never happens with the published ε of 12.5, since |p − q| is at most 1: the weight stays within
8 % of r.

The objective is A r − |A| q (r − 1)² / (2 ε), as in the authors' code (UniRL `drpo.py`), which
first clamps log r to ±20: beyond, its gradient is 0, while this one pulls back with its full
weight. Its option `old_logp_source: replay` measures from π′: `anchor=recomputed`.

Source: DRPO, arXiv 2606.09821 §3, eq. 9; objective A r − |A| q (r − 1)² / (2 ε).
"""

from mismatch_cli.base.arrays import Array, namespace
from mismatch_cli.base.errors import UsageError
from mismatch_cli.rules.policies import Compared, Level

FORMULA = "{r} (1 − sign(A) ({p} − {q}) / {epsilon})"
SYMBOLS = {"epsilon": "ε"}


def weight(compared: Compared, level: Level, advantage_T: Array, *, epsilon: float = 12.5) -> Array:
    """r (1 − sign(A)(p − q) / ε): below r where the update moves p further away, above r where
    it moves p back.
    """
    if not epsilon > 0:
        raise UsageError(f"epsilon={epsilon:g} is out of range: choose a number above 0.")
    sign_T = namespace(advantage_T).sign(advantage_T)
    return compared.level_ratio_T(level) * (1 - sign_T * compared.difference_T / epsilon)
