"""Where the time of a step goes, by algorithm."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from mismatch_cli import numbers
from mismatch_cli.report.plots._lines import palette
from mismatch_cli.report.plots._panels import LEFT, RIGHT, TOP, Box, place_boxes, short_names
from mismatch_cli.report.plots._style import Style
from mismatch_cli.studies.training import OTHER, PHASES, mean_by_phase, phases_of, seconds_by_phase

if TYPE_CHECKING:
    from mismatch_cli.studies.training import TrainingAnalysis

STUDY = "training"
SECTION = "Where the time goes"
TITLE = "Where the time goes"
CAPTION = (
    "Seconds of a step by phase, the mean over steps and seeds, evaluations included; at the end of a bar their sum."
)

_ROW, _BAR, _NAMES = 24, 15, 250  # pixels of a row, of the bar in it, and for the names beside the bars
_LEGEND = 22
_TOTAL = 1.16  # of the longest bar: room for the sums


def needs(data: TrainingAnalysis) -> bool:
    return any(seconds_by_phase(run) for run in data.runs)


def draw(figure: Figure, data: TrainingAnalysis, style: Style) -> None:
    found = {name: seconds for name, runs in data.algorithms.items() if (seconds := mean_by_phase(runs))}
    rows = list(found.values())
    phases = phases_of(rows)
    row_height = _ROW if style.wide else 2 * _ROW - 6
    left = LEFT + _NAMES if style.wide else 12
    legend_rows = 1 if style.wide else -(-len(phases) // 3)
    top = TOP + legend_rows * _LEGEND
    (axes,) = place_boxes(
        figure, style, [Box(left, top, style.layout.width - left - RIGHT, len(rows) * row_height)], 40
    )
    _draw_bars(axes, rows, phases, style)
    _write_names(axes, list(found), style)
    axes.set_xlabel("seconds")
    _draw_legend(axes, phases, left, style)


def _draw_bars(axes: Axes, rows: list[dict[str, float]], phases: list[str], style: Style) -> None:
    longest = max(sum(row.values()) for row in rows) or 1.0
    height = _BAR / (_ROW if style.wide else 2 * _ROW - 6)
    centre = 0.5 if style.wide else 0.95 - height / 2  # narrow: below the name
    start_N = np.zeros(len(rows))
    colours = dict(zip((*PHASES, OTHER), (*palette(style), style.theme.muted), strict=True))
    for phase in phases:
        seconds_N = np.array([row.get(phase, 0.0) for row in rows])
        axes.barh(
            np.arange(len(rows)) + centre, seconds_N, height, left=start_N, color=colours[phase], label=phase,
            edgecolor=style.theme.page, linewidth=0.6,
        )  # fmt: skip
        start_N += seconds_N
    for index, total in enumerate(start_N):
        axes.annotate(
            f"{numbers.number(total)} s", (total, index + centre), xytext=(4, 0), textcoords="offset points",
            va="center", fontsize=style.small,
        )  # fmt: skip
    axes.set_xlim(0, (_TOTAL if style.wide else 1.28) * longest)
    axes.set_ylim(len(rows), 0)
    axes.grid(visible=False, axis="y")


def _write_names(axes: Axes, names: list[str], style: Style) -> None:
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    room = _NAMES - 12 if style.wide else style.layout.width - 40
    for index, name in enumerate(short_names(names, room, style.small)):
        if style.wide:
            axes.annotate(
                name, (0, index + 0.5), xytext=(-6, 0), textcoords="offset points", ha="right", va="center",
                fontsize=style.small, annotation_clip=False,
            )  # fmt: skip
        else:
            axes.annotate(
                name, (0, index + 0.3), xytext=(1, 0), textcoords="offset points", va="center", fontsize=style.small
            )


def _draw_legend(axes: Axes, phases: list[str], left: float, style: Style) -> None:
    width = axes.get_position().width * style.layout.width
    x = ((LEFT if style.wide else 8) - left) / width
    rows = 1 if style.wide else -(-len(phases) // 3)
    axes.set_title("Seconds of a step", x=x, pad=(7 + rows * _LEGEND) * 0.75)
    axes.legend(
        loc="lower left", bbox_to_anchor=(x, 1.0),
        ncols=len(phases) if style.wide else 3, borderaxespad=0.25, borderpad=0.1, handlelength=1.0,
        handletextpad=0.4, columnspacing=1.2,
    )  # fmt: skip
