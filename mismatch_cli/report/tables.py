"""How every table is specified: the title, cells and metric of each column.

Cells take an estimate in any form: a dataclass, JSON, or a plain number, which has no interval.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from operator import itemgetter
from types import SimpleNamespace
from typing import Any, Generic, Literal, Protocol, TypeVar

from mismatch_cli.base import numbers
from mismatch_cli.frameworks.dialects import logged_as
from mismatch_cli.metrics.estimate import FEW_DECIDE, Estimate
from mismatch_cli.metrics.gap_table import METRICS, Metric
from mismatch_cli.metrics.pair_summary import MetricEstimate, Noise
from mismatch_cli.report.view import Brief, Column, MetricRow, Priority, Table

R = TypeVar("R", contravariant=True)
Row = Mapping[str, Any]
Found = Row | Estimate | float | None
_OF_FEW = f"{numbers.FEW} few prompts decide"


@dataclass(frozen=True)
class Col(Generic[R]):
    """A column: its head, and the text of a row in it."""

    head: Column
    cell: Callable[[R], str]


def col(
    title: str,
    cell: Callable[[R], str],
    metric: Metric | None = None,
    *,
    priority: Priority = Priority.USUAL,
    short: str = "",
    optional: bool = False,
) -> Col[R]:
    """A column of numbers."""
    return Col(Column(title, metric, priority=_priority(priority, optional), short=short), cell)


def _priority(priority: Priority, optional: bool, essential: bool = False) -> Priority:
    if essential:
        return Priority.ALWAYS
    return Priority.SPARE if optional else priority


def text(
    title: str,
    cell: Callable[[R], str],
    *,
    priority: Priority = Priority.USUAL,
    short: str = "",
    optional: bool = False,
    essential: bool = False,
    kind: Literal["text", "token"] = "text",
) -> Col[R]:
    """A column of text, or of tokens, which keep their spaces."""
    priority = _priority(priority, optional, essential)
    return Col(Column(title, kind=kind, priority=priority, short=short), cell)


def named(title: str, key: str, *, optional: bool = False) -> Col[Row]:
    """A column of text, under one key of JSON rows."""
    return text(title, lambda row: str(row[key]), optional=optional)


def table(
    title: str,
    rows: Iterable[R],
    columns: Iterable[Col[R]],
    *,
    note: str = "",
    fold: str = "",
    terminal_rows: int | None = None,
    row_metrics: tuple[Metric, ...] = (),
    row_links: tuple[str, ...] = (),
    brief: Brief | None = None,
) -> Table:
    """The finished table; the first cell of a row is its name."""
    columns = tuple(columns)
    cells = tuple(tuple(column.cell(row) for column in columns) for row in rows)
    note = _with_few(note, cells)
    heads = tuple(column.head for column in columns)
    if brief is not None:
        shown = [n for n in brief.rows if n < len(cells)]
        few = _with_few(brief.note, [cells[n] for n in shown])
        brief = replace(brief, rows=shown, note=few)
    return Table(title, heads, cells, note, fold, terminal_rows, row_metrics, row_links, brief)


def _with_few(note: str, rows: Iterable[tuple[str, ...]]) -> str:
    """A note on a table, with the meaning of the mark of few prompts where a cell has it."""
    if not any(cell.endswith(numbers.FEW) for row in rows for cell in row):
        return note
    return "  ".join(filter(None, (note, _OF_FEW)))


def pairs_table(title: str, pairs: Iterable[tuple[str, str]], *heads: str) -> Table:
    """A table with two columns of text."""
    first, second = heads or ("", "")
    return table(title, pairs, [text(first, itemgetter(0)), text(second, itemgetter(1))])


def filled(*tables: Table) -> tuple[Table, ...]:
    """The tables that have rows."""
    return tuple(table for table in tables if table.rows)


def parts(found: Found) -> tuple[float | None, float | None, float | None]:
    """Value, low and high of an estimate."""
    if isinstance(found, Estimate):
        return found.value, found.low, found.high
    if isinstance(found, Mapping):
        return found["value"], found.get("low"), found.get("high")
    return found, None, None


def value_of(found: Found) -> float | None:
    """The value, without its interval."""
    return parts(found)[0]


def number(found: Found) -> str:
    """The value as a cell, without its interval."""
    return numbers.number(value_of(found))


def plain(found: Found) -> str:
    """A value ± half the width of its interval."""
    return numbers.plus_minus(*parts(found)) + _few(found)


def percent(found: Found) -> str:
    """The same for a share in percent; the head of the column has the % sign."""
    in_percent = (None if part is None else 100 * part for part in parts(found))
    return numbers.plus_minus(*in_percent) + _few(found)


def share(found: Found) -> str:
    """A share within a sentence: `0.42 %`."""
    return numbers.share(value_of(found))[0]


class Span(Protocol):
    """A row about some distances, turns or steps; no last: and all later ones."""

    @property
    def first(self) -> int: ...
    @property
    def last(self) -> int | None: ...


class MuBin(Protocol):
    """A row about a bin of μ."""

    @property
    def mu_low(self) -> float: ...
    @property
    def mu_high(self) -> float: ...


def span(row: Span | Row) -> str:
    """`first – last`, one number if they are equal, or `first and later` without a last."""
    if isinstance(row, Mapping):
        row = SimpleNamespace(**row)
    if row.last is None:
        return f"{row.first} and later"
    return f"{row.first}" if row.first == row.last else f"{row.first} – {row.last}"


def mu_bin(row: MuBin | Row) -> str:
    """The bin of μ that a row is about."""
    if isinstance(row, Mapping):
        row = SimpleNamespace(**row)
    return f"{row.mu_low:g} – {row.mu_high:g}"


def interval_or_note(found: Found) -> str:
    """The interval for a column of its own, or why there is none."""
    interval = numbers.estimate(*parts(found))[1]
    return note_of(found) or interval if interval == numbers.MISSING else interval


def logged_by(metric: Metric) -> tuple[tuple[str, str], ...]:
    """The frameworks that log a metric of the gap by the same formula, and their name for it."""
    return logged_as().get(metric.key, ()) if METRICS.get(metric.key) is metric else ()


def frameworks(metric: Metric) -> str:
    """The names of the frameworks that log a metric."""
    return ", ".join(dict.fromkeys(framework for framework, _ in logged_by(metric)))


def in_words(metric: Metric, found: Found) -> tuple[str, str]:
    """A metric's value and interval in its unit; a metric that agrees at 1 is rounded by its
    distance from 1.
    """
    if metric.unit == "share":
        value, interval = numbers.share(*parts(found))
        return value + _few(found), interval
    value, interval = numbers.estimate(*parts(found))
    if metric.agreement == 1 and interval == numbers.MISSING:
        value = numbers.near(value_of(found), 1)
    return value + _few(found), interval


def metric_row(metric: Metric, found: Found, name: str = "") -> MetricRow:
    """A metric with its value; an int is a count, and JSON of a measurement may have the noise
    too.
    """
    value, interval = (
        (numbers.count(found), numbers.MISSING)
        if isinstance(found, int)
        else in_words(metric, found)
    )
    noise = found.noise if isinstance(found, MetricEstimate) else None
    floor, _ = in_words(metric, noise.floor if noise else None)
    return MetricRow(metric, value, interval, floor, times_noise(noise), note_of(found), name)


def times_noise(noise: Noise | None) -> str:
    """The gap in multiples of the trainer's noise."""
    if noise is None:
        return numbers.MISSING
    return numbers.times(noise.times_floor, noise.times_floor_range)


def _few(found: Found) -> str:
    """A mark if a few prompts decide an estimate that has an interval."""
    return numbers.FEW if note_of(found) == FEW_DECIDE and parts(found)[1] is not None else ""


def note_of(found: Found) -> str:
    """Why an estimate has no interval, or what to know of it; empty if there is nothing to say."""
    if isinstance(found, Estimate):
        return found.note or ""
    return (found.get("note") or "") if isinstance(found, Mapping) else ""
