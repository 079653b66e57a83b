"""Reward, and how probable and how uncertain the blocked tokens are (DPPO paper, figure 6)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from matplotlib.figure import Figure

from mismatch_cli.report.plots._lines import looks
from mismatch_cli.report.plots._step_panels import AS_ABOVE, Panel, draw_panels
from mismatch_cli.report.plots._style import Style

if TYPE_CHECKING:
    from mismatch_cli.studies.training import TrainingAnalysis

STUDY = "training"
SECTION = "Bad updates and blocked tokens"
TITLE = "Blocked tokens over training"
CAPTION = (
    "Mean reward; and over the tokens that the algorithm blocks, the mean rollout probability μ and the mean entropy "
    f"of π. A line is interrupted where nothing was blocked. {AS_ABOVE} DPPO paper, figure 6."
)


def needs(data: TrainingAnalysis) -> bool:
    return data.has("mu_blocked") or data.has("entropy_blocked")


def draw(figure: Figure, data: TrainingAnalysis, style: Style) -> None:
    panels = [
        Panel("Mean reward", [data.curves("reward")], within=(0, 1)),
        Panel("Mean μ of blocked tokens", [data.curves("mu_blocked")], within=(0, 1), from_0=True),
        Panel(
            "Entropy of blocked tokens, nats", [data.curves("entropy_blocked")], within=(0, np.inf), from_0=True,
        ),
    ]  # fmt: skip
    draw_panels(figure, style, [panel for panel in panels if any(panel.curves)], looks(data.algorithms, style))
