"""Algorithms and limits that commands and the library are asked for by name, checked before
anything reads a trace.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mismatch_cli.base.errors import UsageError

if TYPE_CHECKING:
    from mismatch_cli.limits.limit_sets import LimitSet
    from mismatch_cli.rules.algorithms.algorithm import Algorithm


def algorithms(
    asked: Sequence[str], compared: Sequence[str]
) -> tuple[list[Algorithm], list[Algorithm]]:
    """The algorithms to analyse, each once, and those to compare; by default the whole table, and
    none.

    Raises a `UsageError` for an unknown algorithm or parameter, for two of one name, and for too
    many to tell apart.
    """
    from mismatch_cli.rules.algorithms.parse import parse_algorithm
    from mismatch_cli.rules.algorithms.table import TABLE

    chosen = [parse_algorithm(spec) for spec in compared]
    listed = [parse_algorithm(spec) for spec in asked] if asked else list(TABLE.values())
    judged = list(dict.fromkeys([*listed, *chosen]))
    names = [algorithm.name for algorithm in judged]
    if repeated := next((name for name in names if names.count(name) > 1), None):
        raise UsageError(
            f"Two different algorithms are called {repeated}. Rename one of the mask files."
        )
    from mismatch_cli.metrics.clipping.overlap import MOST_ALGORITHMS

    if len(judged) > MOST_ALGORITHMS:
        raise UsageError(
            f"{len(judged)} algorithms are too many at once. Name at most {MOST_ALGORITHMS}."
        )
    return judged, chosen


def two_algorithms(named: Sequence[str]) -> tuple[str, str] | None:
    """The names of a comparison; None without any, a `UsageError` for one, three, or the same."""
    if not named:
        return None
    if len(set(named)) != 2 or len(named) != 2:
        raise UsageError(
            "--algorithm is typed twice, for two different algorithms: -a dppo-binary-tv -a pg-is"
        )
    own, rival = named
    return own, rival


def with_parameters(names: Sequence[str], parameters: Mapping[str, Any]) -> list[str]:
    """One name and its parameters as `name:parameter=value,…`; a `UsageError` if they could
    belong to several names.
    """
    if parameters and len(names) != 1:
        example = ",".join(f"{name}={value}" for name, value in parameters.items())
        raise UsageError(
            "Parameters belong to one algorithm. For several, write them after each name: "
            f"NAME:{example}"
        )
    typed = [f"{name}={value}" for name, value in parameters.items()]
    return [name + ("," if ":" in name else ":") * bool(typed) + ",".join(typed) for name in names]


def clipping_arguments(
    specs: Sequence[str], compare: Sequence[str] | None, *, theory: bool
) -> list[str]:
    """The arguments of an equivalent `clipstats` command, without the traces."""
    arguments = [part for spec in specs for part in ("--algorithm", spec)]
    return arguments + (["--compare", *compare] if compare else []) + ["--theory"] * theory


def limit_sets(named: Sequence[str | Mapping[str, Any]], *, has_baseline: bool) -> list[LimitSet]:
    """Sets of limits, each once: published ones, TOML files, or the `limits` table of such a file
    as a mapping.

    Raises a `UsageError` for a relative limit without a baseline.
    """
    from mismatch_cli.limits.limit_sets import OF_BASELINE, load_limits, parse_limits
    from mismatch_cli.limits.published_sets import default_set

    names = dict.fromkeys(name for name in named or [default_set()] if isinstance(name, str))
    sets = [load_limits(name) for name in names]
    sets += [
        parse_limits({"limits": table}, "limits") for table in named if not isinstance(table, str)
    ]
    relative = [
        limit for limit_set in sets for limit in limit_set.limits if limit.bound in OF_BASELINE
    ]
    if relative and not has_baseline:
        raise UsageError(
            f"{relative[0].metric} {relative[0].text} is relative to a baseline. Add --baseline "
            "TRACE."
        )
    return sets
