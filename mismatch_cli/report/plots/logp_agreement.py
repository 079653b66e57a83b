"""The difference of both log-probabilities of each token, against the rollout's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from mismatch_cli.report.drawing.marks import draw_points, thin
from mismatch_cli.report.drawing.panels import Panel, Sheet

if TYPE_CHECKING:
    from mismatch_cli.studies.mismatch import PlotData

STUDY = "mismatch"
SECTION = "The gap"
TITLE = "Agreement of log-probabilities"
DATA = "tokens scored by both sides"
CAPTION = (
    "Each dot is a sampled token: d = log π − log μ against log μ. The vertical axis is linear "
    "near 0 and logarithmic further out, to show both outliers and the bulk. Healthy runs hug 0 "
    "evenly; a tilt means a different temperature, dots on one side only a truncated support. "
    "Dashed lines, if the data shows the pattern: logits rounded in steps s, as by bfloat16, "
    "give d = ±s − log(1 + μ(exp(±s) − 1))."
)

EXPLORED = True

_BULK = 0.95  # of the tokens are in the linear part of the axis


def needs(data: PlotData) -> bool:
    return bool(np.isfinite(data.logp_N).any())


def draw(figure: Sheet, data: PlotData) -> None:
    every = thin(len(data.logq_N))
    logq_N = data.logq_N[every].astype(np.float64)
    d_N = data.logp_N[every].astype(np.float64) - logq_N
    (axes,) = figure.panels(1, height=(320, 270))
    _scale(axes, logq_N, d_N)
    draw_points(axes, logq_N, d_N, figure.theme.blue)
    axes.axhline(0, color=figure.theme.muted, linewidth=0.9, zorder=3)
    _draw_lattice(axes, data.lattice_steps)
    axes.set_xlabel("log μ, nats")
    outside = int(np.isneginf(d_N).sum())
    note = f"{outside:,} with π = 0 not shown" if outside else ""
    axes.headline("d = log π − log μ, nats", note=note)


def _scale(axes: Panel, logq_N: np.ndarray, d_N: np.ndarray) -> None:
    """All tokens; linear over the bulk of the gaps, and symmetric around 0."""
    lowest = float(min(-1.0, 1.04 * logq_N[np.isfinite(logq_N)].min()))
    axes.set_xlim(lowest, -0.02 * lowest)
    size_N = np.abs(d_N[np.isfinite(d_N)])
    reach = max(1e-6, 1.3 * float(size_N.max()))
    axes.stretch(max(1e-7, float(np.quantile(size_N, _BULK))), (-reach, reach))


def _draw_lattice(axes: Panel, steps: tuple[float, ...]) -> None:
    """Lines for tokens whose own logit is off by ±s, which changes their odds by e^±s."""
    theme = axes.theme
    low = axes.get_xlim()[0]
    log_mu_N = np.linspace(low, 0, 200)
    line: dict[str, Any] = {"color": theme.orange, "linewidth": 1.1, "linestyle": (0, (3, 2))}
    for step in steps:
        for error in (step, -step):
            # log1p and expm1: a step is so small that 1 + μ(e^s − 1) would round away its digits.
            d_N = error - np.log1p(np.exp(log_mu_N) * np.expm1(error))
            axes.plot(log_mu_N, d_N, zorder=5, **line)
        name = f"rounded logits: s = 1/{round(1 / step)} nat"
        axes.annotate_beside(name, (low, step), (4, 2), color=theme.ink, va="bottom", zorder=6)
