"""Is this normal? The verdict of a summary as a section of the report: sentences, bars and what others measured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mismatch_cli import numbers
from mismatch_cli.metrics.gap_table import METRICS
from mismatch_cli.report.tables import col, named, plain, table, text
from mismatch_cli.report.view import Section, Table

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
    tables = [_bars(verdict, pair) for pair in dict.fromkeys(row["pair"] for row in verdict["bars"])]
    if verdict["measured"]:
        tables.append(_measured(verdict))
    return Section("Is this normal?", " ".join([*verdict["sentences"], _DIAGNOSE]), tables=tuple(tables))


def _bars(verdict: Mapping[str, Any], pair: str) -> Table:
    with_staleness = ": the trainer as it is now, with staleness" if pair == "total" else ""
    return table(
        f"Published bars{with_staleness}",
        [row for row in verdict["bars"] if row["pair"] == pair],
        [
            text("published by", lambda row: f"{row['who']} ({row['source']})"),
            named("standing", "standing"),  # second: what a phone still shows
            text("healthy if", _limits),
            col("here", plain),
        ],
    )


def _limits(row: Mapping[str, Any]) -> str:
    name = METRICS[row["metric"]].label
    healthy = f"{f'size of {name}' if row['absolute'] else name} ≤ {row['healthy']:g}"
    return healthy if row["broken"] == row["healthy"] else f"{healthy}; broken > {row['broken']:g}"


def _measured(verdict: Mapping[str, Any]) -> Table:
    return table(
        "Measured by others",
        verdict["measured"],
        [
            text("who", _setting),
            text("metric", lambda row: METRICS[row["metric"]].label),
            col("there", _range),
            col("here", lambda row: _number(row["metric"], row["value"])),
        ],
        note=f"The nearest of {_FAMILIES[verdict['family']]}.",
    )


def _setting(row: Mapping[str, Any]) -> str:
    broken = ", broken" if row["state"] else ""
    source = "; ".join(filter(None, (row["source"], row["derived"])))
    return f"{row['model']}: {row['setup']}{broken} ({source})"


def _range(row: Mapping[str, Any]) -> str:
    low, high = (_number(row["metric"], row[end]) for end in ("low", "high"))
    return low if low == high else f"{low} – {high}"


def _number(metric: str, value: float) -> str:
    return numbers.near(value, 1) if METRICS[metric].agreement == 1 else numbers.number(value)
