"""The log-ratio of whole responses by length, with the slope through the origin (FP16 paper,
figure 5).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from mismatch_cli.base.numbers import estimate
from mismatch_cli.metrics.estimate import Estimate
from mismatch_cli.report.drawing.marks import DASHED, draw_points, thin
from mismatch_cli.report.drawing.panels import LEGEND, Panel, Sheet

if TYPE_CHECKING:
    from mismatch_cli.studies.mismatch import PlotData

STUDY = "mismatch"
SECTION = "Whole responses"
TITLE = "Log-ratio of whole responses by length"
DATA = "enough whole responses scored by both sides"
CAPTION = (
    "Each dot is a response: Σd = Σ (log π − log μ) over its tokens, against its length T. The "
    "line through the origin has the slope 1000 · E[T Σd] / E[T²], with its 95 % interval over "
    "prompts; it is thin and dashed if that interval contains 0 or is unknown. Minus the slope "
    "estimates KL(μ‖π) per 1,000 tokens: importance weights exp(Σd) shrink exponentially with "
    "length."
)

_FEWEST = 3  # responses
_FROM_0 = 0.25  # of the longest response: if the shortest is below, the axis begins at 0


def needs(data: PlotData) -> bool:
    return bool(np.isfinite(data.sequence_d_S).sum() >= _FEWEST)


def draw(figure: Sheet, data: PlotData) -> None:
    every = thin(len(data.length_S))
    length_S = data.length_S[every].astype(np.float64)
    d_S = data.sequence_d_S[every].astype(np.float64)
    finite_S = np.isfinite(d_S)
    theme = figure.theme
    (axes,) = figure.panels(1, height=(300, 270), legend=LEGEND)
    axes.set_xlim(*_lengths(length_S))
    axes.axhline(0, color=theme.muted, linewidth=0.9)
    low, high = min(d_S[finite_S].min(), 0), max(d_S[finite_S].max(), 0)
    margin = 0.06 * (high - low) or 1.0
    axes.set_ylim(low - margin, high + margin)
    draw_points(axes, length_S[finite_S], d_S[finite_S], theme.blue)
    # The entry of the legend: a faint dot of the scatter would not be legible there.
    axes.plot([], [], "o", color=theme.blue, markersize=4, markeredgewidth=0, label="response")
    _draw_slope(axes, data.metric("sequence_slope"))
    axes.set_xlabel("length of the response, tokens")
    axes.headline("Σ (log π − log μ), nats")


def _lengths(length_S: np.ndarray) -> tuple[float, float]:
    """The range of the axis: from 0, or from the shortest response if that leaves a quarter
    empty.
    """
    shortest, longest = float(length_S.min()), float(length_S.max())
    if shortest < _FROM_0 * longest:
        return 0, 1.04 * longest
    margin = max(0.04 * (longest - shortest), 1.0)
    return shortest - margin, longest + margin


def _draw_slope(axes: Panel, slope: Estimate) -> None:
    """The line through the origin; thin and dashed if its slope may be 0."""
    if slope.value is None:
        return
    value, interval = estimate(slope.value, slope.low, slope.high)
    sentence = f"slope {value} {interval} nats per 1,000 tokens"
    end_2 = np.array(axes.get_xlim())
    orange = axes.theme.orange
    may_be_0 = True
    if slope.low is not None and slope.high is not None:
        may_be_0 = slope.low <= 0 <= slope.high
        low_2, high_2 = end_2 * slope.low / 1000, end_2 * slope.high / 1000
        axes.fill_between(end_2, low_2, high_2, color=orange, alpha=0.15, linewidth=0)
        if may_be_0:
            sentence += ": it may be 0"
    look: dict[str, Any] = {"linewidth": 2}
    if may_be_0:
        look = {"linewidth": 1.1, "linestyle": DASHED}
    label = axes.style.pick(sentence, f"slope {value}")
    axes.plot(end_2, end_2 * slope.value / 1000, color=orange, label=label, **look)
