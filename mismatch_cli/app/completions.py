"""Shell completion of the names that flags and arguments take: algorithms, runs and
frameworks.
"""

from __future__ import annotations

from pathlib import Path

from mismatch_cli.base import registry
from mismatch_cli.base.places import bundled_names
from mismatch_cli.frameworks import DASHBOARDS

# Of a run, a trace, a training run
_MARKS = ("trace/manifest.json", "manifest.json", "metrics.jsonl")


def algorithms() -> list[str]:
    """Algorithms with their aliases, variants of single frameworks, masks, and weights of
    installed packages.
    """
    from mismatch_cli.rules import trust_regions, weights
    from mismatch_cli.rules.algorithms.table import ALIASES, TABLE, USUAL_WORDS, VARIANTS

    return [
        *TABLE,
        *ALIASES,
        *USUAL_WORDS,
        *VARIANTS,
        *registry.names(trust_regions.PACKAGE),
        *registry.installed(weights.PACKAGE),
    ]


def runs() -> list[str]:
    """Runs and traces in the current folder, and the bundled traces."""
    found = (path.relative_to(".").parts[0] for mark in _MARKS for path in Path().glob(f"*/{mark}"))
    return [*sorted(set(found)), *bundled_names()]


def frameworks() -> list[str]:
    """Frameworks whose metrics are known."""
    return registry.names(DASHBOARDS)


def limits() -> list[str]:
    """The published sets of limits."""
    from mismatch_cli.limits.limit_sets import presets

    return presets()
