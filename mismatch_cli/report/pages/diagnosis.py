"""The page of a diagnosis: a `ReportView`, which terminal and HTML print."""

from mismatch_cli.base import numbers
from mismatch_cli.base.json_form import from_json
from mismatch_cli.diagnosis.diagnose import (
    FLOOR_STAGE,
    PRECISION_STAGE,
    UNEXPLAINED_STAGE,
    Diagnosis,
    module,
)
from mismatch_cli.diagnosis.evidence import Finding
from mismatch_cli.limits.expected import sentence
from mismatch_cli.metrics.gap_table import METRICS, Metric
from mismatch_cli.report.about import command_line, settings_tables, who_facts
from mismatch_cli.report.pages._diagnosis_screen import notes, screen
from mismatch_cli.report.tables import col, filled, metric_row, pairs_table, share, table, text
from mismatch_cli.report.view import MetricRow, ReportView, Section, Table
from mismatch_cli.studies.diagnosis import DiagnosisAnalysis
from mismatch_cli.studies.study import typed
from mismatch_cli.trace.origin import About

_NOTATION = (
    "μ is the rollout’s probability of the sampled token and π the trainer’s; d = log π − log μ "
    "in nats. The typical gap is the 80th percentile of |d| among tokens with about the same log "
    "μ, so gaps in units of it are comparable across probabilities. z counts standard errors "
    "over prompts."
)
_OWN = "mismatch-cli"
GAP = METRICS["abs_d_mean"]
EXPLAINED = Metric(
    "explained", "explained by the first cause", "share of Σ|d| that it explains", "share", _OWN
)
UNEXPLAINED = Metric(
    "unexplained-gap", "unexplained gap", "mean |d| with every cause found undone", "nats", _OWN
)
FAULTS = Metric(
    "faults", "faults found", "checks that answer “found”, except noise and tails", "checks", _OWN
)
MADE = Metric("made", "checks made", "checks that the trace allows, of all checks", "checks", _OWN)
_NO_SCALE = {  # by whether the model was named
    False: (
        "That range is wide, and the trace does not show its own scale; a pass of the model would: "
        "--trainer-model MODEL."
    ),
    True: "That range is wide, and neither the trace nor its model shows a scale of its own.",
}
_STAGES = {
    1: "values",
    2: "alignment",
    3: "distribution",
    4: "weights",
    5: "drift",
    6: "precision and tails",
    7: "precision",
    8: "what is left",
}
_ANSWERS = {"found": "FOUND", "clear": "clear", "untested": "not tested"}


def page(analysis: DiagnosisAnalysis) -> ReportView:
    """The faults first, then every check."""
    diagnosis = analysis.diagnosis
    sections = [
        _finding_section(finding, finding is diagnosis.first_cause, analysis.change(finding))
        for finding in diagnosis.found
    ]
    sections.insert(
        0 if diagnosis.is_minor or not diagnosis.first_cause else 1, _suspects_section(analysis)
    )
    return ReportView(
        title="What is wrong with this trace?",
        about=(
            *who_facts(from_json(About, analysis.result["about"])),
            ("Checked", _looked_at(analysis)),
        ),
        notes=notes(analysis),
        headline=_not_tested(analysis),
        screen=screen(analysis, _reasons(analysis)),
        leading=_leading(analysis),
        outline=[*sections, _all_checks(analysis)],
        settings=settings_tables(from_json(About, analysis.result["about"])),
        command=command_line("diagnose", typed(analysis.traces), *analysis.typed_models),
        notation=_NOTATION,
    )


def _looked_at(analysis: DiagnosisAnalysis) -> str:
    counts, sample = analysis.diagnosis.evidence.counts, analysis.sample
    text = (
        f"{numbers.things(len(sample.kept), 'token')} in "
        f"{numbers.things(sample.num_responses, 'response')}"
    )
    if sample.num_responses < counts.responses:
        text += f", a sample of {numbers.count(counts.responses)}; values and placeholders are checked in all"
    return text


