"""Shared by most masks: checks of thresholds, and blocking updates that move p further away
beyond a threshold.
"""

from mismatch_cli.base.arrays import Array, fill_where, namespace
from mismatch_cli.base.errors import UsageError
from mismatch_cli.rules.trust_regions import Decision

MOST_RANKS = 2**20  # more than any vocabulary


def not_negative(**thresholds: float) -> None:
    """Raise a `UsageError` for a threshold that is negative or not a number."""
    for name, value in thresholds.items():
        if not value >= 0:
            raise UsageError(f"{name}={value:g} is out of range: choose a number of at least 0.")


def sides(letter: str, low: float, high: float) -> dict[str, float]:
    """The two sides of a threshold by their letters; only the letter if both are equal."""
    if low == high:
        return {letter: low}
    return {f"{letter}_low": low, f"{letter}_high": high}


def shares(**thresholds: float) -> None:
    """Raise a `UsageError` for a threshold on a probability, or on the drop of a ratio, outside
    [0, 1].
    """
    for name, value in thresholds.items():
        if not 0 <= value <= 1:
            raise UsageError(f"{name}={value:g} is out of range: choose a number from 0 to 1.")


def band_around_1(*, band_low: float, band_high: float) -> None:
    """Raise a `UsageError` unless 0 ≤ band_low ≤ 1 ≤ band_high: equal policies must be inside."""
    if not 0 <= band_low <= 1 <= band_high:
        raise UsageError(
            f"band_low={band_low:g}, band_high={band_high:g} is out of range: choose a band that "
            "contains the ratio 1 of equal policies, and begins at 0 or above."
        )


def ranks(*, k: int) -> None:
    """Raise a `UsageError` unless k is a number of ranks that an engine can return."""
    if not 1 <= k <= MOST_RANKS:
        raise UsageError(
            f"k={k} is out of range: choose a number of ranks from 1 to {MOST_RANKS:,}."
        )


def signed(divergence_T: Array, log_ratio_T: Array) -> Array:
    """A divergence with the sign of p − q; 0 where both give the sampled token the same
    probability.
    """
    # p − q underflows to 0 for rare tokens, where log p − log q still has the right sign.
    # With the sign of 0, the mask would block updates on the wrong side of the threshold.
    signed_T = namespace(divergence_T).copysign(divergence_T, log_ratio_T)
    return fill_where(signed_T, log_ratio_T == 0, 0.0)


def outward(
    statistic_T: Array, advantage_T: Array, *, low: float = 0.0, high: float = 0.0
) -> Array:
    """Where the update moves p further away from q: A > 0 above `high`, A < 0 below −`low`, without
    equality.

    The statistic has the sign of p − q. Thresholds are rounded to its dtype.
    """
    # numpy, like torch, converts a Python number to the dtype of the array beside it.
    # So thresholds decide in float32 in analysis and training; as float64 arrays they would not.
    rises_T = (advantage_T > 0) & (statistic_T > high)
    falls_T = (advantage_T < 0) & (statistic_T < -low)
    return rises_T | falls_T


def one_sided(statistic_T: Array, advantage_T: Array, *, low: float, high: float) -> Decision:
    """Block A > 0 where the statistic is above `high`, and A < 0 where it is below −`low`;
    equality is kept.
    """
    blocked_T = outward(statistic_T, advantage_T, low=low, high=high)
    return Decision(~blocked_T, statistic_T)
