"""The log-ratio of whole responses against their length, with the slope through the origin (FP16 paper, figure 5)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from mismatch_cli.numbers import estimate
from mismatch_cli.report.plots._fills import thin
from mismatch_cli.report.plots._panels import LEGEND, Panel, Sheet

if TYPE_CHECKING:
    from mismatch_cli.studies.mismatch import PlotData

STUDY = "mismatch"
SECTION = "Whole responses"
TITLE = "Log-ratio of whole responses by length"
CAPTION = (
    "Each dot is a response: Σd = Σ (log π − log μ) over its tokens, against its length T; the line through the "
    "origin has the slope 1000 · E[T Σd] / E[T²], with its 95 % interval over prompts. Minus the slope estimates "
    "KL(μ‖π) per 1,000 tokens: importance weights exp(Σd) shrink exponentially with length."
)


def needs(data: PlotData) -> bool:
    return bool(np.isfinite(data.sequence_d_S).any())


def draw(figure: Sheet, data: PlotData) -> None:
    chosen, theme = thin(len(data.length_S), figure.style), figure.theme
    length_S, d_S = data.length_S[chosen].astype(np.float64), data.sequence_d_S[chosen].astype(np.float64)
    (axes,) = figure.panels(1, height=(340, 270), legend=LEGEND)
    longest = 1.04 * float(length_S.max())
    axes.set_xlim(0, longest)
    axes.axhline(0, color=theme.muted, linewidth=0.9)
    finite_S = np.isfinite(d_S)
    alpha = float(np.clip(40 / np.sqrt(len(d_S)), 0.25, 0.8))
    axes.scatter(
        length_S[finite_S], d_S[finite_S], s=12, color=theme.blue, alpha=alpha, linewidths=0, rasterized=True,
        label="response",
    )  # fmt: skip
    _draw_slope(axes, data.metric("sequence_slope"), longest)
    axes.set_xlabel("length of the response, tokens")
    axes.headline("Σ (log π − log μ), nats")


def _draw_slope(axes: Panel, slope: Mapping[str, Any], longest: float) -> None:
    if slope["value"] is None:
        return
    value, interval = estimate(slope["value"], slope["low"], slope["high"])
    ends, orange = np.array([0, longest]), axes.theme.orange
    label = f"slope {value} nats per 1,000 tokens"
    if slope["low"] is not None and slope["high"] is not None:
        label = f"slope {value} {interval}" + axes.style.pick(" nats per 1,000 tokens", "")
        wedge = [ends * slope[end] / 1000 for end in ("low", "high")]
        axes.fill_between(ends, *wedge, color=orange, alpha=0.25, linewidth=0)
    axes.plot(ends, ends * slope["value"] / 1000, color=orange, linewidth=2, label=label)
