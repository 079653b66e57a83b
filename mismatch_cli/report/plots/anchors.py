"""An algorithm anchored at the rollout against its twin anchored at the recomputed policy (DPPO paper, figure 4)."""

from mismatch_cli.report.plots._lines import AS_ABOVE, DASHED, Chart, Look, draw_charts
from mismatch_cli.report.plots._panels import Sheet
from mismatch_cli.studies.training import TrainingAnalysis

STUDY = "training"
SECTION = "Reward and mismatch"
TITLE = "Anchored at the rollout, or recomputed"
CAPTION = (
    "Mean reward, and mean |π − μ| at the weights that sampled. Solid: the mask measures from the rollout’s μ. Dashed, "
    "in the same colour: the same mask measures from π′, the trainer recomputed at those weights. "
    f"{AS_ABOVE} DPPO paper, figure 4."
)


def needs(data: TrainingAnalysis) -> bool:
    return any(any(chart.curves) for chart in _charts(data))


def draw(figure: Sheet, data: TrainingAnalysis) -> None:
    colours, look_of = figure.theme.accents, {}
    for place, pair in enumerate(_pairs(data)):
        for name, dash in zip(pair, ("-", DASHED), strict=True):
            look_of[name] = Look(colours[place % len(colours)], dash)
    draw_charts(figure, _charts(data), look_of)


def _pairs(data: TrainingAnalysis) -> list[tuple[str, str]]:
    """Both algorithms of each pair; parameters follow the name after a colon."""
    parts = {name: name.partition(":") for name in data.algorithms}
    pairs = [(name, f"{head}-recompute{colon}{rest}") for name, (head, colon, rest) in parts.items()]
    return [pair for pair in pairs if set(pair) <= set(data.algorithms)]


def _charts(data: TrainingAnalysis) -> list[Chart]:
    names = {name for pair in _pairs(data) for name in pair}
    reward, gap = (
        {name: curve for name, curve in data.curves(*keys).items() if name in names}
        for keys in (("reward",), ("mismatch", "abs_dp_mean"))
    )
    return [Chart("Mean reward", [reward]), Chart("Mean |π − μ| at equal weights", [gap], from_0=True)]
