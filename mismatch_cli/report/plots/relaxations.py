"""Ratio clipping relaxed for improbable tokens, on either side or both (DPPO paper, figure 7)."""

from mismatch_cli.report.plots._lines import AS_ABOVE, Chart, draw_charts, looks
from mismatch_cli.report.plots._panels import Sheet
from mismatch_cli.studies.training import Curve, TrainingAnalysis

STUDY = "training"
SECTION = "Reward and mismatch"
TITLE = "Relaxed ratio clipping"
CAPTION = (
    "Mean reward, and mean entropy of π over all tokens on a logarithmic axis, for ratio clipping and for its "
    f"relaxations towards improbable tokens: upwards, downwards, both. {AS_ABOVE} DPPO paper, figure 7."
)

_SHOWN = ("grpo-clip-higher", "relax-high", "relax-low", "relax-both")


def needs(data: TrainingAnalysis) -> bool:
    return len(_relaxed(data, "reward")) >= 2


def draw(figure: Sheet, data: TrainingAnalysis) -> None:
    entropy = {name: curve for name, curve in _relaxed(data, "entropy").items() if (curve.value_N > 0).any()}
    charts = [Chart("Mean reward", [_relaxed(data, "reward")]), Chart("Mean entropy, nats", [entropy], log=True)]
    draw_charts(figure, charts, looks(data.algorithms, figure.style))


def _relaxed(data: TrainingAnalysis, key: str) -> dict[str, Curve]:
    """Parameters follow the name after a colon."""
    return {name: curve for name, curve in data.curves(key).items() if name.partition(":")[0] in _SHOWN}
