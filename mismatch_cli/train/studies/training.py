"""Results of training runs: means over seeds, which algorithm ends above which, curves over
steps, and timings.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import starmap
from typing import NamedTuple

import numpy as np

from mismatch_cli.base.numbers import things
from mismatch_cli.metrics.estimate import Estimate
from mismatch_cli.metrics.update_table import LAST
from mismatch_cli.studies.study import Study
from mismatch_cli.studies.watch_state import WatchState
from mismatch_cli.train.studies.common_steps import CommonSteps, Series, aligned, in_words
from mismatch_cli.train.studies.learning_speed import (
    Claim,
    against_the_first,
    between,
    mean_reward,
    reward_to_reach,
)
from mismatch_cli.train.studies.run_numbers import RunGroup
from mismatch_cli.train.studies.run_settings import SEPARATOR, settings_of_runs, short_name, task_of
from mismatch_cli.train.studies.runs import TrainingRun
from mismatch_cli.train.studies.seeds import SeedDifference, Seeded, difference, seeded
from mismatch_cli.train.studies.staleness import DoseResponse, dose_responses
from mismatch_cli.train.studies.training_result import (
    AlgorithmResult,
    ComparedSteps,
    Lead,
    RunResult,
    TrainingResult,
)

_GRAD_NORM = "grad_norm"
_TELLING = ("step", "reward", _GRAD_NORM)  # runs that agree in these made the same updates
_NAMED = 3  # at most so many models or data sets are named; of more only the number is given


@dataclass(frozen=True)
class TrainingAnalysis(Study):
    """One or more runs; the seeds of an algorithm form one curve, in each setting of the runs."""

    STUDY, FORMAT = "training", "mismatch-cli training"

    runs: Sequence[TrainingRun]
    subject: str = ""  # what was trained on what, in one line
    watched: WatchState | None = None  # what a watch of the only run answers
    claimed: tuple[str, str] | None = None  # does the first learn faster than the second?

    @classmethod
    def of(cls, runs: Sequence[TrainingRun], watched: WatchState | None = None) -> TrainingAnalysis:
        """An analysis with a subject line from the runs' configurations.

        `watched` is the state of a watch of them; by default that of a single run's own folder.
        """
        if watched is None and len(runs) == 1:
            watched = runs[0].watched
        algorithms = cls(runs).algorithms
        facts = list(algorithms) if len(algorithms) == 1 else []
        facts += what_was_trained(runs)
        seeds = max(map(len, algorithms.values()), default=0)
        if seeds > 1:
            facts.append(f"{seeds} seeds")
        for policy in ("trainer", "rollout"):
            dtype = settings_of(runs, f"{policy}_dtype")
            if dtype:
                facts.append(f"{policy} {dtype}")
        return cls(runs, " · ".join(filter(None, facts)), watched)

    @cached_property
    def algorithms(self) -> dict[str, list[TrainingRun]]:
        """The runs of each algorithm in the order given, separately for each setting."""
        return self._by_algorithm(self.runs)

    @cached_property
    def compared(self) -> dict[str, list[TrainingRun]]:
        """The runs of each algorithm, over the steps that all runs of their task share: of these,
        numbers are comparable.
        """
        return self._by_algorithm(self.restricted)

    @cached_property
    def common(self) -> list[CommonSteps]:
        """The common steps of each task."""
        by_task: dict[object, list[TrainingRun]] = {}
        for run in self.runs:
            by_task.setdefault(task_of(run), []).append(run)
        return [CommonSteps(runs) for runs in by_task.values()]

    @cached_property
    def restricted(self) -> list[TrainingRun]:
        """Every run over the common steps of its task, in the order of the runs."""
        # By identity, since a run is not hashable, and two may be equal.
        restricted_of: dict[int, TrainingRun] = {}
        for steps in self.common:
            restricted_of.update(zip(map(id, steps.runs), steps.restricted, strict=True))
        return [restricted_of[id(run)] for run in self.runs]

    @cached_property
    def by_staleness(self) -> list[DoseResponse]:
        """What algorithms block by how old the weights are that sample, where runs differ in
        that.
        """
        return dose_responses(self.restricted)

    @property
    def is_final(self) -> bool:
        """Whether the reward that is compared is that of the end of each run, and not of all of
        it.
        """
        return all(steps.is_final for steps in self.common)

    @property
    def window(self) -> str:
        """The steps of the final reward in words: `last 10 steps`, `steps 1 to 7`."""
        windows = set()
        for steps in self.common:
            if steps.is_final:
                windows.add(f"last {LAST} steps")
            elif len(steps.step_N):
                windows.add(in_words(steps.window_N))
        if len(windows) == 1:
            return windows.pop()
        return f"last {LAST} common steps"

    def _by_algorithm(self, runs: Sequence[TrainingRun]) -> dict[str, list[TrainingRun]]:
        groups: dict[str, list[TrainingRun]] = {}
        for run, setting in zip(runs, self._setting_of, strict=True):
            name = SEPARATOR.join(filter(None, (run.algorithm, setting)))
            groups.setdefault(name, []).append(run)
        return groups

    @cached_property
    def settings(self) -> dict[str, TrainingAnalysis]:
        """The runs of each setting by its name, which is empty if all runs share it."""
        runs_of: dict[str, list[TrainingRun]] = {}
        for run, setting in zip(self.runs, self._setting_of, strict=True):
            runs_of.setdefault(setting, []).append(run)
        return {setting: TrainingAnalysis(runs, self.subject) for setting, runs in runs_of.items()}

    @cached_property
    def claims(self) -> list[Claim]:
        """The comparisons of two algorithms: the one that was claimed, in each setting that has
        both, or the first algorithm of each setting against the others.
        """
        runs_of = {setting: part.algorithms for setting, part in self.settings.items()}
        if self.claimed is None:
            return against_the_first(runs_of)
        return between(*self.claimed, runs_of)

    @cached_property
    def answered(self) -> TrainingAnalysis:
        """The runs that the answer is about: of the two algorithms that were named, else all."""
        if self.claimed is None:
            return self
        return TrainingAnalysis([run for run in self.runs if run.algorithm in self.claimed])

    @property
    def claim_flags(self) -> list[str]:
        """How the two algorithms are typed; empty if none were."""
        if self.claimed is None:
            return []
        own, rival = self.claimed
        return ["-a", own, "-a", rival]

    @cached_property
    def reward_to_reach(self) -> float | None:
        """The reward to which steps are counted; None without one, or with several tasks."""
        if len(self.common) != 1:
            return None
        (steps,) = self.common
        return reward_to_reach([mean_reward(r, steps.step_N) for r in self.compared.values()])

    @cached_property
    def _setting_of(self) -> list[str]:
        return settings_of_runs(self.runs)

    @cached_property
    def eval_sets(self) -> list[str]:
        """The evaluation sets that runs name."""
        names: dict[str, None] = {}
        for run in self.runs:
            for record in run.records:
                accuracy = record.get("eval")
                if isinstance(accuracy, Mapping):
                    names |= dict.fromkeys(accuracy)
        return list(names)

    @property
    def eval_name(self) -> str:
        """The single set that all runs were evaluated on; empty if it is unknown or one of
        several.
        """
        configured = {short_name(str(run.config.get("eval_dataset") or "")) for run in self.runs}
        names = self.eval_sets or sorted(configured)
        return names[0] if len(names) == 1 else ""

    def rivals(self, name: str) -> list[str]:
        """The other algorithms with a final reward on the same problems, with the same model."""
        task = task_of(self.algorithms[name][0])
        rivals = []
        for other in self.final_rewards:
            if other != name and task_of(self.algorithms[other][0]) == task:
                rivals.append(other)
        return rivals

    @property
    def indistinguishable(self) -> list[list[str]]:
        """Algorithms whose runs are bit-identical: they block the same tokens, or none."""
        alike: dict[object, list[str]] = {}
        for name, runs in self.algorithms.items():
            # Without a gradient above 0 nothing was learned: such runs are equal for any algorithm.
            if any((run.series(_GRAD_NORM) > 0).any() for run in runs):
                updates = frozenset(map(_updates_of, runs))
                alike.setdefault(updates, []).append(name)
        return [names for names in alike.values() if len(names) > 1]

    @cached_property
    def by_algorithm(self) -> list[RunGroup]:
        """The runs of each algorithm in its setting, whose numbers are means over seeds."""
        settings = dict(zip(map(id, self.runs), self._setting_of, strict=True))
        groups = []
        for name, runs in self.algorithms.items():
            setting = settings[id(runs[0])]
            group = RunGroup(name, setting, runs, self.compared[name], self.reward_to_reach)
            groups.append(group)
        return groups

    @cached_property
    def by_run(self) -> list[RunGroup]:
        """Each run by itself."""
        groups = []
        for whole, run, setting in zip(self.runs, self.restricted, self._setting_of, strict=True):
            groups.append(RunGroup(whole.name, setting, [whole], [run], self.reward_to_reach))
        return groups

    @property
    def together(self) -> RunGroup:
        """All runs, for what is said of them as one."""
        return RunGroup("", "", self.runs, self.restricted, self.reward_to_reach)

    @property
    def is_done(self) -> bool:
        """Whether every run has reached its last step."""
        return all(run.is_done for run in self.runs)

    @property
    def is_whole(self) -> bool:
        """Whether no run has steps that another run of its task lacks."""
        return all(steps.is_whole for steps in self.common)

    @property
    def fallen(self) -> list[str]:
        """Algorithms of which every run has collapsed."""
        collapsed = []
        for name in self.final_rewards:
            if all(run.has_collapsed for run in self.algorithms[name]):
                collapsed.append(name)
        return collapsed

    @property
    def leader(self) -> str:
        """The algorithm that is above most others; of several, the one with the highest reward."""
        rewards = self.final_rewards
        return max(rewards, key=lambda name: (len(self.above(name)), rewards[name].value or 0.0))

    @cached_property
    def highest_first(self) -> list[str]:
        """The algorithms with a final reward, ranked by it."""
        return sorted(self.final_rewards, key=self._below)

    def _below(self, name: str) -> float:
        return -(self.final_rewards[name].value or 0.0)

    @cached_property
    def final_rewards(self) -> dict[str, Estimate]:
        """Each algorithm's reward over the last common steps with its interval over seeds, if
        recorded.
        """
        rewards = {}
        for group in self.by_algorithm:
            reward = group.number("reward")
            if reward.value is not None:
                rewards[group.name] = reward
        return rewards

    def difference(self, name: str, rival: str) -> SeedDifference:
        """How much higher the final reward of an algorithm is than that of its rival."""
        return difference(_final_rewards(self.compared[name]), _final_rewards(self.compared[rival]))

    def above(self, name: str) -> list[str]:
        """The rivals than which its final reward is higher with 95 % confidence, best first."""
        below = [rival for rival in self.rivals(name) if self.difference(name, rival).is_above]
        return sorted(below, key=self._below)

    @cached_property
    def result(self) -> TrainingResult:
        """What `--json` prints and summary.json holds."""
        runs = zip(self.runs, self.restricted, self._setting_of, strict=True)
        return TrainingResult(
            runs=list(starmap(RunResult.of, runs)),
            compared_over=list(map(ComparedSteps.of, self.common)),
            algorithms=list(map(self._of_algorithm, self.final_rewards)),
            claims=[claim.result for claim in self.claims],
            by_staleness=self.by_staleness or None,
            watch=self.watched.result if self.watched else None,
        )

    def _of_algorithm(self, name: str) -> AlgorithmResult:
        return AlgorithmResult(
            algorithm=name,
            seeds=len(self.algorithms[name]),
            final_reward=self.final_rewards[name],
            above=self.above(name),
            higher_than=[Lead(other, *self.difference(name, other)) for other in self.rivals(name)],
        )

    def curves(self, *keys: str, gaps: bool = True) -> dict[str, Curve]:
        """The curve of each algorithm that recorded the number."""
        curves = {}
        for name, runs in self.algorithms.items():
            curve = curve_of(runs, *keys, gaps=gaps)
            if curve.has_values:
                curves[name] = curve
        return curves

    def curves_of_steps(self, *keys: str) -> dict[str, Curve]:
        """The curves that are ever above 0, without the evaluation before training: step 0 of
        `train`, while a recording that is watched has its first step there.
        """
        first = 1 if self.watched is None else 0
        curves = {}
        for name, curve in self.curves(*keys).items():
            of_steps = curve.only(curve.step_N >= first)
            if (of_steps.value_N > 0).any():
                curves[name] = of_steps
        return curves

    def has(self, *keys: str) -> bool:
        """Whether any run measured it."""
        return any(len(run.measured(*keys)) for run in self.runs)

    def occurs(self, *keys: str) -> bool:
        """Whether it was ever nonzero."""
        return any(run.measured(*keys).any() for run in self.runs)

    def never(self, *keys: str) -> bool:
        """Whether it was measured and is always 0."""
        return self.has(*keys) and not self.occurs(*keys)


def _final_rewards(runs: Sequence[TrainingRun]) -> Seeded:
    """The final reward of each run that has one, with its seed."""
    return seeded(runs, (run.last("reward") for run in runs))


def _updates_of(run: TrainingRun) -> tuple[object, ...]:
    """What two runs share only if they made the same updates."""
    return run.seed, *(run.series(key).tobytes() for key in _TELLING)


def settings_of(runs: Sequence[TrainingRun], key: str) -> str:
    """A setting of the runs, or its different values."""
    different: dict[str, None] = {}
    for run in runs:
        value = run.config.get(key)
        if value not in (None, ""):
            different[str(value)] = None
    return ", ".join(different)


def what_was_trained(runs: Sequence[TrainingRun]) -> list[str]:
    """Models and problems without their folders; if there are many, their number."""
    return [
        _named_or_counted(map(_model_of, runs), "models"),
        _named_or_counted(map(problems_of, runs), "sets of problems"),
    ]


def _model_of(run: TrainingRun) -> str:
    return short_name(str(run.config.get("model") or ""))


def _named_or_counted(names: Iterable[str], kind: str) -> str:
    """Different names that are not empty; if there are many, `4 models`."""
    different = list(dict.fromkeys(filter(None, names)))
    if len(different) > _NAMED:
        return f"{len(different)} {kind}"
    return ", ".join(different)


def problems_of(run: TrainingRun) -> str:
    """The data set, the environment that uses it, or an environment with its own problems; empty
    if unknown.
    """
    environment = str(run.config.get("environment") or "").rsplit("/", 1)[-1]
    # With episodes, the environment makes its own problems.
    if environment and run.config.get("episodes"):
        return environment
    dataset = short_name(str(run.config.get("dataset") or ""))
    return " · ".join(filter(None, (dataset, environment)))


def steps_of(runs: Sequence[TrainingRun]) -> str:
    """The runs' numbers of steps: `110 steps`, `20 to 110 steps`."""
    steps = [run.steps for run in runs]
    low, high = min(steps), max(steps)
    if low == high:
        return things(low, "step")
    return f"{low:,} to {high:,} steps"


