"""Reward, and below it the bad updates of the same steps (DPPO paper, figure 5)."""

from mismatch_cli.report.plots._lines import AS_ABOVE, Chart, draw_charts, looks
from mismatch_cli.report.plots._panels import Sheet
from mismatch_cli.studies.training import TrainingAnalysis

STUDY = "training"
SECTION = "Bad updates and blocked tokens"
TITLE = "Bad updates and reward"
CAPTION = (
    "Mean reward, and below it the share of bad updates among the tokens with A < 0: those that push down a token "
    "whose probability has already fallen by 0.5 or more from the rollout’s, μ − π ≥ 0.5 at the weights of the "
    f"update. {AS_ABOVE} DPPO paper, figure 5."
)


def needs(data: TrainingAnalysis) -> bool:
    return data.has("bad_over_negative")


def draw(figure: Sheet, data: TrainingAnalysis) -> None:
    bad = data.curves("bad_over_negative")
    charts = [
        Chart("Mean reward", [data.curves("reward")]),
        Chart("Bad updates, % of tokens with A < 0", [bad], "Bad updates, % of A < 0", from_0=True, percent=True),
    ]
    look_of = looks(data.algorithms, figure.style)
    for axes in draw_charts(figure, charts, look_of, columns=1, height=(170, 170), between=28)[:-1]:
        axes.set_xlabel("")
