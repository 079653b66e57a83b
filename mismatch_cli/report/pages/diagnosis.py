"""The page of a diagnosis: an `Outline`, which terminal and HTML print."""

from collections.abc import Sequence
from dataclasses import dataclass

from mismatch_cli.base import numbers
from mismatch_cli.base.errors import suggest
from mismatch_cli.diagnosis.diagnose import (
    COMPETE_STAGE,
    FLOOR_STAGE,
    PRECISION_STAGE,
    UNEXPLAINED_STAGE,
    Findings,
    module,
)
from mismatch_cli.limits.assess import LEADING
from mismatch_cli.limits.expected import expected_sentence
from mismatch_cli.metrics.estimate import Estimate
from mismatch_cli.metrics.gap_table import METRICS, Metric
from mismatch_cli.report.outline import (
    Brief,
    Facts,
    MetricRow,
    Outline,
    Priority,
    Profile,
    Section,
    Status,
    Table,
    Verdict,
)
from mismatch_cli.report.preamble import (
    command_line,
    left_out_of,
    settings_tables,
    subject_lines,
    who_facts,
)
from mismatch_cli.report.tables import col, filled, metric_row, pairs_table, share, table, text
from mismatch_cli.studies.diagnosis import DiagnosisAnalysis
from mismatch_cli.studies.diagnosis_result import EvidenceRow, FindingRow, SuspectRow
from mismatch_cli.studies.study import typed_names

_NOTATION = (
    "μ is the rollout’s probability of the sampled token and π the trainer’s; d = log π − log μ "
    "in nats. The typical gap is the 80th percentile of |d| among tokens with about the same log "
    "μ, so gaps in units of it are comparable across probabilities. z counts standard errors "
    "over prompts."
)
_OWN = "mismatch-cli"
GAP = METRICS[LEADING]
UNEXPLAINED = Metric(
    "unexplained-gap", "unexplained gap", "mean |d| with every cause found undone", "nats", _OWN
)
_NO_SCALE = {  # by whether the model was named
    False: (
        "That range is wide, and the trace does not show its own scale; a pass of the model would: "
        "--trainer-model MODEL."
    ),
    True: "That range is wide, and neither the trace nor its model shows a scale of its own.",
}
_GAP = (
    "The mean gap of the tokens, in parts: what the findings explain, what is expected without a "
    "fault, and what is left."
)
_WITHOUT_CAUSE = "more than expected, without a known cause"
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
_AGAIN = "Change that, record or import again, and diagnose again: a fault can hide others."
_ANSWERS = {"found": "FOUND", "clear": "clear", "untested": "not tested"}
_MOST = 4  # findings, and suspects, on a screen
_RELATIVE = "|Δlog p| relative to the typical gap at the same μ"


def page(analysis: DiagnosisAnalysis) -> Outline:
    """The parts of the gap, the faults, the suspects, then every check."""
    diagnosis, about = analysis.diagnosis, analysis.result.about
    first = analysis.result.first_cause
    sections = [_finding_section(row, is_first=row.check == first) for row in analysis.found_rows]
    suspects_come_first = diagnosis.is_minor or first is None
    sections.insert(0 if suspects_come_first else 1, _suspects_section(analysis))
    words, status = answer(diagnosis)
    return Outline(
        title="What is wrong with this trace?",
        about=(*who_facts(about), ("Checked", _checked(analysis))),
        subject=subject_lines(about, analysis.covered),
        notes=_notes(analysis),
        headline=_not_tested(analysis),
        leading=_leading(analysis),
        verdict=Verdict(words, _reason(analysis), status),
        remarks=(("Checks", _checks_made(analysis)),),
        profiles=_profiles(analysis),
        next=_next(analysis),
        parts=[_gap_section(analysis), *sections, _all_checks(analysis)],
        settings=settings_tables(about),
        command=command_line("diagnose", typed_names(analysis.traces), *analysis.typed_models),
        notation=_NOTATION,
    )


def answer(diagnosis: Findings) -> tuple[str, Status]:
    """The verdict in capitals; good only where the trace was judged at its own scale."""
    faults = len(diagnosis.faults)
    if diagnosis.is_unexplained:
        # The unexplained gap counts as a fault: if it is the only one, nothing else was found.
        if faults == 1:
            return "NOT EXPLAINED", "bad"
        return f"{faults} FAULTS, NOT ALL EXPLAINED", "bad"
    if faults:
        rest = "" if diagnosis.is_decided else ", THE REST UNDECIDED"
        return f"{numbers.things(faults, 'fault').upper()} FOUND{rest}", "bad"
    if not diagnosis.is_decided:
        return "UNDECIDED", "mixed"
    return "NO FAULT FOUND", "good" if diagnosis.is_at_own_scale else "mixed"


