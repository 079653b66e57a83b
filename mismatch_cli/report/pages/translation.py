"""The page of `report --as`: one framework's metrics of the gap, or metric names that frameworks
define differently.
"""

from collections.abc import Sequence
from typing import NamedTuple

from mismatch_cli.base import numbers
from mismatch_cli.report.outline import Outline, Priority, Section, Table
from mismatch_cli.report.preamble import partial_notes, who_facts
from mismatch_cli.report.tables import TextColumn, col, filled, pairs_table, table, text
from mismatch_cli.studies.translation import ALL, TranslatedMetric, Translation

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


class _OfFramework(NamedTuple):
    framework: str
    metric: TranslatedMetric


_VALUE: TextColumn[_OfFramework] = col(
    "value", lambda row: numbers.number(row.metric.value, _DIGITS)
)


def page(translation: Translation) -> Outline:
    """The page of one framework; for `all`, names that several frameworks use for different
    numbers.
    """
    result, name = translation.result, translation.framework
    rows = []
    for framework, content in result.frameworks.items():
        rows += [_OfFramework(framework, metric) for metric in content.metrics]
    if name == ALL:
        sections = _same_names(rows)
        title = "Same metric name, different definition"
        headline = "What each framework would log for this trace."
    else:
        sections = [_framework(name, result.frameworks[name].when, rows)]
        title = f"Metrics of {name}"
        headline = f"What {name} would log for this trace."
    notes = list(partial_notes(result.about))
    if result.out_of_support:
        verb = "has" if result.out_of_support == 1 else "have"
        tokens = numbers.things(result.out_of_support, "token")
        notes.append(f"{tokens} {verb} log π = −∞: {_EXCLUDED}")
    return Outline(
        title=title,
        about=who_facts(result.about),
        notes=tuple(notes),
        headline=headline,
        parts=sections,
    )


def _framework(name: str, when: str, rows: Sequence[_OfFramework]) -> Section:
    """A table for each pair of policies that the framework compares, and notes on single
    metrics.
    """
    columns = [
        text("metric", lambda row: row.metric.name),
        _VALUE,
        text("formula", lambda row: row.metric.formula, priority=Priority.SPARE),
    ]
    # A note that several metrics share is printed once, beside all their names.
    noted: dict[str, list[str]] = {}
    for row in rows:
        for note in row.metric.notes:
            noted.setdefault(note, []).append(row.metric.name)
    names_of_notes = [(note, ", ".join(names)) for note, names in noted.items()]
    notes = pairs_table("Notes", names_of_notes, "", "metrics")
    return Section(name, f"{when} {_AVERAGE}", tables=filled(*_by_pair(rows, columns), notes))


def _same_names(rows: Sequence[_OfFramework]) -> list[Section]:
    """A section for each name, with a row per framework that uses it."""
    columns = [
        text("framework", lambda row: row.framework),
        _VALUE,
        text("formula", lambda row: row.metric.formula),
        text("metric", lambda row: row.metric.name, priority=Priority.SPARE),
    ]
    by_word: dict[str, list[_OfFramework]] = {}
    for row in rows:
        if row.metric.word:
            by_word.setdefault(row.metric.word, []).append(row)
    sections = [Section("How values are averaged", _AVERAGE)]
    for word, of_word in by_word.items():
        sections.append(Section(f"“{word}”", tables=_by_pair(of_word, columns)))
    return sections


def _by_pair(
    rows: Sequence[_OfFramework], columns: Sequence[TextColumn[_OfFramework]]
) -> tuple[Table, ...]:
    """A table for each pair of policies compared, and one for each separate topic."""
    by_title: dict[str, list[_OfFramework]] = {}
    for row in rows:
        title = ", ".join(filter(None, (row.metric.compares, row.metric.topic)))
        by_title.setdefault(title, []).append(row)
    return tuple(table(title, of_pair, columns) for title, of_pair in by_title.items())
