"""What if a threshold were another: the sweeps, and which thresholds of two families block as much as each other."""

from __future__ import annotations

from mismatch_cli import numbers
from mismatch_cli.metrics.update_table import CLIPPING
from mismatch_cli.report.pages.clipping_cells import percent, plain
from mismatch_cli.report.pages.clipping_subject import Subject
from mismatch_cli.report.view import Column, Section, Table

_TEXT = (
    "Blocked tokens and lost weight as the threshold moves. An equal threshold is the one of another family that "
    "blocks as many tokens as the algorithm does; it need not block the same ones. The sweeps themselves stand in the "
    "HTML report and in the JSON."
)
_SWEEPS = {
    "ratio_clip": "Ratio clip, by ε",
    "binary_tv": "Binary TV, by δ",
    "top_k_tv": "Top-K TV, by δ",
    "binary_kl": "Binary KL, by δ in nats",
    "top_k_kl": "Top-K KL, by δ in nats",
}
_FOLD = "The sweeps in numbers"


def thresholds_section(subject: Subject) -> Section:
    tables = (_equivalents(subject), *_sweeps(subject))
    return Section("What if", _TEXT, tables=tuple(table for table in tables if table.rows))


def _equivalents(subject: Subject) -> Table:
    return Table(
        "Equal thresholds",
        (
            Column("algorithm", kind="text"), Column("blocks, %", CLIPPING["blocked"]),
            Column("as many as", kind="text"), Column("at", CLIPPING["equivalents"]),
        ),
        tuple(
            (row["algorithm"], percent(row["blocked"]), row["family"].replace("_", "-"), plain(row["threshold"]))
            for row in subject.result["equivalents"]
        ),
        note="The threshold of that family which blocks as many tokens as the algorithm does, at most 3 % off.",
        shrinks=True,
    )  # fmt: skip


def _sweeps(subject: Subject) -> list[Table]:
    sweeps = subject.result["sweeps"]
    tables = [
        Table(
            title,
            (
                Column("threshold"),
                Column("blocked, %", CLIPPING["blocked"]),
                Column("lost weight, %", CLIPPING["lost"]),
            ),
            tuple(
                (numbers.number(row["threshold"]), percent(row["blocked"]), percent(row["lost"]))
                for row in sweeps.get(key) or ()
            ),
            fold=_FOLD,
            terminal_rows=0,
        )
        for key, title in _SWEEPS.items()
    ]
    cap = Table(
        "Cap of the weight, by C",
        (Column("C"), Column("tokens above, %", CLIPPING["share"]), Column("lost weight, %", CLIPPING["capped"])),
        tuple(
            (numbers.number(row["cap"]), percent(row["share"]), percent(row["lost"])) for row in sweeps.get("cap") or ()
        ),
        fold=_FOLD,
        terminal_rows=0,
    )
    return [*tables, cap]
