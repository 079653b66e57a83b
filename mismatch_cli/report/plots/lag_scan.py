"""Whether the two columns of log-probabilities belong to the same tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from matplotlib.figure import Figure

from mismatch_cli.report.plots._panels import panels, title
from mismatch_cli.report.plots._style import Style

if TYPE_CHECKING:
    from mismatch_cli.studies.diagnosis import DiagnosisAnalysis

STUDY = "diagnosis"
SECTION = ("Shifted by some tokens", "Retokenised text", "Every check")
TITLE = "The gap at every shift"
CAPTION = (
    "Mean gap between log π of token t + lag and log μ of token t, each token counting for at most 2 nats: over "
    "the responses that are out of step, if there are any. The lowest bar belongs at 0."
)


def needs(data: DiagnosisAnalysis) -> bool:
    return any(np.isfinite(gap) for gap in data.lags.values())


def draw(figure: Figure, data: DiagnosisAnalysis, style: Style) -> None:
    (axes,) = panels(figure, style, 1, height=220 if style.wide else 180)
    lags, gaps = list(data.lags), np.nan_to_num(list(data.lags.values()))
    colors = [style.theme.orange if lag == 0 else style.theme.blue for lag in lags]
    bars = axes.bar(lags, gaps, color=colors, width=0.7)
    axes.bar_label(
        bars,
        labels=[f"{gap:.2g}".replace("-", "−") for gap in gaps],
        padding=3,
        fontsize=style.small,
        color=style.theme.ink,
    )
    axes.set_ylim(0, 1.2 * max(gaps.max(), 1e-6))
    axes.set_xticks(lags, [f"{lag:+d}".replace("-", "−") if lag else "0" for lag in lags])
    axes.set_xlabel("lag of the trainer, tokens")
    axes.grid(visible=False, axis="x")
    title(axes, "Mean |log π[t + lag] − log μ[t]|, nats" if style.wide else "Mean gap, nats", style)
