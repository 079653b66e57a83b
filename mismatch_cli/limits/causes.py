"""Settings that move log-probabilities, ordered by how often and how far: the one ranking that
all commands use (`causes.toml`), and what a fault means in a framework's configuration.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mismatch_cli.base import registry

# A requested setting, and a version under a second name, map to the setting as it was resolved.
_RESOLVED_NAMES = (
    (r"config\.trainer\.(\w+)", r"trainer.\1"),
    (r"config\.rollout_dtype", "rollout.dtype"),
    (r"config\.engine_args\.(\w+)", r"rollout.\1"),
    (r"config\.(engine|model|seed)", r"rollout.\1"),
    (r"config\.(threads|top_logprobs)", r"\1"),
    (r"trainer\.threads|recomputed\.threads", "threads"),
    (r"(?:trainer|recomputed)\.(torch|transformers)", r"libraries.\1"),
    (r"libraries\.vllm(?:-cpu)?", "rollout.version"),
    (r"config\.prompts\.location", "prompts.source"),
    (r"config\.prompt_template", "prompts.template"),
)


@dataclass(frozen=True)
class Cause:
    """Settings known to move log-probabilities: a pattern of their names, why they do, who reported
    it, and how large the gap was there.
    """

    settings: str
    why: str
    source: str
    seen: str = ""


CAUSES = tuple(Cause(**row) for row in registry.table_of(__file__)["cause"])
_IN_FRAMEWORKS = "mismatch_cli.frameworks.NAME.causes"


def cause_rank(setting: str) -> int | None:
    """A setting's rank among the known causes, from 1; None if it is not one of them."""
    for rank, cause in enumerate(CAUSES, start=1):
        if re.fullmatch(cause.settings, setting):
            return rank
    return None


def framework_remedy(framework: str, check: str) -> str:
    """What to set in a framework after a finding of a check of `diagnose`; empty if it has no such
    row in its `causes.toml`.
    """
    remedies = registry.tables(_IN_FRAMEWORKS).get(framework, {})
    return str(remedies.get(check, ""))


def settings_below(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Every setting below a path, by its canonical name: a requested setting has the name of the
    resolved one. A path that holds a plain value is a setting itself.
    """
    if not isinstance(value, Mapping):
        yield _canonical_name(path), value
        return
    for name, inner in value.items():
        yield from settings_below(f"{path}.{name}", inner)


def _canonical_name(path: str) -> str:
    for pattern, resolved_name in _RESOLVED_NAMES:
        if re.fullmatch(pattern, path):
            return re.sub(pattern, resolved_name, path)
    return path
