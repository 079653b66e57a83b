"""The gate as a GitHub-flavoured table: for a job's summary, a comment, or an issue."""

from __future__ import annotations

import re

from mismatch_cli.report.about import about_facts, partial_notes
from mismatch_cli.studies.gate import GateResult, limit_text, measured_text, source_text, subject
from mismatch_cli.text import visible

_SPECIAL = re.compile(r"([\\`*_{}\[\]<>|~#&@])")


def markdown(result: GateResult) -> str:
    """The verdict, a row per limit, and who was compared."""
    lines = [
        f"### {'✅' if result.passed else '❌'} mismatch-cli gate",
        "",
        escaped(result.verdict),
        "",
        "| | metric | measured, 95 % | limit | set | source |",
        "|---|---|---|---|---|---|",
    ]
    for check in result.checks:
        measured = measured_text(check) if check.known else check.reason
        if check.known and not check.holds and check.found.detail:
            measured += f": {check.found.detail}"  # which fault it was, where a count alone would not say
        cells = (subject(check), measured, limit_text(check), check.limits, source_text(check))
        lines.append(" | ".join([f"| {'✅' if check.holds else '❌'}", *map(escaped, cells)]) + " |")
    lines += ["", *(f"- {escaped(note)}" for note in partial_notes(result.measured.summary["about"]))]
    lines += [*(f"- {escaped(label)}: {escaped(value)}" for label, value in about_facts(result.measured.summary))]
    return "\n".join(lines) + "\n"


def escaped(text: str) -> str:
    """Text that Markdown shows as it is, on one line."""
    return _SPECIAL.sub(r"\\\1", visible(text))
