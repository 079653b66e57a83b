"""Where the time of a step goes, by algorithm."""

import numpy as np

from mismatch_cli.base import numbers
from mismatch_cli.report.drawing.panels import LEFT, RIGHT, TOP, Box, Panel, Sheet, short_names
from mismatch_cli.train.studies.phases import OTHER, PHASES, StepTime, mean_time, phases_of
from mismatch_cli.train.studies.training import TrainingAnalysis

STUDY = "training"
SECTION = "Where the time goes"
TITLE = "Where the time goes"
DATA = "the seconds of each phase of a step"
CAPTION = (
    "Seconds per step by phase: means over steps and seeds, including evaluations; the sum is at "
    "the end of each bar."
)

_BAR, _NAMES = 15, 250  # pixels of a bar, and of the names beside the bars
_LEGEND = 22
_IN_DETAIL = 4  # algorithms whose phases are named in words


def needs(data: TrainingAnalysis) -> bool:
    return bool(_times(data))


def draw(figure: Sheet, data: TrainingAnalysis) -> None:
    style, time_of = figure.style, _times(data)
    rows, phases = list(time_of.values()), phases_of(time_of.values())
    left, row_height, columns = style.pick((LEFT + _NAMES, 24, len(phases)), (12, 42, 3))
    legend = _LEGEND * -(-len(phases) // columns)
    box = Box(left, TOP + legend, style.width - left - RIGHT, len(rows) * row_height, legend)
    (axes,) = figure.place([box], 40)
    _draw_bars(axes, rows, phases, _BAR / row_height)
    _write_names(axes, list(time_of))
    axes.set_xlabel("seconds")
    axes.flush = (figure.flush - left) / box.width
    axes.headline(
        "Seconds per step", ncols=columns, handlelength=1.0, handletextpad=0.4, columnspacing=1.2
    )


def _times(data: TrainingAnalysis) -> dict[str, StepTime]:
    """The mean time of a step, by algorithm that recorded it."""
    times = {name: mean_time(runs) for name, runs in data.algorithms.items()}
    return {name: time for name, time in times.items() if time.by_phase}


def alternative(data: TrainingAnalysis) -> str:
    """The seconds of each algorithm; of its phases if there are few algorithms."""
    parts = []
    for name, time in _times(data).items():
        phases = ", ".join(f"{key} {numbers.number(part)}" for key, part in time.by_phase.items())
        detail = f" ({phases})" if len(data.algorithms) <= _IN_DETAIL else ""
        parts.append(f"{name}: {numbers.number(time.seconds)} s{detail}")
    return (
        f"Stacked bars, one for each algorithm. Horizontal: seconds per step. {'; '.join(parts)}."
    )


def _draw_bars(axes: Panel, rows: list[StepTime], phases: list[str], height: float) -> None:
    # Narrow: below the name
    centre_N = np.arange(len(rows)) + axes.style.pick(0.5, 0.95 - height / 2)
    end_N = np.zeros(len(rows))
    colours = dict(zip((*PHASES, OTHER), (*axes.theme.accents, axes.theme.muted), strict=True))
    for phase in phases:
        seconds_N = np.array([row.of(phase) for row in rows])
        axes.barh(
            centre_N,
            seconds_N,
            height,
            left=end_N,
            color=colours[phase],
            label=phase,
            edgecolor=axes.theme.page,
            linewidth=0.6,
        )
        end_N += seconds_N
    for centre, total in zip(centre_N, end_N, strict=True):
        axes.annotate(
            f"{numbers.number(total)} s",
            (total, centre),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=axes.style.small,
        )
    axes.set_xlim(0, axes.style.pick(1.16, 1.28) * (end_N.max() or 1.0))  # with room for the sums
    axes.set_ylim(len(rows), 0)
    axes.grid(visible=False, axis="y")


def _write_names(axes: Panel, names: list[str]) -> None:
    """Write names to the left of the bars, or above them."""
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    style = axes.style
    room, place, shift, align = style.pick(
        (_NAMES - 12, 0.5, -6, "right"), (style.width - 40, 0.3, 1, "left")
    )
    for index, name in enumerate(short_names(names, room, style.small)):
        axes.annotate(
            name,
            (0, index + place),
            xytext=(shift, 0),
            textcoords="offset points",
            ha=align,
            va="center",
            fontsize=style.small,
            annotation_clip=False,
        )
