"""What `watch` has found so far, from the state in its folder: the limits, the alarms, and what
was never measured.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

from mismatch_cli.base.numbers import things
from mismatch_cli.base.text import parsed_json
from mismatch_cli.limits.judge import Range, pair_for
from mismatch_cli.limits.limit_sets import Limit
from mismatch_cli.trace.training_folder import WATCH_FILE

# Of a limit; an alarm's pair may be one that the trace chose
LIMIT_KEYS = ("limits", "metric", "bound", "threshold", "decide")


@dataclass
class Alarm:
    """A limit that was exceeded, from its first step on."""

    since: int
    check: Mapping[str, Any]  # of that step, as in `gate --json`
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
    def quantity(self) -> str:
        """The metric and its pair."""
        return f"{self.check['metric']} ({self.check['pair']})"

    @property
    def limit(self) -> tuple[Any, ...]:
        """What makes a limit the same one, whatever pair a trace chose for it."""
        return tuple(self.check[key] for key in LIMIT_KEYS)

    def to_json(self) -> dict[str, Any]:
        """Its first step's check, with the last step that did not hold the limit."""
        return {"step": self.since, "last": self.last, "over": self.over, **self.check}


def under_way_first(alarms: Iterable[Alarm]) -> list[Alarm]:
    return sorted(alarms, key=lambda alarm: alarm.over is not None)


def counted(alarms: Sequence[Alarm]) -> str:
    """`3 alarms, 1 under way`."""
    under_way = sum(alarm.over is None for alarm in alarms)
    if not alarms or under_way == len(alarms):
        return things(len(alarms), "alarm")
    return f"{things(len(alarms), 'alarm')}, {under_way or 'none'} under way"


@dataclass(frozen=True)
class WatchState:
    """The answer of a watch."""

    # Metric, pair, bound, threshold and the set that they are from
    limits: Sequence[Mapping[str, Any]]
    alarms: Sequence[Alarm]  # of these limits
    unmeasured: Sequence[str]  # limits that no step could be compared with

    def to_json(self) -> dict[str, Any]:
        return {
            "limits": len(self.limits),
            "alarms": [alarm.to_json() for alarm in self.alarms],
            "unmeasured": list(self.unmeasured),
        }


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
    rows: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for limit in watched.limits:
        if pair := pair_for(limit["pair"], recorded):
            rows.setdefault((limit["metric"], pair), []).append(limit)
    return [_limited(watched, *key, limits) for key, limits in rows.items()]


def _limited(
    watched: WatchState, metric: str, pair: str, limits: Sequence[Mapping[str, Any]]
) -> LimitedMetric:
    ranges = [Range.of({limit["bound"]: limit["threshold"]}) for limit in limits]
    bounds = dict.fromkeys(bound for allowed in ranges for bound in (allowed.low, allowed.high))
    alarms = [
        (alarm.since, alarm.last)
        for alarm in watched.alarms
        if (alarm.check["metric"], alarm.check["pair"]) == (metric, pair)
    ]
    text = ", ".join(dict.fromkeys(map(_text, limits)))
    return LimitedMetric(metric, pair, text, [b for b in bounds if isfinite(b)], alarms)


def limit_name(limit: Mapping[str, Any]) -> str:
    """`k3 (mismatch) ≤ 0.015`: a limit in words; without a pair if it names none."""
    pair = f" ({limit['pair']})" if limit["pair"] else ""
    return f"{limit['metric']}{pair} {_text(limit)}"


def _text(limit: Mapping[str, Any]) -> str:
    return Limit(limit["metric"], limit["bound"], limit["threshold"]).text


def limit_key(limit: Mapping[str, Any]) -> str:
    """How the state names a limit that has been measured: two sets may have the same one, of which
    only one is for these models.
    """
    return f"{limit['limits']}: {limit_name(limit)}"


def watch_state(folder: Path | None) -> WatchState | None:
    """The state in a folder of `watch`; None for any other folder, and for a state that is not
    readable.
    """
    try:
        content = parsed_json(((folder or Path()) / WATCH_FILE).read_text(encoding="utf-8"))
        sets = content["asked"]["limits"]
        limits = [{**limit, "limits": of["name"]} for of in sets for limit in of["limits"]]
        asked = {tuple(limit[key] for key in LIMIT_KEYS) for limit in limits}
        alarms = [Alarm(**row) for row in content["alarms"]]
        known = set(content["known"])
        return WatchState(
            limits,
            [alarm for alarm in alarms if alarm.limit in asked],
            [limit_name(limit) for limit in limits if limit_key(limit) not in known],
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
