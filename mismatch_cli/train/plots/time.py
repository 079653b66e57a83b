"""Where the time of a step goes, by algorithm."""

from typing import Any

import numpy as np

from mismatch_cli.base import numbers
from mismatch_cli.report.drawing.marks import names_beside
from mismatch_cli.report.drawing.panels import Panel, Sheet, legend_below_height
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

_ROW = 24  # pixels
_IN_DETAIL = 4  # algorithms whose phases are named in words


def needs(data: TrainingAnalysis) -> bool:
    return bool(_times(data))


def draw(figure: Sheet, data: TrainingAnalysis) -> None:
    time_of = _times(data)
    phases = phases_of(time_of.values())
    names, left = names_beside(list(time_of), figure.style)
    columns, high = figure.style.pick(len(phases), 3), _ROW * len(names)
    legend = legend_below_height(len(phases), columns)
    (axes,) = figure.panels(1, height=(high, high), left=left, legend=legend)
    axes.name_rows(names)
    _draw_bars(axes, list(time_of.values()), phases)
    axes.set_xlabel("seconds")
    axes.headline("Seconds per step", is_axis=False, ncols=columns, handlelength=1.0)


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


def _draw_bars(axes: Panel, rows: list[StepTime], phases: list[str]) -> None:
    """The phases of each row one after the other, and their sum at the end."""
    place_N, end_N = np.arange(len(rows)), np.zeros(len(rows))
    colours = dict(zip((*PHASES, OTHER), (*axes.theme.accents, axes.theme.muted), strict=True))
    for phase in phases:
        seconds_N = np.array([row.of(phase) for row in rows])
        look: dict[str, Any] = {"color": colours[phase], "edgecolor": axes.theme.page}
        axes.barh(place_N, seconds_N, 0.62, end_N, label=phase, linewidth=0.6, **look)
        end_N += seconds_N
    for place, seconds in enumerate(end_N.tolist()):
        words = f"{numbers.number(seconds)} s"
        axes.annotate_beside(words, (seconds, place), (4, 0), va="center")
    axes.set_xlim(0, axes.style.pick(1.16, 1.28) * (end_N.max() or 1.0))  # with room for the sums
