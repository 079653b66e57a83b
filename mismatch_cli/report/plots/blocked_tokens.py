"""Reward, and how probable and how uncertain the blocked tokens are (DPPO paper, figure 6)."""

import numpy as np

from mismatch_cli.report.plots._lines import AS_ABOVE, Chart, draw_charts, looks
from mismatch_cli.report.plots._panels import Sheet
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


def draw(figure: Sheet, data: TrainingAnalysis) -> None:
    charts = [
        Chart("Mean reward", [data.curves("reward")]),
        Chart("Mean μ of blocked tokens", [data.curves("mu_blocked")], from_0=True),
        Chart("Entropy of blocked tokens, nats", [data.curves("entropy_blocked")], within=(0, np.inf), from_0=True),
    ]
    draw_charts(figure, charts, looks(data.algorithms, figure.style))
