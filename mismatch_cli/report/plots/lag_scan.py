"""Whether both columns of log-probabilities belong to the same tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from mismatch_cli.report.drawing.panels import Panel, Sheet, plain_label

if TYPE_CHECKING:
    from mismatch_cli.studies.diagnosis import DiagnosisAnalysis

STUDY = "diagnosis"
SECTION = ("Shifted by some tokens", "Retokenised text", "All checks")
TITLE = "Gap by shift"
DATA = "tokens whose log-probabilities can be compared shifted"
CAPTION = (
    "Mean gap between log π of token t + lag and log μ of token t, with each token capped at 2 "
    "nats, over the misaligned responses if there are any. The axis is logarithmic. In a healthy "
    "trace the lowest dot is at lag 0."
)

_BELOW = 3  # the axis begins this many times below the smallest gap
_NOTHING = 1e-7  # nats: the smallest gap where both sides agree to the bit at every lag


def needs(data: DiagnosisAnalysis) -> bool:
    return any(map(np.isfinite, data.lags.values()))


def draw(figure: Sheet, data: DiagnosisAnalysis) -> None:
    (axes,) = figure.panels(1, height=(220, 180))
    gap_of = {lag: gap for lag, gap in data.lags.items() if np.isfinite(gap)}
    # A gap of 0 has no place on a logarithmic axis: its dot is at the lower end.
    floor = min([gap for gap in gap_of.values() if gap > 0], default=_NOTHING) / _BELOW
    highest = max(*gap_of.values(), floor)
    axes.set_ylim(floor, 2 * highest * (highest / floor) ** 0.15)
    axes.logarithmic("y")
    for lag, gap in gap_of.items():
        _draw_gap(axes, lag, gap, floor)
    _label_lags(axes, list(data.lags))
    axes.headline("Mean |log π[t + lag] − log μ[t]|, nats", "Mean gap, nats")


def _draw_gap(axes: Panel, lag: int, gap: float, floor: float) -> None:
    """A dot on a stem, with its value."""
    colour = axes.theme.blue if lag else axes.theme.orange
    height = max(gap, floor)
    axes.vlines(lag, floor, height, color=colour, linewidth=1.2, alpha=0.5)
    axes.plot(lag, height, "o", color=colour, markersize=7)
    axes.annotate_beside(plain_label(float(f"{gap:.2g}")), (lag, height), (0, 7), ha="center")


def _label_lags(axes: Panel, lags: Sequence[int]) -> None:
    labels = [f"{lag:+d}".replace("-", "−") if lag else "0" for lag in lags]
    axes.set_xlim(min(lags) - 0.6, max(lags) + 0.6)
    axes.set_xticks(lags, labels)
    axes.set_xlabel("lag of the trainer, tokens")
    axes.grid(visible=False, axis="x")
