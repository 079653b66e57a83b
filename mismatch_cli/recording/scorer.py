"""Which model a trace names as the one that can score it again: the manifest knows, so nobody has to type it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mismatch_cli.recording.config import EQUAL, NEWER


def named_scorer(manifest: Mapping[str, Any], weights: str) -> Mapping[str, Any] | None:
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
