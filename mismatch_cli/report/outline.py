"""What a report shows, as plain values and finished text: page and terminal compute nothing."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from mismatch_cli import __version__
from mismatch_cli.base.numbers import MISSING
from mismatch_cli.metrics.gap_table import Metric
from mismatch_cli.report.figures import FigureView

if TYPE_CHECKING:
    from mismatch_cli.report.explorer import ExplorerView

Facts = tuple[tuple[str, str], ...]  # label and value
Status = Literal["good", "mixed", "bad", ""]  # sets the colour and sign of a verdict
SIGNS: dict[Status, str] = {"good": "✔ ", "mixed": "! ", "bad": "✘ ", "": ""}  # of a verdict
# What is undecided has a sign of its own in tables
_STATUS_OF_SIGN = {sign: status for status, sign in SIGNS.items() if sign} | {"? ": "mixed"}
_MORE_FIGURES = "More figures"  # the title of the last section
NOTATION = (
    "μ is the rollout’s probability of the sampled token and π the trainer’s; d = log π − log μ "
    "in nats, r = π/μ. E is the mean over the tokens that count, E_y over responses, Σd the sum "
    "over a response of T tokens. Intervals cover 95 % over prompts. Noise is the same metric "
    "for the trainer against itself in another batch shape; × noise is the gap in multiples of "
    "it."
)


@dataclass(frozen=True)
class MetricRow:
    """A metric with its numbers as text; `note` says why there is no interval."""

    metric: Metric
    value: str
    interval: str = MISSING
    floor: str = MISSING
    times_floor: str = MISSING
    note: str = ""
    name: str = ""  # instead of the metric's label, where that does not say whose number it is
    limit: str = ""  # the strictest published one
    status: Status = ""  # whether the limit holds


@dataclass(frozen=True)
class MetricGroup:
    """Metrics that answer one question."""

    title: str
    rows: tuple[MetricRow, ...]

    @property
    def has_floor(self) -> bool:
        return any(row.floor != MISSING for row in self.rows)


class Priority(IntEnum):
    """How long a column stays where there is little room: the last ones go first."""

    ALWAYS = 0  # a status is never hidden
    USUAL = 1
    SPARE = 2
    FULL = 3  # not on a screen


@dataclass(frozen=True)
class Column:
    """A column of a table; `metric` links it to its definition."""

    title: str
    metric: Metric | None = None
    kind: Literal["number", "text", "token"] = "number"  # text may wrap, a token keeps its spaces
    priority: Priority = Priority.USUAL
    short: str = ""  # the title on a screen, where it differs


@dataclass(frozen=True)
class Brief:
    """A table on a screen: these of its rows, the most important first, and another note.

    They are shown in the table's order; where there is no room, the last ones named are left out,
    and the table says how many.
    """

    rows: Sequence[int]
    note: str = ""
    title: str = ""
    fewest: int = 3  # rows that stay where others give way; with 0 the table may go
    counts_rest: bool = True  # whether it counts the rows that are only on the page, too
    left_out: int = 0  # rows for which there was no room

    @classmethod
    def first(cls, rows: int, **others: Any) -> Brief:
        """The first rows of a table, with the other fields as given."""
        return cls(range(rows), **others)


@dataclass(frozen=True)
class Table:
    """A table of finished text; the first column names the rows.

    Consecutive tables with the same `fold` are folded together on the page, under that name.
    """

    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""
    fold: str = ""
    terminal_rows: int | None = None  # how many a terminal shows; 0 leaves the table to the page
    row_metrics: tuple[Metric, ...] = ()  # the metric of each row, where rows are metrics
    row_links: tuple[str, ...] = ()  # the anchor of the section on each row
    brief: Brief | None = None  # without one, a screen does not show it


def status_of(cell: str) -> Status:
    """The status whose sign a cell begins with, as `✘ EXCEEDED`; else empty."""
    return _STATUS_OF_SIGN.get(cell[:2], "")


@dataclass(frozen=True)
class TokenText:
    """Raw token text, which the page escapes.

    Weight 0 is plain, 1 to 4 are increasingly strong highlights.
    """

    text: str
    weight: int = 0
    hint: str = ""  # shown on hover


@dataclass(frozen=True)
class Excerpt:
    """A response, or a token in its context, with what was measured on it."""

    title: str
    facts: Facts
    pieces: tuple[TokenText, ...]
    prompt: str = ""  # raw
    short: str = ""  # the title on a screen; empty where it is not on one
    stays: bool = False  # on a screen even without room: its user asked for so many


@dataclass(frozen=True)
class Section:
    """A part of the page: text, metrics, figures, tables and excerpts, in this order; empty
    parts are left out.
    """

    title: str
    text: str = ""
    groups: tuple[MetricGroup, ...] = ()
    figures: tuple[FigureView, ...] = ()
    tables: tuple[Table, ...] = ()
    excerpts: Sequence[Excerpt] = ()
    terminal_excerpts: int | None = None  # how many a terminal shows
    stays: bool = False  # even if it has only text

    @property
    def has_content(self) -> bool:
        return bool(self.stays or self.groups or self.figures or self.tables or self.excerpts)

    @property
    def anchor(self) -> str:
        return re.sub(r"\W+", "-", self.title.lower()).strip("-")


@dataclass(frozen=True)
class Verdict:
    """The answer: one or two words and a sentence."""

    words: str
    text: str
    status: Status = ""


class Note(str):
    """What a reader has to know of the numbers; `short` is how a screen says it, empty if it
    does not.
    """

    short: str

    def __new__(cls, text: str, short: str | None = None) -> Note:
        note = super().__new__(cls, text)
        note.short = text if short is None else short
        return note


def stated(facts: Iterable[tuple[str, str]]) -> Facts:
    """The facts that have a value."""
    return tuple((label, value) for label, value in facts if value)


def short_note(note: str) -> str:
    """A note as a screen has it."""
    return note.short if isinstance(note, Note) else note


@dataclass(frozen=True)
class Profile:
    """A quantity along an axis, on one line: bars from 0 to the largest value, between labels of
    both ends.
    """

    title: str  # the axis
    values: tuple[float | None, ...]
    first: str
    last: str
    note: str = ""  # what the bars show
    drawn: bool = False  # already in the page's first figure, so the page omits it


@dataclass(frozen=True)
class Screen:
    """What a terminal shows without `--full`: at most 40 lines of 80 columns beside what was asked
    for, the answer last.
    """

    subject: tuple[str, ...]  # what was measured, in two lines
    verdict: Verdict
    notes: tuple[str, ...] = ()  # what was left out, a sentence each
    tables: tuple[Table, ...] = ()  # the numbers that decide
    remarks: Facts = ()  # label and sentence
    profiles: tuple[Profile, ...] = ()  # where the gap is
    excerpts: tuple[Excerpt, ...] = ()  # tokens in context, a line or two each
    next: Facts = ()  # commands, and what they show
    more_notes: int = 0  # for which there was no room
    left_out: tuple[str, ...] = ()  # what else there was no room for, by name
    everything: str = "--full"  # what shows it


def with_figures(sections: Iterable[Section], figures: Sequence[FigureView]) -> tuple[Section, ...]:
    """Sections with content: each figure is in the first section that its plot names, or else in
    a last section.
    """
    sections = (*sections, Section(_MORE_FIGURES))
    figures_of: dict[str, list[FigureView]] = {section.title: [] for section in sections}
    for figure in figures:
        figures_of[_section_of(figure, figures_of)].append(figure)
    placed = []
    for section in sections:
        section = replace(section, figures=tuple(figures_of[section.title]))
        if section.has_content:
            placed.append(section)
    return tuple(placed)


def _section_of(figure: FigureView, titles: Iterable[str]) -> str:
    """The first of the page's sections that the figure's plot names, else the last section."""
    for title in titles:
        if title in figure.sections:
            return title
    return _MORE_FIGURES


@dataclass(frozen=True)
class Outline:
    """The whole page, in reading order."""

    title: str
    about: Facts  # models, dtypes, versions, temperature, number of tokens, responses and prompts
    parts: Sequence[Section]  # all possible sections; empty ones are left out
    headline: str = ""  # what the screen's verdict does not say
    subject: tuple[str, ...] = ()  # what was measured, in two lines
    verdict: Verdict | None = None  # without one there is no screen: everything is printed
    remarks: Facts = ()  # beside the answer: label and sentence
    profiles: tuple[Profile, ...] = ()  # where the gap is
    next: Facts = ()  # commands, and what they show
    everything: str = "--full"  # the flag that shows what a screen leaves out
    notes: tuple[str, ...] = ()  # what was left out, and why
    leading: tuple[MetricRow, ...] = ()  # the three or four numbers of the headline
    # How it was measured: tables of settings with their titles
    settings: tuple[tuple[str, Facts], ...] = ()
    command: str = ""  # the command that makes this report again
    figures: Sequence[FigureView] = ()
    explorer: ExplorerView | None = None
    version: str = __version__  # of mismatch-cli
    notation: str = NOTATION  # what the symbols in the definitions mean
    reload_seconds: int = 0  # until the page reloads; 0 if it is final

    @cached_property
    def screen(self) -> Screen | None:
        """All that a terminal may show first; None without a verdict."""
        if self.verdict is None:
            return None
        tables: list[Table] = []
        excerpts: list[Excerpt] = []
        for section in self.parts:
            tables += [table for table in section.tables if table.rows and table.brief]
            for excerpt in section.excerpts:
                if excerpt.short:
                    excerpts.append(replace(excerpt, title=excerpt.short))
        return Screen(
            subject=self.subject,
            verdict=self.verdict,
            notes=tuple(filter(None, map(short_note, self.notes))),
            tables=tuple(tables),
            remarks=self.remarks,
            profiles=self.profiles,
            excerpts=tuple(excerpts),
            next=self.next,
            everything=self.everything,
        )

    @cached_property
    def leading_figure(self) -> FigureView | None:
        """The figure beside the verdict: the first that has the section its plot prefers."""
        titles = {section.title for section in self.parts}

        def wish(figure: FigureView) -> int:
            for n, title in enumerate(figure.sections):
                if title in titles:
                    return n
            return len(figure.sections)

        return min(self.figures, key=wish, default=None)

    @cached_property
    def sections(self) -> tuple[Section, ...]:
        """Sections with content, with all figures but the leading one."""
        others = [figure for figure in self.figures if figure is not self.leading_figure]
        return with_figures(self.parts, others)

    def definitions(self) -> list[Metric]:
        """Every metric on the page, once, in order of appearance."""
        metrics = [row.metric for row in self.leading]
        for section in self.sections:
            for group in section.groups:
                metrics += [row.metric for row in group.rows]
            # Two loops, not one: the definitions of all columns come before those of rows.
            for table in section.tables:
                metrics += [column.metric for column in table.columns if column.metric]
            for table in section.tables:
                metrics += table.row_metrics
        return list(dict.fromkeys(metrics))


def definition_anchor(metric: Metric) -> str:
    """The id of a metric's definition."""
    # A metric per bin may have the key of one over all tokens: both need an id of their own.
    suffix = "-in-bin" if "in the bin" in metric.formula else ""
    return "metric-" + re.sub(r"\W+", "-", f"{metric.key}{suffix}")
