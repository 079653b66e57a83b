"""What to do about a finding, as far as it fits the trace: the settings of the framework that made
it, without what was typed already.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from mismatch_cli.frameworks import dialects
from mismatch_cli.limits.causes import framework_remedy
from mismatch_cli.trace.recorder_notes import RECORD

# Whose models on record have the weights of every response; a run that trains has moved on
_OF_FIXED_WEIGHTS = ("probe", "rescore", "curate")


def framework_of(manifest: Mapping[str, Any]) -> str:
    """The framework whose run a trace is of, as `dialects` names it; empty if it is none."""
    name = str(manifest.get("imported", {}).get("format", ""))
    if name == RECORD:
        name = str(manifest.get("trainer", {}).get("name") or "")
    name = name.lower().replace("_", "-")
    if name in dialects.names():
        return name
    return ""


def has_fixed_models(manifest: Mapping[str, Any]) -> bool:
    """Whether the models on record are those of every response, so that `bisect` can load them."""
    named = all(manifest.get(side, {}).get("model") for side in ("rollout", "trainer"))
    command = manifest.get("command", "probe")
    return named and command in _OF_FIXED_WEIGHTS and "imported" not in manifest


def in_the_framework(check: str, manifest: Mapping[str, Any]) -> str:
    """What to set in the framework that made the trace; empty if that is not known."""
    return framework_remedy(framework_of(manifest), check)


def clauses_without(advice: str, typed: Collection[str]) -> str:
    """An advice without the clauses, parted by semicolons, that name a flag that was typed; empty
    if none is left.
    """
    clauses = advice.rstrip(".").split("; ")
    fitting = list(clauses)
    for flag in typed:
        fitting = [clause for clause in fitting if flag not in clause]
    if fitting == clauses:
        return advice
    if not fitting:
        return ""
    sentence = "; ".join(fitting)
    return f"{sentence[0].upper()}{sentence[1:]}."
