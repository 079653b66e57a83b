"""Whether the two columns of log-probabilities belong to the same tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from mismatch_cli.report.plots._panels import Sheet

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


def draw(figure: Sheet, data: DiagnosisAnalysis) -> None:
    (axes,) = figure.panels(1, height=(220, 180))
    lags, gaps = list(data.lags), np.nan_to_num(list(data.lags.values()))
    bars = axes.bar(lags, gaps, color=[axes.theme.blue if lag else axes.theme.orange for lag in lags], width=0.7)
    labels = [f"{gap:.2g}".replace("-", "−") for gap in gaps]
    axes.bar_label(bars, labels=labels, padding=3, fontsize=axes.style.small, color=axes.theme.ink)
    axes.set_ylim(0, 1.2 * max(gaps.max(), 1e-6))
    axes.set_xticks(lags, [f"{lag:+d}".replace("-", "−") if lag else "0" for lag in lags])
    axes.set_xlabel("lag of the trainer, tokens")
    axes.grid(visible=False, axis="x")
    axes.headline("Mean |log π[t + lag] − log μ[t]|, nats", "Mean gap, nats")
