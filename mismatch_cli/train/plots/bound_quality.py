"""How much of the full total variation its lower bounds see while a run trains."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice

from mismatch_cli.base.numbers import counted
from mismatch_cli.report.drawing.marks import DASHED, DASHES, LineStyle
from mismatch_cli.report.drawing.panels import Panel, Sheet
from mismatch_cli.report.drawing.style import Theme
from mismatch_cli.train.plots._charts import (
    AS_ABOVE,
    draw_curve,
    draw_legend,
    equal_panels,
    share_steps,
)
from mismatch_cli.train.studies.bound_tightness import BOUNDS, bound_qualities, tokens_per_step
from mismatch_cli.train.studies.training import Curve, TrainingAnalysis

STUDY = "training"
SECTION = "Bad updates and blocked tokens"
TITLE = "Quality of the bounds on total variation"
DATA = "the full TV of some tokens of each step (`bounds` in metrics.jsonl)"
CAPTION = (
    "For each algorithm: the mean binary and top-K TV at the weights of the update, in percent of "
    "the mean full TV over the same tokens of the step, those that were also scored over the whole "
    "vocabulary. Both are lower bounds: at 100 % (dotted) they miss nothing, and a mask on a bound "
    "at 50 % sees half of what the policy moved. At most nine algorithms are drawn. "
    f"{AS_ABOVE} DPPO paper, appendix B.1."
)

_MOST = 9
_TOP = 1.06  # of the axis: bounds never exceed 1


def needs(data: TrainingAnalysis) -> bool:
    return bool(bound_qualities(data))


def draw(figure: Sheet, data: TrainingAnalysis) -> None:
    curves_of = dict(islice(bound_qualities(data).items(), _MOST))
    look_of = _looks(figure.theme)
    panels = equal_panels(figure, len(curves_of), look_of, height=(210, 170))
    for axes, (name, curves) in zip(panels, curves_of.items(), strict=True):
        _draw_bounds(axes, curves, look_of)
        axes.headline_name(name, counted(tokens_per_step(data.algorithms[name]), "tokens a step"))
        if axes.style.labelled:
            axes.set_ylabel("bound, % of the full TV")
    share_steps(panels)
    draw_legend(figure, look_of)


def _looks(theme: Theme) -> dict[str, LineStyle]:
    binary, top_k = BOUNDS
    return {binary: LineStyle(theme.blue), top_k: LineStyle(theme.orange, DASHED)}


def _draw_bounds(
    axes: Panel, curves: Mapping[str, Curve], look_of: Mapping[str, LineStyle]
) -> None:
    axes.axhline(1, color=axes.theme.muted, linewidth=1.2, linestyle=DASHES[2], zorder=1)
    for bound, curve in curves.items():
        draw_curve(axes, curve, look_of[bound], name=bound)
    axes.set_ylim(0, _TOP)
    axes.in_percent()
    axes.whole_steps(axes.style.pick(6, 5))
