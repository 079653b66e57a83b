"""How much higher the reward of one algorithm is than that of another, over the steps."""

import numpy as np

from mismatch_cli.report.drawing.marks import LineStyle, estimate_array
from mismatch_cli.report.drawing.panels import Panel, Sheet, short_names
from mismatch_cli.train.plots._charts import Chart, draw_chart
from mismatch_cli.train.studies.learning_speed import Claim
from mismatch_cli.train.studies.training import SMOOTHED_FROM, Curve, TrainingAnalysis

STUDY = "training"
SECTION = "Which learns faster"
PLACE = 4
TITLE = "Difference of the rewards"
CAPTION = (
    "Mean reward of the first algorithm minus that of the second, at each step that all of their "
    "runs share, with its 95 % interval: paired by seed where at least two seeds are shared, else "
    "Welch’s; one seed has no interval. Above 0 the first is ahead. The mean of the curve is the "
    f"difference of the areas. Curves of more than {SMOOTHED_FROM} steps are smoothed by a "
    "Gaussian, with the raw curve faint behind them. Neighbouring steps share a policy: how often "
    "an interval excludes 0 says little, the area decides. At most nine comparisons are drawn."
)

DATA = "two algorithms whose runs share steps"

_MOST = 9  # panels; the table has all
_COLUMNS = 3
_LEAST = 0.05  # of a reward: a smaller range is noise


def needs(data: TrainingAnalysis) -> bool:
    return any(map(_has_steps, data.claims))


def draw(figure: Sheet, data: TrainingAnalysis) -> None:
    claims = list(filter(_has_steps, data.claims))[:_MOST]
    columns = min(_COLUMNS, len(claims))  # a single panel is as wide as the figure
    panels = figure.panels(len(claims), columns=columns, height=(230, 190))
    for axes, claim in zip(panels, claims, strict=True):
        _draw_claim(axes, claim)
    limit_P2 = np.array([axes.get_ylim() for axes in panels])
    for axes in panels:
        axes.set_ylim(limit_P2.min(), limit_P2.max())


def _has_steps(claim: Claim) -> bool:
    return bool(np.isfinite(_curve(claim).value_N).any())


def _curve(claim: Claim) -> Curve:
    step_N, estimates = claim.by_step
    return Curve(step_N, *estimate_array(estimates).T)


def _draw_claim(axes: Panel, claim: Claim) -> None:
    (short,) = short_names([claim.title], axes.title_letters)
    chart = Chart(short, [{short: _curve(claim)}], least=_LEAST, ideal=True)
    draw_chart(axes, chart, {short: LineStyle(axes.theme.blue)})
