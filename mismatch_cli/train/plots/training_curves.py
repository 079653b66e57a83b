"""Training curves, a panel per quantity (DPPO paper, figures 3, 4 and 7, and figures 13 to 18)."""

from mismatch_cli.report.drawing.marks import DASHES
from mismatch_cli.report.drawing.panels import Sheet
from mismatch_cli.train.plots._charts import BANDS, OF_PAPER, Chart, draw_charts, has_curves
from mismatch_cli.train.plots._training_charts import (
    accuracy,
    blocked,
    entropy,
    extremes,
    gap,
    length,
    reward,
    top_k_mass,
)
from mismatch_cli.train.studies.training import TrainingAnalysis

STUDY = "training"
SECTION = "Reward and mismatch"
PLACE = 1
TITLE = "Training curves"
DATA = "the metrics of steps, in at most three settings"
CAPTION = (
    "Mean reward of the batch, and accuracy at evaluations (◆, or a panel for each of several "
    "sets); at the weights that sampled, mean |π − μ| over tokens and the largest and smallest π "
    "− μ of the step; the share of tokens with A ≠ 0 that the algorithm blocks; length and "
    "entropy of the responses; the probability mass of the top K, if an algorithm uses them. "
    f"{BANDS} With several settings, dashes are settings. {OF_PAPER} DPPO paper, figures 3, 4 "
    "and 7, and figures 13 to 18."
)


def needs(data: TrainingAnalysis) -> bool:
    return len(data.settings) <= len(DASHES) and has_curves(_charts(data))


def draw(figure: Sheet, data: TrainingAnalysis) -> None:
    draw_charts(figure, _charts(data), data.algorithms)


def _charts(data: TrainingAnalysis) -> list[Chart]:
    """All charts; with several evaluation sets, the paper's six panels come first."""
    mismatch = gap(data), blocked(data), extremes(data)
    responses = length(data), entropy(data)
    if len(data.eval_sets) < 2:
        return [reward(data, evaluations=True), *mismatch, *responses, top_k_mass(data)]
    accuracies = [accuracy(data, name) for name in data.eval_sets]
    return [reward(data, evaluations=False), *accuracies, *responses, *mismatch, top_k_mass(data)]
