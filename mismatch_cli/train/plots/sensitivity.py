"""Final results by threshold, and the curves of each (DPPO paper, figure 19)."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mismatch_cli.report.drawing.marks import (
    DASHED,
    LineStyle,
    draw_bars,
    estimate_array,
    margin_of,
)
from mismatch_cli.report.drawing.panels import Panel, Sheet
from mismatch_cli.report.drawing.style import Style
from mismatch_cli.train.plots._charts import Chart, draw_chart, draw_legend, room_for_legend
from mismatch_cli.train.studies.sensitivity import Family, families
from mismatch_cli.train.studies.training import TrainingAnalysis

STUDY = "training"
SECTION = "Reward and mismatch"
PLACE = 3
TITLE = "Sensitivity to the threshold"
DATA = "one algorithm trained with several values of one threshold"
CAPTION = (
    "Runs of one algorithm with several thresholds: final reward and final accuracy by "
    "threshold, with 95 % intervals over seeds (Student’s t) if there are several; horizontal "
    "lines are other algorithms. Then the reward over the steps, in stronger colours for larger "
    "thresholds. A level line means that the threshold does not matter. DPPO paper, figure 19."
)

_FAINTEST = 0.35  # opacity of the curve of the smallest threshold
_LEAST = 0.05  # of a reward: the smallest range of the axis
_MARGIN = 0.08  # of the drawn range, around it
_DECADES = 20  # times between thresholds: beyond, their axis is logarithmic
_MOST_TICKS = 6
_FAMILIES = 3  # accent colours for families; the rest are for other algorithms


def needs(data: TrainingAnalysis) -> bool:
    return bool(families(data))


def draw(figure: Sheet, data: TrainingAnalysis) -> None:
    swept = families(data)
    look_of = _looks(swept, figure.style)
    # A row of panels per family: one for each measured result, then one for the curves.
    counts = [len(family.measured) + 1 for family in swept]
    columns = max(counts)
    cells: list[int] = []
    for row, count in enumerate(counts):
        cells += range(columns * row, columns * row + count)
    below = room_for_legend(figure, look_of)
    panels = figure.panels(len(cells), columns=columns, height=(220, 180), below=below, cells=cells)
    remaining = iter(panels)
    for family in swept:
        for key in family.measured:
            _draw_ends(next(remaining), family, key, look_of)
        curves = {ending.name: ending.curve for ending in family.endings}
        chart = Chart(f"Mean reward by {family.threshold}", [curves], least=_LEAST)
        draw_chart(next(remaining), chart, look_of)
    draw_legend(figure, look_of)


def _looks(swept: Sequence[Family], style: Style) -> dict[str, LineStyle]:
    """A colour per algorithm, fainter for smaller thresholds; other algorithms are dashed."""
    accents = style.theme.accents
    algorithms = list(dict.fromkeys(family.algorithm for family in swept))
    looks = {}
    for family in swept:
        colour = accents[algorithms.index(family.algorithm) % _FAMILIES]
        opacities = np.linspace(_FAINTEST, 1, len(family.endings)).tolist()
        for ending, opacity in zip(family.endings, opacities, strict=True):
            looks[ending.name] = LineStyle(colour, "-", opacity)
    others = dict.fromkeys(ending.name for family in swept for ending in family.others)
    # Other algorithms without a colour are not drawn: the tables have the rest.
    for name, colour in zip(others, (*accents[_FAMILIES:], style.theme.ink), strict=False):
        looks[name] = LineStyle(colour, DASHED)
    return looks


def _draw_ends(axes: Panel, family: Family, key: str, look_of: Mapping[str, LineStyle]) -> None:
    """A result by threshold, and that of other algorithms as levels."""
    ends = [getattr(ending, key) for ending in family.endings]
    colour = look_of[family.endings[-1].name].colour
    drawn = [draw_bars(axes, family.values, ends, colour, markersize=5, label=family.name)]
    for ending in family.others:
        estimate = getattr(ending, key)
        look = look_of.get(ending.name)
        if look is None or estimate.value is None:
            continue
        axes.axhline(estimate.value, **look.of_line)
        if estimate.low is not None:
            band: dict[str, Any] = {"color": look.colour, "alpha": 0.08, "linewidth": 0}
            axes.axhspan(estimate.low, estimate.high, **band)
        drawn.append(estimate_array([estimate]))
    _scale(axes, family.values, np.concatenate(drawn))
    axes.set_xlabel(f"{family.threshold} of {family.name}")
    axes.headline(f"Final {key} by {family.threshold}")


def _scale(axes: Panel, values: Sequence[float], estimate_N3: np.ndarray) -> None:
    """Show every interval, and a tick at each threshold."""
    low, high = float(np.nanmin(estimate_N3)), float(np.nanmax(estimate_N3))
    margin = margin_of(low, high, _MARGIN, _LEAST)
    axes.set_ylim(low - margin, high + margin)
    first, last = values[0], values[-1]
    if first > 0 and last > _DECADES * first:
        factor = (last / first) ** _MARGIN
        axes.set_xlim(first / factor, last * factor)
        axes.logarithmic("x")
    else:
        margin = _MARGIN * (last - first)
        axes.set_xlim(first - margin, last + margin)
    if len(values) <= _MOST_TICKS:
        axes.set_xticks(values, [f"{value:g}" for value in values])
