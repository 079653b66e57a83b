"""Log π against log μ, token by token, and what is left when the diagonal is taken away."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from mismatch_cli.report.plots._panels import panels, title
from mismatch_cli.report.plots._points import draw_points, thin
from mismatch_cli.report.plots._style import Style

if TYPE_CHECKING:
    from mismatch_cli.studies.mismatch import PlotData

STUDY = "mismatch"
SECTION = "The gap"
TITLE = "Agreement of log-probabilities"
CAPTION = (
    "Each dot is a sampled token: log π against log μ, and their difference d = log π − log μ against log μ. "
    "Healthy runs hug the line evenly; a tilt means another temperature, one side only means a truncated support, "
    "and single dots far away mean wrong values."
)


def needs(data: PlotData) -> bool:
    return bool(np.isfinite(data.logp_N).any())


def draw(figure: Figure, data: PlotData, style: Style) -> None:
    chosen = thin(len(data.logq_N), style)
    logq_N, logp_N = data.logq_N[chosen].astype(np.float64), data.logp_N[chosen].astype(np.float64)
    d_N = logp_N - logq_N
    agreement, difference = panels(figure, style, 2, height=360 if style.wide else 270)
    lowest = _lowest(logq_N, logp_N)
    _draw_agreement(agreement, logq_N, logp_N, lowest, style)
    _draw_difference(difference, logq_N, d_N, lowest, style)


def _lowest(logq_N: np.ndarray, logp_N: np.ndarray) -> float:
    joint_N = np.concatenate([logq_N, logp_N])
    return float(min(-1.0, 1.04 * joint_N[np.isfinite(joint_N)].min()))


def _draw_agreement(axes: Axes, logq_N: np.ndarray, logp_N: np.ndarray, lowest: float, style: Style) -> None:
    top = -0.02 * lowest
    axes.set_xlim(lowest, top)
    axes.set_ylim(lowest, top)
    draw_points(axes, style, logq_N, logp_N, style.theme.blue)
    axes.plot([lowest, 0], [lowest, 0], color=style.theme.orange, linewidth=1.2, zorder=3)
    axes.text(0.97, 0.05, "line: π = μ", transform=axes.transAxes, ha="right", color=style.theme.orange)
    axes.set_xlabel("log μ, nats")
    title(axes, "log π against log μ, nats", style)


def _draw_difference(axes: Axes, logq_N: np.ndarray, d_N: np.ndarray, lowest: float, style: Style) -> None:
    finite_N = np.abs(d_N[np.isfinite(d_N)])
    reach = max(1e-6, 1.08 * float(finite_N.max()))
    axes.set_xlim(lowest, -0.02 * lowest)
    axes.set_ylim(-reach, reach)
    draw_points(axes, style, logq_N, d_N, style.theme.blue)
    axes.axhline(0, color=style.theme.orange, linewidth=1.2, zorder=3)
    axes.set_xlabel("log μ, nats")
    title(axes, "Difference log π − log μ, nats", style)
