"""What a gate answers: every check, in one object that terminal, JSON, Markdown and JUnit are made from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from mismatch_cli import numbers
from mismatch_cli.places import shown
from mismatch_cli.studies.limit_checks import Check, Measurement, frameworks_of, judge
from mismatch_cli.studies.limits import DIAGNOSIS, SURELY, LimitSet
from mismatch_cli.trace.reader import Trace

_FORMAT, _VERSION = "mismatch-cli gate", 1


@dataclass(frozen=True)
class GateResult:
    """The checks of every set of limits on some traces, beside a baseline where there is one."""

    sets: Sequence[LimitSet]
    checks: Sequence[Check]
    measured: Measurement
    baseline: Measurement | None = None
    allow_partial: bool = False  # whether traces that lack a part of themselves may pass

    @classmethod
    def of(
        cls,
        sets: Sequence[LimitSet],
        traces: Sequence[Trace],
        baseline: Sequence[Trace],
        *,
        allow_partial: bool = False,
    ) -> GateResult:
        """Measure the traces, and the baseline where one is given, and judge."""
        frameworks = frameworks_of(sets)
        measured = Measurement(traces, frameworks)
        before = Measurement(baseline, frameworks) if baseline else None
        return cls(sets, judge(sets, measured, before), measured, before, allow_partial)

    @cached_property
    def failed(self) -> list[Check]:
        return [check for check in self.checks if not check.holds]

    @cached_property
    def partial(self) -> list[dict[str, Any]]:
        """What each partial trace lacks, the baseline's among them."""
        sides = [self.measured] + ([self.baseline] if self.baseline else [])
        return [trace for side in sides for trace in side.summary["about"]["partial"]]

    @property
    def refused(self) -> str:
        """Why the traces cannot be judged, whatever the limits say: no gate opens by absence. Empty where they can."""
        if self.allow_partial or not self.partial:
            return ""
        lacking = "; ".join(f"{trace['trace']}: {', '.join(trace['reasons'])}" for trace in self.partial)
        return f"{lacking}. A partial trace does not pass unless it is allowed: --allow-partial"

    @property
    def passed(self) -> bool:
        return not self.failed and not self.refused

    @property
    def verdict(self) -> str:
        """One sentence."""
        total = len(self.checks)
        if self.passed:
            return "Passed: the limit holds." if total == 1 else f"Passed: all {total} limits hold."
        refused = f"Failed: {self.refused}" if self.refused else ""
        if not self.failed:
            return f"{refused}."
        named = "; ".join(f"{subject(check)} {check.limit.text}" for check in self.failed)
        many = f"{len(self.failed)} limits of {total} do" if len(self.failed) > 1 else f"1 limit of {total} does"
        return f"Failed: {many} not hold: {named}." + (f" {refused}." if refused else "")

    def to_json(self) -> dict[str, Any]:
        """What `--json` prints; documented in docs/gate.md."""
        return {
            "format": _FORMAT,
            "version": _VERSION,
            "traces": shown([str(trace.folder) for trace in self.measured.traces]),
            "baseline": shown([str(trace.folder) for trace in self.baseline.traces]) if self.baseline else None,
            "passed": self.passed,
            "verdict": self.verdict,
            "partial": self.partial,
            "allow_partial": self.allow_partial,
            "checks": [_row(check) for check in self.checks],
        }


def subject(check: Check) -> str:
    """The metric as the limits name it, and the pair it was measured on."""
    return f"{check.limit.metric} ({check.found.pair})"


def measured_text(check: Check) -> str:
    """The value with its interval, or a dash."""
    found = check.found
    value, interval = numbers.estimate(found.value, found.low, found.high)
    return _number(check, found.value) if interval == numbers.MISSING else f"{value} {interval}"


def limit_text(check: Check) -> str:
    """The bound in words; a relative one also with what it starts from."""
    name = "floor" if "floor" in check.limit.bound else "baseline"
    start = "" if check.reference is None else f"; {name} {_number(check, check.reference)}"
    return f"{check.limit.text}{start}{' (surely)' if check.limit.decide == SURELY else ''}"


def _number(check: Check, value: float | None) -> str:
    if check.limit.framework == DIAGNOSIS and value is not None:
        return numbers.count(int(value))
    return numbers.near(value, 1) if check.limit.agreement == 1 else numbers.number(value, 4)


def source_text(check: Check) -> str:
    """Where a limit comes from, and why it is one."""
    return "; ".join(part for part in (check.limit.source, check.limit.why) if part)


def _row(check: Check) -> dict[str, Any]:
    limit, found = check.limit, check.found
    return {
        "limits": check.limits,
        "metric": limit.metric,
        "pair": found.pair,
        "value": found.value,
        "low": found.low,
        "high": found.high,
        "bound": limit.bound,
        "threshold": limit.threshold,
        "decide": limit.decide,
        "reference": check.reference,
        "allowed": check.allowed,
        "holds": check.holds,
        "reason": check.reason or None,
        "source": limit.source,
        "why": limit.why,
    }
