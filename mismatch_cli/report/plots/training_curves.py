"""How training went: reward, gap between the engines, blocked tokens, length and entropy (DPPO paper, figure 3)."""

import numpy as np

from mismatch_cli.report.plots._charts import BANDS, Chart, draw_charts
from mismatch_cli.report.plots._panels import Sheet
from mismatch_cli.studies.training import TrainingAnalysis

STUDY = "training"
SECTION = "Reward and mismatch"
PLACE = 1
TITLE = "Training curves"
CAPTION = (
    "Mean reward of the batch, and accuracy at the evaluations (◆); at the weights that sampled, mean |π − μ| over "
    "tokens and the largest and smallest π − μ of the step; the share of the tokens with A ≠ 0 that the algorithm "
    f"blocks; length and entropy of the responses. {BANDS} DPPO paper, figures 3, 4 and 7."
)
_LEAST = 0.05  # of a reward: what is less is noise
_DECADES = 30.0  # from the least to the highest entropy: beyond, its axis is logarithmic


def needs(data: TrainingAnalysis) -> bool:
    return any(any(chart.curves) for chart in _charts(data))


def draw(figure: Sheet, data: TrainingAnalysis) -> None:
    draw_charts(figure, _charts(data), data.algorithms)


def _charts(data: TrainingAnalysis) -> list[Chart]:
    accuracy = data.curves("eval_accuracy", gaps=False)
    blocked, entropy = data.curves("blocked"), data.curves("entropy")
    entropies = np.concatenate([curve.value_N[curve.value_N > 0] for curve in entropy.values()] or [np.ones(1)])
    return [
        Chart("Mean reward", [data.curves("reward")], accuracy, "◆ evaluation" if accuracy else "", least=_LEAST),
        Chart("Mean |π − μ|, equal weights", [data.curves("mismatch", "abs_dp_mean")], from_0=True),
        Chart("Blocked, % of A ≠ 0", [blocked] if data.occurs("blocked") else [], from_0=True, percent=True),
        Chart("Largest and smallest π − μ", [data.curves("mismatch", key) for key in ("dp_max", "dp_min")]),
        Chart("Response length, tokens", [data.curves("length")]),
        Chart("Mean entropy, nats", [entropy], log=_is_wide(entropies)),
    ]


def _is_wide(value_N: np.ndarray) -> bool:
    return bool(len(value_N) and value_N.max() > _DECADES * value_N.min())
