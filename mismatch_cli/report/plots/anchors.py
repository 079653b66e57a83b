"""An algorithm anchored at the rollout against its twin anchored at the recomputed policy (DPPO paper, figure 4)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from matplotlib.figure import Figure

from mismatch_cli.report.plots._lines import DASHED, Look, palette
from mismatch_cli.report.plots._step_panels import AS_ABOVE, Panel, draw_panels
from mismatch_cli.report.plots._style import Style

if TYPE_CHECKING:
    from mismatch_cli.studies.training import TrainingAnalysis

STUDY = "training"
SECTION = "Reward and mismatch"
TITLE = "Anchored at the rollout, or recomputed"
CAPTION = (
    "Mean reward, and mean |π − μ| at the weights that sampled. Solid: the mask measures from the rollout’s μ. Dashed, "
    "in the same colour: the same mask measures from π′, the trainer recomputed at those weights. "
    f"{AS_ABOVE} DPPO paper, figure 4."
)


def needs(data: TrainingAnalysis) -> bool:
    return bool(_pairs(data)) and bool(_panels(data))


def draw(figure: Figure, data: TrainingAnalysis, style: Style) -> None:
    colours = palette(style)
    look_of = {}
    for place, pair in enumerate(_pairs(data)):
        for name, dash in zip(pair, ("-", DASHED), strict=True):
            look_of[name] = Look(colours[place % len(colours)], dash)
    draw_panels(figure, style, _panels(data), look_of)


def _pairs(data: TrainingAnalysis) -> list[tuple[str, str]]:
    """Both algorithms of each pair; parameters follow the name after a colon."""
    parts = {name: name.partition(":") for name in data.algorithms}
    pairs = [(name, f"{head}-recompute{colon}{rest}") for name, (head, colon, rest) in parts.items()]
    return [pair for pair in pairs if set(pair) <= set(data.algorithms)]


def _panels(data: TrainingAnalysis) -> list[Panel]:
    names = {name for pair in _pairs(data) for name in pair}
    panels = []
    for title, keys in (("Mean reward", ("reward",)), ("Mean |π − μ| at equal weights", ("mismatch", "abs_dp_mean"))):
        curves = {name: curve for name, curve in data.curves(*keys).items() if name in names}
        panels += [Panel(title, [curves], within=(0, 1), from_0=keys != ("reward",))] if curves else []
    return panels