def _notes(analysis: DiagnosisAnalysis) -> tuple[str, ...]:
    """What is left out of the trace, and of the gap."""
    counts = analysis.diagnosis.evidence.counts
    missing = sum(side.not_a_number for side in counts.sides.values())
    left_out = (
        (counts.out_of_support, "sampled tokens have log π = −∞ and are left out of the gap"),
        (missing, "values are not a number and are left out of the gap"),
    )
    return left_out_of(analysis.result.about, left_out)


def _checked(analysis: DiagnosisAnalysis) -> str:
    sample, responses = analysis.result.sample, analysis.result.responses
    checked = (
        f"{numbers.things(sample.tokens, 'token')} in "
        f"{numbers.things(sample.responses, 'response')}"
    )
    if sample.responses == responses:
        return checked
    of_all = "values and placeholders are checked in all"
    return f"{checked}, a sample of {numbers.count(responses)}; {of_all}"


def _reason(analysis: DiagnosisAnalysis) -> str:
    """The fault or the cause of the gap, then what is suspected."""
    diagnosis, result = analysis.diagnosis, analysis.result
    first = None
    if result.first_cause is not None:
        first = result.finding(result.first_cause)
    unexplained = ""
    if diagnosis.is_unexplained:
        unexplained = result.finding(UNEXPLAINED.key).sentence
    # A minor finding leaves most of the gap to the suspects, which then come before it.
    is_minor = diagnosis.is_minor and bool(analysis.suspects)
    if first is not None and not is_minor:
        sentences = [f"{first.title}. {first.sentence}", _explained(first, "at most "), unexplained]
        if diagnosis.is_mostly_explained:
            sentences.append(_AGAIN)
    elif unexplained:
        sentences = [unexplained, _may_be(result.suspects), _first_suspect(analysis)]
    else:
        sentences = [_beside_expected(analysis), _first_suspect(analysis)]
        if first is not None and first.explains is not None:
            sentences.append(f"{first.title} explains {share(first.explains)} of the gap.")
    return " ".join(filter(None, sentences))


def _explained(finding: FindingRow, bound: str, value: str = "") -> str:
    """What a finding explains, after the words for a bound or for a value; empty for nothing."""
    if not finding.explains:
        return ""
    qualified = bound if finding.at_most else value
    return f"It explains {qualified}{share(finding.explains)} of the gap."


def _may_be(suspects: Sequence[SuspectRow]) -> str:
    """The checks that show in an unexplained gap, in a sentence; empty where none does."""
    causes = []
    for row in suspects:
        if row.check is not None and not row.needs:
            title = module(row.check).TITLE
            causes.append(f"“{title}”, which explains {share(row.explains)} of it")
    if not causes:
        return ""
    return f"It may be {'; or '.join(causes)}."


def _first_suspect(analysis: DiagnosisAnalysis) -> str:
    """The first suspect in a sentence; empty where there is none."""
    if not analysis.suspects:
        return ""
    first = analysis.suspects[0]
    seen_in = f" Seen: {first.seen}." if first.seen else ""
    reason = f"{first.why}: {first.source}"
    return f"First suspect: {first.setting} = {first.value} ({reason}).{seen_in}"


def _beside_expected(analysis: DiagnosisAnalysis) -> str:
    """The gap beside what is expected without a fault, and what would have shown."""
    diagnosis, evidence = analysis.diagnosis, analysis.diagnosis.evidence
    if not diagnosis.has_a_gap:
        return f"The gap of {evidence.gap.value:.2g} nats is that of float32 rounding."
    sentences = [expected_sentence(evidence.gap.value, evidence.expected)]
    if not diagnosis.is_at_own_scale:
        sentences.append(_NO_SCALE[analysis.trainer_model is not None])
    if not diagnosis.is_decided:
        sentences.append("That is not yet two standard errors over prompts.")
    sentences.append(f"A fault would show from {evidence.resolution:.2g} nats.")
    return " ".join(sentences)


def _checks_made(analysis: DiagnosisAnalysis) -> str:
    """How many checks were made, and what the others need."""
    checks, untested = len(analysis.result.findings), len(analysis.result.untested)
    sentences = [f"{checks - untested} of {checks} made"]
    for need, rows in _untested_by_need(analysis).items():
        sentences.append(f"{need} allows {len(rows)} more")
    return "; ".join(sentences)


def _not_tested(analysis: DiagnosisAnalysis) -> str:
    """The checks that more input would allow, by what to type for them."""
    sentences = []
    for need, rows in _untested_by_need(analysis).items():
        sentences.append(f"{need}: {', '.join(row.title for row in rows)}")
    if not sentences:
        return ""
    return f"Not tested. {'; '.join(sentences)}."


