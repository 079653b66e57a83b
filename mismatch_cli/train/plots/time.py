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
    columns = figure.style.pick(len(phases), 3)
    high = _ROW * len(names)
    legend = legend_below_height(len(phases), columns)
    (axes,) = figure.panels(1, height=(high, high), left=left, legend=legend)
    axes.name_rows(names)
    _draw_bars(axes, list(time_of.values()), phases)
    axes.set_xlabel("seconds")
    axes.headline("Seconds per step", is_axis=False, ncols=columns, handlelength=1.0)


def _times(data: TrainingAnalysis) -> dict[str, StepTime]:
    """The mean time of a step, by algorithm that recorded it."""
    time_of = {}
    for name, runs in data.algorithms.items():
        time = mean_time(runs)
        if time.by_phase:
            time_of[name] = time
    return time_of


def alternative(data: TrainingAnalysis) -> str:
    """The seconds of each algorithm; of its phases if there are few algorithms."""
    bars = []
    for name, time in _times(data).items():
        bar = f"{name}: {numbers.number(time.seconds)} s"
        if len(data.algorithms) <= _IN_DETAIL:
            phases = [f"{key} {numbers.number(seconds)}" for key, seconds in time.by_phase.items()]
            bar += f" ({', '.join(phases)})"
        bars.append(bar)
    return f"Stacked bars, one for each algorithm. Horizontal: seconds per step. {'; '.join(bars)}."


def _draw_bars(axes: Panel, rows: list[StepTime], phases: list[str]) -> None:
    """The phases of each row one after the other, and their sum at the end."""
    place_N = np.arange(len(rows))
    end_N = np.zeros(len(rows))
    colours = dict(zip((*PHASES, OTHER), (*axes.theme.accents, axes.theme.muted), strict=True))
    for phase in phases:
        seconds_N = np.array([row.of(phase) for row in rows])
        look: dict[str, Any] = {"color": colours[phase], "edgecolor": axes.theme.page}
        axes.barh(place_N, seconds_N, 0.62, end_N, label=phase, linewidth=0.6, **look)
        end_N += seconds_N
    for place, seconds in enumerate(end_N.tolist()):
        axes.annotate_beside(f"{numbers.number(seconds)} s", (seconds, place), (4, 0), va="center")
    axes.set_xlim(0, axes.style.pick(1.16, 1.28) * (end_N.max() or 1.0))  # with room for the sums
