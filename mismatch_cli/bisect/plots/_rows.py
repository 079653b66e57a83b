"""The end of a horizontal bar."""

from __future__ import annotations

from typing import Any

from mismatch_cli.report.drawing.panels import Panel

_CAP = 0.13  # half the height of the end of an interval, of a row


def end_bar(
    axes: Panel, row: int, end: float, interval: tuple[float | None, float | None], words: str
) -> None:
    """The interval of a bar, and words to its right; `end` is its right end."""
    low, high = interval
    if low is not None and high is not None:
        ink: dict[str, Any] = {"color": axes.theme.ink, "linewidth": 1.1, "zorder": 3}
        axes.hlines(row, low, high, **ink)
        axes.vlines((low, high), row - _CAP, row + _CAP, **ink)
        end = max(end, high)
    axes.annotate_beside(words, (end, row), (5, 0), va="center_baseline", color=axes.theme.ink)
