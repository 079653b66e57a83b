"""The gate as JUnit XML, as CI systems read it: a suite per set of limits, a test case per limit."""

from __future__ import annotations

from xml.etree import ElementTree

from mismatch_cli.places import shown
from mismatch_cli.report.about import about_facts
from mismatch_cli.studies.gate import Check, GateResult, limit_text, measured_text, source_text, subject
from mismatch_cli.studies.limits import LimitSet
from mismatch_cli.text import visible

_NAME = "mismatch-cli gate"
_WHOLE = "the traces are whole"


def junit(result: GateResult) -> str:
    """The whole file. A test case has the same name in every run, so that CI can follow it."""
    root = ElementTree.Element("testsuites", _attributes(_NAME, list(result.checks), bool(result.refused)))
    for limit_set in result.sets:
        checks = [check for check in result.checks if check.limits == limit_set.name]
        suite = ElementTree.SubElement(root, "testsuite", _attributes(limit_set.name, checks) | {"skipped": "0"})
        _add_properties(suite, result, limit_set)
        for check in checks:
            _add_case(suite, check)
    if result.refused:
        suite = ElementTree.SubElement(root, "testsuite", _attributes(_WHOLE, [], True) | {"skipped": "0"})
        case = ElementTree.SubElement(suite, "testcase", classname="mismatch-cli.gate", name=_WHOLE, time="0")
        ElementTree.SubElement(case, "failure", type="PartialTrace", message=visible(result.refused))
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _attributes(name: str, checks: list[Check], refused: bool = False) -> dict[str, str]:
    failures = sum(not check.holds for check in checks) + refused
    return {
        "name": visible(name),
        "tests": str(len(checks) + refused),
        "failures": str(failures),
        "errors": "0",
        "time": "0",
    }


def _add_properties(suite: ElementTree.Element, result: GateResult, limits: LimitSet) -> None:
    properties = ElementTree.SubElement(suite, "properties")
    facts = [*about_facts(result.measured.summary), *[("About", limits.about)] * bool(limits.about)]
    facts += [("Trace", shown(str(trace.folder))) for trace in result.measured.traces]
    for name, value in facts:
        ElementTree.SubElement(properties, "property", name=visible(name), value=visible(value))


def _add_case(suite: ElementTree.Element, check: Check) -> None:
    name = f"{check.limit.metric} {check.limit.text}" + (f" [{check.limit.pair}]" if check.limit.pair else "")
    case = ElementTree.SubElement(
        suite, "testcase", classname=f"mismatch-cli.gate.{visible(check.limits)}", name=visible(name), time="0"
    )
    lines = (
        f"measured {subject(check)}: {measured_text(check)}",
        f"limit: {limit_text(check)}",
        f"source: {source_text(check) or 'none given'}",
    )
    text = "\n".join(visible(line) for line in lines)
    if check.holds:
        ElementTree.SubElement(case, "system-out").text = text
    else:
        kind = "LimitExceeded" if check.known else "NotMeasured"
        failure = ElementTree.SubElement(case, "failure", type=kind, message=visible(check.reason))
        failure.text = text
