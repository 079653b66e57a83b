"""Settings that distinguish training runs besides algorithm and seed, each named by what
differs.
"""

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from mismatch_cli.probe.tasks.answers import VERL_RULE
from mismatch_cli.train.studies.runs import TrainingRun

# Lines of a figure, length, how the work is done, watched and kept: nothing here changes an update.
NO_SETTING = {
    "algorithm", "seed", "steps", "recompute", "average_decay", "engine_url", "served_model",
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
    names = [
        ", ".join(_in_words(key, values_of[key][place]) for key in keys)
        for place in range(len(runs))
    ]
    return _numbered(names, _rows(values_of, keys))


def shared_and_different(runs: Sequence[TrainingRun]) -> tuple[list[str], list[str]]:
    """The keys of settings that all runs share, and of those in which they differ."""
    configs = [run.config for run in runs]
    keys = list(dict.fromkeys(chain.from_iterable(configs)))
    different = [key for key in keys if len({repr(config.get(key)) for config in configs}) > 1]
    return [key for key in keys if key not in different], different


def task_of(run: TrainingRun) -> tuple[Any, ...]:
    """The task of a run: the model and what it learns; settings that an older run lacks were
    off.
    """
    return tuple(run.config.get(key, BEFORE.get(key)) or None for key in _TASK)


def short_name(name: str) -> str:
    """A model or data set without its folders; the hub's `owner/name` stays."""
    return name if name.count("/") < 2 and not name.startswith("…/") else name.rsplit("/", 1)[-1]


def _differences(runs: Sequence[TrainingRun]) -> dict[str, list[Any]]:
    """The values of all runs for each key in which they differ: names first, then switches, then
    the rest.
    """
    keys = [
        key
        for key in dict.fromkeys(key for run in runs for key in run.config)
        if key not in NO_SETTING
    ]
    found = {key: values for key in keys if len(set(map(repr, values := _values(runs, key)))) > 1}

    def place(key: str) -> int:
        return (
            _NAMES.index(key)
            if key in _NAMES
            else len(_NAMES) + (not isinstance(found[key][0], bool))
        )

    return {key: found[key] for key in sorted(found, key=place)}


def _values(runs: Sequence[TrainingRun], key: str) -> list[Any]:
    """A key's value in each run; a setting that an older run lacks had its former value, or
    counts as equal.
    """
    known = [run.config[key] for run in runs if key in run.config]
    missing = (
        False if all(isinstance(value, bool) for value in known) else BEFORE.get(key, known[0])
    )
    return [run.config.get(key, missing) for run in runs]


def _rows(values_of: Mapping[str, Sequence[Any]], keys: Sequence[str]) -> list[tuple[str, ...]]:
    """Each run's values for these keys."""
    columns = [list(map(repr, values_of[key])) for key in keys]
    return list(zip(*columns, strict=True)) if columns else []


def _telling(values_of: Mapping[str, Sequence[Any]]) -> list[str]:
    """The keys needed to distinguish all settings, in their order."""

    def settings(keys: Sequence[str]) -> int:
        return len(set(_rows(values_of, keys))) or 1

    chosen: list[str] = []
    for key in values_of:
        if settings([*chosen, key]) > settings(chosen):
            chosen.append(key)
    for key in reversed(chosen):  # an early key may follow from later ones
        others = [other for other in chosen if other != key]
        chosen = others if settings(others) == settings(chosen) else chosen
    return chosen


def _in_words(key: str, value: Any) -> str:
    """`Qwen3-8B-Base` of any owner, `LoRA`, `no router replay`, `learning rate 1e-06`."""
    words = _WORDS.get(key, key.replace("_", " "))
    if isinstance(value, bool):
        return words if value else f"no {words}"
    if key == "environment":
        return _cut(str(value).rsplit("/", 1)[-1]) if value else "no environment"
    if key == "staleness":
        return f"staleness {value}"
    if key in _NAMES and value:
        return _cut(str(value).rsplit("/", 1)[-1])
    return f"{words} {f'{value:g}' if isinstance(value, float) else value or 'by default'}"


def _cut(name: str) -> str:
    """Cut the middle out of a name that is too long for a table row."""
    return (
        name if len(name) <= _LONGEST else f"{name[: _LONGEST // 2]}…{name[-_LONGEST // 2 + 1 :]}"
    )


def _numbered(names: Sequence[str], rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Number settings with the same words, such as two models of one name in two folders."""
    alike: dict[str, list[tuple[str, ...]]] = {}
    numbered = []
    for name, row in zip(names, rows or [()] * len(names), strict=True):
        seen = alike.setdefault(name, [])
        seen += [row] * (row not in seen)
        number = seen.index(row) + 1
        numbered.append(name if number == 1 else f"{name} ({number})")
    return numbered
