"""What the limits of a watched run are about, over the steps."""

from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any

from mismatch_cli.limits.judge import Range, pair_for
from mismatch_cli.limits.limit_sets import Limit
from mismatch_cli.metrics.gap_table import METRICS
from mismatch_cli.metrics.update_table import OF_STEP
from mismatch_cli.report.drawing.panels import Sheet
from mismatch_cli.train.plots._charts import Chart, draw_charts
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
_RECORDED = {"mismatch": "mismatch", "total": "current"}  # pairs, by their keys in metrics.jsonl
_OF_PAIR = {"mismatch": "", "total": ", with staleness"}


def needs(data: TrainingAnalysis) -> bool:
    return data.watched is not None and any(any(chart.curves) for chart in _charts(data))


def draw(figure: Sheet, data: TrainingAnalysis) -> None:
    draw_charts(figure, _charts(data), data.algorithms)


def _charts(data: TrainingAnalysis) -> list[Chart]:
    """A chart for each metric and pair that has a limit and that steps have a number for."""
    assert data.watched is not None
    recorded = [pair for pair, key in _RECORDED.items() if data.has(key, "abs_dp_mean")]
    rows: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for limit in data.watched.limits:
        pair = pair_for(limit["pair"], recorded)
        if limit["metric"] in _FIELDS and pair:
            rows.setdefault((limit["metric"], pair), []).append(limit)
    return [_chart(data, metric, pair, limits) for (metric, pair), limits in rows.items()]


def _chart(
    data: TrainingAnalysis, metric: str, pair: str, limits: Sequence[Mapping[str, Any]]
) -> Chart:
    assert data.watched is not None
    alarms = [
        (alarm["step"], alarm["last"])
        for alarm in data.watched.alarms
        if (alarm["metric"], alarm["pair"]) == (metric, pair)
    ]
    ranges = [Range.of({limit["bound"]: limit["threshold"]}) for limit in limits]
    bounds = [bound for allowed in ranges for bound in (allowed.low, allowed.high)]
    texts = (Limit(metric, limit["bound"], limit["threshold"]).text for limit in limits)
    return Chart(
        METRICS[metric].label + _OF_PAIR[pair],
        [data.curves(_RECORDED[pair], _FIELDS[metric])],
        note=", ".join(dict.fromkeys(texts)),
        limits=[bound for bound in dict.fromkeys(bounds) if isfinite(bound)],
        alarms=alarms,
    )
