"""What makes a threshold sensible, said in one sentence where it does not."""

from __future__ import annotations

from mismatch_cli.errors import UsageError

MOST_RANKS = 2**20  # more than any vocabulary has


def not_negative(**thresholds: float) -> None:
    """Raise a `UsageError` for a threshold that is negative or no number."""
    for name, value in thresholds.items():
        if not value >= 0:
            raise UsageError(f"{name}={value:g} makes no sense: choose a number of at least 0.")


def shares(**thresholds: float) -> None:
    """Raise a `UsageError` for a threshold on a probability or a fall of a ratio that is not in [0, 1]."""
    for name, value in thresholds.items():
        if not 0 <= value <= 1:
            raise UsageError(f"{name}={value:g} makes no sense: choose a number from 0 to 1.")


def positive(**thresholds: float) -> None:
    """Raise a `UsageError` for a threshold that is zero, negative or no number."""
    for name, value in thresholds.items():
        if not value > 0:
            raise UsageError(f"{name}={value:g} makes no sense: choose a number above 0.")


def band_around_1(*, band_low: float, band_high: float) -> None:
    """Raise a `UsageError` unless 0 ≤ band_low ≤ 1 ≤ band_high: equal policies must lie inside."""
    if not 0 <= band_low <= 1 <= band_high:
        raise UsageError(
            f"The band band_low={band_low:g}, band_high={band_high:g} makes no sense: it must hold the ratio 1 "
            "of equal policies, and begin at 0 or above."
        )


def ranks(*, k: int) -> None:
    """Raise a `UsageError` unless k is a number of ranks that an engine can return."""
    if not 1 <= k <= MOST_RANKS:
        raise UsageError(f"k={k} makes no sense: choose a number of ranks from 1 to {MOST_RANKS:,}.")
