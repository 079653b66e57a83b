"""Which training runs repeat the sanity test of the DPPO paper, and the values that it starts and
ends with.

A run repeats it if its recorded settings are those of `--preset paper`: the name of a preset is
not recorded, and would not say what flags changed.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from mismatch_cli.base.numbers import number
from mismatch_cli.base.text import parse_toml
from mismatch_cli.rules.algorithms.table import ALIASES
from mismatch_cli.train.studies.paper_values import ENDINGS, READ_TO, PaperEnding
from mismatch_cli.train.studies.run_settings import BEFORE, NO_SETTING
from mismatch_cli.train.studies.runs import TrainingRun

_PRESET = Path(__file__).parents[1] / "presets" / "paper.toml"
# What the paper also states and the preset leaves at its default
_DEFAULTS: Mapping[str, Any] = {
    "temperature": 1.0,
    "epochs": 1,
    "kv_cache_dtype": "auto",
    "lora": False,
    "reward": "",
    "environment": "",
    "episodes": 0,
    "num_problems": 0,
    "dynamic_sampling": 0,
}
_EVALUATION = "eval_"
_STARTS = "expected"  # the preset's table of values that a run starts with: no setting
_AIME24 = "aime_2024"


class PaperValue(NamedTuple):
    """A value of the paper, as exactly as its figure can be read."""

    low: float
    high: float
    words: str  # empty for all ends but the highest, if algorithms end differently
    is_start: bool = False


def repeats_paper(run: TrainingRun, *, evaluation: bool = False) -> bool:
    """Whether a run has every setting of the paper's sanity test that changes an update, or that
    changes its `evaluation`.

    Models and data sets are compared by name, since they may be local copies.
    """
    for key, value in _stated().items():
        counts = evaluation or not key.startswith(_EVALUATION)
        if counts and _setting(run, key) != _comparable(value):
            return False
    return True


@cache
def _stated() -> dict[str, Any]:
    settings = {**_DEFAULTS, **_preset()}
    return {key: value for key, value in settings.items() if key not in (*NO_SETTING, _STARTS)}


@cache
def _preset() -> dict[str, Any]:
    return parse_toml(_PRESET.read_text(encoding="utf-8"))


def _start_of(key: str) -> float:
    """What the preset expects of the first line of metrics.jsonl."""
    targets = _preset()[_STARTS]["values"].values()
    values = {target["key"]: target["value"] for target in targets}
    return float(values[key])


def _setting(run: TrainingRun, key: str) -> Any:
    return _comparable(run.config.get(key, BEFORE.get(key)))


def _comparable(value: Any) -> Any:
    """A setting in the form in which two runs may share it: names without their folders."""
    return value.rsplit("/", 1)[-1] if isinstance(value, str) else value


def reward_of_paper(runs: Sequence[TrainingRun]) -> list[PaperValue]:
    """The mean reward with which runs of the paper start and end; empty unless all repeat it."""
    return _values(runs, _start_of("reward"), lambda ending: ending.reward, most=1.0)


def mismatch_of_paper(runs: Sequence[TrainingRun]) -> list[PaperValue]:
    """The mean |π − μ| at the weights that sampled with which runs of the paper start and end; empty
    unless all repeat it.
    """
    return _values(runs, _start_of("mismatch.abs_dp_mean"), lambda ending: ending.mismatch)


def accuracy_of_paper(runs: Sequence[TrainingRun], name: str) -> list[PaperValue]:
    """The accuracy on AIME24 with which it starts; empty for another set, or if a run evaluates in
    another way.
    """
    if _AIME24 not in name or not all(repeats_paper(run, evaluation=True) for run in runs):
        return []
    start = _start_of(f"eval.{_AIME24}")
    return [_start(start, f"paper, AIME24 start: {number(start)}", 1.0)]


def _values(
    runs: Sequence[TrainingRun],
    start: float,
    end_of: Callable[[PaperEnding], float | None],
    most: float = float("inf"),
) -> list[PaperValue]:
    if not runs or not all(map(repeats_paper, runs)):
        return []
    names = {ALIASES.get(run.algorithm, run.algorithm) for run in runs}
    endings = {end_of(ENDINGS[name]) for name in names if name in ENDINGS}
    values = [_start(start, f"paper, start: {number(start)}", most)]
    # Lines that are close would overlap in their words: only the highest has some.
    words = "paper, ends" if len(endings) > 1 else "paper, end: {}"
    for end in sorted(filter(None, endings), reverse=True):
        values.append(_read(end, words.format(number(end)), most))
        words = ""
    return values


def _start(value: float, words: str, most: float) -> PaperValue:
    return _read(value, words, most)._replace(is_start=True)


def _read(value: float, words: str, most: float) -> PaperValue:
    return PaperValue(value * (1 - READ_TO), min(most, value * (1 + READ_TO)), words)
