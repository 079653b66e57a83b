"""Probability mass of the top K over the steps of training (DPPO paper, figure 12)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from mismatch_cli.metrics.gap_table import METRICS
from mismatch_cli.report.drawing.lines import DASHED, draw_line, middle_of_steps, parts_of
from mismatch_cli.report.drawing.panels import LEGEND, Sheet
from mismatch_cli.report.drawing.scales import margin_of

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
    for (key, dash), colour in zip(_POLICIES.items(), colours, strict=True):
        estimates, name = [row.masses[key] for row in rows], METRICS[key].label.rpartition(" ")[2]
        draw_line(
            axes,
            middle_of_steps(rows),
            estimates,
            colour,
            linestyle=dash,
            marker="o",
            markersize=3,
            label=name,
        )
    shown = np.concatenate([parts_of(row.masses[key] for row in rows) for key in _POLICIES])
    low, high = float(np.nanmin(shown)), float(np.nanmax(shown))
    margin = margin_of(low, high, 0.08, _LEAST)
    axes.set_ylim(low - margin, min(high + margin, 1.0) if high < 1 else 1 + margin / 8)
    axes.in_percent(lambda value: f"{value:.7g}")
    axes.whole_steps()
    axes.headline("Mean mass of the top K, %", "Mass of the top K, %")
