"""The page of the gate, and its other forms for CI systems: JUnit XML, Markdown, annotations."""

from collections.abc import Iterator, Sequence
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
    Table,
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
from mismatch_cli.trace.origin import About

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
    return Outline(
        title="Does the gap stay within its limits?",
        about=about_facts(measured.about, measured.main.counts),
        subject=subject_lines(measured.about, measured.main.counts),
        notes=_notes(result),
        headline="Judged by " + ", ".join(limit_set.name for limit_set in result.sets),
        verdict=Verdict(words, result.reason, status),
        remarks=(*_by_value_alone(result), *_reconciled(result)),
        next=_next(result),
        parts=(Section("Checks", tables=_tables(result)),),
        command=command_line("gate", typed_names(result.measured.traces)),
    )


def _tables(result: GateAnalysis) -> tuple[Table, ...]:
    checks = sorted(result.checks, key=lambda check: check.holds)
    limits = table("Limits", checks, _columns(result), brief=Brief.first(_MOST))
    limit: TextColumn[Check] = text(
        "limit", lambda check: f"{_named(result, check)} {check.limit.text}"
    )
    reasons = table(
        "Limits that do not hold, or are not decided",
        [check for check in checks if check.reason],
        [limit, text("why", lambda check: check.reason)],
    )
    sources = table(
        "Sources",
        filter(source_text, checks),
        [limit, text("source", source_text)],
    )
    return (limits, *filled(reasons, sources))


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
    metric = subject(check)
    sets = {other.limits for other in result.checks if subject(other) == metric}
    if len(sets) == 1:
        return metric
    name = Path(check.limits).name
    # Two files of the same name are told apart by their folders.
    is_unique = [Path(limits).name for limits in sets].count(name) == 1
    return f"{metric}, {name if is_unique else check.limits}"


def _status(check: Check) -> str:
    """The judge's word; of one that is undecided, also what the gate makes of it."""
    if check.status == UNDECIDED:
        return "undecided, passes" if check.holds else "undecided, FAILS"
    return _STATUS[check.status]


def _signed(check: Check) -> str:
    return f"{_SIGNS.get(check.status, '?')} {_status(check)}"


def _by_value_alone(result: GateAnalysis) -> Facts:
    """Failed limits of metrics without an interval, which another sample could pass."""
    metrics = []
    for check in result.exceeded:
        # A diagnosis counts its findings: a count never has an interval.
        is_count = check.limit.framework == DIAGNOSIS
        if not is_count and measured_parts(check)[1] == numbers.MISSING:
            metrics.append(check.limit.metric)
    if not metrics:
        return ()
    names = " and ".join(dict.fromkeys(metrics))
    return (
        ("No interval", f"{names}: judged by the value alone, which may depend on a few prompts."),
    )


def _reconciled(result: GateAnalysis) -> Facts:
    """Why one set of limits holds and another fails; empty where all agree."""
    # A set that could not be judged does not hold either.
    failing = {check.limits for check in result.checks if not check.holds}
    passed = [limits.name for limits in result.sets if limits.name not in failing]
    if not result.exceeded or not passed:
        return ()
    failed_pairs = {check.measured.pair for check in result.exceeded}
    passed_pairs = {check.measured.pair for check in result.checks if check.holds}
    reason = (
        "publishers limit different metrics for different models, and limits differ by more than "
        "ten times"
    )
    if failed_pairs == {"total"} and "total" not in passed_pairs:
        reason = (
            "failed limits cover the trainer as it is now, including staleness; the others, equal "
            "weights"
        )
    sets = " and ".join(passed)
    return (("Why both", f"The limits of {sets} hold although others fail: {reason}."),)


def _next(result: GateAnalysis) -> Facts:
    """What to look at when a limit fails."""
    if result.passed:
        return ()
    line = suggest("diagnose", *typed_names(result.measured.traces))
    return ((line, "a mistake, or which setting?"),)


def _notes(result: GateAnalysis) -> tuple[str, ...]:
    measured = result.measured.result
    notes = left_out(measured.about, measured.main, measured.total)
    if result.baseline is None:
        return notes
    return (*notes, *_of_baseline(result, result.baseline.result.about))


def _of_baseline(result: GateAnalysis, baseline: About) -> Iterator[str]:
    """What is missing of the baseline, and why it may not compare."""
    yield from partial_notes(baseline)
    if not any(check.limit.bound in OF_BASELINE for check in result.checks):
        yield (
            "No limit refers to the baseline: add a relative one, such as max_times_baseline, or "
            "omit --baseline."
        )
    elif result.measured.result.about.sampling_settings != baseline.sampling_settings:
        yield (
            "The baseline was sampled with different settings: its gap may differ for that alone."
        )


def junit(result: GateAnalysis) -> str:
    """A suite per set of limits and a test case per limit, with the same name in every run so
    that CI can track it.
    """
    refused = 1 if result.refused else 0
    root = Element("testsuites", _attributes(_SUITES, result.checks, refused))
    for limit_set in result.sets:
        checks = [check for check in result.checks if check.limits == limit_set.name]
        suite = _add_suite(root, limit_set.name, checks)
        _add_properties(suite, result, limit_set)
        for check in checks:
            _add_case(suite, check)
    if refused:
        suite = _add_suite(root, _WHOLE, [], refused)
        case = SubElement(suite, "testcase", classname="mismatch-cli.gate", name=_WHOLE, time="0")
        SubElement(case, "failure", type="PartialTrace", message=visible(result.refused))
    indent(root)
    return tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _add_suite(root: Element, name: str, checks: Sequence[Check], refused: int = 0) -> Element:
    attributes = _attributes(name, checks, refused) | {"skipped": "0"}
    return SubElement(root, "testsuite", attributes)


def _attributes(name: str, checks: Sequence[Check], refused: int) -> dict[str, str]:
    """The counts of a suite; refused traces are one more test, which fails."""
    judged = [check for check in checks if check.is_judged]
    failures = [check.holds for check in judged].count(False)
    return {
        "name": visible(name),
        "tests": str(len(checks) + refused),
        "failures": str(failures + refused),
        "errors": str(len(checks) - len(judged)),
        "time": "0",
    }


def _add_properties(suite: Element, result: GateAnalysis, limits: LimitSet) -> None:
    properties = SubElement(suite, "properties")
    measured = result.measured.result
    facts = list(about_facts(measured.about, measured.main.counts))
    if limits.about:
        facts.append(("About", limits.about))
    facts += [("Trace", shorten_paths(str(trace.folder))) for trace in result.measured.traces]
    for name, value in facts:
        SubElement(properties, "property", name=visible(name), value=visible(value))


# JUnit tells a test that fails from one that could not be made
_FAILURE, _ERROR = ("failure", "LimitExceeded"), ("error", "NotMeasured")


def _add_case(suite: Element, check: Check) -> None:
    pair = f" [{check.limit.pair}]" if check.limit.pair else ""
    name = f"{check.limit.metric} {check.limit.text}{pair}"
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
    messages = [f"{subject(check)} {check.limit.text}: {check.reason}" for check in result.failed]
    if result.refused:
        messages.append(result.refused)
    if len(messages) > _ANNOTATIONS:
        others = len(messages) - _ANNOTATIONS + 1
        messages[_ANNOTATIONS - 1 :] = [f"{others} more limits failed: see the summary."]
    commands = []
    for message in messages:
        # GitHub reads % as the beginning of an escape.
        escaped = visible(message).replace("%", "%25")
        commands.append(f"::error title=mismatch-cli gate::{escaped}\n")
    return "".join(commands)
