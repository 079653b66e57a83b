"""Means with their 95 % bars along an axis, in typical gaps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from mismatch_cli.diagnosis.grouped import Mean
from mismatch_cli.report.plots._panels import add_subject, panels, title
from mismatch_cli.report.plots._style import Style

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw_profile(
    figure: Figure, points: Sequence[tuple[float, Mean]], style: Style, *, along: str, subject: str
) -> None:
    """One line; a mean over too few prompts has no bar."""
    (axes,) = panels(figure, style, 1, height=240 if style.wide else 190)
    x = [place for place, _ in points]
    value = np.array([mean.value for _, mean in points])
    error = np.array([1.96 * mean.error if np.isfinite(mean.error) else 0.0 for _, mean in points])
    axes.errorbar(x, value, yerr=error, color=style.theme.blue, marker="o", markersize=4.5, elinewidth=1)
    axes.set_ylim(0, 1.15 * max(float((value + error).max()), 1e-6))
    axes.set_xlabel(along)
    title(
        axes, "Mean gap, in typical gaps of the token’s probability" if style.wide else "Mean gap, typical = 1", style
    )
    add_subject(figure, style, subject)
