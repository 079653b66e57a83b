"""Horizontal bars, one below the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mismatch_cli.report.drawing.panels import Panel

_CAP = 0.13  # half the height of the end of an interval, of a row


def name_rows(axes: Panel, names: Sequence[str]) -> None:
    """A named row for each bar, the first on top."""
    axes.set_yticks(range(len(names)), names, fontsize=axes.style.small)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.grid(visible=False, axis="y")


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
    axes.annotate(
        words,
        (end, row),
        xytext=(5, 0),
        textcoords="offset points",
        va="center_baseline",
        fontsize=axes.style.small,
        color=axes.theme.ink,
    )
