"""Training runs on disk, one JSON object per step beside the configuration, and the numbers of a
run.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, islice
from os.path import isabs
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mismatch_cli.base.errors import MismatchError, unreadable
from mismatch_cli.base.numbers import things
from mismatch_cli.base.places import shorten_apart, shorten_paths, shorten_to_folder
from mismatch_cli.base.text import parse_json
from mismatch_cli.metrics.update_table import FIRST, LAST
from mismatch_cli.studies.watch_state import WatchState, watch_state
from mismatch_cli.trace.training_folder import CONFIG, METRICS, read_config, training_runs

MOST_MISSING = 10_000  # steps that are listed
# What the line of an evaluation before training has
EVALUATION = {"step", "eval_accuracy", "eval"}
_LARGEST = 1e300  # anything larger is not a measurement


@dataclass(frozen=True)
class PartialRun:
    """What an incomplete run has: its newest step of those planned, and the steps that are lost."""

    steps: int
    planned_steps: int | None
    missing_steps: Sequence[int]


@dataclass(frozen=True)
class SetAccuracy:
    """The accuracy on one evaluation set before training, at its end, and at its best."""

    before: float | None
    final: float | None
    best: float | None


@dataclass(frozen=True)
class TrainingRun:
    """One algorithm with one seed: the record of each step, and the settings if they are known."""

    name: str
    algorithm: str
    seed: int | None
    records: list[dict[str, Any]]
    config: Mapping[str, Any] = field(default_factory=dict)
    folder: Path | None = None
    watched: WatchState | None = None  # for records that `watch` made of a trace or a dump
    _series: dict[tuple[str, ...], np.ndarray] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @property
    def step_N(self) -> np.ndarray:
        """The step of each record; records without one are numbered."""
        step_N = self.series("step")
        return np.where(np.isfinite(step_N), step_N, np.arange(1, len(step_N) + 1))

    def series(self, *keys: str) -> np.ndarray:
        """A number of each record, found by nested keys, outermost first; NaN if there is none."""
        if keys not in self._series:  # every figure asks again, in each of its variants
            self._series[keys] = np.array(
                [_number(record, keys) for record in self.records], dtype=np.float64
            )
        return self._series[keys]

    def measured(self, *keys: str) -> np.ndarray:
        """The same number, without the records that lack it."""
        return _finite(self.series(*keys))

    def mean(self, *keys: str) -> float | None:
        """The mean over all steps."""
        return _or_none(np.mean, self.series(*keys))

    def median(self, *keys: str) -> float | None:
        return _or_none(np.median, self.series(*keys))

    def highest(self, *keys: str) -> float | None:
        """The largest value, for a number that counts up over the run."""
        return _or_none(np.max, self.series(*keys))

    @cached_property
    def is_step_N(self) -> np.ndarray:
        """Whether each record is a step; `train` evaluates before its first one, as step 0, and
        others count from 0.
        """
        return np.array([bool(record.keys() - EVALUATION) for record in self.records], dtype=bool)

    @property
    def num_steps(self) -> int:
        """How many steps are on record."""
        return int(self.is_step_N.sum())

    @property
    def steps(self) -> int:
        """How far it is: `train` numbers its steps from 1; what is watched may count from 0, or
        be joined late.
        """
        return self.last_step if self.watched is None else self.num_steps

    def ends(self, *keys: str) -> tuple[float | None, float | None]:
        """The means over the first and over the last steps, which have none in common: of few
        steps, half each.
        """
        value_N = self.series(*keys)[self.is_step_N]
        first = min(FIRST, len(value_N) // 2)
        last = min(LAST, len(value_N) - first)
        return _or_none(np.mean, value_N[:first]), _or_none(np.mean, value_N[len(value_N) - last :])

    def last(self, *keys: str) -> float | None:
        """The mean over the last steps, however few there are."""
        return _or_none(np.mean, self.series(*keys)[-LAST:])

    @property
    def best_reward(self) -> float | None:
        """The highest mean over a window of steps as long as that of the final reward."""
        reward_N = self.measured("reward")
        width = min(LAST, len(reward_N))
        if not width:
            return None
        mean_N = np.convolve(reward_N, np.full(width, 1 / width), "valid")
        return float(mean_N.max())

    @property
    def final_accuracy(self) -> float | None:
        """The last evaluation's mean over its sets; the evaluation before training does not
        count.
        """
        return self._last_measured("eval_accuracy")

    @property
    def accuracy_before(self) -> float | None:
        """The accuracy in the evaluation before the first step."""
        return _or_none(np.mean, self.series("eval_accuracy")[self.step_N == 0])

    @property
    def accuracy_by_set(self) -> dict[str, SetAccuracy]:
        """The accuracy on each evaluation set; empty if there is only one."""
        names = dict.fromkeys(chain.from_iterable(map(evaluated_sets, self.records)))
        return {name: self._accuracy_on(name) for name in names}

    def _accuracy_on(self, name: str) -> SetAccuracy:
        return SetAccuracy(
            before=_or_none(np.mean, self.series("eval", name)[self.step_N == 0]),
            final=self._last_measured("eval", name),
            best=self.highest("eval", name),
        )

    def _last_measured(self, *keys: str) -> float | None:
        return _or_none(np.mean, _finite(self.series(*keys)[self.step_N > 0])[-1:])

    @property
    def has_gained(self) -> bool:
        """Whether it ends higher than it began: in accuracy if it was evaluated before training,
        else in reward.
        """
        first, last = self.accuracy_before, self.final_accuracy
        if first is None or last is None:
            first, last = self.ends("reward")
        return first is not None and last is not None and last > first

    @property
    def has_collapsed(self) -> bool:
        """Whether the final reward is less than half of the best, if that is above 0."""
        final, best = self.last("reward"), self.best_reward
        return final is not None and best is not None and final < best / 2 and best > 0

    @property
    def last_trace(self) -> Path | None:
        """The newest step kept as a trace."""
        if self.folder is None:
            return None
        numbered: dict[int, Path] = {}
        for folder in (self.folder / "traces").glob("step-*"):
            step = folder.name.removeprefix("step-")
            if step.isdecimal():  # a user's copy has a different name
                numbered[int(step)] = folder
        if not numbered:
            return None
        return numbered[max(numbered)]

    @property
    def last_step(self) -> int:
        return int(self.step_N.max()) if self.records else 0

    @property
    def planned_steps(self) -> int | None:
        """How many steps it should have; None if its settings are unknown."""
        planned = self.config.get("steps")
        return planned if isinstance(planned, int) else None

    @property
    def is_done(self) -> bool:
        """Whether it has reached its last step, as far as known."""
        return self.planned_steps is None or self.last_step >= self.planned_steps

    @property
    def partial(self) -> PartialRun | None:
        """Which steps an incomplete run has: it is still running, was ended early, or its file
        lost lines.
        """
        first = 1
        # A watch may begin late: what was before it is not lost.
        if self.watched is not None and self.records:
            first = int(self.step_N.min())
        recorded = set(self.step_N.tolist())
        # A damaged record may have a huge number: the steps before it are not listed without end.
        absent = (step for step in range(first, self.last_step + 1) if step not in recorded)
        missing = list(islice(absent, MOST_MISSING))
        if self.is_done and not missing:
            return None
        return PartialRun(self.last_step, self.planned_steps, missing)


def algorithms_of(runs: Iterable[TrainingRun]) -> list[str]:
    """The algorithms of runs in their order, each once."""
    return list(dict.fromkeys(run.algorithm for run in runs))


def evaluated_sets(record: Mapping[str, Any]) -> dict[str, Any]:
    """The accuracy on each set of an evaluation with several sets."""
    accuracy = record.get("eval")
    if isinstance(accuracy, Mapping) and len(accuracy) > 1:
        return dict(accuracy)
    return {}


def _finite(value_N: np.ndarray) -> np.ndarray:
    return value_N[np.isfinite(value_N)]


def _or_none(summary: Callable[[np.ndarray], Any], value_N: np.ndarray) -> float | None:
    """A summary of the finite values; None if there are none."""
    finite_N = _finite(value_N)
    if not len(finite_N):
        return None
    return float(summary(finite_N))


def _number(record: object, keys: Sequence[str]) -> float:
    """The number under nested keys; NaN for anything else."""
    value = record
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    if isinstance(value, int | float) and abs(value) < _LARGEST:
        return float(value)
    return np.nan


_PROVEN = "proven"
_SYNC = {
    _PROVEN: "proven at {}",
    "newer": "newer weights at {}",
    "undecidable": "too small a step to tell at {}",
}


class SyncChecks(NamedTuple):
    """How often each answer about the engine's weights was given, over the steps with an answer."""

    answers: Counter[str]
    steps: int

    @property
    def proven(self) -> int:
        """At how many steps the engine was shown to have the new weights."""
        return self.answers[_PROVEN]


