"""How every table is specified: the title, cells and metric of each column.

Cells take an estimate, or a plain number, which has no interval.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import chain
from operator import itemgetter
from typing import Generic, Literal, Protocol, TypeVar

from mismatch_cli.base import numbers
from mismatch_cli.frameworks.dialects import logged_as
from mismatch_cli.metrics.estimate import FEW_DECIDE, Estimate
from mismatch_cli.metrics.gap_table import METRICS, Metric
from mismatch_cli.metrics.pair_summary import MetricEstimate, Noise
from mismatch_cli.report.outline import Brief, Column, MetricRow, Priority, Table

R = TypeVar("R", contravariant=True)
Number = Estimate | float | None
_OF_FEW = f"{numbers.FEW} few prompts decide"


@dataclass(frozen=True)
class TextColumn(Generic[R]):
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
) -> TextColumn[R]:
    """A column of numbers."""
    return TextColumn(Column(title, metric, priority=priority, short=short), cell)


def text(
    title: str,
    cell: Callable[[R], str],
    *,
    priority: Priority = Priority.USUAL,
    short: str = "",
    kind: Literal["text", "token"] = "text",
) -> TextColumn[R]:
    """A column of text, or of tokens, which keep their spaces."""
    return TextColumn(Column(title, kind=kind, priority=priority, short=short), cell)


def table(
    title: str,
    rows: Iterable[R],
    columns: Iterable[TextColumn[R]],
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
    cells = []
    for row in rows:
        cells.append(tuple(column.cell(row) for column in columns))
    note = _with_few(note, cells)
    heads = tuple(column.head for column in columns)
    if brief is not None:
        shown = [n for n in brief.rows if n < len(cells)]
        brief_note = _with_few(brief.note, [cells[n] for n in shown])
        brief = replace(brief, rows=shown, note=brief_note)
    return Table(
        title, heads, tuple(cells), note, fold, terminal_rows, row_metrics, row_links, brief
    )


def _with_few(note: str, rows: Iterable[tuple[str, ...]]) -> str:
    """A note on a table, with the meaning of the mark of few prompts where a cell has it."""
    if not any(cell.endswith(numbers.FEW) for cell in chain.from_iterable(rows)):
        return note
    return f"{note}  {_OF_FEW}" if note else _OF_FEW


def pairs_table(title: str, pairs: Iterable[tuple[str, str]], *heads: str) -> Table:
    """A table with two columns of text."""
    first, second = heads or ("", "")
    return table(title, pairs, [text(first, itemgetter(0)), text(second, itemgetter(1))])


def filled(*tables: Table) -> tuple[Table, ...]:
    """The tables that have rows."""
    return tuple(table for table in tables if table.rows)


def parts(number: Number) -> tuple[float | None, float | None, float | None]:
    """Value, low and high of an estimate; a plain number has no interval."""
    if isinstance(number, Estimate):
        return number.value, number.low, number.high
    return number, None, None


def value_of(number: Number) -> float | None:
    """The value, without its interval."""
    return parts(number)[0]


def number(estimate: Number) -> str:
    """The value as a cell, without its interval."""
    return numbers.number(value_of(estimate))


def plain(estimate: Number) -> str:
    """A value ± half the width of its interval, with a mark if a few prompts decide it."""
    return numbers.plus_minus(*parts(estimate)) + _few(estimate)


def percent(estimate: Number) -> str:
    """A share in percent ± half the width of its interval, with the mark of few prompts; the
    head of the column has the % sign.
    """
    in_percent = [None if part is None else 100 * part for part in parts(estimate)]
    return numbers.plus_minus(*in_percent) + _few(estimate)


def share(estimate: Number) -> str:
    """A share within a sentence: `0.42 %`."""
    return numbers.share(value_of(estimate))[0]


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


class OnTokens(Protocol):
    """A row about some tokens."""

    @property
    def tokens(self) -> int: ...


T = TypeVar("T", bound=OnTokens)


def occupied(rows: Iterable[T]) -> list[T]:
    """The rows that have tokens: others would show a dash in every cell."""
    return [row for row in rows if row.tokens]


def span(row: Span) -> str:
    """`first – last`, one number if they are equal, or `first and later` without a last."""
    if row.last is None:
        return f"{row.first} and later"
    if row.first == row.last:
        return f"{row.first}"
    return f"{row.first} – {row.last}"


def mu_bin(row: MuBin) -> str:
    """The bin of μ that a row is about."""
    return f"{row.mu_low:g} – {row.mu_high:g}"


def interval_or_note(estimate: Number) -> str:
    """The interval for a column of its own, or why there is none."""
    interval = numbers.estimate(*parts(estimate))[1]
    if interval != numbers.MISSING:
        return interval
    return note_of(estimate) or interval


def logged_by(metric: Metric) -> tuple[tuple[str, str], ...]:
    """The frameworks that log a metric of the gap by the same formula, and their name for it."""
    # A metric of a bin, or of another study, may have the key of one of the gap.
    if METRICS.get(metric.key) is not metric:
        return ()
    return logged_as().get(metric.key, ())


def frameworks(metric: Metric) -> str:
    """The names of the frameworks that log a metric."""
    return ", ".join(dict.fromkeys(framework for framework, _ in logged_by(metric)))


def in_words(metric: Metric, estimate: Number) -> tuple[str, str]:
    """A metric's value and interval in its unit; a metric that agrees at 1 is rounded by its
    distance from 1.
    """
    if metric.unit == "share":
        value, interval = numbers.share(*parts(estimate))
    else:
        value, interval = numbers.estimate(*parts(estimate))
        # Without an interval nothing says how many digits count, and 1.00003 would read 1.00.
        if metric.agreement == 1 and interval == numbers.MISSING:
            value = numbers.near(value_of(estimate), 1)
    return value + _few(estimate), interval


def metric_row(metric: Metric, estimate: Number, name: str = "") -> MetricRow:
    """A metric with its value, and its noise where that was measured; an int is a count."""
    if isinstance(estimate, int):
        return MetricRow(metric, numbers.count(estimate), name=name)
    value, interval = in_words(metric, estimate)
    noise = estimate.noise if isinstance(estimate, MetricEstimate) else None
    floor = noise.floor if noise else None
    return MetricRow(
        metric,
        value,
        interval,
        floor=in_words(metric, floor)[0],
        times_floor=times_noise(noise),
        note=note_of(estimate),
        name=name,
    )


def times_noise(noise: Noise | None) -> str:
    """The gap in multiples of the trainer's noise."""
    if noise is None:
        return numbers.MISSING
    return numbers.times(noise.times_floor, noise.times_floor_range)


def note_of(estimate: Number) -> str:
    """Why an estimate has no interval, or what to know of it; empty if there is nothing to say."""
    if isinstance(estimate, Estimate):
        return estimate.note or ""
    return ""


def _few(estimate: Number) -> str:
    """A mark if a few prompts decide an estimate that has an interval."""
    has_interval = parts(estimate)[1] is not None
    return numbers.FEW if has_interval and note_of(estimate) == FEW_DECIDE else ""
