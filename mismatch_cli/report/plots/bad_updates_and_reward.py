"""Reward, and below it the bad updates of the same steps (DPPO paper, figure 5)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from matplotlib.figure import Figure

from mismatch_cli.report.plots._lines import looks
from mismatch_cli.report.plots._step_panels import AS_ABOVE, Panel, draw_panels
from mismatch_cli.report.plots._style import Style

if TYPE_CHECKING:
    from mismatch_cli.studies.training import TrainingAnalysis

STUDY = "training"
SECTION = "Bad updates and blocked tokens"
TITLE = "Bad updates and reward"
CAPTION = (
    "Mean reward, and below it the share of bad updates among the tokens with A < 0: those that push down a token "
    "whose probability has already fallen by 0.5 or more from the rollout’s, μ − π ≥ 0.5 at the weights of the "
    f"update. {AS_ABOVE} DPPO paper, figure 5."
)

_HEIGHT, _BETWEEN = 170, 28


def needs(data: TrainingAnalysis) -> bool:
    return data.has("bad_over_negative")


def draw(figure: Figure, data: TrainingAnalysis, style: Style) -> None:
    panels = [
        Panel("Mean reward", [data.curves("reward")], within=(0, 1)),
        Panel(
            "Bad updates, % of tokens with A < 0", [data.curves("bad_over_negative")], "Bad updates, % of A < 0",
            within=(0, 1), from_0=True, percent=True,
        ),
    ]  # fmt: skip
    panels = [panel for panel in panels if any(panel.curves)]
    axes = draw_panels(
        figure, style, panels, looks(data.algorithms, style), columns=1, height=_HEIGHT, between=_BETWEEN
    )
    for above in axes[:-1]:
        above.set_xlabel("")