def sync_checks(records: Sequence[Mapping[str, Any]]) -> SyncChecks:
    """The answers about the engine's weights.

    The first step has no older weights to compare with, unless the engine's tensors can be read.
    """
    answers = []
    for record in records:
        answer = record.get("sync")
        if isinstance(answer, str) and answer != "unchecked":
            answers.append(answer)
    if answers[:1] == ["undecidable"]:
        del answers[0]
    return SyncChecks(Counter(answers), len(answers))


def sync_in_words(runs: Iterable[Sequence[Mapping[str, Any]]]) -> str:
    """`proven at 2 of 10 steps, newer weights at 4, …` over the records of runs; empty if no
    step had an answer.
    """
    total: Counter[str] = Counter()
    steps = 0
    for records in runs:
        checks = sync_checks(records)
        total += checks.answers
        steps += checks.steps
    if not steps:
        return ""
    words = [f"{_SYNC[_PROVEN].format(f'{total[_PROVEN]:,}')} of {things(steps, 'check')}"]
    for answer, text in _SYNC.items():
        if total[answer] and answer != _PROVEN:
            words.append(text.format(f"{total[answer]:,}"))
    return ", ".join(words)


def read_runs(folders: Iterable[Path | str]) -> list[TrainingRun]:
    """The runs in these folders, in order; raises a `MismatchError` if one has no readable run.

    A run that is still running is read up to its last complete line; among several, one without a
    line is left out.
    """
    paths = list(map(Path, folders))
    configs = _shortened([read_config(path / CONFIG) for path in paths])
    runs = list(map(_read_run, paths, _names(paths), configs))
    begun = [run for run in runs if run.records]
    if paths and not begun:
        raise MismatchError(
            f"{paths[0] / METRICS} has no steps yet. Wait until the first one is done."
        )
    return begun


