"""How the end of training depends on a threshold: runs of one algorithm that differ in it, and
all others.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache, partial
from math import isfinite
from typing import Any, NamedTuple

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
_Choices = tuple[tuple[Any, ...], ...]  # of each rule


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
    every_family = []
    for setting, analysis in study.settings.items():
        sweeps = _sweeps(analysis.algorithms)
        swept: set[str] = set()
        for sweep in sweeps:
            swept.update(sweep.names)
        ending = partial(_ending, analysis)
        unswept = [name for name in analysis.final_rewards if name not in swept]
        others = tuple(map(ending, unswept))
        for sweep in sweeps:
            # A curve over a threshold needs two points.
            if len(analysis.final_rewards.keys() & set(sweep.names)) > 1:
                endings = tuple(map(ending, sweep.names))
                family = Family(sweep.head, setting, sweep.threshold, sweep.values, endings, others)
                every_family.append(family)
    return every_family


def _ending(study: TrainingAnalysis, name: str) -> Ending:
    runs = study.compared[name]
    return Ending(
        name,
        reward=over_seeds(run.last("reward") for run in runs),
        accuracy=over_seeds(run.final_accuracy for run in runs),
        curve=curve_of(study.algorithms[name], "reward"),
    )


class _ThresholdSweep(NamedTuple):
    """One algorithm with several values of one threshold, smallest first."""

    head: str  # its name, as in `dppo-binary-tv:max_tv=0.1` before the colon
    threshold: str  # its letter, else its name
    values: tuple[float, ...]
    names: tuple[str, ...]  # the algorithm with each value


def _sweeps(names: Iterable[str]) -> list[_ThresholdSweep]:
    """The sweeps among these algorithms."""
    alike: dict[tuple[str, _Choices], dict[str, Algorithm]] = {}
    for name in names:
        algorithm = algorithm_of(name)
        if algorithm is not None:
            key = (name.partition(":")[0], _choices(algorithm))
            alike.setdefault(key, {})[name] = algorithm
    sweeps = []
    for (head, _), algorithms in alike.items():
        sweep = _sweep(head, algorithms)
        if sweep is not None:
            sweeps.append(sweep)
    return sweeps


def _sweep(head: str, algorithms: Mapping[str, Algorithm]) -> _ThresholdSweep | None:
    """The sweep of algorithms that are called alike before the colon and differ only in numbers;
    None if they do not differ in one threshold.
    """
    thresholds_of = {name: _thresholds(algorithm) for name, algorithm in algorithms.items()}
    first, *rest = thresholds_of.values()
    moved = []
    for key, value in first.items():
        if any(other[key] != value for other in rest):
            moved.append(key)
    # A clip has two sides: they are one threshold where they move together, to equal values.
    name_by_value: dict[float, str] = {}
    for name, thresholds in thresholds_of.items():
        values = {thresholds[key] for key in moved}
        if len(values) == 1:
            name_by_value[values.pop()] = name
    has_value_each = len(name_by_value) == len(algorithms)
    if len(algorithms) < 2 or not has_value_each or not all(map(isfinite, name_by_value)):
        return None
    values_and_names = sorted(name_by_value.items())
    letter = _letter(next(iter(algorithms.values())), moved)
    return _ThresholdSweep(head, letter, *zip(*values_and_names, strict=True))


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
    thresholds = {}
    for place, rule in enumerate(algorithm.rules):
        for name, value in rule.parameters.items():
            if isinstance(value, int | float):
                thresholds[place, name] = value
    return thresholds


def _choices(algorithm: Algorithm) -> _Choices:
    """What of each rule is no number: the policies that it compares, and words such as the side
    that is relaxed.
    """
    choices = []
    for rule in algorithm.rules:
        words = [value for value in rule.parameters.values() if isinstance(value, bool | str)]
        choices.append((rule.ratio, *words))
    return tuple(choices)


def _letter(algorithm: Algorithm, moved: Sequence[tuple[int, str]]) -> str:
    """`C`, `δ_high`, or `δ` if both sides moved; a threshold without a letter goes by its name."""
    place, name = moved[0]
    rule = list(algorithm.rules)[place]
    letter = trust_regions.symbols(rule.module).get(name, name)
    if len(moved) > 1:
        return letter.partition("_")[0]
    return letter