class Correlation(NamedTuple):
    """The correlation of bad updates with another series of the same run."""

    run: str
    other: str
    steps: int
    estimate: Estimate


def correlations(run: TrainingRun) -> Iterator[Correlation]:
    """The correlation of bad updates with a step's reward, and with its change from the previous
    step.
    """
    from mismatch_cli.metrics.correlation import series_correlation

    bad_N, reward_N = run.series("bad_over_negative"), run.series("reward")
    for other, value_N in (
        ("the reward", reward_N),
        ("its change", np.diff(reward_N, prepend=np.nan)),
    ):
        has_N = np.isfinite(bad_N) & np.isfinite(value_N)
        # A constant correlates with nothing: no update of the run was bad.
        if bad_N[has_N].any():
            estimate = series_correlation(bad_N[has_N], value_N[has_N])
            yield Correlation(run.name, other, int(has_N.sum()), estimate)


SMOOTHED_FROM = 100  # curves with more steps are smoothed
LEAST_SIGMA = 2  # points
_SIGMA = 0.01  # of the number of points
_REACH = 4  # standard deviations


@dataclass(frozen=True)
class Curve:
    """`_N` is one point per step; NaN in the value is a gap, NaN in the band a step with only
    one seed.
    """

    step_N: np.ndarray
    value_N: np.ndarray
    low_N: np.ndarray
    high_N: np.ndarray

    @property
    def has_values(self) -> bool:
        return bool(np.isfinite(self.value_N).any())

    @property
    def is_long(self) -> bool:
        """Whether the curve is smoothed; gaps count towards its length."""
        return len(self.step_N) > SMOOTHED_FROM and self.has_values

    def only(self, keep_N: np.ndarray) -> Curve:
        """Some of its points."""
        return Curve(
            self.step_N[keep_N], self.value_N[keep_N], self.low_N[keep_N], self.high_N[keep_N]
        )


