"""The named algorithms, each as masks × weight, with its defaults and their source.

`table.toml` has the published ones; `algorithms.toml` in a framework's folder has its settings of
them. Besides the keys that `table.toml` explains, a framework's row may have `after`, a published
algorithm after which it is compared too, and `means`, a word of `MEANINGS` that it shares.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import inf
from typing import Any

from mismatch_cli.base import registry
from mismatch_cli.rules.algorithms.algorithm import Algorithm
from mismatch_cli.rules.algorithms.masks_and_factors import Factor, Mask, factor, mask
from mismatch_cli.rules.policies import Ratio

_PUBLISHED = registry.table_of(__file__)
_FRAMEWORKS = registry.tables("mismatch_cli.frameworks.NAME.algorithms")

Row = Mapping[str, Any]


def _rows() -> list[Row]:
    """The published rows, those of frameworks that follow one of them included; then the others."""
    rows: list[Row] = list(_PUBLISHED["algorithm"])
    for content in _FRAMEWORKS.values():
        for row in content["algorithm"]:
            if "after" not in row:
                rows.append({"variant": True, **row})
                continue
            names = [other["name"] for other in rows]
            rows.insert(names.index(row["after"]) + 1, {"variant": False, **row})
    return rows


def _named(rows: Iterable[Row], *, variant: bool) -> dict[str, Algorithm]:
    return {row["name"]: _algorithm(row) for row in rows if row.get("variant", False) == variant}


def _algorithm(row: Row) -> Algorithm:
    return Algorithm(
        row["name"],
        tuple(map(_mask, row.get("masks", ()))),
        tuple(map(_factor, row.get("weight", ()))),
        row["source"],
        _factor(row["term"]) if "term" in row else None,
    )


def _mask(entry: Row) -> Mask:
    name, ratio, parameters = _rule(entry)
    return mask(name, ratio, **parameters)


def _factor(entry: Row) -> Factor:
    name, ratio, parameters = _rule({"name": "capped-ratio", **entry})
    return factor(name, ratio, **parameters)


def _rule(entry: Row) -> tuple[str, Ratio, dict[str, Any]]:
    """The name, the ratio and the parameters of a mask or factor."""
    parameters = dict(entry)
    current, anchor = parameters.pop("ratio", "trainer/rollout").split("/")
    level = parameters.pop("level", "token")
    gap_cap = parameters.pop("gap_cap", inf)
    return parameters.pop("name"), Ratio(current, anchor, level, gap_cap), parameters


def _meanings() -> dict[str, tuple[str, ...]]:
    meanings = {word: tuple(names) for word, names in _PUBLISHED["meanings"].items()}
    for row in ROWS:
        if "means" in row:
            meanings[row["means"]] += (row["name"],)
    return meanings


ROWS = _rows()
# What is compared where no algorithm is named
TABLE = _named(ROWS, variant=False)
# Settings of single frameworks and experiments, used only where they are named
VARIANTS = _named(ROWS, variant=True)
ALIASES: dict[str, str] = _PUBLISHED["aliases"]
# What the field's words can mean, the usual meaning first
MEANINGS = _meanings()
# Words of the field that everybody uses for one of their meanings: the first
USUAL_WORDS = ("dppo", "grpo")
