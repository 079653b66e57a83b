"""Settings that distinguish training runs besides algorithm and seed, each named by what
differs.
"""

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from mismatch_cli.probe.tasks.answers import VERL_RULE
from mismatch_cli.train.studies.runs import TrainingRun

AVERAGE = "average_decay"  # changes the updates only of algorithms that measure from the average
# Algorithm and seed are what the lines of a figure are; the others change no update: length, memory,
# processes, evaluations, records.
NO_SETTING = {
    "algorithm", "seed", "steps", "recompute", AVERAGE, "engine_url", "served_model",
    "weight_transfer",  # of earlier versions
    "weights_folder", "engine_memory", "tensor_parallel", "token_budget", "gradient_checkpointing",
    "cpu_offload",
    "threads", "eval_every", "eval_samples", "reward_seconds", "environment_seconds",
    "environment_processes",
    "trace_every", "checkpoint_every", "bounds_share",
}  # fmt: skip
# The values in effect before the setting existed.
BEFORE: dict[str, Any] = {
    "max_prompt_tokens": 0, "answer_format": "auto", "grader": VERL_RULE, "environment": "",
    "episodes": 0, "eval_episodes": 0,
    "max_turns": 10, "turn_tokens": 0, "dynamic_sampling": 0, "max_context_tokens": 0,
    "staleness": 0,
    "eval_temperature": 0.0,
    "eval_top_p": 1.0,
}  # fmt: skip
_NAMES = ("model", "dataset", "eval_dataset")  # their values need no label
# Rewards are comparable between runs with equal values of these.
_TASK = ("model", "dataset", "split", "num_problems", "reward", "grader", "environment", "episodes")
_WORDS = {"lora": "LoRA", "replay_routes": "router replay"}
_LONGEST = 28  # letters of a model's name
SEPARATOR = " · "  # between an algorithm and its setting


def settings_of_runs(runs: Sequence[TrainingRun]) -> list[str]:
    """Each run's setting, in the fewest differences that distinguish all settings; empty if
    there is only one.
    """
    values_of = _differences(runs)
    keys = _telling(values_of)
    names = []
    for place in range(len(runs)):
        words = [_in_words(key, values_of[key][place]) for key in keys]
        names.append(", ".join(words))
    return _numbered(names, _rows(values_of, keys))


def shared_and_different(runs: Sequence[TrainingRun]) -> tuple[list[str], list[str]]:
    """The keys of settings that all runs share, and of those in which they differ."""
    configs = [run.config for run in runs]
    shared: list[str] = []
    different: list[str] = []
    for key in dict.fromkeys(chain.from_iterable(configs)):
        values = {repr(config.get(key)) for config in configs}
        (different if len(values) > 1 else shared).append(key)
    return shared, different


def task_of(run: TrainingRun) -> tuple[Any, ...]:
    """The task of a run: the model and what it learns; settings that an older run lacks were
    off.
    """
    return tuple(run.config.get(key, BEFORE.get(key)) or None for key in _TASK)


def short_name(name: str) -> str:
    """A model or data set without its folders; the hub's `owner/name` stays."""
    is_path = name.count("/") > 1 or name.startswith("…/")
    return _without_folders(name) if is_path else name


def _without_folders(name: str) -> str:
    return name.rstrip("/").rsplit("/", 1)[-1]


def _differences(runs: Sequence[TrainingRun]) -> dict[str, list[Any]]:
    """The values of all runs for each key in which they differ: names first, then switches, then
    the rest.
    """
    values_of = {}
    for key in dict.fromkeys(chain.from_iterable(run.config for run in runs)):
        if key in NO_SETTING and key != AVERAGE:
            continue
        values = _decays(runs) if key == AVERAGE else _values(runs, key)
        if len(set(map(repr, values))) > 1:
            values_of[key] = values

    def place(key: str) -> int:
        if key in _NAMES:
            return _NAMES.index(key)
        is_switch = isinstance(values_of[key][0], bool)
        return len(_NAMES) if is_switch else len(_NAMES) + 1

    return {key: values_of[key] for key in sorted(values_of, key=place)}


def _values(runs: Sequence[TrainingRun], key: str) -> list[Any]:
    """A key's value in each run; a setting that an older run lacks had its former value, or
    counts as equal.
    """
    recorded = [run.config[key] for run in runs if key in run.config]
    former = BEFORE.get(key, recorded[0])
    # A switch was off before it existed.
    if all(isinstance(value, bool) for value in recorded):
        former = False
    return [run.config.get(key, former) for run in runs]


def _decays(runs: Sequence[TrainingRun]) -> list[Any]:
    """The decay of the weights' average in each run; in one that does not measure from it, the
    first of the others'.
    """
    from mismatch_cli.rules.algorithms.table import TABLE, VARIANTS

    averaging = {name for name, row in (TABLE | VARIANTS).items() if row.needs_average}
    decays = []
    for run in runs:
        measures_from_it = run.algorithm.partition(":")[0] in averaging
        decays.append(run.config.get(AVERAGE) if measures_from_it else None)
    first = next(filter(None, decays), None)
    return [first if decay is None else decay for decay in decays]


def _rows(values_of: Mapping[str, Sequence[Any]], keys: Sequence[str]) -> list[tuple[str, ...]]:
    """Each run's values for these keys."""
    if not keys:
        return []
    columns = [map(repr, values_of[key]) for key in keys]
    return list(zip(*columns, strict=True))


def _telling(values_of: Mapping[str, Sequence[Any]]) -> list[str]:
    """The keys needed to distinguish all settings, in their order."""

    def settings(keys: Sequence[str]) -> int:
        """How many settings these keys tell apart."""
        return len(set(_rows(values_of, keys))) or 1

    chosen: list[str] = []
    for key in values_of:
        if settings([*chosen, key]) > settings(chosen):
            chosen.append(key)
    for key in reversed(chosen):  # an early key may follow from later ones
        others = [other for other in chosen if other != key]
        if settings(others) == settings(chosen):
            chosen = others
    return chosen


def _in_words(key: str, value: Any) -> str:
    """`Qwen3-8B-Base` of any owner, `LoRA`, `no router replay`, `learning rate 1e-06`."""
    words = _WORDS.get(key, key.replace("_", " "))
    if isinstance(value, bool):
        return words if value else f"no {words}"
    if key == "environment" and not value:
        return "no environment"
    if key == "environment" or (key in _NAMES and value):
        return _cut(",".join(map(_without_folders, str(value).split(","))))
    # Elsewhere 0 means the default, while as a staleness it is a number like any other.
    if key == "staleness":
        return f"staleness {value}"
    if isinstance(value, float):
        return f"{words} {value:g}"
    return f"{words} {value or 'by default'}"


def _cut(name: str) -> str:
    """Cut the middle out of a name that is too long for a table row."""
    if len(name) <= _LONGEST:
        return name
    return f"{name[: _LONGEST // 2]}…{name[-_LONGEST // 2 + 1 :]}"


def _numbered(names: Sequence[str], rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Number settings with the same words, such as two models of one name in two folders."""
    if not rows:
        return list(names)
    rows_of: dict[str, list[tuple[str, ...]]] = {}
    numbered = []
    for name, row in zip(names, rows, strict=True):
        alike = rows_of.setdefault(name, [])
        if row not in alike:
            alike.append(row)
        number = alike.index(row) + 1
        numbered.append(name if number == 1 else f"{name} ({number})")
    return numbered
