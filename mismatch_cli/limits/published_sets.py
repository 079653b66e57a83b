"""The tables of published limits that frameworks bring, and the sets of `gate --limits` in them.

Importing this is quick: `gate --help` names the default.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import cache
from typing import Any

from mismatch_cli.base import registry


def published_tables() -> Collection[Mapping[str, Any]]:
    """The `limits.toml` of each framework, in the order of their names."""
    return registry.tables("mismatch_cli.frameworks.NAME.limits").values()


@cache
def about_sets() -> Mapping[str, str]:
    """The sets of limits that `gate` offers, by name, with what each is."""
    about: dict[str, str] = {}
    for content in published_tables():
        about |= content["about"]
    return dict(sorted(about.items()))


def default_set() -> str:
    """The set that is checked where none is named: the one marked `default`, or the first."""
    for content in published_tables():
        if "default" in content:
            return str(content["default"])
    return next(iter(about_sets()))
