"""What `watch` has found so far, from the state in its folder: the limits, the alarms, and what
was never measured.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

from mismatch_cli.base.errors import MismatchError
from mismatch_cli.base.json_form import beside_if_any, from_json, to_json
from mismatch_cli.base.numbers import things
from mismatch_cli.base.text import parse_json
from mismatch_cli.limits.judge import Range, pair_for
from mismatch_cli.limits.limit_sets import CheckRow, Limit, LimitSet
from mismatch_cli.trace.training_folder import WATCH_FILE


@dataclass
class Alarm:
    """A limit that was exceeded, from its first step on."""

    since: int
    check: CheckRow  # of that step
    last: int  # the newest step that did not hold it
    told: int  # the newest step at which that was told
    over: int | None = None  # the step that held it again

    @property
    def when(self) -> str:
        """`since step 12` if it is under way, else `at step 12` or `from step 12 to 37`."""
        if self.over is None:
            return f"since step {self.since}"
        if self.last == self.since:
            return f"at step {self.since}"
        return f"from step {self.since} to {self.last}"

    @property
    def row(self) -> AlarmRow:
        """Its first step's check, with the last step that did not hold the limit."""
        return AlarmRow(self.since, self.last, self.over, self.check)

    def to_json(self) -> dict[str, Any]:
        return dict(to_json(self.row))


@dataclass(frozen=True)
class AlarmRow:
    """An alarm as JSON has it: its first step, the newest that did not hold the limit, and the one
    that held it again.
    """

    step: int
    last: int
    over: int | None
    check: CheckRow | None = beside_if_any()


def under_way_first(alarms: Iterable[Alarm]) -> list[Alarm]:
    """These alarms, those that are not over before the others."""
    return sorted(alarms, key=lambda alarm: alarm.over is not None)


def alarm_count(alarms: Sequence[Alarm]) -> str:
    """`3 alarms, 1 under way`."""
    count = things(len(alarms), "alarm")
    under_way = sum(alarm.over is None for alarm in alarms)
    if under_way == len(alarms):
        return count
    return f"{count}, {under_way or 'none'} under way"


@dataclass(frozen=True)
class SetLimit(Limit):
    """A limit with the name of the set that it is from."""

    limits: str = ""

    @classmethod
    def all_of(cls, sets: Iterable[LimitSet]) -> list[SetLimit]:
        """Every limit of these sets."""
        limits = []
        for limit_set in sets:
            limits += [cls(**vars(limit), limits=limit_set.name) for limit in limit_set.limits]
        return limits

    @property
    def key(self) -> tuple[str, str, str, float, str]:
        """What identifies the limit in a check of a step: the same as `CheckRow.key`."""
        return self.limits, self.metric, self.bound, self.threshold, self.decide

    @property
    def name(self) -> str:
        """`k3 (mismatch) ≤ 0.015`: the limit in words; without a pair if it names none."""
        if self.pair:
            return f"{self.metric} ({self.pair}) {self.text}"
        return f"{self.metric} {self.text}"

    @property
    def state_key(self) -> str:
        """How the state names a limit that has been measured: two sets may have the same one, of
        which only one is for these models.
        """
        return f"{self.limits}: {self.name}"


@dataclass(frozen=True)
class WatchState:
    """The answer of a watch."""

    limits: Sequence[SetLimit]
    alarms: Sequence[Alarm]  # of these limits
    unmeasured: Sequence[str]  # limits that no step could be compared with

    @property
    def result(self) -> WatchResult:
        rows = [alarm.row for alarm in self.alarms]
        return WatchResult(len(self.limits), rows, list(self.unmeasured))


@dataclass(frozen=True)
class WatchResult:
    """The answer of a watch as JSON has it: how many limits there are, and what they said."""

    limits: int
    alarms: Sequence[AlarmRow]
    unmeasured: Sequence[str]


@dataclass(frozen=True)
class LimitedMetric:
    """A metric of a pair that has limits: in words, their bounds, and the first and last steps of
    each alarm.
    """

    metric: str
    pair: str
    text: str
    bounds: Sequence[float]
    alarms: Sequence[tuple[int, int]]


def limited_metrics(watched: WatchState, recorded: Collection[str]) -> list[LimitedMetric]:
    """The metrics that have absolute limits, for the pairs that steps have recorded."""
    by_metric: dict[tuple[str, str], list[SetLimit]] = {}
    for limit in watched.limits:
        pair = pair_for(limit.pair, recorded)
        if pair:
            by_metric.setdefault((limit.metric, pair), []).append(limit)
    return [_limited_metric(watched, *metric, limits) for metric, limits in by_metric.items()]


def _limited_metric(
    watched: WatchState, metric: str, pair: str, limits: Sequence[SetLimit]
) -> LimitedMetric:
    """A metric with these limits; what several of them have in common is said once."""
    bounds: list[float] = []
    texts: list[str] = []
    for limit in limits:
        if limit.text not in texts:
            texts.append(limit.text)
        allowed = Range.of({limit.bound: limit.threshold})
        for bound in (allowed.low, allowed.high):
            if isfinite(bound) and bound not in bounds:
                bounds.append(bound)
    alarms = []
    for alarm in watched.alarms:
        if (alarm.check.metric, alarm.check.pair) == (metric, pair):
            alarms.append((alarm.since, alarm.last))
    return LimitedMetric(metric, pair, ", ".join(texts), bounds, alarms)


def watch_state(folder: Path | None) -> WatchState | None:
    """The state in a folder of `watch`; None for any other folder, and for a state that is not
    readable.
    """
    try:
        content = parse_json(((folder or Path()) / WATCH_FILE).read_text(encoding="utf-8"))
        limits = []
        for limit_set in content["asked"]["limits"]:
            for limit in limit_set["limits"]:
                limits.append(from_json(SetLimit, {**limit, "limits": limit_set["name"]}))
        keys = {limit.key for limit in limits}
        alarms = [from_json(Alarm, alarm) for alarm in content["alarms"]]
        measured = set(content["known"])
        unmeasured = [limit.name for limit in limits if limit.state_key not in measured]
        return WatchState(limits, [a for a in alarms if a.check.key in keys], unmeasured)
    # The folder is that of any command, and a state may be from any version.
    except (OSError, ValueError, KeyError, TypeError, AttributeError, MismatchError):
        return None
