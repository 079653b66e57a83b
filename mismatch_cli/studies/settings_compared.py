"""The settings in which two manifests differ, most frequent causes of different
log-probabilities first.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mismatch_cli.base.errors import UsageError
from mismatch_cli.limits.causes import CAUSES, cause_rank, settings_below

NAMES = "ABCDEF"  # of the traces, one per distinguishable colour
_SECTIONS = (
    "rollout", "trainer", "recomputed", "equal_weights", "threads", "top_logprobs", "libraries",
    "prompts", "training",
    "imported", "config",
)  # fmt: skip
# Source, amount and random seed: these change which responses exist, not how one is scored.
_HARMLESS = re.compile(
    r".*\.(seed|digest|source|location|count|skipped|limit|shuffle_seed|noise_responses)"
    r"|.*\.(folder|path|paths|file|files)"
    r"|rollout\.(url|served_model|timeout|patience)"
    r"|libraries\.(python|numpy|pyarrow|math-verify|mismatch-cli)"
    r"|prompts\..*|config\.(prompts\..*|samples_per_prompt)"
    r"|imported\.(rows\w*|tokens|steps|file_count|left_out.*|noted.*|libraries.*)"
    r"|config\.sampling\.max_tokens|rollout\.max_model_len|top_logprobs|config\.reward.*"
    r"|config\.(answer_format|grader|routes|keep_routes)"
)


def check_trace_count(traces: int) -> None:
    """Raise a `UsageError` for more traces than colours can distinguish."""
    if traces > len(NAMES):
        raise UsageError(f"{traces} traces are too many: name at most {len(NAMES)}.")


@dataclass(frozen=True)
class SettingDifference:
    """One setting in which two traces differ; None if a manifest lacks it.

    `likely` is its rank among the known causes, from 1, or None if it is not a known cause;
    `harmless` ones change which responses exist, not how one is scored.
    """

    setting: str
    first: Any
    other: Any
    likely: int | None
    harmless: bool
    why: str
    source: str

    @property
    def in_one_only(self) -> bool:
        return self.first is None or self.other is None


def settings_diff(
    first: Mapping[str, Any], other: Mapping[str, Any], *, at_equal_weights: bool = False
) -> list[SettingDifference]:
    """The differing settings, leaf by leaf: known causes by rank, then unknown ones, then harmless
    ones.

    A setting that only one manifest has comes after those that both have. A gap `at_equal_weights`
    has no staleness.
    """
    sections = [name for name in _SECTIONS if not at_equal_weights or name != "equal_weights"]
    settings = _settings(first, other, sections)
    other_settings = _settings(other, first, sections)
    by_name = {}
    for name in dict.fromkeys([*settings, *other_settings]):
        value, other_value = settings.get(name), other_settings.get(name)
        if value != other_value:
            by_name[name] = _difference(name, value, other_value)
    rows = [row for row in by_name.values() if not _repeats_trainer(row, by_name)]
    return sorted(
        rows, key=lambda row: (row.harmless, row.in_one_only, row.likely or len(CAUSES) + 1)
    )


def _settings(
    manifest: Mapping[str, Any], other: Mapping[str, Any], sections: Sequence[str]
) -> dict[str, Any]:
    """Every setting once: resolved values take precedence over requested ones.

    A section that the other manifest lacks counts as one setting.
    """
    settings: dict[str, Any] = {}
    for section in sections:
        if section not in manifest:
            continue
        content = manifest[section]
        if isinstance(content, Mapping) and section not in other:
            content = "recorded"
        for name, value in settings_below(section, content):
            settings.setdefault(name, value)
    return settings


def _difference(name: str, first: Any, other: Any) -> SettingDifference:
    likely = cause_rank(name)
    if likely is None:
        return SettingDifference(name, first, other, None, bool(_HARMLESS.fullmatch(name)), "", "")
    cause = CAUSES[likely - 1]
    return SettingDifference(name, first, other, likely, False, cause.why, cause.source)


def _repeats_trainer(row: SettingDifference, by_name: Mapping[str, SettingDifference]) -> bool:
    """Whether the trainer at the rollout's weights differs exactly as the trainer does, or is
    absent.
    """
    section, _, name = row.setting.partition(".")
    if section != "recomputed":
        return False
    trainer = by_name.get(f"trainer.{name}")
    is_equal = trainer is not None and (trainer.first, trainer.other) == (row.first, row.other)
    return not name or is_equal
