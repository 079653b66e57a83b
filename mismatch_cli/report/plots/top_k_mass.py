"""Probability mass of the top K over the steps of training (DPPO paper, figure 12)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from mismatch_cli.metrics.gap_table import METRICS
from mismatch_cli.report.drawing.marks import (
    DASHED,
    draw_line,
    estimate_array,
    margin_of,
    middle_of_steps,
)
from mismatch_cli.report.drawing.panels import LEGEND, Panel, Sheet

if TYPE_CHECKING:
    from mismatch_cli.studies.mismatch import PlotData

STUDY = "mismatch"
SECTION = "The gap"
TITLE = "Probability mass of the top K by step"
DATA = "several steps with the log-probabilities of a top K"
CAPTION = (
    "Total probability of the K tokens that the engine ranks highest (the recorded K) by step: "
    "the mean over tokens under the engine (μ) and the trainer (π), with 95 % intervals over "
    "prompts where there are enough. Top-K divergences treat the rest as one bucket. DPPO paper, "
    "figure 12: 99.4 % at first and 99.9 % after 100 steps, with K = 20."
)

_POLICIES = {"topk_mass_reference": "-", "topk_mass_current": DASHED}
_LEAST = 5e-3  # of a probability: the smallest range of the axis, the paper's


def needs(data: PlotData) -> bool:
    return len(data.summary.by_step) > 1


def draw(figure: Sheet, data: PlotData) -> None:
    (axes,) = figure.panels(1, height=(240, 200), legend=LEGEND)
    rows = data.summary.by_step
    colours = (axes.theme.blue, axes.theme.orange)
    all_masses = []
    for (key, dash), colour in zip(_POLICIES.items(), colours, strict=True):
        name = METRICS[key].label.rpartition(" ")[2]
        look: dict[str, Any] = {"linestyle": dash, "marker": "o", "markersize": 3, "label": name}
        masses = [row.masses[key] for row in rows]
        draw_line(axes, middle_of_steps(rows), masses, colour, **look)
        all_masses += masses
    _scale(axes, estimate_array(all_masses))
    axes.whole_steps()
    axes.headline("Mean mass of the top K, %", "Mass of the top K, %")


def _scale(axes: Panel, estimate_B3: np.ndarray) -> None:
    """Show every interval, and nothing above 100 %."""
    low, high = float(np.nanmin(estimate_B3)), float(np.nanmax(estimate_B3))
    margin = margin_of(low, high, 0.08, _LEAST)
    # A mass of 1 needs a little room above it, or the frame of the panel would cut its marker.
    top = min(high + margin, 1.0) if high < 1 else 1 + margin / 8
    axes.set_ylim(low - margin, top)
    axes.in_percent()
