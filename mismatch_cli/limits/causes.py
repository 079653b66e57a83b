"""Settings that move log-probabilities, ordered by how often and how far: the one ranking that
all commands use (`causes.toml`), and what a fault means in a framework's configuration.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mismatch_cli.base import registry

# A requested setting, and a version under a second name, map to the setting as it was resolved.
_SAME_AS = (
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
    """Settings known to move log-probabilities: why, who reported it, and how large the gap was.

    `settings` is a pattern of their names.
    """

    settings: str
    why: str
    source: str
    seen: str = ""


CAUSES = tuple(Cause(**row) for row in registry.table_of(__file__)["cause"])
_IN_FRAMEWORKS = "mismatch_cli.frameworks.NAME.causes"


def cause_rank(setting: str) -> int | None:
    """A setting's rank among the known causes, from 1; None if it is not one of them."""
    return next(
        (n for n, cause in enumerate(CAUSES, start=1) if re.fullmatch(cause.settings, setting)),
        None,
    )


def framework_remedy(framework: str, check: str) -> str:
    """What to set in a framework after a finding of a check of `diagnose`; empty if it has no such
    row in its `causes.toml`.
    """
    words: str = registry.tables(_IN_FRAMEWORKS).get(framework, {}).get(check, "")
    return words


def settings_below(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Every setting below a path, by its canonical name: a requested setting has the name of the
    resolved one.
    """
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from settings_below(f"{path}.{name}", inner)
    else:
        yield _canonical(path), value


def _canonical(path: str) -> str:
    for pattern, name in _SAME_AS:
        if re.fullmatch(pattern, path):
            return re.sub(pattern, name, path)
    return path
