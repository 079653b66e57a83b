"""The report on a terminal: the same view as the HTML page, as rich tables that fit the width there is."""

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Table as RichTable
from rich.text import Text

from mismatch_cli.numbers import MISSING
from mismatch_cli.report.view import Excerpt, Facts, MetricGroup, ReportView, Section, Table
from mismatch_cli.text import for_terminal, visible

_WEIGHT_STYLES = ("", "yellow", "bold yellow", "bold red", "bold white on red")
_WITHOUT_HALF_WIDTH = re.compile(r" (± \S+|\[\S+ \S+\])")
_UNLIMITED = 100_000  # columns
_WITH_FACTOR, _WITH_FLOOR = 72, 100  # from these widths on the factor, and the noise itself, have room


def print_report(view: ReportView, console: Console) -> None:
    """Print a view; token text in it is escaped, colours follow the console."""
    console.print(Text(visible(view.title), style="bold"))
    console.print(_facts(view.about))
    for note in view.notes:
        console.print(Text.assemble(("! ", "yellow"), for_terminal(note)))
    console.print()
    console.print(Text(visible(view.headline), style="bold"))
    for section in view.sections:
        shown = replace(section, excerpts=section.excerpts[: section.terminal_excerpts])
        if shown.has_content:
            console.print()
            console.print(Group(*_section(shown, console)))


def _section(section: Section, console: Console) -> list[RenderableType]:
    parts: list[RenderableType] = [Text(section.title, style="bold underline")]
    if section.text:
        parts.append(Text(visible(section.text), style="dim"))
    if section.groups:
        parts.append(_metrics(section.groups, console.width))
    parts += [Padding(table_grid(table, console), (1, 0, 0, 0)) for table in section.tables if table.terminal_rows != 0]
    parts += [_excerpt(excerpt) for excerpt in section.excerpts]
    return parts


def _facts(facts: Facts) -> RenderableType:
    grid = RichTable.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for label, value in facts:
        grid.add_row(label, for_terminal(value))
    return grid


def _metrics(groups: Sequence[MetricGroup], width: int) -> RenderableType:
    """One table for all groups of a section, so that their columns stand below each other."""
    floors, several = any(group.has_floor for group in groups), len(groups) > 1
    columns = {"value": "value", "95 % interval": "interval"}
    columns |= {"noise": "floor"} if floors and width >= _WITH_FLOOR else {}
    columns |= {"× noise": "times_floor"} if floors and width >= _WITH_FACTOR else {}
    table = RichTable(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("", no_wrap=width >= _WITH_FACTOR)
    for title in columns:
        table.add_column(title, justify="right", overflow="fold")
    for group in groups:
        if several:
            table.add_row(Text(group.title, style="bold"))
        for row in group.rows:
            cells = (getattr(row, name) for name in columns.values())
            label = "  " * several + (row.name or row.metric.label)
            table.add_row(for_terminal(label), *("" if cell == MISSING else cell for cell in cells))
    return table


def table_grid(table: Table, console: Console) -> RenderableType:
    """A table that fits the console; what had no room is named below it."""
    rows = table.rows[: table.terminal_rows]
    columns = list(range(len(table.columns)))
    rich = _grid(table, columns, rows)
    while table.shrinks and _too_wide(rich, console):
        if given_up := [n for n in columns if table.columns[n].optional][-1:]:
            columns.remove(*given_up)
        elif rows != (bare := tuple(_without_half_widths(table, row) for row in rows)):
            rows = bare
        else:
            break
        rich = _grid(table, columns, rows)
    left = len(table.rows) - len(rows)
    missing = ", ".join(table.columns[n].title for n in range(len(table.columns)) if n not in columns)
    note = [table.note] * bool(table.note) + [f"{left} more in the HTML report."] * (left > 0)
    note += [f"No room here for: {missing}."] * bool(missing)
    return Group(rich, *(Text(visible(line), style="dim") for line in note))


def _without_half_widths(table: Table, row: Sequence[str]) -> tuple[str, ...]:
    """Numbers alone; a text such as `outside [0.8, 1.25]` stays whole."""
    pairs = zip(table.columns, row, strict=True)
    return tuple(cell if column.kind == "text" else _WITHOUT_HALF_WIDTH.sub("", cell) for column, cell in pairs)


def _too_wide(rich: RichTable, console: Console) -> bool:
    needed = Measurement.get(console, console.options.update(max_width=_UNLIMITED), rich)
    return needed.maximum > console.width


def _grid(table: Table, columns: Sequence[int], rows: Sequence[Sequence[str]]) -> RichTable:
    rich = RichTable(
        title=for_terminal(table.title) if table.title else None, title_justify="left", title_style="bold",
        box=None, padding=(0, 1, 0, 0), header_style="dim",
    )  # fmt: skip
    for number in columns:
        column = table.columns[number]
        rich.add_column(
            for_terminal(column.title),
            justify="right" if column.kind == "number" else "left",
            overflow="fold",
            no_wrap=number == 0 and column.kind == "number",
        )
    for row in rows:
        rich.add_row(*(for_terminal(row[number]) for number in columns))
    return rich


def _excerpt(excerpt: Excerpt) -> RenderableType:
    facts = "  ".join(f"{label} {value}" for label, value in excerpt.facts)
    text = Text.assemble(*(_piece(piece) for piece in excerpt.pieces))
    return Padding(
        Group(Text.assemble(for_terminal(excerpt.title), "  ", (facts, "dim")), Padding(text, (0, 0, 0, 2))),
        (1, 0, 0, 0),
    )


_LINE_FACTS = 3  # of an excerpt in a line


def excerpt_line(excerpt: Excerpt, console: Console) -> list[RenderableType]:
    """An excerpt in two lines: what it is, and its context, cut so that the marked token stands in the middle."""
    facts = "  ".join(f"{label} {value}" for label, value in excerpt.facts[:_LINE_FACTS])
    head = Text.assemble((visible(excerpt.title), "bold"), "  ", (visible(facts), "dim"))
    context = Text.assemble(*(_piece(piece) for piece in excerpt.pieces))
    marked = next((span for span in context.spans if span.style == _WEIGHT_STYLES[-1]), None)
    room = console.width - 4
    first = 0 if marked is None else max(0, min((marked.start + marked.end - room) // 2, len(context) - room))
    return [head, Text("  ").append_text(context[first : first + room])]


def _piece(piece: Any) -> tuple[str, str]:
    text = visible(piece.text)
    marked = f"»{text}«" if piece.weight == len(_WEIGHT_STYLES) - 1 else text  # seen without colours too
    return marked, _WEIGHT_STYLES[piece.weight]
