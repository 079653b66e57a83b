"""Clipping relaxed where μ < α, a line per α (DPPO paper, figure 6)."""

from collections.abc import Mapping, Sequence

from mismatch_cli.report.drawing.panels import Sheet
from mismatch_cli.train.plots._charts import AS_ABOVE, Chart, draw_charts, has_curves
from mismatch_cli.train.studies.relaxations import relaxations
from mismatch_cli.train.studies.runs import TrainingRun
from mismatch_cli.train.studies.training import Curve, TrainingAnalysis, curve_of

STUDY = "training"
SECTION = "Bad updates and blocked tokens"
TITLE = "Relaxed clipping by α"
DATA = (
    "runs of relaxed clipping (relax-both:alpha=0.1, …) that differ in α; grpo-clip-higher is α = 0"
)
CAPTION = (
    "Ratio clipping that leaves out tokens with μ < α, a line per α: mean reward, mean rollout "
    "probability μ and mean entropy of π over the tokens that are still clipped, with gaps where "
    f"none are. α = 0 is grpo-clip-higher, the clip itself. {AS_ABOVE} DPPO paper, figure 6."
)

_LEAST = 0.05  # of a reward: the smallest range of the axis


def needs(data: TrainingAnalysis) -> bool:
    return has_curves(_charts(relaxations(data)))


def draw(figure: Sheet, data: TrainingAnalysis) -> None:
    runs_of = relaxations(data)
    draw_charts(figure, _charts(runs_of), runs_of)


def _charts(runs_of: Mapping[str, Sequence[TrainingRun]]) -> list[Chart]:
    return [
        Chart("Mean reward", [_curves(runs_of, "reward")], least=_LEAST),
        Chart("Mean μ of clipped tokens", [_curves(runs_of, "mu_blocked")], from_0=True),
        Chart(
            "Entropy of clipped tokens, nats", [_curves(runs_of, "entropy_blocked")], from_0=True
        ),
    ]


def _curves(runs_of: Mapping[str, Sequence[TrainingRun]], key: str) -> dict[str, Curve]:
    curves = {}
    for name, runs in runs_of.items():
        curve = curve_of(runs, key)
        if curve.has_values:
            curves[name] = curve
    return curves
