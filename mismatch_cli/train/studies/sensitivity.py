"""How the end of training depends on a threshold: runs of one algorithm that differ in it, and
all others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from math import isfinite
from typing import NamedTuple

from mismatch_cli.base.errors import MismatchError
from mismatch_cli.base.registry import names_file
from mismatch_cli.metrics.estimate import Estimate
from mismatch_cli.rules import trust_regions
from mismatch_cli.rules.algorithms.algorithm import Algorithm
from mismatch_cli.rules.algorithms.parse import parse_algorithm
from mismatch_cli.train.studies.run_settings import SEPARATOR
from mismatch_cli.train.studies.seeds import over_seeds
from mismatch_cli.train.studies.training import Curve, TrainingAnalysis, curve_of

_Thresholds = Mapping[tuple[int, str], float]  # by the number of the rule, and its parameter


class Ending(NamedTuple):
    """The final values of an algorithm's seeds, and the curve that leads there."""

    name: str
    reward: Estimate
    accuracy: Estimate
    curve: Curve  # of the reward


class Family(NamedTuple):
    """One algorithm with several values of one threshold, smallest first, and the others in its
    setting.
    """

    algorithm: str
    setting: str
    threshold: str  # its letter, else its name
    values: tuple[float, ...]
    endings: tuple[Ending, ...]  # of each value
    others: tuple[Ending, ...]  # algorithms in the same setting with a reward and no family

    @property
    def name(self) -> str:
        """The algorithm, with the setting if there are several."""
        return SEPARATOR.join(filter(None, (self.algorithm, self.setting)))

    @property
    def measured(self) -> list[str]:
        """The numbers of an ending: the reward, and the accuracy if there was an evaluation."""
        evaluated = any(ending.accuracy.value is not None for ending in self.endings)
        return ["reward", "accuracy"] if evaluated else ["reward"]


def families(study: TrainingAnalysis) -> list[Family]:
    """Every algorithm trained with several values of one threshold, in each setting."""
    found = []
    for setting, part in study.settings.items():
        sweeps = list(_sweeps(list(part.algorithms)))
        swept = {name for _, _, names in sweeps for name in names.values()}
        others = tuple(_ending(part, name) for name in part.final_rewards if name not in swept)
        for head, threshold, names in sweeps:
            endings = tuple(_ending(part, name) for name in names.values())
            if sum(ending.reward.value is not None for ending in endings) > 1:
                found.append(Family(head, setting, threshold, tuple(names), endings, others))
    return found


def _ending(study: TrainingAnalysis, name: str) -> Ending:
    runs, curve = study.compared[name], curve_of(study.algorithms[name], "reward")
    rewards, accuracies = (run.last("reward") for run in runs), (run.final_accuracy for run in runs)
    return Ending(name, over_seeds(rewards), over_seeds(accuracies), curve)


def _sweeps(names: Sequence[str]) -> Iterator[tuple[str, str, dict[float, str]]]:
    """Name, threshold, and algorithms by its value, from names such as
    `dppo-binary-tv:max_tv=0.1`.
    """
    by_head: dict[str, dict[str, Algorithm]] = {}
    for name in names:
        if (algorithm := algorithm_of(name)) is not None:
            by_head.setdefault(name.partition(":")[0], {})[name] = algorithm
    for head, algorithms in by_head.items():
        thresholds_of = {name: _thresholds(algorithm) for name, algorithm in algorithms.items()}
        moved = [
            key
            for key in next(iter(thresholds_of.values()))
            if len({t[key] for t in thresholds_of.values()}) > 1
        ]
        values = {
            name: {thresholds[key] for key in moved} for name, thresholds in thresholds_of.items()
        }
        by_value = {
            value: name for name, found in values.items() if len(found) == 1 for value in found
        }
        if len(by_value) == len(algorithms) > 1 and all(map(isfinite, by_value)):
            yield (
                head,
                _letter(next(iter(algorithms.values())), moved),
                dict(sorted(by_value.items())),
            )


@cache
def algorithm_of(name: str) -> Algorithm | None:
    """An algorithm by name; None for a user's file, whose runs are drawn like any others: a
    report runs no code.
    """
    if names_file(name):
        return None
    try:
        return parse_algorithm(name)
    except MismatchError:
        return None


def _thresholds(algorithm: Algorithm) -> _Thresholds:
    return {
        (place, name): value
        for place, rule in enumerate(algorithm.rules)
        for name, value in rule.parameters.items()
        if isinstance(value, int | float)
    }


def _letter(algorithm: Algorithm, moved: Sequence[tuple[int, str]]) -> str:
    """`C`, `δ_high`, or `δ` if both sides moved; a threshold without a letter goes by its name."""
    place, name = moved[0]
    letter = trust_regions.symbols(list(algorithm.rules)[place].module).get(name, name)
    return letter.partition("_")[0] if len(moved) > 1 else letter
