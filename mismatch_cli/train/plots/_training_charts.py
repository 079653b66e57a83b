"""The quantities of training runs as charts: for all runs together, and for each setting."""

import numpy as np

from mismatch_cli.train.plots._charts import Chart
from mismatch_cli.train.studies.paper_runs import (
    accuracy_of_paper,
    mismatch_of_paper,
    reward_of_paper,
)
from mismatch_cli.train.studies.training import TrainingAnalysis

_LEAST = 0.05  # of a reward: a smaller range is noise
_LEAST_MASS = 5e-3  # of a probability
_DECADES = 30.0  # times between the lowest and highest entropy: beyond, its axis is logarithmic


def reward(data: TrainingAnalysis, *, evaluations: bool) -> Chart:
    """The reward; evaluations are marks, unless their sets have charts of their own."""
    accuracies = data.curves("eval_accuracy", gaps=False) if evaluations else {}
    note = ""
    of_paper = reward_of_paper(data.runs)
    if accuracies:
        note = f"◆ {data.eval_name or 'evaluation'}"
        of_paper += accuracy_of_paper(data.runs, data.eval_name)
    rewards = [data.curves("reward")]
    return Chart("Mean reward", rewards, accuracies, note, least=_LEAST, of_paper=of_paper)


def accuracy(data: TrainingAnalysis, name: str) -> Chart:
    """The accuracy on one of several evaluation sets."""
    curves = data.curves("eval", name, gaps=False)
    of_paper = accuracy_of_paper(data.runs, name)
    return Chart(f"Accuracy, {name}", [curves], least=_LEAST, of_paper=of_paper)


def gap(data: TrainingAnalysis) -> Chart:
    curves = data.curves("mismatch", "abs_dp_mean")
    of_paper = mismatch_of_paper(data.runs)
    return Chart("Mean |π − μ|", [curves], note="0: no mismatch", ideal=True, of_paper=of_paper)


def extremes(data: TrainingAnalysis) -> Chart:
    curves = [data.curves("mismatch", key) for key in ("dp_max", "dp_min")]
    return Chart("Largest and smallest π − μ", curves, quantities=("largest", "smallest"))


def blocked(
    data: TrainingAnalysis, title: str = "Blocked, % of A ≠ 0", key: str = "blocked"
) -> Chart:
    """A share of blocked tokens; without curves where no step has blocked any."""
    curves = [data.curves(key)] if data.occurs(key) else []
    return Chart(title, curves, from_0=True, percent=True)


def length(data: TrainingAnalysis) -> Chart:
    return Chart("Response length, tokens", [data.curves("length")])


def entropy(data: TrainingAnalysis) -> Chart:
    curves = data.curves("entropy")
    value_N = np.concatenate([np.empty(0)] + [curve.value_N for curve in curves.values()])
    return Chart("Mean entropy, nats", [curves], log=_is_wide(value_N[value_N > 0]))


def top_k_mass(data: TrainingAnalysis) -> Chart:
    """The mass of the top K, if an algorithm uses them."""
    return Chart(
        "Mass of the top K by μ, %",
        [data.curves("current", "topk_mass_rollout")],
        percent=True,
        least=_LEAST_MASS,
    )


def _is_wide(value_N: np.ndarray) -> bool:
    return bool(len(value_N) and value_N.max() > _DECADES * value_N.min())