def curve_of(runs: Sequence[TrainingRun], *keys: str, gaps: bool = True) -> Curve:
    """The mean over the runs with a value at a step; the band spans the lowest to the highest of
    several.

    Without `gaps`, steps without any value are left out, for numbers that are measured only now and
    then.
    """
    curve = mean_curve([(run.step_N, run.series(*keys)) for run in runs])
    return curve if gaps else curve.only(np.isfinite(curve.value_N))


def mean_curve(series: Sequence[Series]) -> Curve:
    """The mean of several series, each its steps and its values."""
    step_N = np.unique(np.concatenate([step for step, _ in series])) if series else np.zeros(0)
    return Curve(step_N, *_mean_and_range(aligned(series, step_N)))


def _mean_and_range(value_RN: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    finite_RN = np.isfinite(value_RN)
    count_N = finite_RN.sum(axis=0)
    mean_N = np.where(finite_RN, value_RN, 0).sum(axis=0) / np.maximum(count_N, 1)
    low_N = np.where(finite_RN, value_RN, np.inf).min(axis=0, initial=np.inf)
    high_N = np.where(finite_RN, value_RN, -np.inf).max(axis=0, initial=-np.inf)
    mean_N[count_N == 0] = np.nan
    low_N[count_N < 2] = np.nan
    high_N[count_N < 2] = np.nan
    return mean_N, low_N, high_N


def smoothed(curve: Curve) -> Curve:
    """The curve under a Gaussian whose σ is 1 % of its points, at least two; gaps stay gaps and
    contribute nothing.

    It stops σ before the ends of the curve: closer to them the Gaussian is one-sided and mostly
    shows noise.
    """
    points = len(curve.step_N)
    sigma = max(_SIGMA * points, LEAST_SIGMA)
    smooth = Curve(
        curve.step_N,
        _gaussian(curve.value_N, sigma),
        _gaussian(curve.low_N, sigma),
        _gaussian(curve.high_N, sigma),
    )
    place_N = np.arange(points)
    return smooth.only((place_N >= sigma) & (place_N < points - sigma))


def _gaussian(value_N: np.ndarray, sigma: float) -> np.ndarray:
    finite_N = np.isfinite(value_N)
    if not finite_N.any():
        return value_N
    # np.convolve returns the length of the longer input, which must be the curve.
    reach = min(int(_REACH * sigma) + 1, (len(value_N) - 1) // 2)
    weight = np.exp(-0.5 * (np.arange(-reach, reach + 1) / sigma) ** 2)
    total_N = np.convolve(np.where(finite_N, value_N, 0), weight, "same")
    count_N = np.convolve(finite_N.astype(float), weight, "same")
    return np.where(finite_N, total_N / np.where(finite_N, count_N, 1), np.nan)


def thinned(curve: Curve, most: int) -> Curve:
    """Every k-th point including the last: a smoothed curve loses nothing, and the picture stays
    small.
    """
    every = -(-len(curve.step_N) // most)
    keep_N = np.zeros(len(curve.step_N), dtype=bool)
    keep_N[::-1][::every] = True
    return curve.only(keep_N)


def envelope(curve: Curve, columns: int) -> tuple[np.ndarray, np.ndarray]:
    """A line that looks like the raw one: the lowest and highest value in each column of the
    picture.
    """
    finite_N = np.isfinite(curve.value_N)
    step_N, value_N = curve.step_N[finite_N], curve.value_N[finite_N]
    if len(step_N) <= 2 * columns:
        return curve.step_N, curve.value_N
    steps, values = [], []
    for part_N, bin_N in zip(
        np.array_split(step_N, columns), np.array_split(value_N, columns), strict=True
    ):
        first, second = sorted((int(bin_N.argmin()), int(bin_N.argmax())))
        steps += [part_N[first], part_N[second]]
        values += [bin_N[first], bin_N[second]]
    return np.array(steps), np.array(values)
