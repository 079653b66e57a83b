"""The page of the gate, and its other forms for CI systems: JUnit XML, Markdown, annotations."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from xml.etree.ElementTree import Element, SubElement, indent, tostring

from mismatch_cli.base import numbers
from mismatch_cli.base.errors import suggest
from mismatch_cli.base.places import shorten_paths
from mismatch_cli.base.text import visible
from mismatch_cli.limits.judge import EXCEEDED, HOLDS, UNDECIDED, UNJUDGED
from mismatch_cli.limits.limit_sets import DIAGNOSIS, OF_BASELINE, LimitSet
from mismatch_cli.report.markdown import as_markdown
from mismatch_cli.report.outline import (
    Brief,
    Facts,
    Outline,
    Priority,
    Section,
    Status,
    Verdict,
)
from mismatch_cli.report.preamble import (
    about_facts,
    command_line,
    left_out,
    partial_notes,
    subject_lines,
)
from mismatch_cli.report.tables import TextColumn, col, filled, table, text
from mismatch_cli.studies.gate import (
    Check,
    GateAnalysis,
    limit_text,
    measured_parts,
    measured_text,
    source_text,
    subject,
)
from mismatch_cli.studies.study import typed_names

_SUITES, _WHOLE = "mismatch-cli gate", "the traces are whole"
_MOST = 12  # limits on a screen
_ANNOTATIONS = 10
_SIGNS = {HOLDS: "✔", EXCEEDED: "✘", UNJUDGED: "?"}
_STATUS = {HOLDS: "holds", EXCEEDED: "EXCEEDED", UNJUDGED: "not judged"}
_VERDICTS: dict[str, tuple[str, Status]] = {
    "passed": ("PASSED", "good"),
    "failed": ("FAILED", "bad"),
    "unjudged": ("COULD NOT BE JUDGED", "mixed"),
}


def page(result: GateAnalysis) -> Outline:
    """Every limit, failed ones first, and why sets of limits disagree."""
    measured = result.measured.result
    words, status = _VERDICTS[result.status]
    checks = _failed_first(result)
    limits = table("Limits", checks, _columns(result), brief=Brief.first(_MOST))
    which: list[TextColumn[Check]] = [
        text("limit", lambda check: f"{_named(result, check)} {check.limit.text}")
    ]
    why = table(
        "Limits that do not hold, or are not decided",
        [check for check in checks if check.reason],
        [*which, text("why", lambda check: check.reason)],
    )
    sources = table(
        "Sources",
        [check for check in checks if source_text(check)],
        [*which, text("source", source_text)],
    )
    return Outline(
        title="Does the gap stay within its limits?",
        about=about_facts(measured.about, measured.main.counts),
        subject=subject_lines(measured.about, measured.main.counts),
        notes=_notes(result),
        headline="Judged by " + ", ".join(limit_set.name for limit_set in result.sets),
        verdict=Verdict(words, result.reason, status),
        remarks=(*_by_value_alone(result), *_reconciled(result)),
        next=_next(result),
        parts=(Section("Checks", tables=(limits, *filled(why, sources))),),
        command=command_line("gate", typed_names(result.measured.traces)),
    )


def _failed_first(result: GateAnalysis) -> list[Check]:
    return sorted(result.checks, key=lambda check: check.holds)


def _columns(result: GateAnalysis) -> list[TextColumn[Check]]:
    """What each row says about its limit."""
    return [
        text("metric", partial(_named, result)),
        col("measured", lambda check: measured_parts(check)[0]),
        col("95 % interval", lambda check: measured_parts(check)[1]),
        text("limit", limit_text),
        text("status", _signed, priority=Priority.ALWAYS),
        text("set", lambda check: check.limits, priority=Priority.FULL),
    ]


def _named(result: GateAnalysis, check: Check) -> str:
    """The metric, with the set that limits it if another set limits it too; a file without its
    folder.
    """
    also = {other.limits for other in result.checks if subject(other) == subject(check)}
    short = [Path(name).name for name in also]
    own = Path(check.limits).name
    return (
        f"{subject(check)}, {own if short.count(own) == 1 else check.limits}"
        if len(also) > 1
        else subject(check)
    )


def _status(check: Check) -> str:
    """The judge's word; of one that is undecided, also what the gate makes of it."""
    if check.status == UNDECIDED:
        return "undecided, passes" if check.holds else "undecided, FAILS"
    return _STATUS[check.status]


def _signed(check: Check) -> str:
    return f"{_SIGNS.get(check.status, '?')} {_status(check)}"


def _by_value_alone(result: GateAnalysis) -> Facts:
    """Failed limits of metrics without an interval, which another sample could pass."""
    # Not counts
    estimated = [check for check in result.exceeded if check.limit.framework != DIAGNOSIS]
    without_interval = [check for check in estimated if measured_parts(check)[1] == numbers.MISSING]
    if not without_interval:
        return ()
    metrics = " and ".join(dict.fromkeys(check.limit.metric for check in without_interval))
    words = f"{metrics}: judged by the value alone, which may depend on a few prompts."
    return (("No interval", words),)


