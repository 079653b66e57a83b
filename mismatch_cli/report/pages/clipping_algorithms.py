"""What each algorithm throws away: blocked tokens and lost weight, altogether, by probability, by position, by step."""

from __future__ import annotations

from collections.abc import Callable

from mismatch_cli import numbers
from mismatch_cli.metrics.update_table import CLIPPING
from mismatch_cli.report.pages.clipping_cells import (
    SIGNS,
    Row,
    mu_bin,
    percent,
    plain,
    sign_cells,
    sign_columns,
    span,
    value_of,
    when,
)
from mismatch_cli.report.pages.clipping_subject import Subject
from mismatch_cli.report.view import Column, Section, Table

_TERMINAL_ROWS = 12
_NOT_BY_RATIO = "†"
_LOST = (
    "Lost weight is the share of Σ r·|A| that no longer enters the update: a weight, not the norm of a gradient, for "
    "which the directions of the updates would have to be known. "
)


def algorithms_section(subject: Subject) -> Section:
    tables = [_overview(subject), _parts(subject), _formulas(subject)]
    for row in subject.blocking:
        tables += _breakdown(subject, row)
    return Section(
        "What each algorithm throws away",
        _text(subject),
        tables=tuple(table for table in tables if table.rows),
    )


def _text(subject: Subject) -> str:
    text = "A blocked token contributes nothing to the update. " + _LOST
    if not all(row["weighs_by_ratio"] for row in subject.rows):
        text += f"Rows with {_NOT_BY_RATIO} weigh by something other than r: theirs is the share of Σ |A|, without r. "
    if not subject.advantages:
        text += (
            "The trace has no advantages: every token is judged twice, as if its advantage were positive and as if it "
            "were negative, with |A| = 1. "
        )
    return text + (
        "The anchor is the policy from which the mask measures the trainer's distance: the rollout's μ, or π′, the "
        "trainer at the weights that sampled, recomputed."
    )


def _overview(subject: Subject) -> Table:
    columns = (
        Column("algorithm", kind="text"),
        Column("anchor", kind="text", optional=True),
        *sign_columns(subject.advantages),
        *_lost_columns(subject),
        *([Column("responses, %", CLIPPING["responses_touched"], optional=True)] if subject.advantages else []),
    )
    lost = SIGNS[:1] if subject.advantages else SIGNS[1:]
    rows = (
        (
            row["name"], row["anchor"], *sign_cells(row["blocked"], subject.advantages), *_lost_cells(row, *lost),
            *([percent(row["responses_touched"])] if subject.advantages else []),
        )
        for row in subject.rows
    )  # fmt: skip
    return Table(
        "Blocked tokens and lost weight",
        columns,
        tuple(rows),
        note="± is half the 95 % interval over prompts; there is none for fewer than 10 prompts, or where all say the "
        "same. When each algorithm blocks a token: mismatch-cli algorithms.",
        shrinks=True,
    )


def _lost_columns(subject: Subject) -> tuple[Column, ...]:
    if subject.advantages:
        return (Column("lost weight, %", CLIPPING["lost"]),)
    return tuple(Column(f"lost {when(sign, False)}, %", CLIPPING["lost"]) for sign in SIGNS[1:])


def _lost_cells(row: Row, *keys: str) -> list[str]:
    mark = "" if row["weighs_by_ratio"] else f" {_NOT_BY_RATIO}"
    cells = [percent(row["lost"][key]) for key in keys]
    return [cell if cell == numbers.MISSING else cell + mark for cell in cells]


def _parts(subject: Subject) -> Table:
    """Where the lost weight comes from; without advantages there is no sum over both signs to take apart."""
    rows = [row for row in subject.rows if subject.advantages and value_of(row["lost"]["all"])]
    return Table(
        "The lost weight in its parts",
        (
            Column("algorithm", kind="text"), Column("A > 0, %", CLIPPING["lost"], optional=True),
            Column("A < 0, %", CLIPPING["lost"], optional=True),
            Column("by the mask, %", CLIPPING["masked"]), Column("by the cap, %", CLIPPING["capped"]),
        ),
        tuple((row["name"], *_lost_cells(row, "positive", "negative", "masked", "capped")) for row in rows),
        note="A > 0 and A < 0 are shares of the weight with that sign; mask and cap add up to the lost weight.",
        fold="The lost weight in its parts",
        shrinks=True,
    )  # fmt: skip


def _formulas(subject: Subject) -> Table:
    return Table(
        "When a token is blocked, and its weight otherwise",
        (
            Column("algorithm", kind="text"),
            *(Column(title, kind="text") for title in ("blocked when", "weight", "source")),
        ),
        tuple((row["name"], row["blocked_when"], row["weight"], row["source"]) for row in subject.rows),
        note="Here p, q and p′ are π, μ and π′ of the sampled token.",
        fold="The masks and weights in formulas",
        terminal_rows=0,
    )


def _breakdown(subject: Subject, row: Row) -> tuple[Table, ...]:
    """One algorithm by μ, position and step; a terminal shows those of the leading ones."""
    shown = _TERMINAL_ROWS if subject.leads(row) else 0

    def table(by: str, key: str, name: Callable[[Row], str]) -> Table:
        return Table(
            f"{row['name']}, by {by}",
            (Column(by), Column("tokens"), *sign_columns(subject.advantages)),
            tuple(
                (name(part), numbers.count(part["tokens"]), *sign_cells(part["blocked"], subject.advantages))
                for part in row[key]
                if part["tokens"]
            ),
            fold=_fold(row),
            shrinks=True,
            terminal_rows=shown,
        )

    steps = _by_step(row, subject.advantages, shown)
    return (
        table("μ", "by_mu", mu_bin),
        table("position", "by_position", span),
        *([steps] if len(steps.rows) > 1 else []),
    )


def _fold(row: Row) -> str:
    return f"{row['name']}, by μ, position and step"


def _by_step(row: Row, advantages: bool, shown: int) -> Table:
    return Table(
        f"{row['name']}, by step",
        (
            Column("step"), Column("tokens"), *sign_columns(advantages),
            Column("mean μ of blocked", CLIPPING["mu_blocked"]),
            Column("their mean entropy, nats", CLIPPING["entropy_blocked"], optional=True),
        ),
        tuple(
            (
                span(part), numbers.count(part["tokens"]), *sign_cells(part["blocked"], advantages),
                plain(part["mu_blocked"]),
                plain(part["entropy_blocked"]),
            )
            for part in row["by_step"]
            if value_of(part["tokens"])
        ),
        fold=_fold(row),
        shrinks=True,
        terminal_rows=shown,
    )  # fmt: skip
