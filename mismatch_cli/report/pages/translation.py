"""The page of `report --as`: one framework's metrics of the gap, or metric names that frameworks
define differently.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from mismatch_cli.base import numbers
from mismatch_cli.base.json_form import from_json
from mismatch_cli.report.about import partial_notes, who_facts
from mismatch_cli.report.tables import Col, Row, col, filled, named, pairs_table, table
from mismatch_cli.report.view import ReportView, Section, Table
from mismatch_cli.studies.translation import ALL, Translation
from mismatch_cli.trace.origin import About

_DIGITS = 6
_EXCLUDED = (
    "left out of metrics of log-probabilities, where a framework would show infinity. Their "
    "ratio is 0."
)
_AVERAGE = (
    "Measured over all tokens of the trace at once; a dashboard averages such numbers over "
    "micro-batches, ranks or steps. In the formulas π is the first of the two policies compared "
    "and μ the second, both for the sampled token; d = log π − log μ in nats, r = π/μ, E the "
    "mean over tokens, E_y over responses, Σd the sum over a response."
)


def page(translation: Translation) -> ReportView:
    """The page of one framework; for `all`, names that several frameworks use for different
    numbers.
    """
    result, name = translation.result, translation.asked
    frameworks = result["frameworks"]
    if name == ALL:
        sections = tuple(_words(frameworks))
        title, headline = (
            "Same metric name, different definition",
            "What each framework would log for this trace.",
        )
    else:
        sections = tuple(
            _framework(framework, content) for framework, content in frameworks.items()
        )
        title, headline = f"Metrics of {name}", f"What {name} would log for this trace."
    outside = result["out_of_support"]
    tokens = "1 token has" if outside == 1 else f"{numbers.count(outside)} tokens have"
    notes = (f"{tokens} log π = −∞: {_EXCLUDED}",) if outside else ()
    return ReportView(
        title=title,
        about=who_facts(from_json(About, result["about"])),
        notes=(*partial_notes(from_json(About, result["about"])), *notes),
        headline=headline,
        outline=sections,
    )


def _framework(name: str, framework: Mapping[str, Any]) -> Section:
    """A table for each pair of policies that the framework compares, and notes on single
    metrics.
    """
    rows = framework["metrics"]
    columns = [
        named("metric", "name"),
        col("value", _value),
        named("formula", "formula", optional=True),
    ]
    noted: dict[str, list[str]] = {}
    for row in rows:
        for note in row["notes"]:
            noted.setdefault(note, []).append(row["name"])
    notes = pairs_table(
        "Notes", ((note, ", ".join(names)) for note, names in noted.items()), "", "metrics"
    )
    return Section(
        name, f"{framework['when']} {_AVERAGE}", tables=filled(*_by_pair(rows, columns), notes)
    )


def _words(frameworks: Mapping[str, Any]) -> list[Section]:
    """A section for each name, with a row per framework that uses it."""
    rows = [
        row | {"framework": name}
        for name, content in frameworks.items()
        for row in content["metrics"]
    ]
    columns = [
        named("framework", "framework"),
        col("value", _value),
        named("formula", "formula"),
        named("metric", "name", optional=True),
    ]
    sections = [Section("How values are averaged", _AVERAGE)]
    for word in dict.fromkeys(row["word"] for row in rows if row["word"]):
        sections.append(
            Section(
                f"“{word}”", tables=_by_pair([row for row in rows if row["word"] == word], columns)
            )
        )
    return sections


def _by_pair(rows: Sequence[Row], columns: Sequence[Col[Row]]) -> tuple[Table, ...]:
    """A table for each pair of policies compared, and one for each separate topic."""
    by_title: dict[str, list[Row]] = {}
    for row in rows:
        by_title.setdefault(", ".join(filter(None, (row["compares"], row["topic"]))), []).append(
            row
        )
    return tuple(table(title, found, columns) for title, found in by_title.items())


def _value(row: Mapping[str, Any]) -> str:
    return numbers.number(row["value"], _DIGITS)
