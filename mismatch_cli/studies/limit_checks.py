"""Whether limits hold: every limit against what was measured. What was not measured fails: no gate opens by absence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mismatch_cli import dialects
from mismatch_cli.diagnosis.evidence import gather
from mismatch_cli.diagnosis.run import Diagnosis, diagnose
from mismatch_cli.metrics.estimate import FLOOR_RESOLUTION, NOT_MEASURED
from mismatch_cli.studies.limits import DIAGNOSIS, FACTORS, FAULTS, OF_BASELINE, SURELY, Limit, LimitSet
from mismatch_cli.studies.mismatch import analyse, summary_json
from mismatch_cli.trace.reader import Trace


@dataclass(frozen=True)
class Found:
    """What was measured of a metric: a value with its interval and noise floor, or why there is none."""

    value: float | None = None
    low: float | None = None
    high: float | None = None
    floor: float | None = None
    pair: str = ""
    why: str = ""
    detail: str = ""  # what stands behind the value, for the sentence that says why a limit does not hold


@dataclass(frozen=True)
class Check:
    """A limit and what it was held against; `reason` says why it does not hold."""

    limits: str  # the name of its set
    limit: Limit
    found: Found
    allowed: float | None  # the bound as a number of the metric, or of its distance from agreement for a factor
    reference: float | None  # the floor's or the baseline's value
    reason: str = ""

    @property
    def holds(self) -> bool:
        return not self.reason

    @property
    def known(self) -> bool:
        """Whether there was something to judge."""
        return self.allowed is not None and self.found.value is not None


class Measurement:
    """The metrics of some traces, pooled: the summary that `report` prints, and frameworks' own as they are asked."""

    def __init__(self, traces: Sequence[Trace], frameworks: Sequence[str]) -> None:
        self.traces = traces
        self.summary = summary_json(analyse(traces, 0))
        self.diagnosis = diagnose(gather(traces)) if DIAGNOSIS in frameworks else None
        others = [name for name in frameworks if name != DIAGNOSIS]
        readings = dialects.readings(traces, others).of if others else {}
        self._readings = {f"{name}:{reading.line.name}": reading for name, rows in readings.items() for reading in rows}

    def find(self, limit: Limit) -> Found:
        """What was measured of a limit's metric, or why nothing was."""
        if self.diagnosis is not None and limit.framework == DIAGNOSIS:
            return _diagnosed(limit.metric.removeprefix(f"{DIAGNOSIS}:"), self.diagnosis)
        if limit.framework:
            reading = self._readings[limit.metric]
            return Found(reading.value, pair=reading.line.pair, why=reading.why)
        pairs: Mapping[str, Any] = self.summary["pairs"]
        name = limit.pair or next(iter(pairs))
        if name not in pairs:
            return Found(pair=name, why=f"the trace does not tell {name} (it has: {', '.join(pairs)})")
        found = pairs[name]["metrics"][limit.metric]
        parts = {part: found.get(part) for part in ("value", "low", "high", "floor")}
        return Found(**parts, pair=name, why="" if found["value"] is not None else found["note"] or NOT_MEASURED)


def _diagnosed(name: str, diagnosis: Diagnosis) -> Found:
    """How many faults were found, or whether one check found something; one that was not possible is not measured."""
    pair = diagnosis.evidence.pair.name
    if name == FAULTS:
        return Found(float(len(diagnosis.faults)), pair=pair, detail=", ".join(f.check for f in diagnosis.faults))
    finding = next(f for f in diagnosis.findings if f.check == name)
    if finding.status == "untested":
        return Found(pair=pair, why=finding.reason)
    return Found(float(finding.status == "found"), pair=pair, detail=finding.sentence)


def judge(sets: Sequence[LimitSet], measured: Measurement, baseline: Measurement | None) -> list[Check]:
    """Every limit of every set, in their order; limits against a baseline need one."""
    return [_check(limit_set.name, limit, measured, baseline) for limit_set in sets for limit in limit_set.limits]


def frameworks_of(sets: Sequence[LimitSet]) -> list[str]:
    """The frameworks whose metrics are asked for."""
    return sorted({limit.framework for limit_set in sets for limit in limit_set.limits if limit.framework})


def _check(name: str, limit: Limit, measured: Measurement, baseline: Measurement | None) -> Check:
    found = measured.find(limit)
    if found.value is None:
        return Check(name, limit, found, None, None, f"{found.why}, and what is not measured does not pass")
    reference, why = _reference(limit, found, baseline)
    if why:
        return Check(name, limit, found, None, None, f"{why}, and what cannot be compared does not pass")
    allowed = _allowed(limit, reference)
    value, low, high = _held(limit, found)
    beyond = _beyond(limit, value, low, high, allowed)
    return Check(name, limit, found, allowed, reference, _sentence(limit, found, value, allowed) if beyond else "")


def _reference(limit: Limit, found: Found, baseline: Measurement | None) -> tuple[float | None, str]:
    """The number that a relative limit starts from, or why there is none."""
    if limit.bound in OF_BASELINE:
        assert baseline is not None
        before = baseline.find(replace(limit, pair=found.pair))  # the same two policies, whatever comes first there
        return before.value, f"in the baseline: {before.why}" if before.value is None else ""
    if limit.bound == "max_times_floor":
        return found.floor, "the trace has no noise floor (--noise-responses)" if found.floor is None else ""
    return None, ""


def _allowed(limit: Limit, reference: float | None) -> float:
    if reference is None:
        return limit.threshold
    if limit.bound == "max_above_baseline":
        return reference + limit.threshold
    if limit.bound == "max_below_baseline":
        return reference - limit.threshold
    distance = abs(reference - limit.agreement)
    if limit.bound == "max_times_floor":
        distance = max(distance, FLOOR_RESOLUTION)  # what is below cannot be told from nothing
    return limit.threshold * distance


def _held(limit: Limit, found: Found) -> tuple[float, float | None, float | None]:
    """The value and interval that are held against `allowed`: for a factor, distances from agreement."""
    assert found.value is not None
    if limit.bound not in FACTORS:
        return found.value, found.low, found.high
    ideal = limit.agreement
    if found.low is None or found.high is None:
        return abs(found.value - ideal), None, None
    ends = sorted((abs(found.low - ideal), abs(found.high - ideal)))
    return abs(found.value - ideal), 0.0 if found.low <= ideal <= found.high else ends[0], ends[1]


def _beyond(limit: Limit, value: float, low: float | None, high: float | None, allowed: float) -> bool:
    if limit.bound in ("min", "max_below_baseline"):
        return (high if limit.decide == SURELY and high is not None else value) < allowed
    return (low if limit.decide == SURELY and low is not None else value) > allowed


def _sentence(limit: Limit, found: Found, value: float, allowed: float) -> str:
    side = "below" if value < allowed else "above"
    distances = f", both as distances from {limit.agreement:g}" if limit.bound in FACTORS and limit.agreement else ""
    detail = f": {found.detail}" if found.detail else ""
    return f"{value:.6g} is {side} {allowed:.6g}{distances}{detail}"
