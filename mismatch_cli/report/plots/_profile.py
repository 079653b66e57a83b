"""Means with their 95 % bars along an axis, in typical gaps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from mismatch_cli.metrics.estimate import Estimate
from mismatch_cli.report.plots._panels import add_subject, panels, title
from mismatch_cli.report.plots._style import Style

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw_profile(
    figure: Figure, points: Sequence[tuple[float, Estimate]], style: Style, *, along: str, subject: str
) -> None:
    """One line; a mean over too few prompts has no bar."""
    (axes,) = panels(figure, style, 1, height=240 if style.wide else 190)
    x = [place for place, _ in points]
    ends = [(mean.low, mean.value, mean.high) for _, mean in points]
    low, value, high = np.array([(v if lo is None else lo, v, v if hi is None else hi) for lo, v, hi in ends]).T
    axes.errorbar(
        x, value, yerr=[value - low, high - value], color=style.theme.blue, marker="o", markersize=4.5, elinewidth=1
    )
    axes.set_ylim(0, 1.15 * max(float(high.max()), 1e-6))
    axes.set_xlabel(along)
    title(
        axes, "Mean gap, in typical gaps of the token’s probability" if style.wide else "Mean gap, typical = 1", style
    )
    add_subject(figure, style, subject)
