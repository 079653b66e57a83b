"""The screen of a diagnosis: how much of the gap is explained, the suspects, and the command
that tests the first.
"""

from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np

from mismatch_cli.base import numbers
from mismatch_cli.base.errors import suggest
from mismatch_cli.base.json_form import from_json
from mismatch_cli.diagnosis.diagnose import COMPETE_STAGE, UNEXPLAINED_STAGE, Diagnosis, module
from mismatch_cli.diagnosis.evidence import Finding
from mismatch_cli.limits.suspects import Suspect
from mismatch_cli.metrics.estimate import Estimate
from mismatch_cli.report.about import left_out_of, subject_lines
from mismatch_cli.report.tables import col, share, table, text
from mismatch_cli.report.view import Facts, Profile, Screen, Status, Table, Verdict
from mismatch_cli.studies.diagnosis import DiagnosisAnalysis
from mismatch_cli.studies.study import typed
from mismatch_cli.trace.origin import About
from mismatch_cli.trace.recorder_notes import RECORD

_MOST_FOUND, _MOST_SUSPECTS = 4, 4
_Part = tuple[str, float, str]


def screen(analysis: DiagnosisAnalysis, reasons: str) -> Screen:
    """The parts of the gap, the findings and the suspects; `reasons` follow the verdict."""
    diagnosis = analysis.diagnosis
    words, status = _words(diagnosis)
    found = [
        finding for finding in diagnosis.found if module(finding.check).STAGE != UNEXPLAINED_STAGE
    ]
    return Screen(
        subject=subject_lines(
            from_json(About, analysis.result["about"]), SimpleNamespace(**_counts(analysis))
        ),
        notes=notes(analysis),
        tables=tuple(
            part
            for part in (
                _parts(analysis),
                _found(analysis, found),
                _suspects(analysis.suspects),
            )
            if part.rows
        ),
        remarks=_not_made(diagnosis),
        profiles=_profiles(analysis),
        verdict=Verdict(words, reasons, status),
        next=_next(analysis),
    )


def notes(analysis: DiagnosisAnalysis) -> tuple[str, ...]:
    """What is left out of the trace, and of the gap."""
    counts = analysis.diagnosis.evidence.counts
    missing = sum(side.not_a_number for side in counts.sides.values())
    left_out = (
        (counts.out_of_support, "sampled tokens have log π = −∞ and are left out of the gap"),
        (missing, "values are not a number and are left out of the gap"),
    )
    return left_out_of(from_json(About, analysis.result["about"]), left_out)


def _words(diagnosis: Diagnosis) -> tuple[str, Status]:
    faults = len(diagnosis.faults)
    if diagnosis.is_unexplained:
        return "NOT EXPLAINED" if faults == 1 else f"{faults} FAULTS, NOT ALL EXPLAINED", "bad"
    if faults:
        rest = "" if diagnosis.is_decided else ", THE REST UNDECIDED"
        return f"{numbers.things(faults, 'fault').upper()} FOUND{rest}", "bad"
    if not diagnosis.is_decided:
        return "UNDECIDED", "mixed"
    return "NO FAULT FOUND", "good" if diagnosis.is_at_own_scale else "mixed"


def _counts(analysis: DiagnosisAnalysis) -> dict[str, int | bool]:
    sample = analysis.sample
    prompts = len(np.unique(sample.prompt_id_S))
    responses = sample.num_responses
    return {
        "tokens": len(sample.kept),
        "responses": responses,
        "prompts": prompts,
        "prompts_exact": True,
    }


def _parts(analysis: DiagnosisAnalysis) -> Table:
    """The parts of the gap, which add up to it."""
    shares, expected = analysis.diagnosis.shares, analysis.diagnosis.evidence.expected
    span = f"{numbers.number(expected.low)} to {numbers.number(expected.high)}"
    gap = analysis.gap.value or 0.0
    rows: list[_Part] = [
        ("mean |Δlog p|", 1.0, "all of it"),
        ("  explained", shares.explained, "caused by what was found"),
        ("  expected", shares.expected, f"of {expected.who}: {span} nats"),
        ("  unexplained", shares.unexplained, "more than expected, without a known cause"),
    ]
    return table(
        "",
        rows,
        [
            text("the gap", lambda row: row[0]),
            col("nats", lambda row: numbers.number(row[1] * gap)),
            col("share", lambda row: share(row[1])),
            text("", lambda row: row[2]),
        ],
    )


