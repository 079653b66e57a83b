"""Probability mass of the top K over the steps of training (DPPO paper, figure 12)."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from mismatch_cli.metrics.gap_table import METRICS
from mismatch_cli.report.drawing.marks import (
    DASHED,
    draw_line,
    margin_of,
    middle_of_steps,
    parts_of,
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
    rows, colours = data.summary.by_step, (axes.theme.blue, axes.theme.orange)
    masses = {key: [row.masses[key] for row in rows] for key in _POLICIES}
    for (key, dash), colour in zip(_POLICIES.items(), colours, strict=True):
        name = METRICS[key].label.rpartition(" ")[2]
        look: dict[str, Any] = {"linestyle": dash, "marker": "o", "markersize": 3, "label": name}
        draw_line(axes, middle_of_steps(rows), masses[key], colour, **look)
    _scale(axes, parts_of(chain.from_iterable(masses.values())))
    axes.whole_steps()
    axes.headline("Mean mass of the top K, %", "Mass of the top K, %")


def _scale(axes: Panel, part_B3: np.ndarray) -> None:
    """Show every interval, and nothing above 100 %."""
    low, high = float(np.nanmin(part_B3)), float(np.nanmax(part_B3))
    margin = margin_of(low, high, 0.08, _LEAST)
    axes.set_ylim(low - margin, min(high + margin, 1.0) if high < 1 else 1 + margin / 8)
    axes.in_percent()
