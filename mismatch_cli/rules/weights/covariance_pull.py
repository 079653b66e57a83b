"""KL-Cov: pulls back the few tokens whose log p covaries most with A, as a term.

The loss of a chosen token includes + β |log r|, whose gradient is 0 at log r = 0. The authors'
code, verl and SkyRL choose in each micro-batch, this in the batch. verl's β is 0.1, the authors' 1,
with a share of 2e-4 for their 32B and 2e-3 for their 7B; SkyRL's share of 0.2 is a fifth.

Source: KL-Cov, arXiv 2505.22617, there β 1 and shares of 2e-4 (32B), 2e-3 (7B); verl, SkyRL.
"""

from collections.abc import Sequence

import numpy as np

from mismatch_cli.base.arrays import Array, namespace
from mismatch_cli.base.errors import UsageError
from mismatch_cli.rules.policies import Compared, Level

FORMULA = (
    "−{beta} sign(log {r}) for the share {share} of the batch with the largest (A − mean A)(log "
    "{p} − mean log {p})"
)
SYMBOLS = {"beta": "β"}
SCOPE = "batch"


def collect(
    compared: Compared, advantage_T: Array, *, beta: float = 0.1, share: float = 2e-4
) -> Array:
    """A and log p, float64."""
    xp = namespace(advantage_T)
    columns = (advantage_T, compared.logp_current_T)
    return xp.stack([xp.astype(column_T, xp.float64) for column_T in columns], axis=1)


def settle(rows_UM: np.ndarray, *, beta: float = 0.1, share: float = 2e-4) -> Sequence[float]:
    """Mean A, mean log p, and the covariance that max(1, ⌊share · tokens⌋) tokens reach, without
    excluded ones.
    """
    rows_UM = rows_UM[rows_UM[:, 1] > -np.inf]
    if not len(rows_UM):
        return [0.0, 0.0, np.inf]
    means = rows_UM.mean(axis=0)
    covariance_U = (rows_UM - means).prod(axis=1)
    number = min(max(int(share * len(rows_UM)), 1), len(rows_UM))
    return [*means, np.partition(covariance_U, -number)[-number]]


def weight(
    compared: Compared,
    level: Level,
    advantage_T: Array,
    settled_TF: Array,
    *,
    beta: float = 0.1,
    share: float = 2e-4,
) -> Array:
    """−β sign(d) where the covariance is among the largest, ties included, else 0."""
    if not (beta >= 0 and 0 <= share <= 1):
        raise UsageError(
            f"β={beta:g}, share={share:g} is out of range: choose β ≥ 0, and a share from 0 to 1."
        )
    xp = namespace(advantage_T)
    covariance_T = (advantage_T - settled_TF[:, 0]) * (compared.logp_current_T - settled_TF[:, 1])
    sign_T = xp.sign(compared.level_log_ratio_T(level))
    return -beta * sign_T * (covariance_T >= settled_TF[:, 2])
