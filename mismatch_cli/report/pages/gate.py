"""The gate as it is shown on a terminal: the checks in a table, and where their limits come from."""

from __future__ import annotations

from mismatch_cli.report.about import about_facts, command_line, left_out, partial_notes
from mismatch_cli.report.tables import filled, table, text
from mismatch_cli.report.view import ReportView, Section
from mismatch_cli.studies.gate import Check, GateResult, limit_text, measured_text, source_text, subject

HOLDS, EXCEEDED, UNKNOWN = "holds", "EXCEEDED", "UNKNOWN"


def page(result: GateResult) -> ReportView:
    """The whole answer but the verdict, which comes last."""
    summary = result.measured.summary
    sources = dict.fromkeys((c.limit.metric, source_text(c)) for c in result.checks if source_text(c))
    tables = (
        table(
            "Limits",
            result.checks,
            [
                text("metric", subject),
                text("measured, 95 %", measured_text),
                text("limit", limit_text),
                text("", _answer),
            ],
        ),
        table(
            "What does not hold",
            result.failed,
            [text("limit", lambda c: f"{c.limit.metric} {c.limit.text}"), text("why", lambda c: c.reason)],
        ),
        table("Sources", sources, [text("metric", lambda pair: pair[0]), text("source", lambda pair: pair[1])]),
    )
    return ReportView(
        title="Does the gap stay within its limits?",
        about=about_facts(summary),
        notes=(*left_out(summary), *_notes(result)),
        headline="Judged by " + ", ".join(limit_set.name for limit_set in result.sets),
        outline=(Section("Checks", tables=tables[:1] + filled(*tables[1:])),),
        command=command_line(summary, "gate"),
    )


def _answer(check: Check) -> str:
    return HOLDS if check.holds else EXCEEDED if check.known else UNKNOWN


def _notes(result: GateResult) -> tuple[str, ...]:
    if result.baseline is None:
        return ()
    partial = partial_notes(result.baseline.summary["about"])
    sampling = [s.traces[0].manifest.get("config", {}).get("sampling") for s in (result.measured, result.baseline)]
    if sampling[0] != sampling[1]:
        return (*partial, "The baseline was sampled with other settings: its gap may differ for that reason alone.")
    return partial
