"""Blocked tokens by sign, and their probability and entropy (DPPO paper, figure 6)."""

from mismatch_cli.report.drawing.panels import Sheet
from mismatch_cli.train.plots._charts import AS_ABOVE, Chart, draw_charts, has_curves
from mismatch_cli.train.plots._training_charts import blocked
from mismatch_cli.train.studies.training import TrainingAnalysis

STUDY = "training"
SECTION = "Bad updates and blocked tokens"
TITLE = "Blocked tokens over training"
DATA = "blocked tokens at one step at least"
CAPTION = (
    "The share of blocked tokens by the sign of the advantage; the mean rollout probability μ "
    "and the mean entropy of π over blocked tokens, with gaps where nothing is blocked. "
    f"{AS_ABOVE} DPPO paper, figure 6."
)


def needs(data: TrainingAnalysis) -> bool:
    return has_curves(_charts(data))


def draw(figure: Sheet, data: TrainingAnalysis) -> None:
    draw_charts(figure, _charts(data), data.algorithms)


def _charts(data: TrainingAnalysis) -> list[Chart]:
    return [
        blocked(data, "Blocked, % of A > 0", "blocked_positive"),
        blocked(data, "Blocked, % of A < 0", "blocked_negative"),
        Chart("Mean μ of blocked tokens", [data.curves("mu_blocked")], from_0=True),
        Chart("Entropy of blocked tokens, nats", [data.curves("entropy_blocked")], from_0=True),
    ]
