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
    r".*\.(seed|digest|source|location|count|skipped|limit|shuffle_seed|noise_responses|folder|path|paths|file|files)"
    r"|rollout\.(url|served_model|timeout|patience)"
    r"|libraries\.(python|numpy|pyarrow|math-verify|mismatch-cli)|prompts\..*|config\.(prompts\..*|samples_per_prompt)"
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
    settings, other_settings = _settings(first, other, sections), _settings(other, first, sections)
    names = list(dict.fromkeys([*settings, *other_settings]))
    rows = [
        _row(name, settings.get(name), other_settings.get(name))
        for name in names
        if settings.get(name) != other_settings.get(name)
    ]
    rows = [row for row in rows if not _repeats_trainer(row, rows)]
    return sorted(
        rows, key=lambda row: (row.harmless, row.in_one_only, row.likely or len(CAUSES) + 1)
    )


def _settings(
    manifest: Mapping[str, Any], other: Mapping[str, Any], sections: Sequence[str]
) -> dict[str, Any]:
    """Every setting once: resolved values take precedence over requested ones.

    A section that the other manifest lacks counts as one setting.
    """
    found: dict[str, Any] = {}
    for section in sections:
        if section in manifest:
            known = section in other or not isinstance(manifest[section], Mapping)
            for name, value in settings_below(section, manifest[section] if known else "recorded"):
                found.setdefault(name, value)
    return found


def _row(name: str, first: Any, other: Any) -> SettingDifference:
    if likely := cause_rank(name):
        cause = CAUSES[likely - 1]
        return SettingDifference(name, first, other, likely, False, cause.why, cause.source)
    return SettingDifference(name, first, other, None, bool(_HARMLESS.fullmatch(name)), "", "")


def _repeats_trainer(row: SettingDifference, rows: list[SettingDifference]) -> bool:
    """Whether the trainer at the rollout's weights differs exactly as the trainer does, or is
    absent.
    """
    section, _, name = row.setting.partition(".")
    trainer_pairs = [
        (other.first, other.other) for other in rows if other.setting == f"trainer.{name}"
    ]
    return section == "recomputed" and (not name or (row.first, row.other) in trainer_pairs)