def _untested_by_need(analysis: DiagnosisAnalysis) -> dict[str, list[FindingRow]]:
    """The checks that were not made, by what to type for them; without those that nothing would
    allow.
    """
    by_need: dict[str, list[FindingRow]] = {}
    for row in analysis.result.untested:
        if row.needs:
            by_need.setdefault(row.needs, []).append(row)
    return by_need


def _leading(analysis: DiagnosisAnalysis) -> tuple[MetricRow, ...]:
    left = analysis.result.unexplained
    expected = f"{left.expected.low:.2g} to {left.expected.high:.2g}, {left.expected.who}"
    unexplained = MetricRow(UNEXPLAINED, numbers.number(left.nats), note=f"expected: {expected}")
    return (metric_row(GAP, analysis.gap), unexplained)


def _profiles(analysis: DiagnosisAnalysis) -> tuple[Profile, ...]:
    """The gap by position and by step, where there is more than one."""
    positions = [(f"{position:.0f}", gap) for position, gap in analysis.by_position]
    steps = [(str(step), gap) for step, gap in analysis.by_step]
    profiles = []
    if len(positions) > 1:
        profiles.append(_profile("By position", positions, _RELATIVE))
    if len(steps) > 1:
        profiles.append(_profile("By step", steps))
    return tuple(profiles)


def _profile(title: str, points: Sequence[tuple[str, Estimate]], note: str = "") -> Profile:
    labels, gaps = zip(*points, strict=True)
    return Profile(title, tuple(gap.value for gap in gaps), labels[0], labels[-1], note)


def _next(analysis: DiagnosisAnalysis) -> Facts:
    """The command that decides an unexplained gap; else those that test the first suspect, or
    enable a check that was not possible, unless a fault that explains most has to go first.
    """
    every = (
        suggest("diagnose", *typed_names(analysis.traces), *analysis.typed_models, "--full"),
        "every check, with its evidence",
    )
    if analysis.has_an_open_gap and analysis.can_be_bisected:
        search = suggest("bisect", *typed_names(analysis.traces))
        return ((search, "which setting, tensor or module makes the gap"), every)
    if analysis.diagnosis.is_mostly_explained:
        return (every, *_import_again(analysis))
    return (every, *(_of_suspect(analysis) or _of_check(analysis)), *_import_again(analysis))


def _of_suspect(analysis: DiagnosisAnalysis) -> Facts:
    """The commands that measure how much of the gap the first suspect causes."""
    commands = []
    for suspect in analysis.suspects[:1]:
        shows = f"how much of the gap {suspect.setting} causes"
        for line in suspect.test:
            commands.append((line, shows))
            shows = ""
    return tuple(commands)


def _of_check(analysis: DiagnosisAnalysis) -> Facts:
    """The first thing to type that allows more checks, and the first of these."""
    for need, rows in _untested_by_need(analysis).items():
        title = rows[0].title
        causes = numbers.things(len(rows), "more cause")
        shows = f"tests {causes}, such as {title[0].lower()}{title[1:]}"
        return ((analysis.line_that_tests(need), shows),)
    return ()


def _import_again(analysis: DiagnosisAnalysis) -> Facts:
    """How to replace an imported trace whose values or alignment are wrong; its dump has to be
    corrected first.
    """
    spoiled = any(module(check).STAGE < COMPETE_STAGE for check in analysis.result.faults)
    source = analysis.result.about.source
    imported = source is not None and not source.is_recorded
    if not (spoiled and imported and len(analysis.traces) == 1):
        return ()
    again = suggest("import", "DUMP", "--output", *typed_names(analysis.traces), "--force")
    return ((again, "once DUMP is corrected; repeat your other options"),)


@dataclass(frozen=True)
class _PartOfGap:
    """A part of the gap, and its cause."""

    name: str
    share: float
    cause: str


def _gap_section(analysis: DiagnosisAnalysis) -> Section:
    tables = (_parts_of_gap(analysis), *filled(_causes(analysis)))
    return Section("The gap", _GAP, tables=tables)


def _parts_of_gap(analysis: DiagnosisAnalysis) -> Table:
    """The parts add up to the gap."""
    shares, expected = analysis.result.shares, analysis.result.unexplained.expected
    gap = analysis.gap.value or 0.0
    span = f"{numbers.number(expected.low)} to {numbers.number(expected.high)}"
    parts = (
        _PartOfGap("mean |Δlog p|", 1.0, "all of it"),
        _PartOfGap("  explained", shares.explained, "caused by what was found"),
        _PartOfGap("  expected", shares.expected, f"of {expected.who}: {span} nats"),
        _PartOfGap("  unexplained", shares.unexplained, _WITHOUT_CAUSE),
    )
    return table(
        "",
        parts,
        [
            text("the gap", lambda part: part.name),
            col("nats", lambda part: numbers.number(part.share * gap)),
            col("share", lambda part: share(part.share)),
            text("", lambda part: part.cause),
        ],
        brief=Brief.first(len(parts), fewest=len(parts)),
    )


