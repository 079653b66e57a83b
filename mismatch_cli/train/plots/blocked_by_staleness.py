"""Blocked tokens by how many updates old the weights are that sample."""

from typing import Any

from matplotlib.ticker import MaxNLocator

from mismatch_cli.report.drawing.marks import LineStyle, draw_bars, looks
from mismatch_cli.report.drawing.panels import Panel, Sheet
from mismatch_cli.train.plots._charts import draw_legend, room_for_legend
from mismatch_cli.train.studies.staleness import SHARES, DoseResponse
from mismatch_cli.train.studies.training import TrainingAnalysis

STUDY = "training"
SECTION = "Bad updates and blocked tokens"
PLACE = 3
TITLE = "Blocked tokens by staleness"
CAPTION = (
    "Runs whose engine samples with weights N optimiser steps old: the share of tokens that each "
    "algorithm blocks by N, in the mean over the steps at which every engine is as far behind as "
    "it should be, with 95 % intervals over seeds (Student’s t) if there are several. A trust "
    "region that blocks more at a higher N acts on how far the policy has moved; one that blocks "
    "the same acts on the engine’s mismatch."
)

DATA = "runs that differ in the key `staleness`"

_TITLES = ("Blocked, % of A ≠ 0", "Blocked, % of A > 0", "Blocked, % of A < 0")
_MOST_TICKS = 6


def needs(data: TrainingAnalysis) -> bool:
    return bool(data.by_staleness)


def draw(figure: Sheet, data: TrainingAnalysis) -> None:
    look_of = looks((response.algorithm for response in data.by_staleness), figure.style)
    columns = figure.style.pick(len(SHARES), 1)
    below = room_for_legend(figure, look_of)
    panels = figure.panels(len(SHARES), columns=columns, height=(220, 180), below=below)
    for axes, key, title in zip(panels, SHARES, _TITLES, strict=True):
        for response in data.by_staleness:
            _draw_doses(axes, response, key, look_of[response.algorithm])
        axes.set_ylim(bottom=0)
        axes.in_percent()
        axes.xaxis.set_major_locator(MaxNLocator(nbins=_MOST_TICKS, integer=True))
        axes.set_xlabel("N, updates")
        axes.headline(title)
    draw_legend(figure, look_of)


def _draw_doses(axes: Panel, response: DoseResponse, key: str, look: LineStyle) -> None:
    staleness, shares = [], []
    for dose in response.doses:
        share = getattr(dose, key)
        if share.value is not None:
            staleness.append(dose.staleness)
            shares.append(share)
    line: dict[str, Any] = {"markersize": 5, "linestyle": look.dash, "label": response.algorithm}
    draw_bars(axes, staleness, shares, look.colour, **line)
