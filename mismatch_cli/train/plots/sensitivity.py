"""Final results by threshold, and the curves of each (DPPO paper, figure 19)."""

from collections.abc import Mapping, Sequence

import numpy as np

from mismatch_cli.report.drawing.lines import DASHED, Look, draw_bars, parts_of
from mismatch_cli.report.drawing.panels import Panel, Sheet
from mismatch_cli.report.drawing.scales import margin_of
from mismatch_cli.report.drawing.style import Style
from mismatch_cli.train.plots._charts import Chart, draw_chart, draw_legend, room_for_legend
from mismatch_cli.train.studies.run_settings import SEPARATOR
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
    found = families(data)
    look_of, numbers = _looks(found, figure.style), [_measured(family) for family in found]
    columns = 1 + max(map(len, numbers))
    cells = [
        columns * row + place for row, keys in enumerate(numbers) for place in range(1 + len(keys))
    ]
    below = room_for_legend(figure, look_of)
    panels = iter(
        figure.panels(len(cells), columns=columns, height=(220, 180), below=below, cells=cells)
    )
    for family, keys in zip(found, numbers, strict=True):
        for key in keys:
            _draw_ends(next(panels), family, key, look_of)
        curves = {ending.name: ending.curve for ending in family.endings}
        draw_chart(
            next(panels),
            Chart(f"Mean reward by {family.threshold}", [curves], least=_LEAST),
            look_of,
        )
    draw_legend(figure, look_of)


def _measured(family: Family) -> list[str]:
    """The final numbers: the reward, and the accuracy if there was an evaluation."""
    return [
        key
        for key in ("reward", "accuracy")
        if any(getattr(end, key).value is not None for end in family.endings)
    ]


def _looks(found: Sequence[Family], style: Style) -> dict[str, Look]:
    """A colour per algorithm, fainter for smaller thresholds; other algorithms are dashed."""
    accents = style.theme.accents
    heads = list(dict.fromkeys(family.name.partition(SEPARATOR)[0] for family in found))
    looks = {}
    for family in found:
        colour = accents[heads.index(family.name.partition(SEPARATOR)[0]) % _FAMILIES]
        for place, ending in enumerate(family.endings):
            share = place / (len(family.endings) - 1)
            looks[ending.name] = Look(colour, "-", _FAINTEST + (1 - _FAINTEST) * share)
    others = dict.fromkeys(
        ending.name
        for family in found
        for ending in family.others
        if ending.reward.value is not None
    )
    # The tables have the rest
    shown = zip(others, (*accents[_FAMILIES:], style.theme.ink), strict=False)
    return looks | {name: Look(colour, DASHED) for name, colour in shown}


def _draw_ends(axes: Panel, family: Family, key: str, look_of: Mapping[str, Look]) -> None:
    colour = look_of[family.endings[-1].name].colour
    part_B3 = draw_bars(
        axes,
        family.values,
        [getattr(end, key) for end in family.endings],
        colour,
        markersize=5,
        label=family.name,
    )
    drawn = [part_B3]
    for ending in family.others:
        estimate = getattr(ending, key)
        if ending.name in look_of and estimate.value is not None:
            axes.axhline(estimate.value, **look_of[ending.name].of_line)
            if estimate.low is not None:
                axes.axhspan(
                    estimate.low,
                    estimate.high,
                    color=look_of[ending.name].colour,
                    alpha=0.08,
                    linewidth=0,
                )
            drawn.append(parts_of([estimate]))
    _scale(axes, family.values, np.concatenate(drawn))
    axes.set_xlabel(f"{family.threshold} of {family.name}")
    axes.headline(f"Final {key} by {family.threshold}")


def _scale(axes: Panel, values: Sequence[float], part_N3: np.ndarray) -> None:
    """Show every interval, and a tick at each threshold."""
    low, high = float(np.nanmin(part_N3)), float(np.nanmax(part_N3))
    margin = margin_of(low, high, _MARGIN, _LEAST)
    axes.set_ylim(low - margin, high + margin)
    wide = values[0] > 0 and values[-1] > _DECADES * values[0]
    span = (values[-1] / values[0]) ** _MARGIN if wide else _MARGIN * (values[-1] - values[0])
    axes.set_xlim(
        *((values[0] / span, values[-1] * span) if wide else (values[0] - span, values[-1] + span))
    )
    if wide:
        axes.logarithmic("x")
    if len(values) <= _MOST_TICKS:
        axes.set_xticks(values, [f"{value:g}" for value in values])
