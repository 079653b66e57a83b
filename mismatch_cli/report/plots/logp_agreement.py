"""Log π against log μ, token by token, and what is left when the diagonal is taken away."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from mismatch_cli.report.plots._fills import draw_points, thin
from mismatch_cli.report.plots._panels import Sheet

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


def draw(figure: Sheet, data: PlotData) -> None:
    chosen = thin(len(data.logq_N), figure.style)
    logq_N, logp_N = data.logq_N[chosen].astype(np.float64), data.logp_N[chosen].astype(np.float64)
    d_N = logp_N - logq_N
    joint_N = np.concatenate([logq_N, logp_N])
    lowest = float(min(-1.0, 1.04 * joint_N[np.isfinite(joint_N)].min()))
    top, orange = -0.02 * lowest, figure.theme.orange
    agreement, difference = figure.panels(2, height=(360, 270))
    agreement.set_ylim(lowest, top)
    reach = max(1e-6, 1.08 * float(np.abs(d_N[np.isfinite(d_N)]).max()))
    difference.set_ylim(-reach, reach)
    for axes, y_N in ((agreement, logp_N), (difference, d_N)):
        axes.set_xlim(lowest, top)
        axes.set_xlabel("log μ, nats")
        draw_points(axes, logq_N, y_N, figure.theme.blue)
    agreement.plot([lowest, 0], [lowest, 0], color=orange, linewidth=1.2, zorder=3)
    agreement.text(0.97, 0.05, "line: π = μ", transform=agreement.transAxes, ha="right", color=orange)
    agreement.headline("log π against log μ, nats")
    difference.axhline(0, color=orange, linewidth=1.2, zorder=3)
    difference.headline("Difference log π − log μ, nats")