def _reconciled(result: GateAnalysis) -> Facts:
    """Why one set of limits holds and another fails; empty where all agree."""
    failed = {check.limits for check in result.exceeded}
    passed = [limits.name for limits in result.sets if limits.name not in failed]
    if not failed or not passed:
        return ()
    pairs = [
        {check.measured.pair for check in result.checks if check.holds is holds}
        for holds in (False, True)
    ]
    stale = pairs[0] == {"total"} and "total" not in pairs[1]
    why = (
        "failed limits cover the trainer as it is now, including staleness; the others, equal "
        "weights"
        if stale
        else (
            "publishers limit different metrics for different models, and limits differ by more "
            "than ten times"
        )
    )
    return (
        ("Why both", f"The limits of {' and '.join(passed)} hold although others fail: {why}."),
    )


def _next(result: GateAnalysis) -> Facts:
    """What to look at when a limit fails."""
    if result.passed:
        return ()
    return (
        (suggest("diagnose", *typed_names(result.measured.traces)), "a mistake, or which setting?"),
    )


def _notes(result: GateAnalysis) -> tuple[str, ...]:
    measured = result.measured.result
    counts, total = measured.main.counts, measured.total
    left = left_out(measured.about, counts, total.counts if total else None)
    return (*left, *_of_baseline(result))


def _of_baseline(result: GateAnalysis) -> tuple[str, ...]:
    if result.baseline is None:
        return ()
    notes = partial_notes(result.baseline.result.about)
    if not any(check.limit.bound in OF_BASELINE for check in result.checks):
        unused = (
            "No limit refers to the baseline: add a relative one, such as max_times_baseline, or "
            "omit --baseline."
        )
        return (*notes, unused)
    about, earlier = result.measured.result.about, result.baseline.result.about
    if about.sampling_settings != earlier.sampling_settings:
        return (
            *notes,
            "The baseline was sampled with different settings: its gap may differ for that alone.",
        )
    return notes


def junit(result: GateAnalysis) -> str:
    """A suite per set of limits and a test case per limit, with the same name in every run so
    that CI can track it.
    """
    root = Element("testsuites", _attributes(_SUITES, result.checks, bool(result.refused)))
    for limit_set in result.sets:
        checks = [check for check in result.checks if check.limits == limit_set.name]
        suite = SubElement(
            root, "testsuite", _attributes(limit_set.name, checks) | {"skipped": "0"}
        )
        _add_properties(suite, result, limit_set)
        for check in checks:
            _add_case(suite, check)
    if result.refused:
        suite = SubElement(root, "testsuite", _attributes(_WHOLE, [], True) | {"skipped": "0"})
        case = SubElement(suite, "testcase", classname="mismatch-cli.gate", name=_WHOLE, time="0")
        SubElement(case, "failure", type="PartialTrace", message=visible(result.refused))
    indent(root)
    return tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _about(result: GateAnalysis) -> list[tuple[str, str]]:
    measured = result.measured.result
    return list(about_facts(measured.about, measured.main.counts))


def _attributes(name: str, checks: Sequence[Check], refused: bool = False) -> dict[str, str]:
    statuses = [check.status for check in checks]
    return {
        "name": visible(name),
        "tests": str(len(checks) + refused),
        "failures": str(sum(check.is_judged and not check.holds for check in checks) + refused),
        "errors": str(statuses.count(UNJUDGED)),
        "time": "0",
    }


def _add_properties(suite: Element, result: GateAnalysis, limits: LimitSet) -> None:
    properties = SubElement(suite, "properties")
    facts = _about(result)
    if limits.about:
        facts.append(("About", limits.about))
    facts += [("Trace", shorten_paths(str(trace.folder))) for trace in result.measured.traces]
    for name, value in facts:
        SubElement(properties, "property", name=visible(name), value=visible(value))


# JUnit tells a test that fails from one that could not be made
_FAILURE, _ERROR = ("failure", "LimitExceeded"), ("error", "NotMeasured")


def _add_case(suite: Element, check: Check) -> None:
    name = f"{check.limit.metric} {check.limit.text}" + (
        f" [{check.limit.pair}]" if check.limit.pair else ""
    )
    classname = f"mismatch-cli.gate.{visible(check.limits)}"
    case = SubElement(suite, "testcase", classname=classname, name=visible(name), time="0")
    if check.holds:
        answer = SubElement(case, "system-out")
    else:
        tag, kind = _FAILURE if check.is_judged else _ERROR
        answer = SubElement(case, tag, type=kind, message=visible(check.reason))
    lines = (
        f"measured {subject(check)}: {measured_text(check)}",
        f"limit: {limit_text(check)}",
        f"source: {source_text(check) or 'none given'}",
        f"{check.status}: {check.reason}" if check.reason else check.status,
    )
    answer.text = "\n".join(map(visible, lines))


def markdown(result: GateAnalysis) -> str:
    """The page for a job summary, a comment or an issue."""
    return as_markdown(page(result))


def annotations(result: GateAnalysis) -> str:
    """A GitHub Actions workflow command per failed limit, at most as many as GitHub shows for a
    step.
    """
    lines = [f"{subject(check)} {check.limit.text}: {check.reason}" for check in result.failed]
    lines += [result.refused] * bool(result.refused)
    if len(lines) > _ANNOTATIONS:
        lines[_ANNOTATIONS - 1 :] = [
            f"{len(lines) - _ANNOTATIONS + 1} more limits failed: see the summary."
        ]
    return "".join(
        f"::error title=mismatch-cli gate::{visible(line).replace('%', '%25')}\n" for line in lines
    )
