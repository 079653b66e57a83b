"""Whether one algorithm learns faster than another, over the steps that their runs share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import compress, product, repeat
from math import inf
from typing import NamedTuple

import numpy as np

from mismatch_cli.metrics.estimate import Estimate
from mismatch_cli.metrics.update_table import LAST
from mismatch_cli.train.studies.common_steps import CommonSteps, Series, aligned
from mismatch_cli.train.studies.phases import LEARNING_PHASES
from mismatch_cli.train.studies.run_settings import SEPARATOR, task_of
from mismatch_cli.train.studies.runs import TrainingRun
from mismatch_cli.train.studies.seeds import (
    ONE_SEED,
    Seeded,
    difference,
    over_seeds,
    paired,
    seeded,
)

SHOWN, NOT_SHOWN, CONTRADICTED = "shown", "not shown", "contradicted"
ONE_SEED_EACH, NO_INTERVAL = "one seed", "no interval"
NOT_REACHED, NOT_MEASURED = "not reached", "not measured"


class Measure(NamedTuple):
    """A number of a run over the common steps; the reward to reach is its second argument.

    None where it was not measured, infinite where the run never reaches that reward.
    """

    key: str
    value: Callable[[TrainingRun, float | None], float | None]
    more_is_better: bool = False


def reward_to_reach(curves: Sequence[np.ndarray]) -> float | None:
    """Half-way up: (start + top) / 2, from the mean reward of each algorithm over the same steps.

    The start is the mean over the algorithms at the first step, the top the highest of all
    algorithms and steps. There the curves are steep, so that noise moves the crossing least, and
    it does not depend on the slowest run.
    """
    measured = list(filter(len, map(_finite, curves)))
    if not measured:
        return None
    start = float(np.mean(list(map(_first, measured))))
    top = float(max(map(np.max, measured)))
    return (start + top) / 2


def _finite(value_N: np.ndarray) -> np.ndarray:
    return value_N[np.isfinite(value_N)]


def _first(value_N: np.ndarray) -> float:
    return float(value_N[0])


def reward_matrix(runs: Sequence[TrainingRun], step_N: np.ndarray) -> np.ndarray:
    """The rewards of runs at these steps, [runs, N]; NaN where one has none."""
    return aligned(list(map(_rewards, runs)), step_N)


def _rewards(run: TrainingRun) -> Series:
    """The rewards of training steps."""
    return run.step_N[run.is_step_N], run.series("reward")[run.is_step_N]


def mean_reward(runs: Sequence[TrainingRun], step_N: np.ndarray) -> np.ndarray:
    """The mean over the runs with a reward at a step; NaN where none has one."""
    reward_RN = np.ma.masked_invalid(reward_matrix(runs, step_N))
    return np.asarray(reward_RN.mean(axis=0).filled(np.nan), dtype=np.float64)


def _steps_to(run: TrainingRun, reward: float | None) -> float | None:
    """The step at which a run reaches a reward, linear between steps."""
    return _at_crossing(run, reward, run.step_N)


def _seconds_to(run: TrainingRun, reward: float | None) -> float | None:
    """Seconds of learning before that step: sample, grade, recompute, update and sync."""
    phases = map(run.series, repeat("seconds"), LEARNING_PHASES)
    phase_PN = np.array(list(phases))
    if not np.isfinite(phase_PN).any():
        return None
    second_N = np.nansum(phase_PN, axis=0)
    # The reward of a step is that of the weights before it, so its own seconds do not count.
    return _at_crossing(run, reward, np.cumsum(second_N) - second_N)


def _at_crossing(run: TrainingRun, reward: float | None, value_N: np.ndarray) -> float | None:
    """A value at which a run first reaches a reward, linear between steps; infinity if never."""
    reward_N = run.series("reward")
    has_N = np.isfinite(reward_N)
    reward_N, value_N = reward_N[has_N], value_N[has_N]
    if reward is None or not len(reward_N):
        return None
    if reward_N.max() < reward:
        return inf
    place = int(np.argmax(reward_N >= reward))
    if place == 0:
        return float(value_N[0])
    before, after = reward_N[place - 1 : place + 1]
    share = (reward - before) / (after - before)
    return float(value_N[place - 1] + share * (value_N[place] - value_N[place - 1]))


def _area(run: TrainingRun, _reward: float | None) -> float | None:
    """The mean reward over the steps: the area under the curve, divided by its length."""
    return run.mean("reward")


def _final(run: TrainingRun, _reward: float | None) -> float | None:
    return run.last("reward")


def _bad_of_all(run: TrainingRun, _reward: float | None) -> float | None:
    return run.mean("bad_over_tokens")


def _bad_of_negative(run: TrainingRun, _reward: float | None) -> float | None:
    return run.mean("bad_over_negative")


AREA = Measure("area", _area, more_is_better=True)
FINAL = Measure("final_reward", _final, more_is_better=True)
STEPS = Measure("steps_to_reward", _steps_to)
SECONDS = Measure("seconds_to_reward", _seconds_to)
BAD_OF_ALL = Measure("bad_over_tokens", _bad_of_all)
BAD_OF_NEGATIVE = Measure("bad_over_negative", _bad_of_negative)


def mean_of(measure: Measure, runs: Sequence[TrainingRun], reward: float | None) -> Estimate:
    """The mean of a measure over runs; of a reward that only some reach, their number."""
    return _mean(_values(runs, measure, reward))


@dataclass(frozen=True)
class ClaimRow:
    """What one measure says about a claim: both algorithms, own − rival, and the answer."""

    measure: str  # the key of a `Measure`
    own: Estimate
    rival: Estimate
    difference: Estimate
    paired_seeds: int  # 0 where the runs are not paired
    answer: str
    not_reached_by: Sequence[str] = ()  # names of runs that do not reach the reward


@dataclass(frozen=True, kw_only=True)
class ClaimResult:
    """A claim as in summary.json."""

    algorithm: str
    rival: str
    setting: str
    answer: str
    steps: int  # that all runs share
    reward_to_reach: float | None
    by_seed: Mapping[str, float]  # own − rival area with each seed that both have
    measures: Sequence[ClaimRow]


@dataclass(frozen=True)
class Claim:
    """That an algorithm learns faster than its rival: the area under its reward is larger.

    The runs are whole, of one task; what is said of them is over the steps that all of them share.
    """

    own: str
    rival: str
    own_runs: Sequence[TrainingRun]
    rival_runs: Sequence[TrainingRun]
    setting: str = ""  # that both share, where the report has several

    @property
    def title(self) -> str:
        """`dppo-binary-tv − pg-is`, with the setting if there are several."""
        title = f"{self.own} − {self.rival}"
        return SEPARATOR.join(filter(None, (title, self.setting)))

    @cached_property
    def common(self) -> CommonSteps:
        """The steps that these runs share."""
        return CommonSteps([*self.own_runs, *self.rival_runs])

    @cached_property
    def _restricted(self) -> tuple[list[TrainingRun], list[TrainingRun]]:
        """Own runs and the rival's, over the common steps."""
        runs, count = self.common.restricted, len(self.own_runs)
        return runs[:count], runs[count:]

    @cached_property
    def reward(self) -> float | None:
        """The reward to reach; None if none was recorded."""
        step_N = self.common.step_N
        return reward_to_reach(list(map(mean_reward, self._restricted, repeat(step_N))))

    @property
    def area(self) -> ClaimRow:
        """What decides the claim."""
        return self.rows[0]

    @property
    def answer(self) -> str:
        """Whether the runs show the claim, by the area under the reward."""
        return self.area.answer

    @cached_property
    def rows(self) -> list[ClaimRow]:
        """A row per measure that was taken; the area is the first.

        A final reward that is the mean of all steps would be the area again, and is left out.
        """
        measures = [FINAL, STEPS, SECONDS, BAD_OF_ALL, BAD_OF_NEGATIVE]
        if len(self.common.step_N) <= LAST:
            measures.remove(FINAL)
        return [self._row(AREA), *filter(_is_measured, map(self._row, measures))]

    def row(self, measure: Measure) -> ClaimRow | None:
        """The row of a measure, if it was taken."""
        for row in self.rows:
            if row.measure == measure.key:
                return row
        return None

    @property
    def by_seed(self) -> dict[int, float]:
        """How much larger the area is with each seed that both have."""
        own, rival = self._seeded(AREA)
        return {seed: mine - other for seed, (mine, other) in paired(own, rival).items()}

    @cached_property
    def by_step(self) -> tuple[np.ndarray, list[Estimate]]:
        """The common steps, and at each of them own − rival reward over the paired seeds."""
        step_N = self.common.step_N
        own_RN, rival_RN = map(reward_matrix, self._restricted, repeat(step_N))
        return step_N, list(map(self._difference, own_RN.T, rival_RN.T))

    def _difference(self, own_R: np.ndarray, rival_R: np.ndarray) -> Estimate:
        """Own − rival value over the paired seeds; without a value if either has none."""
        own = _with_seeds(self.own_runs, own_R)
        rival = _with_seeds(self.rival_runs, rival_R)
        if not own or not rival:
            return Estimate(None)
        return difference(own, rival).estimate

    def _row(self, measure: Measure) -> ClaimRow:
        """What a measure says; no difference where a run never reaches the reward."""
        value_2R = self._values(measure)
        own_mean, rival_mean = map(_mean, value_2R)
        row = partial(ClaimRow, measure.key, own_mean, rival_mean)
        never_R = np.isinf(np.concatenate(value_2R))
        if never_R.any():
            unreached = [run.name for run in compress(self.common.runs, never_R)]
            return row(Estimate(None), 0, NOT_REACHED, unreached)
        own, rival = self._seeded(measure)
        if not own or not rival:
            return row(Estimate(None), 0, NOT_MEASURED)
        estimate, pairs = difference(own, rival)
        return row(estimate, pairs, _answer(estimate, measure.more_is_better))

    def _values(self, measure: Measure) -> list[np.ndarray]:
        """The measure of own runs, and of the rival's."""
        return list(map(_values, self._restricted, repeat(measure), repeat(self.reward)))

    def _seeded(self, measure: Measure) -> list[Seeded]:
        return list(map(_with_seeds, self._restricted, self._values(measure)))

    @property
    def result(self) -> ClaimResult:
        return ClaimResult(
            algorithm=self.own,
            rival=self.rival,
            setting=self.setting,
            answer=self.answer,
            steps=len(self.common.step_N),
            reward_to_reach=self.reward,
            by_seed={str(seed): value for seed, value in self.by_seed.items()},
            measures=self.rows,
        )


