"""The gate as it is shown on a terminal: the checks in a table, and where their limits come from."""

from __future__ import annotations

from mismatch_cli import __version__
from mismatch_cli.report.about import about_facts, command_line, left_out, partial_notes
from mismatch_cli.report.view import Column, ReportView, Section, Table
from mismatch_cli.studies.gate import GateResult, limit_text, measured_text, source_text, subject

HOLDS, EXCEEDED, UNKNOWN = "holds", "EXCEEDED", "UNKNOWN"


def build_view(result: GateResult) -> ReportView:
    """The whole answer but the verdict, which comes last."""
    summary = result.measured.summary
    rows = tuple(
        (subject(c), measured_text(c), limit_text(c), HOLDS if c.holds else EXCEEDED if c.known else UNKNOWN)
        for c in result.checks
    )
    columns = ("metric", "measured, 95 %", "limit", "")
    checks = Table("Limits", tuple(Column(title, kind="text") for title in columns), rows)
    sources = dict.fromkeys((c.limit.metric, source_text(c)) for c in result.checks if source_text(c))
    reasons = tuple((f"{c.limit.metric} {c.limit.text}", c.reason) for c in result.failed)
    tables = [checks]
    if reasons:
        tables.append(Table("What does not hold", (Column("limit", kind="text"), Column("why", kind="text")), reasons))
    if sources:
        source = (Column("metric", kind="text"), Column("source", kind="text"))
        tables.append(Table("Sources", source, tuple(sources)))
    return ReportView(
        title="Does the gap stay within its limits?",
        about=about_facts(summary),
        notes=(*left_out(summary), *_notes(result)),
        headline="Judged by " + ", ".join(one.name for one in result.sets),
        leading=(),
        sections=(Section("Checks", tables=tuple(tables)),),
        settings=(),
        command=command_line(summary, "gate"),
        version=__version__,
    )


def _notes(result: GateResult) -> tuple[str, ...]:
    if result.baseline is None:
        return ()
    partial = partial_notes(result.baseline.summary["about"])
    sampling = [one.traces[0].manifest.get("config", {}).get("sampling") for one in (result.measured, result.baseline)]
    if sampling[0] != sampling[1]:
        return (*partial, "The baseline was sampled with other settings: its gap may differ for that reason alone.")
    return partial
