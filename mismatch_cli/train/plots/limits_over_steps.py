"""What the limits of a watched run are about, over the steps."""

from mismatch_cli.metrics.gap_table import METRICS
from mismatch_cli.metrics.update_table import OF_STEP, PAIRS_OF_STEP
from mismatch_cli.report.drawing.panels import Sheet
from mismatch_cli.studies.watch_state import limited_metrics
from mismatch_cli.train.plots._charts import Chart, draw_charts, has_curves
from mismatch_cli.train.studies.training import TrainingAnalysis

STUDY = "training"
SECTION = "Limits"
PLACE = 0  # before the training curves: a watch is about its limits
TITLE = "Limits over the steps"
DATA = "a watch with limits on metrics that a step records"
CAPTION = (
    "Each metric that has a limit, at every step; its limits are dashed where they are near the "
    "values. Bands are the steps of an alarm, from the first that does not hold a limit (cross) to "
    "the last."
)
_FIELDS = {key: field for field, key in OF_STEP.items()}  # of a step, by metric
_OF_PAIR = {"mismatch": "", "total": ", with staleness"}


def needs(data: TrainingAnalysis) -> bool:
    return data.watched is not None and has_curves(charts(data))


def draw(figure: Sheet, data: TrainingAnalysis) -> None:
    draw_charts(figure, charts(data), data.algorithms)


def charts(data: TrainingAnalysis) -> list[Chart]:
    """A chart for each metric and pair that has a limit and that steps have a number for."""
    assert data.watched is not None
    recorded = [pair for pair, key in PAIRS_OF_STEP.items() if data.has(key, "abs_dp_mean")]
    all_charts = []
    for limited in limited_metrics(data.watched, recorded):
        # A trace has more metrics than a step of training, and a watch may limit any of them.
        if limited.metric not in _FIELDS:
            continue
        title = METRICS[limited.metric].label + _OF_PAIR[limited.pair]
        curves = data.curves(PAIRS_OF_STEP[limited.pair], _FIELDS[limited.metric])
        chart = Chart(
            title, [curves], note=limited.text, limits=limited.bounds, alarms=limited.alarms
        )
        all_charts.append(chart)
    return all_charts