def _found(analysis: DiagnosisAnalysis, findings: Sequence[Finding]) -> Table:
    """What to change is said in the words of the framework where they are known."""
    return table(
        "",
        findings[:_MOST_FOUND],
        [
            text("found", lambda finding: module(finding.check).TITLE),
            col("explains", _explains),
            text(
                "what to change",
                lambda finding: _clause(analysis.setting(finding) or analysis.change(finding)),
            ),
        ],
        note=f"{len(findings) - _MOST_FOUND} more with --full."
        if len(findings) > _MOST_FOUND
        else "",
    )


def _explains(finding: Finding) -> str:
    return ("≤ " if finding.at_most else "") + share(finding.explains)


def _clause(words: str) -> str:
    """The first sentence, up to a bracket or a semicolon."""
    return words.partition(";")[0].partition(" (")[0].partition(". ")[0].rstrip(".")


def _suspects(suspects: Sequence[Suspect]) -> Table:
    return table(
        "",
        suspects[:_MOST_SUSPECTS],
        [
            text("suspects", lambda suspect: suspect.setting),
            text("value", lambda suspect: str(suspect.value)),
            text("why it can cause a gap", lambda suspect: suspect.why),
        ],
        note=f"{len(suspects) - _MOST_SUSPECTS} more with --full."
        if len(suspects) > _MOST_SUSPECTS
        else "",
    )


def _not_made(diagnosis: Diagnosis) -> Facts:
    """How many checks were made, and what the others need."""
    missing = [finding for finding in diagnosis.findings if finding.status == "untested"]
    needs = dict.fromkeys(finding.needs for finding in missing if finding.needs)
    made = f"{len(diagnosis.findings) - len(missing)} of {len(diagnosis.findings)} made"
    asks = (
        f"{need} allows {sum(finding.needs == need for finding in missing)} more" for need in needs
    )
    return (("Checks", "; ".join((made, *asks))),)


def _profiles(analysis: DiagnosisAnalysis) -> tuple[Profile, ...]:
    what = "|Δlog p| relative to the typical gap at the same μ"
    positions = analysis.by_position
    ends = (f"{positions[0][0]:.0f}", f"{positions[-1][0]:.0f}") if positions else ("", "")
    profiles = [_profile("By position", [found for _, found in positions], *ends, what)]
    steps = analysis.by_step
    if len(steps) > 1:
        profiles.append(
            _profile(
                "By step", [found for _, found in steps], str(steps[0][0]), str(steps[-1][0]), ""
            )
        )
    return tuple(profile for profile in profiles if len(profile.values) > 1)


def _profile(title: str, found: Sequence[Estimate], first: str, last: str, what: str) -> Profile:
    return Profile(title, tuple(estimate.value for estimate in found), first, last, what)


def _tests(missing: Sequence[Finding], first: Finding) -> str:
    """`tests 4 more causes, such as another prompt on one side`."""
    title = module(first.check).TITLE
    count = sum(finding.needs == first.needs for finding in missing)
    return f"tests {numbers.things(count, 'more cause')}, such as {title[0].lower()}{title[1:]}"


def _next(analysis: DiagnosisAnalysis) -> Facts:
    """The command that decides an unexplained gap; else those that test the first suspect, or
    enable a check that was not possible.
    """
    every = (
        suggest("diagnose", *typed(analysis.traces), *analysis.typed_models, "--full"),
        "every check, with its evidence",
    )
    if analysis.has_an_open_gap and analysis.can_be_bisected:
        search = suggest("bisect", *typed(analysis.traces))
        return ((search, "which setting, tensor or module makes the gap"), every)
    return (every, *(_of_suspect(analysis) or _of_check(analysis)), *_import_again(analysis))


def _of_suspect(analysis: DiagnosisAnalysis) -> Facts:
    if not analysis.suspects:
        return ()
    first = analysis.suspects[0]
    shows = (f"how much of the gap {first.setting} causes", *[""] * len(first.test))
    return tuple(zip(first.test, shows, strict=False))


def _of_check(analysis: DiagnosisAnalysis) -> Facts:
    missing = analysis.diagnosis.allowed_by_more
    return tuple(
        (analysis.line_that_tests(finding), _tests(missing, finding)) for finding in missing[:1]
    )


def _import_again(analysis: DiagnosisAnalysis) -> Facts:
    """How to replace an imported trace whose values or alignment are wrong; its dump has to be
    corrected first.
    """
    spoiled = any(
        module(finding.check).STAGE < COMPETE_STAGE for finding in analysis.diagnosis.faults
    )
    imported = analysis.result["about"].get("imported", {}).get("format", RECORD) != RECORD
    if not (spoiled and imported and len(analysis.traces) == 1):
        return ()
    again = suggest("import", "DUMP", "--output", *typed(analysis.traces), "--force")
    return ((again, "once DUMP is corrected; repeat your other options"),)