def _causes(analysis: DiagnosisAnalysis) -> Table:
    """What was found, with the setting of the framework that made the trace where it is known."""
    causes = [row for row in analysis.found_rows if row.stage != UNEXPLAINED_STAGE]

    def explains(row: FindingRow) -> str:
        bound = "≤ " if row.at_most else ""
        return bound + share(row.explains)

    return table(
        "",
        causes,
        [
            text("found", lambda row: row.title),
            col("explains", explains),
            text("what to change", lambda row: _clause(analysis.setting(row.check) or row.change)),
        ],
        row_links=tuple(Section(row.title).anchor for row in causes),
        brief=Brief.first(_MOST),
    )


def _clause(words: str) -> str:
    """The first sentence, up to a bracket or a semicolon."""
    return words.partition(";")[0].partition(" (")[0].partition(". ")[0].rstrip(".")


def _suspects_section(analysis: DiagnosisAnalysis) -> Section:
    """Settings known to cause gaps, the likeliest first, and the commands that measure how much
    each causes here.
    """
    suspects = table(
        "",
        analysis.suspects,
        [
            text("setting", lambda suspect: suspect.setting, short="suspects"),
            text("value", lambda suspect: str(suspect.value)),
            text("why it can cause a gap", lambda suspect: suspect.why),
            text("seen elsewhere", lambda suspect: suspect.seen, priority=Priority.FULL),
            text("source", lambda suspect: suspect.source, priority=Priority.FULL),
        ],
        brief=None if analysis.diagnosis.is_mostly_explained else Brief.first(_MOST),
    )
    tests = []
    for suspect in analysis.suspects:
        tests.append((f"{suspect.setting}: {suspect.change}", " && ".join(suspect.test)))
    return Section(
        "Suspects",
        "Settings of this trace that are known to cause gaps, sorted by how often they caused "
        "large ones. They are not findings: the command that tests one measures the same prompts "
        "without it.",
        tables=filled(suspects, pairs_table("To test", tests, "instead", "type")),
    )


def _finding_section(finding: FindingRow, *, is_first: bool) -> Section:
    label = "First cause" if is_first else "Also found"
    if finding.stage in (PRECISION_STAGE, FLOOR_STAGE):
        label += " (rounding noise or a tail, not bookkeeping)"
    explained = _explained(finding, "at most ", "about ")
    if finding.stage == UNEXPLAINED_STAGE:
        label, explained = "Unexplained", ""
    facts = (
        ("Likely cause", finding.cause),
        ("What to change", finding.change),
        ("Seen in", finding.source),
    )
    return Section(
        finding.title,
        " ".join(filter(None, (f"{label}.", finding.sentence, explained))),
        tables=(pairs_table("", facts), _evidence(finding.evidence, "Evidence")),
    )


def _evidence(measurements: Sequence[EvidenceRow], title: str, fold: str = "") -> Table:
    """What the check measured; if folded, only the page shows it."""
    return table(
        title,
        measurements,
        [text("measurement", lambda row: row.label), col("value", lambda row: _text(row.value))],
        fold=fold,
        terminal_rows=0 if fold else None,
    )


def _text(value: float | int | str | None) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, int):
        return f"{value:,}".replace("-", "−")
    return numbers.number(value, 4)


def _all_checks(analysis: DiagnosisAnalysis) -> Section:
    findings = analysis.result.findings
    checks = table(
        "",
        findings,
        [
            text("check", lambda row: row.title),
            text("kind", lambda row: _STAGES[row.stage], priority=Priority.SPARE),
            text("answer", lambda row: _ANSWERS[row.status], priority=Priority.ALWAYS),
            col("effect", lambda row: numbers.number(row.effect)),
            text("measured as, or why not tested", _measured_as),
        ],
    )
    # Those that found something have sections of their own, with their evidence.
    clear = [row for row in findings if row.status == "clear"]
    fold = "Evidence of the checks that found nothing"
    evidence = [_evidence(row.evidence, row.title, fold) for row in clear]
    return Section(
        "All checks",
        f"{_checks_made(analysis)}. Faults that corrupt tokens come first; then causes by how much "
        "of the gap they explain once stronger ones are undone. For detection rates and the "
        "smallest faults found: mismatch-cli guide diagnose.",
        tables=(checks, *filled(*evidence)),
    )


def _measured_as(finding: FindingRow) -> str:
    if finding.status == "untested":
        return ": ".join(filter(None, (finding.reason, finding.needs)))
    return "; ".join(filter(None, (finding.measure or finding.sentence, finding.reason)))
