"""Bad updates: how many there are, over which tokens they are counted, and how they go with the reward."""

from __future__ import annotations

from mismatch_cli import numbers
from mismatch_cli.metrics.update_table import CLIPPING
from mismatch_cli.report.pages.clipping_cells import Row, estimate_of, percent, plain, share, span
from mismatch_cli.report.pages.clipping_subject import Subject
from mismatch_cli.report.view import Column, Section, Table

_STEPS_SHOWN = 100
BAD_IN_WORDS = "one that pushes down a token whose probability has already fallen by δ = {delta:g} or more"


def updates_section(subject: Subject) -> Section:
    bad = subject.result["bad_updates"]
    tables = (_sweep(bad, subject.advantages), _by_step(bad, subject.advantages), _correlations(bad))
    return Section(
        "Bad updates",
        _text(bad, subject.advantages),
        tables=tuple(table for table in tables if table.rows),
    )


def _text(bad: Row, advantages: bool) -> str:
    words = BAD_IN_WORDS.format(delta=bad["delta"])
    text = f"A bad update is {words}, measured from the rollout's: A < 0 and μ − π ≥ δ. "
    if advantages:
        text += (
            f"At δ = {bad['delta']:g} that is {share(bad['over_tokens'])} of the tokens with A ≠ 0, and "
            f"{share(bad['over_negative'])} of the tokens with A < 0. The paper does not name its denominator, so both "
            "are shown. "
        )
    else:
        text += (
            f"The trace has no advantages: were A < 0 everywhere, {share(bad['over_negative'])} of the tokens would be "
            "bad updates. "
        )
    if not bad["correlations"]:
        text += "Whether bad updates go with the reward takes a training trace with several steps."
    return text.rstrip()


def _share_columns(advantages: bool) -> tuple[tuple[str, Column], ...]:
    if not advantages:
        return (("over_negative", Column("of all tokens, if A < 0, %", CLIPPING["over_negative"])),)
    return (
        ("over_tokens", Column("of tokens with A ≠ 0, %", CLIPPING["over_tokens"])),
        ("over_negative", Column("of tokens with A < 0, %", CLIPPING["over_negative"])),
    )


def _sweep(bad: Row, advantages: bool) -> Table:
    shares = _share_columns(advantages)
    return Table(
        "By the threshold δ",
        (Column("δ"), Column("bad updates", CLIPPING["bad"]), *(column for _, column in shares)),
        tuple(
            (f"{row['delta']:g}", numbers.count(row["bad"]), *(percent(row[key]) for key, _ in shares))
            for row in bad["sweep"]
        ),
        shrinks=True,
    )


def _by_step(bad: Row, advantages: bool) -> Table:
    shares = _share_columns(advantages)
    rows = bad["by_step"][-_STEPS_SHOWN:] if len(bad["by_step"]) > 1 else ()
    note = f"The last {_STEPS_SHOWN} steps; all of them are in the JSON." if len(bad["by_step"]) > _STEPS_SHOWN else ""
    return Table(
        f"By step, δ = {bad['delta']:g}",
        (
            Column("step"), Column("tokens"), Column("with A < 0"), Column("bad updates", CLIPPING["bad"]),
            *(column for _, column in shares), Column("mean reward", CLIPPING["reward"]),
            Column("its change", CLIPPING["reward_change"]),
        ),
        tuple(
            (
                span(row), *(numbers.count(row[key]) for key in ("tokens", "negative", "bad")),
                *(percent(row[key]) for key, _ in shares), plain(row["reward"]), plain(row["reward_change"]),
            )
            for row in rows
        ),
        note=note,
        fold="Bad updates by step",
        terminal_rows=0,
    )  # fmt: skip


def _correlations(bad: Row) -> Table:
    return Table(
        "Over the steps",
        (
            Column("correlation of", kind="text"), Column("with", kind="text"), Column("steps"),
            Column("value", CLIPPING["correlations"]), Column("95 % interval"),
        ),
        tuple(
            (row["of"], row["with"], numbers.count(row["steps"]), *_value_and_interval(row))
            for row in bad["correlations"]
        ),
        note="Steps follow each other and share their policy: an association over them shows no cause.",
    )  # fmt: skip


def _value_and_interval(row: Row) -> tuple[str, str]:
    value, interval = numbers.estimate(*estimate_of(row))
    return value, (row.get("note") or interval) if interval == numbers.MISSING else interval
