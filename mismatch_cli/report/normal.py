"""Is this normal? The verdict of a summary as a section of the report: sentences, bars and what others measured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mismatch_cli import numbers
from mismatch_cli.metrics.gap_table import METRICS
from mismatch_cli.report.view import Column, Section, Table

_FAMILIES = {
    "dense": "dense models",
    "moe": "mixtures of experts",
    "": "all models: whether this one is dense is not known",
}
_DIAGNOSE = (
    "No bar is a universal tolerance, and they differ from each other by more than ten times. Most large gaps are "
    "bookkeeping, not arithmetic: `mismatch-cli diagnose` looks for that."
)


def verdict_section(summary: Mapping[str, Any]) -> Section:
    """Where the numbers stand; every row with its source."""
    verdict = summary["verdict"]
    text = " ".join([*verdict["sentences"], _DIAGNOSE])
    tables = [_bars(verdict, pair) for pair in dict.fromkeys(row["pair"] for row in verdict["bars"])]
    if verdict["measured"]:
        tables.append(_measured(verdict))
    return Section("Is this normal?", text, tables=tuple(tables))


def _bars(verdict: Mapping[str, Any], pair: str) -> Table:
    with_staleness = ": the trainer as it is now, with staleness" if pair == "total" else ""
    columns = (
        Column("published by", kind="text"),
        Column("standing", kind="text"),  # second: what a phone still shows
        Column("healthy if", kind="text"),
        Column("here"),
    )
    rows = (
        (f"{row['who']} ({row['source']})", row["standing"], _limits(row), _here(row))
        for row in verdict["bars"]
        if row["pair"] == pair
    )
    return Table(f"Published bars{with_staleness}", columns, tuple(rows))


def _limits(row: Mapping[str, Any]) -> str:
    name = METRICS[row["metric"]].label
    text = f"{f'size of {name}' if row['absolute'] else name} ≤ {row['healthy']:g}"
    return text if row["broken"] == row["healthy"] else f"{text}; broken > {row['broken']:g}"


def _here(row: Mapping[str, Any]) -> str:
    return numbers.plus_minus(row["value"], row["low"], row["high"])


def _measured(verdict: Mapping[str, Any]) -> Table:
    columns = (Column("who", kind="text"), Column("metric", kind="text"), Column("there"), Column("here"))
    rows = tuple(
        (_setting(row), METRICS[row["metric"]].label, _range(row), _number(row["metric"], row["value"]))
        for row in verdict["measured"]
    )
    return Table("Measured by others", columns, rows, note=f"The nearest of {_FAMILIES[verdict['family']]}.")


def _setting(row: Mapping[str, Any]) -> str:
    broken = ", broken" if row["state"] else ""
    source = "; ".join(filter(None, (row["source"], row["derived"])))
    return f"{row['model']}: {row['setup']}{broken} ({source})"


def _range(row: Mapping[str, Any]) -> str:
    low, high = (_number(row["metric"], row[end]) for end in ("low", "high"))
    return low if low == high else f"{low} – {high}"


def _number(metric: str, value: float) -> str:
    return numbers.near(value, 1) if METRICS[metric].agreement == 1 else numbers.number(value)
