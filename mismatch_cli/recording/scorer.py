"""Which model a trace names as the one that can score it again: the manifest knows, so nobody has to type it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mismatch_cli.errors import UsageError
from mismatch_cli.recording.settings import EQUAL, NEWER


def scorer_of(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Flags for the model, and its adapter, that the trace names for the weights asked for; none where one was named.

    Raises a `UsageError` where neither is.
    """
    from mismatch_cli.trace.reader import Trace

    if flags["trainer_model"] is not None:
        return {}
    scorer = _named_scorer(Trace.open(Path(flags["trace"])).manifest, flags["weights"])
    if scorer is None:
        raise UsageError("Name the model that is to score: --trainer-model, a folder or a hub name.")
    found = {"trainer_model": scorer["model"]}
    if scorer.get("adapter") and not flags.get("trainer_adapter"):
        found |= {"trainer_adapter": scorer["adapter"], "merge_adapter": bool(scorer.get("adapter_merged"))}
    return found


def _named_scorer(manifest: Mapping[str, Any], weights: str) -> Mapping[str, Any] | None:
    """The section of the manifest whose `model` holds these weights, with its adapter; None where none is sure to.

    A training run names the model that it began with, whose weights have moved on, and a dump names none.
    """
    command = manifest.get("command")
    if command not in ("probe", "curate", "rescore"):
        return None
    equal = manifest.get("equal_weights")
    if weights == NEWER:
        found = manifest.get("trainer") if equal is False else None
    elif weights == EQUAL:
        found = manifest.get("recomputed") or (manifest.get("trainer") if equal else None)
        found = found or (None if command == "rescore" else _sampler(manifest))
    else:
        found = None
    return found


def _sampler(manifest: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The model that sampled, as it was asked for: a server may call it otherwise."""
    config = manifest.get("config", {})
    rollout = manifest.get("rollout", {})
    adapter = {"adapter": config.get("adapter"), "adapter_merged": False}
    return adapter | {"model": config["model"]} if rollout and isinstance(config.get("model"), str) else None
