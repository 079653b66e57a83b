"""Who is blocked: how probable and how open blocked tokens are beside kept ones, and which tokens they are."""

from __future__ import annotations

from mismatch_cli import numbers
from mismatch_cli.metrics.update_table import CLIPPING
from mismatch_cli.report.pages.clipping_cells import SIGNS, Row, percent, plain, quoted, value_of, when
from mismatch_cli.report.pages.clipping_subject import Subject
from mismatch_cli.report.view import Column, Section, Table

_SHOWN, _ON_TERMINAL = 50, 10
_TEXT = (
    "Rate is how often a token is blocked where it occurs, lift how many times the rate of all tokens with that sign "
    "of A that is: a frequent token ranks high by count alone, a lift above 1 says that the mask singles it out. Means "
    "of μ, π and r are over the blocked occurrences."
)


def tokens_section(subject: Subject) -> Section:
    tables = [_means(subject)] if subject.blocking else []
    tables += [_tokens(subject, row, sign) for row in subject.blocking for sign in SIGNS[1:]]
    return Section("Who is blocked", _TEXT, tables=tuple(table for table in tables if table.rows))


def _means(subject: Subject) -> Table:
    columns = [("mu_blocked", "μ, blocked", CLIPPING["mu_blocked"]), ("mu_kept", "μ, kept", CLIPPING["mu_kept"])]
    if subject.result["has"]["entropy"]:
        columns += [
            ("entropy_blocked", "entropy, blocked", CLIPPING["entropy_blocked"]),
            ("entropy_kept", "entropy, kept", CLIPPING["entropy_kept"]),
        ]
    missing = "" if subject.result["has"]["entropy"] else " The trace has no entropy: probe records it."
    return Table(
        "Mean probability and entropy",
        (
            Column("algorithm", kind="text"),
            *(Column(title, metric, optional=key.endswith("kept")) for key, title, metric in columns),
        ),
        tuple((row["name"], *(plain(row[key]) for key, *_ in columns)) for row in subject.blocking),
        note="Of blocked and of kept tokens: μ of the sampled token, entropy of π in nats." + missing,
        shrinks=True,
    )


def _tokens(subject: Subject, row: Row, sign: str) -> Table:
    tokens = row["blocked_tokens"][sign][:_SHOWN]
    return Table(
        f"{row['name']}, {when(sign, subject.advantages)}: the most frequently blocked tokens",
        (
            Column("token", kind="token"), Column("class", kind="text", optional=True),
            Column("blocked", CLIPPING["blocked_tokens"]), Column("rate, %", CLIPPING["rate"]),
            Column("lift", CLIPPING["lift"]), Column("μ", CLIPPING["mu"]),
            Column("π", CLIPPING["pi"]), Column("r", CLIPPING["ratio"], optional=True),
        ),
        tuple(_token(found) for found in tokens),
        fold=f"{row['name']}: the most frequently blocked tokens",
        shrinks=True,
        terminal_rows=_ON_TERMINAL if subject.leads(row) else 0,
    )  # fmt: skip


def _token(found: Row) -> tuple[str, ...]:
    return (
        quoted(found["text"]), found["class"], numbers.count(found["blocked"]), percent(found["rate"]),
        *(numbers.number(value_of(found[key])) for key in ("lift", "mu", "pi", "ratio")),
    )  # fmt: skip
