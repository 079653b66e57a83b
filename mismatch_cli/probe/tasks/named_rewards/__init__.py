"""Rewards that the package brings, one per file: `--reward NAME` instead of FILE.py:FUNCTION.

A file defines

    NEEDS_ANSWER: bool                                whether it uses `right`
    def reward(response: str, right: float) -> float  the reward of a response, from 0 to 1

`right` is 1 where the product's own grading calls the response right, else 0; NaN without
NEEDS_ANSWER, where nothing is graded. The file's name is the reward's name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, cast

from mismatch_cli.base import registry
from mismatch_cli.base.errors import UsageError

PACKAGE = "mismatch_cli.probe.tasks.named_rewards"


class NamedReward(Protocol):
    """What a file in this folder defines."""

    NEEDS_ANSWER: bool
    reward: Callable[[str, float], float]


def check(name: str) -> None:
    """A `UsageError` that suggests the nearest name for an unknown one; imports nothing."""
    if name not in names():
        raise UsageError(
            f"{registry.unknown_name('reward', name, names())} Or name a function of your own as "
            "path/to/file.py:function."
        )


def find(name: str) -> NamedReward:
    """The reward with a public name; a `UsageError` for an unknown one."""
    check(name)
    return cast(NamedReward, registry.load(PACKAGE, name, "reward"))


def names() -> list[str]:
    """The public names; imports nothing."""
    return registry.names(PACKAGE)
