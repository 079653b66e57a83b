"""How training went: reward, evaluation accuracy and the gap between the engines (DPPO paper, figure 3)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from matplotlib.figure import Figure

from mismatch_cli.report.plots._lines import looks
from mismatch_cli.report.plots._step_panels import BANDS, Panel, draw_panels
from mismatch_cli.report.plots._style import Style

if TYPE_CHECKING:
    from mismatch_cli.studies.training import TrainingAnalysis

STUDY = "training"
SECTION = "Reward and mismatch"
PLACE = 1
TITLE = "Training curves"
CAPTION = (
    "Mean reward of the batch; accuracy at the evaluations, where there were any; and, at the weights that sampled, "
    f"mean |π − μ| over tokens and the largest and smallest π − μ of the step. {BANDS} DPPO paper, figure 3."
)


def needs(data: TrainingAnalysis) -> bool:
    return bool(_panels(data))


def draw(figure: Figure, data: TrainingAnalysis, style: Style) -> None:
    draw_panels(figure, style, _panels(data), looks(data.algorithms, style))


def _panels(data: TrainingAnalysis) -> list[Panel]:
    extremes = [data.curves("mismatch", key) for key in ("dp_max", "dp_min")]
    panels = [
        Panel("Mean reward", [data.curves("reward")], within=(0, 1)),
        Panel("Evaluation accuracy", [data.curves("eval_accuracy", gaps=False)], within=(0, 1)),
        Panel("Mean |π − μ| at equal weights", [data.curves("mismatch", "abs_dp_mean")], within=(0, 1), from_0=True),
        Panel("Max and min of π − μ at equal weights", extremes, "Max and min of π − μ", within=(-1, 1)),
    ]
    return [panel for panel in panels if any(panel.curves)]
