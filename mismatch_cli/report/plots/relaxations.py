"""Ratio clipping relaxed for improbable tokens, on either side or both (DPPO paper, figure 7)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from matplotlib.figure import Figure

from mismatch_cli.report.plots._lines import looks
from mismatch_cli.report.plots._step_panels import AS_ABOVE, Panel, draw_panels
from mismatch_cli.report.plots._style import Style

if TYPE_CHECKING:
    from mismatch_cli.studies.curves import Curve
    from mismatch_cli.studies.training import TrainingAnalysis

STUDY = "training"
SECTION = "Reward and mismatch"
TITLE = "Relaxed ratio clipping"
CAPTION = (
    "Mean reward, and mean entropy of π over all tokens on a logarithmic axis, for ratio clipping and for its "
    f"relaxations towards improbable tokens: upwards, downwards, both. {AS_ABOVE} DPPO paper, figure 7."
)

_SHOWN = ("grpo-clip-higher", "relax-high", "relax-low", "relax-both")


def needs(data: TrainingAnalysis) -> bool:
    return len(_relaxed(data.curves("reward"))) >= 2


def draw(figure: Figure, data: TrainingAnalysis, style: Style) -> None:
    panels = [Panel("Mean reward", [_relaxed(data.curves("reward"))], within=(0, 1))]
    entropy = {name: curve for name, curve in _relaxed(data.curves("entropy")).items() if (curve.value_N > 0).any()}
    if entropy:
        panels.append(Panel("Mean entropy, nats", [entropy], log=True))
    draw_panels(figure, style, panels, looks(data.algorithms, style))


def _relaxed(curves: Mapping[str, Curve]) -> dict[str, Curve]:
    """Parameters follow the name after a colon."""
    return {name: curve for name, curve in curves.items() if name.partition(":")[0] in _SHOWN}