def _reasons(analysis: DiagnosisAnalysis) -> str:
    """The fault or the cause of the gap, then what is suspected."""
    diagnosis = analysis.diagnosis
    first = diagnosis.first_cause
    unexplained = next((f.sentence for f in diagnosis.faults if f.check == UNEXPLAINED.key), "")
    if first is not None and not (diagnosis.is_minor and analysis.suspects):
        most = "at most " if first.at_most else ""
        explained = (
            f" It explains {most}{share(first.explains)} of the gap." if first.explains else ""
        )
        return " ".join(
            filter(None, (f"{module(first.check).TITLE}. {first.sentence}{explained}", unexplained))
        )
    suspected = _suspected_first(analysis)
    if unexplained:
        return " ".join(filter(None, (unexplained, _may_be(diagnosis), suspected)))
    also = ""
    if first is not None and first.explains is not None:
        also = f"{module(first.check).TITLE} explains {share(first.explains)} of the gap."
    return " ".join(filter(None, (_against_expected(analysis), suspected, also)))


def _may_be(diagnosis: Diagnosis) -> str:
    """The checks that show in an unexplained gap, and those that were not made."""
    parts: dict[str, list[str]] = {"It may be": [], "Not tested:": []}
    for finding in diagnosis.suspects:
        words = "Not tested:" if finding.status == "untested" else "It may be"
        parts[words].append(_suspect(finding))
    return " ".join(f"{words} {'; or '.join(names)}." for words, names in parts.items() if names)


def _suspected_first(analysis: DiagnosisAnalysis) -> str:
    """The first suspect in a sentence; empty where there is none."""
    if not analysis.suspects:
        return ""
    first = analysis.suspects[0]
    seen = f" Seen: {first.seen}." if first.seen else ""
    return f"First suspect: {first.setting} = {first.value} ({first.why}: {first.source}).{seen}"


def _suspect(finding: Finding) -> str:
    title = f"“{module(finding.check).TITLE}”"
    if finding.status == "untested":
        return f"{title} ({finding.needs})"
    return f"{title}, which explains {share(finding.explains)} of it"


def _against_expected(analysis: DiagnosisAnalysis) -> str:
    """The gap beside what is expected without a fault, and what would have shown."""
    diagnosis, evidence = analysis.diagnosis, analysis.diagnosis.evidence
    if not diagnosis.has_a_gap:
        return f"The gap of {evidence.gap.value:.2g} nats is that of float32 rounding."
    said = [sentence(evidence.gap.value, evidence.expected)]
    if not diagnosis.is_at_own_scale:
        said.append(_NO_SCALE[analysis.trainer_model is not None])
    if not diagnosis.is_decided:
        said.append("That is not yet two standard errors over prompts.")
    said.append(f"A fault would show from {evidence.resolution:.2g} nats.")
    return " ".join(said)


def _not_tested(analysis: DiagnosisAnalysis) -> str:
    """Checks that were not made but could be; empty beside a finding, which comes first."""
    diagnosis = analysis.diagnosis
    if diagnosis.faults or (diagnosis.first_cause and not diagnosis.is_minor):
        return ""
    missing = diagnosis.allowed_by_more
    return (
        f"Not tested: {', '.join(f'{module(f.check).TITLE} ({f.needs})' for f in missing)}."
        if missing
        else ""
    )


def _leading(analysis: DiagnosisAnalysis) -> tuple[MetricRow, ...]:
    diagnosis = analysis.diagnosis
    made = sum(finding.status != "untested" for finding in diagnosis.findings)
    first = diagnosis.first_cause.explains if diagnosis.first_cause else None
    expected = diagnosis.evidence.expected
    return (
        MetricRow(FAULTS, numbers.count(len(diagnosis.faults))),
        MetricRow(EXPLAINED, share(first), note="an estimate" if first is not None else ""),
        MetricRow(
            UNEXPLAINED,
            numbers.number(diagnosis.unexplained.nats),
            note=f"expected: {expected.low:.2g} to {expected.high:.2g}, {expected.who}",
        ),
        metric_row(GAP, analysis.gap),
        MetricRow(MADE, f"{made} of {len(diagnosis.findings)}"),
    )


