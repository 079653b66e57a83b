"""M2PO: drops the tokens with the largest (log p − log q)² until the mean of the rest is small.

The mean is over the batch. The paper counts and drops only tokens that PPO's clip can affect: those
that the update moves further away. AReaL counts all tokens, on the engine gap, in each micro-batch,
which a trace does not record.

Source: M2PO, arXiv 2510.01161.
"""

from collections.abc import Sequence

import numpy as np

from mismatch_cli.base.arrays import Array, fill_where, namespace
from mismatch_cli.base.errors import UsageError
from mismatch_cli.rules.decisions import not_negative, outward
from mismatch_cli.rules.policies import Compared
from mismatch_cli.rules.trust_regions import Decision

FORMULA = (
    "(log {p} − log {q})² above the cut that leaves a mean of {max_moment} in the batch, over "
    "{counted} tokens"
)
SYMBOLS = {"max_moment": "τ"}
NOT_ONE_SIDED = "With all tokens it ignores the advantage; with outward ones it is one-sided."
SCOPE = "batch"


def collect(
    compared: Compared, advantage_T: Array, *, max_moment: float = 0.04, counted: str = "outward"
) -> Array:
    """(log p − log q)² of each counted token, NaN for the others."""
    xp = namespace(advantage_T)
    squared_T = compared.log_ratio_T**2
    counts_T = _counts(compared, advantage_T, counted)
    return xp.where(counts_T, squared_T, xp.full_like(squared_T, float("nan")))[:, None]


def settle(
    rows_UM: np.ndarray, *, max_moment: float = 0.04, counted: str = "outward"
) -> Sequence[float]:
    """The largest value that remains when the largest are dropped until the mean of the rest is
    below τ.

    If the mean never falls below τ, only the smallest remains.
    """
    squared_U = rows_UM[:, 0]
    sorted_U = np.sort(squared_U[~np.isnan(squared_U)])
    if not len(sorted_U):
        return [np.inf]
    # The mean of the smallest, of the two smallest, and so on
    mean_U = np.cumsum(sorted_U) / np.arange(1, len(sorted_U) + 1)
    below = np.flatnonzero(mean_U < max_moment)
    last = below[-1] if len(below) else 0
    return [sorted_U[last]]


def trust_region(
    compared: Compared,
    advantage_T: Array,
    settled_TF: Array,
    *,
    max_moment: float = 0.04,
    counted: str = "outward",
) -> Decision:
    """Block counted tokens whose (log p − log q)² is above the settled value.

    The statistic is this square, nats².
    """
    not_negative(τ=max_moment)
    squared_T = compared.log_ratio_T**2
    beyond_T = _counts(compared, advantage_T, counted) & (squared_T > settled_TF[:, 0])
    return Decision(~beyond_T, fill_where(squared_T, advantage_T == 0, 0.0))


def _counts(compared: Compared, advantage_T: Array, counted: str) -> Array:
    d_T = compared.log_ratio_T
    if counted == "all":
        return d_T == d_T  # True for every token, in d's library and on its device
    if counted != "outward":
        raise UsageError(f"counted={counted} is unknown. Choose one of: outward, all.")
    return outward(d_T, advantage_T)