_BySetting = Mapping[str, Mapping[str, Sequence[TrainingRun]]]  # setting → algorithm → runs


def against_the_first(runs_of: _BySetting) -> list[Claim]:
    """In each setting, that its first algorithm learns faster than each other one."""
    claims = []
    for setting, by_name in runs_of.items():
        (own, own_runs), *rivals = by_name.items()
        claims += [Claim(own, rival, own_runs, runs, setting) for rival, runs in rivals]
    return claims


def between(own: str, rival: str, runs_of: _BySetting) -> list[Claim]:
    """That one algorithm learns faster than another, in each setting that has both.

    If none has, each of their settings is compared with each, as far as they share a task.
    """
    claims = []
    for setting, by_name in runs_of.items():
        if own in by_name and rival in by_name:
            claims.append(Claim(own, rival, by_name[own], by_name[rival], setting))
    return claims or list(_across_settings(own, rival, runs_of))


def _across_settings(own: str, rival: str, runs_of: _BySetting) -> Iterator[Claim]:
    """The claim between each setting of one algorithm and each of the other, on a shared task."""
    for (own_setting, mine), (rival_setting, others) in product(runs_of.items(), repeat=2):
        own_runs, rival_runs = mine.get(own, ()), others.get(rival, ())
        if own_runs and rival_runs and task_of(own_runs[0]) == task_of(rival_runs[0]):
            names = f"{own}{SEPARATOR}{own_setting}", f"{rival}{SEPARATOR}{rival_setting}"
            yield Claim(*names, own_runs, rival_runs)


