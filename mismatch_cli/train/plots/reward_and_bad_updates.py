"""Reward and bad updates in one panel per algorithm (DPPO paper, figure 5)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from mismatch_cli.report.drawing.marks import DASHES, LineStyle, margin_of
from mismatch_cli.report.drawing.panels import Panel, Sheet
from mismatch_cli.train.plots._charts import (
    AS_ABOVE,
    OF_PAPER,
    draw_curve,
    draw_legend,
    draw_paper_values,
    equal_panels,
    looks_of,
    share_steps,
)
from mismatch_cli.train.studies.bad_update_courses import BadUpdateCourse, bad_update_courses
from mismatch_cli.train.studies.training import TrainingAnalysis

STUDY = "training"
SECTION = "Bad updates and blocked tokens"
PLACE = 4
TITLE = "Reward and bad updates"
DATA = "the reward and bad updates of each step, and a bad update at one step at least"
CAPTION = (
    "For each algorithm the mean reward (solid, left axis) and the share of bad updates (right "
    "axis), which push down a token that already lost 0.5 or more: A < 0 and μ − π ≥ 0.5 at the "
    "weights of the update. The paper does not state its denominator: dashed, of the tokens with "
    "A < 0; dotted, of all tokens with A ≠ 0. All panels have the same axes; at most nine "
    f"algorithms are drawn. {AS_ABOVE} {OF_PAPER} DPPO paper, figure 5."
)

_MOST = 9
_RIGHT = 60  # pixels for the labels of the right axis, such as `1.5e−8`
_HEADROOM = 1.5  # times the largest share: bad updates stay below the end of the reward
_MARGIN = 0.05  # of the range of rewards
_LEAST = 0.05  # of a reward: the smallest range of the axis
_DASH_OF = {
    "mean reward (left)": DASHES[0],
    "bad updates, % of A < 0 (right)": DASHES[1],
    "bad updates, % of all tokens (right)": DASHES[2],
}


def needs(data: TrainingAnalysis) -> bool:
    return bool(bad_update_courses(data))


def draw(figure: Sheet, data: TrainingAnalysis) -> None:
    courses = dict(islice(bad_update_courses(data).items(), _MOST))
    look_of = looks_of(data.algorithms, figure.style)
    left = equal_panels(figure, len(courses), _DASH_OF, height=(230, 190), right=_RIGHT)
    right = [figure.second_axis(axes) for axes in left]
    for axes, second, (name, course) in zip(left, right, courses.items(), strict=True):
        _draw_course(axes, second, course, look_of[name].colour)
        axes.headline_name(name)
        if figure.style.labelled:
            axes.set_ylabel("mean reward")
            second.set_ylabel("bad updates, %")
    _scale(left, right)
    draw_legend(
        figure, {name: LineStyle(figure.theme.ink, dash) for name, dash in _DASH_OF.items()}
    )


def _draw_course(axes: Panel, second: Panel, course: BadUpdateCourse, colour: str) -> None:
    draw_paper_values(axes, course.of_paper)
    reward, of_negative, of_all = _DASH_OF
    draw_curve(axes, course.reward, LineStyle(colour, _DASH_OF[reward]), name=reward)
    for name, curve in ((of_negative, course.of_negative), (of_all, course.of_all)):
        draw_curve(second, curve, LineStyle(colour, _DASH_OF[name]), faint=True, name=name)


def _scale(left: Sequence[Panel], right: Sequence[Panel]) -> None:
    """Give all panels the same axes; shares begin at 0."""
    share_steps(left)
    low = min(float(axes.dataLim.y0) for axes in left)
    high = max(float(axes.dataLim.y1) for axes in left)
    margin = margin_of(low, high, _MARGIN, _LEAST)
    most = max(float(axes.dataLim.y1) for axes in right)
    for axes, second in zip(left, right, strict=True):
        axes.set_ylim(low - margin, high + margin)
        second.set_xlim(axes.get_xlim())
        second.set_ylim(0, _HEADROOM * most)
        second.in_percent()
        axes.whole_steps(axes.style.pick(6, 5))
