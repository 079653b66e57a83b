"""How good binary and top-K divergences are, against the full divergence or a bracket around it; and the theory."""

from __future__ import annotations

from collections.abc import Sequence

from mismatch_cli import numbers
from mismatch_cli.metrics.update_table import CLIPPING, THEORY
from mismatch_cli.report.pages.clipping_cells import Row, estimate_of, percent, plain, value_of
from mismatch_cli.report.pages.clipping_subject import Subject
from mismatch_cli.report.view import Column, MetricGroup, MetricRow, Section, Table

_NARROW = 1e-4
_AGAINST_FULL = (
    "Binary and top-K divergences look at the sampled token and at the K most probable ones and merge the rest; they "
    "never exceed the divergence over the whole vocabulary. Here they stand beside it, on the {tokens} tokens whose "
    "full divergence was recorded: means, bias and rank correlation over all of them, wrong masks over those with an "
    "advantage; with the same δ for all, so that only the divergence differs."
)
_WITHOUT_FULL = (
    "Binary and top-K divergences look at the sampled token and at the K most probable ones and merge the rest; they "
    "never exceed the divergence over the whole vocabulary. This trace does not hold that one, so the table says "
    "between which two values its mean certainly lies. Record it with mismatch-cli probe --full-divergence N: bias, "
    "rank correlation and wrong masks stand here then, as they do for the bundled trace."
)
_THEORY = (
    "Sample values of the terms in the paper's bounds; no certificate: the bounds need the largest TV over all states, "
    "and a sample knows only the largest that it saw ({tv_max_of}). L′ − Δ equals the importance-weighted difference "
    "of rewards exactly, response by response."
)


def approximation_section(subject: Subject) -> Section:
    found = subject.result["approximation"]
    tables = [_rows(found)]
    if found["truth"] is None:
        tables.append(_bracket(found["bracket"]))
    return Section(
        "How good is the approximation",
        _WITHOUT_FULL if found["truth"] is None else _AGAINST_FULL.format(tokens=numbers.count(found["tokens"])),
        tables=tuple(table for table in tables if table.rows),
    )


def _rows(found: Row) -> Table:
    columns = [("mean", Column("mean", CLIPPING["mean"]), plain)]
    if found["truth"] is not None:
        columns += [
            ("bias", Column("bias", CLIPPING["bias"]), plain),
            ("rank_correlation", Column("rank correlation", CLIPPING["rank_correlation"]), _near_1),
            ("wrong_mask", Column("wrong mask, %", CLIPPING["wrong_mask"]), percent),
        ]
    return Table(
        "Approximations of TV and KL",
        (
            Column("divergence", kind="text"), Column("K"), Column("threshold δ", optional=True),
            *(column for _, column, _ in columns),
        ),
        tuple(
            (
                {"tv": "TV", "kl": "KL, nats"}.get(row["divergence"], row["divergence"]), _k(row["k"]),
                f"{row['threshold']:g}", *(show(row[key]) for key, _, show in columns),
            )
            for row in found["rows"]
        ),
        shrinks=True,
    )  # fmt: skip


def _k(k: int) -> str:
    return "binary" if k == 0 else str(k)


def _near_1(found: Row | float | None) -> str:
    """A correlation with its half interval, as long as that is not lost beside a value that would read 1.00."""
    value, low, high = estimate_of(found)
    narrow = low is None or high is None or (high - low) / 2 < _NARROW
    return numbers.near(value, 1) if narrow else plain(found)


def _nearly_all(share: Row | float | None) -> str:
    """A share in percent that does not round to 100."""
    value = value_of(share)
    return numbers.near(None if value is None else 100 * value, 100)


def _bracket(rows: Sequence[Row]) -> Table:
    return Table(
        "Where the mean full TV certainly lies",
        (
            Column("from K"), Column("at least", CLIPPING["low"]), Column("at most", CLIPPING["high"]),
            Column("threshold δ", optional=True), Column("decided, %", CLIPPING["decided"]),
        ),
        tuple(
            (
                _k(row["k"]), plain(row["low"]), plain(row["high"]), f"{row['threshold']:g}",
                _nearly_all(row["decided"]),
            )
            for row in rows
        ),
        shrinks=True,
    )  # fmt: skip


def theory_section(subject: Subject) -> Section:
    """Empty, and hence left out, without `--theory`."""
    theory = subject.result["theory"]
    if not theory:
        return Section("Theory")
    rows = []
    for metric in THEORY.values():
        found = theory[metric.key]
        show = numbers.share if metric.unit == "share" else numbers.estimate
        value, interval = show(*estimate_of(found))
        value = numbers.count(found) if isinstance(found, int) else value
        note = found.get("note") or "" if hasattr(found, "get") else ""
        rows.append(MetricRow(metric, value, interval, note=note))
    text = _THEORY.format(tv_max_of=theory["tv_max_of"])
    bounds = {"quadratic": theory["quadratic_bound"], "linear": theory["linear_bound"]}
    vacuous = [name for name, found in bounds.items() if (value_of(found) or 0) < -theory["xi"]]
    if vacuous:
        text += f" Vacuous here, because no reward changes by more than ξ: the {' and the '.join(vacuous)} bound."
    return Section("Theory", text, groups=(MetricGroup("Terms of the bounds, over responses", tuple(rows)),))