def _is_measured(row: ClaimRow) -> bool:
    return row.answer != NOT_MEASURED


def _mean(value_R: np.ndarray) -> Estimate:
    """The mean over runs that have a value; if some never reach the reward, how many do."""
    if np.isinf(value_R).any():
        return Estimate(None, note=f"{np.isfinite(value_R).sum()} of {len(value_R)} runs")
    measured = _finite(value_R).tolist()
    return over_seeds(measured) if measured else Estimate(None)


def _values(runs: Sequence[TrainingRun], measure: Measure, reward: float | None) -> np.ndarray:
    """The measure of each run; NaN where it was not taken."""
    values = map(measure.value, runs, repeat(reward))
    return np.array(list(values), dtype=np.float64)


def _with_seeds(runs: Sequence[TrainingRun], value_R: np.ndarray) -> Seeded:
    """The finite values, each with the seed of its run."""
    has_R = np.isfinite(value_R)
    return seeded(compress(runs, has_R), value_R[has_R].tolist())


def _answer(difference: Estimate, more_is_better: bool) -> str:
    """Whether own − rival shows that own is better, with 95 % confidence."""
    if difference.low is None or difference.high is None:
        if difference.note == ONE_SEED:
            return ONE_SEED_EACH
        # All seeds differ by the same: by nothing, or by a number whose error is unknown.
        return NO_INTERVAL if difference.value else NOT_SHOWN
    if difference.low <= 0 <= difference.high:
        return NOT_SHOWN
    own_is_more = difference.low > 0
    return SHOWN if own_is_more == more_is_better else CONTRADICTED