def _names(paths: Sequence[Path]) -> list[str]:
    """What runs are called: the name of the folder, and its path where two have the same name."""
    names = [path.resolve().name for path in paths]
    repeated = {name for name, times in Counter(names).items() if times > 1}
    if not repeated:
        return names
    shortened = shorten_apart(*map(str, paths))
    return [path if name in repeated else name for name, path in zip(names, shortened, strict=True)]


def named_by(folders: Sequence[Path]) -> Sequence[Path]:
    """What names these runs on the command line: the folder that holds them and no others, else
    each of them.
    """
    parents = {folder.parent for folder in folders}
    if len(folders) > 1 == len(parents) and training_runs(*parents) == sorted(folders):
        return [*parents]
    return folders


def _shortened(configs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The settings with short paths; those of one name in two folders, such as
    `…/gsm8k/train.jsonl` and `…/math/train.jsonl`, with the folder.
    """
    # Elsewhere a folder says where a machine has its files, and runs of two machines are alike.
    paths_of: dict[tuple[str, str], set[str]] = {}
    for config in configs:
        for key, value in config.items():
            for path in filter(isabs, _paths(key, value)):
                paths_of.setdefault((key, shorten_paths(path)), set()).add(path)

    def short(key: str, path: str) -> str:
        shortened = str(shorten_paths(path))
        if len(paths_of.get((key, shortened), ())) > 1:
            shortened = shorten_to_folder(path)
        # A completed folder ends in a slash, which is the same folder.
        return shortened.rstrip("/")

    every_config = []
    for config in configs:
        shortened = shorten_paths(dict(config))
        for key, value in config.items():
            if isinstance(value, str):
                shortened[key] = ",".join(short(key, path) for path in _paths(key, value))
        every_config.append(shortened)
    return every_config


def _paths(key: str, value: Any) -> list[str]:
    """The paths of a setting: several evaluation sets have commas between them."""
    if not isinstance(value, str):
        return []
    return value.split(",") if key == "eval_dataset" else [value]


def _read_run(folder: Path, name: str, config: Mapping[str, Any]) -> TrainingRun:
    records = _read_records(folder / METRICS)
    # A folder of another trainer may have no configuration, or one with other types.
    algorithm = config.get("algorithm")
    if not isinstance(algorithm, str) or not algorithm:
        algorithm = name
    seed = config.get("seed")
    if not isinstance(seed, int):
        seed = None
    return TrainingRun(
        name=name,
        algorithm=algorithm,
        seed=seed,
        records=records,
        config=config,
        folder=folder,
        watched=watch_state(folder),
    )


def _read_records(path: Path) -> list[dict[str, Any]]:
    try:
        lines = path.read_bytes().decode(errors="replace").rstrip("\n").split("\n")
    except OSError as error:
        raise unreadable(
            path, error, "Name the folder of a training run.", "cannot be read ({})"
        ) from error
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            record = parse_json(line)
        except ValueError:
            record = None
        if isinstance(record, dict):
            records.append(record)
        elif number < len(lines):  # the last line may be half-written
            raise MismatchError(
                f"{path} is damaged: line {number} is not a JSON object. Repeat the command that "
                "started the run with --resume: it cuts the run back to its newest checkpoint "
                "and continues."
            )
    return records