def _suspects_section(analysis: DiagnosisAnalysis) -> Section:
    """Settings known to cause gaps, the likeliest first, and the commands that measure how much
    each causes here.
    """
    suspects = table(
        "",
        analysis.suspects,
        [
            text("setting", lambda suspect: suspect.setting),
            text("value", lambda suspect: str(suspect.value)),
            text("why it can cause a gap", lambda suspect: suspect.why),
            text("seen elsewhere", lambda suspect: suspect.seen, optional=True),
            text("source", lambda suspect: suspect.source, optional=True),
        ],
    )
    tests = (
        (f"{suspect.setting}: {suspect.change}", " && ".join(suspect.test))
        for suspect in analysis.suspects
    )
    return Section(
        "Suspects",
        "Settings of this trace that are known to cause gaps, sorted by how often they caused "
        "large ones. They are not findings: the command that tests one measures the same prompts "
        "without it.",
        tables=filled(suspects, pairs_table("To test", tests, "instead", "type")),
    )


def _finding_section(finding: Finding, is_first: bool, change: str) -> Section:
    check = module(finding.check)
    order = "First cause" if is_first else "Also found"
    kind = (
        " (rounding noise or a tail, not bookkeeping)"
        if check.STAGE in (PRECISION_STAGE, FLOOR_STAGE)
        else ""
    )
    about = "at most" if finding.at_most else "about"
    explains = (
        f" It explains {about} {share(finding.explains)} of the gap." if finding.explains else ""
    )
    if check.STAGE == UNEXPLAINED_STAGE:
        order, explains = "Unexplained", ""
    facts = (
        ("Likely cause", finding.cause or check.CAUSE),
        ("What to change", change),
        ("Seen in", check.SOURCE),
    )
    return Section(
        check.TITLE,
        f"{order}{kind}. {finding.sentence}{explains}",
        tables=(
            pairs_table("", facts),
            _evidence(finding, "Evidence"),
        ),
    )


def _evidence(finding: Finding, title: str, fold: str = "") -> Table:
    """What the check measured; if folded, only the page shows it."""
    return table(
        title,
        finding.evidence,
        [text("measurement", lambda fact: fact[0]), col("value", lambda fact: _text(fact[1]))],
        fold=fold,
        terminal_rows=0 if fold else None,
    )


def _text(value: float | int | str | None) -> str:
    if isinstance(value, str):
        return value
    return f"{value:,}".replace("-", "−") if isinstance(value, int) else numbers.number(value, 4)


def _all_checks(analysis: DiagnosisAnalysis) -> Section:
    checks = table(
        "",
        analysis.diagnosis.findings,
        [
            text("check", lambda finding: module(finding.check).TITLE),
            text("kind", lambda finding: _STAGES[module(finding.check).STAGE], optional=True),
            text("answer", lambda finding: _ANSWERS[finding.status]),
            col("effect", lambda finding: numbers.number(finding.effect)),
            text("measured as, or why not tested", _measured_as),
        ],
    )
    evidence = (
        _evidence(
            finding, module(finding.check).TITLE, fold="Evidence of the checks that found nothing"
        )
        for finding in analysis.diagnosis.findings
        if finding.status == "clear"
    )
    return Section(
        "All checks",
        "Faults that corrupt tokens come first; then causes by how much of the gap they explain "
        "once stronger ones are undone. For detection rates and the smallest faults found: "
        "mismatch-cli guide diagnose.",
        tables=(checks, *filled(*evidence)),
    )


def _measured_as(finding: Finding) -> str:
    if finding.status == "untested":
        return ": ".join(filter(None, (finding.reason, finding.needs)))
    return "; ".join(filter(None, (finding.measure or finding.sentence, finding.reason)))
