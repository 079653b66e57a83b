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
    requested: Sequence[str], compared: Sequence[str]
) -> tuple[list[Algorithm], list[Algorithm]]:
    """The algorithms to analyse, each once, and those to compare; by default the whole table, and
    none.

    Raises a `UsageError` for an unknown algorithm or parameter, for two of one name, and for too
    many to tell apart.
    """
    from mismatch_cli.rules.algorithms.parse import parse_algorithm
    from mismatch_cli.rules.algorithms.table import TABLE

    rivals = list(map(parse_algorithm, compared))
    listed = list(map(parse_algorithm, requested)) or list(TABLE.values())
    judged = list(dict.fromkeys([*listed, *rivals]))
    names = [algorithm.name for algorithm in judged]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(
                f"Two different algorithms are called {name}. Rename one of the mask files."
            )
    from mismatch_cli.metrics.clipping.overlap import MOST_ALGORITHMS

    if len(judged) > MOST_ALGORITHMS:
        raise UsageError(
            f"{len(judged)} algorithms are too many at once. Name at most {MOST_ALGORITHMS}."
        )
    return judged, rivals


def two_algorithms(names: Sequence[str]) -> tuple[str, str] | None:
    """The names of a comparison; None without any, a `UsageError` for one, three, or the same."""
    if not names:
        return None
    if len(set(names)) != 2 or len(names) != 2:
        raise UsageError(
            "--algorithm is typed twice, for two different algorithms: -a dppo-binary-tv -a pg-is"
        )
    own, rival = names
    return own, rival


def with_parameters(names: Sequence[str], parameters: Mapping[str, Any]) -> list[str]:
    """One name and its parameters as `name:parameter=value,…`; a `UsageError` if they could
    belong to several names.
    """
    if not parameters:
        return list(names)
    typed = ",".join(f"{name}={value}" for name, value in parameters.items())
    if len(names) != 1:
        raise UsageError(
            "Parameters belong to one algorithm. For several, write them after each name: "
            f"NAME:{typed}"
        )
    (name,) = names
    separator = "," if ":" in name else ":"
    return [f"{name}{separator}{typed}"]


def clipping_arguments(
    specs: Sequence[str], compare: Sequence[str] | None, *, theory: bool
) -> list[str]:
    """The arguments of an equivalent `clipstats` command, without the traces."""
    arguments: list[str] = []
    for spec in specs:
        arguments += ["--algorithm", spec]
    if compare:
        arguments += ["--compare", *compare]
    if theory:
        arguments.append("--theory")
    return arguments


def limit_sets(
    requested: Sequence[str | Mapping[str, Any]], *, has_baseline: bool
) -> list[LimitSet]:
    """Sets of limits, each once: published ones, TOML files, or the `limits` table of such a file
    as a mapping.

    Raises a `UsageError` for a relative limit without a baseline.
    """
    from mismatch_cli.limits.limit_sets import OF_BASELINE, load_limits, parse_limits
    from mismatch_cli.limits.published_sets import default_set

    names: dict[str, None] = {}  # each once, in order
    tables: list[Mapping[str, Any]] = []
    for choice in requested or [default_set()]:
        if isinstance(choice, str):
            names[choice] = None
        else:
            tables.append(choice)
    sets = list(map(load_limits, names))
    sets += [parse_limits({"limits": table}, "limits") for table in tables]
    if has_baseline:
        return sets
    for limit_set in sets:
        for limit in limit_set.limits:
            if limit.bound in OF_BASELINE:
                raise UsageError(
                    f"{limit.metric} {limit.text} is relative to a baseline. Add --baseline TRACE."
                )
    return sets
