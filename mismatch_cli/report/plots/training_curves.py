"""How training went: reward, evaluation accuracy and the gap between the engines (DPPO paper, figure 3)."""

from mismatch_cli.report.plots._lines import BANDS, Chart, draw_charts, looks
from mismatch_cli.report.plots._panels import Sheet
from mismatch_cli.studies.training import TrainingAnalysis

STUDY = "training"
SECTION = "Reward and mismatch"
PLACE = 1
TITLE = "Training curves"
CAPTION = (
    "Mean reward of the batch; accuracy at the evaluations, where there were any; and, at the weights that sampled, "
    f"mean |π − μ| over tokens and the largest and smallest π − μ of the step. {BANDS} DPPO paper, figure 3."
)


def needs(data: TrainingAnalysis) -> bool:
    return any(any(chart.curves) for chart in _charts(data))


def draw(figure: Sheet, data: TrainingAnalysis) -> None:
    draw_charts(figure, _charts(data), looks(data.algorithms, figure.style))


def _charts(data: TrainingAnalysis) -> list[Chart]:
    extremes = [data.curves("mismatch", key) for key in ("dp_max", "dp_min")]
    return [
        Chart("Mean reward", [data.curves("reward")]),
        Chart("Evaluation accuracy", [data.curves("eval_accuracy", gaps=False)]),
        Chart("Mean |π − μ| at equal weights", [data.curves("mismatch", "abs_dp_mean")], from_0=True),
        Chart("Max and min of π − μ at equal weights", extremes, "Max and min of π − μ", within=(-1, 1)),
    ]
