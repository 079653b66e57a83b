"""Alarms as states: a limit is exceeded since a step, still is, or no longer.

An alarm begins at the first step at which `gate` would fail, and is over at the first later step
that holds the limit: a step that is undecided may begin one by its value, but ends none. A step
that was not measured changes nothing. It is told when it begins, every `EVERY` steps, and when it
is over.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from typing import Any

from mismatch_cli.base.json_form import to_json
from mismatch_cli.limits.judge import HOLDS, UNDECIDED
from mismatch_cli.limits.limit_sets import CheckRow, LimitSet
from mismatch_cli.studies.gate import Check, check_row
from mismatch_cli.studies.watch_state import Alarm, SetLimit

EVERY = 25  # steps between two reminders: a few in a run of hundreds of steps
BEGINS, STILL, OVER = "begins", "still", "over"


@dataclass(frozen=True)
class Event:
    """What the user hears of an alarm at a step: it begins, still is, or is over."""

    state: str  # begins, still or over
    step: int
    since: int  # the step at which the alarm began
    check: CheckRow  # of this step

    @property
    def key(self) -> str:
        """A name of the limit and the step, equal in every session; also a file name."""
        return f"step-{self.step}-{limit_of(self.check)}"

    @property
    def text(self) -> str:
        """`k3 (mismatch) at step 12: 0.02 is above 0.015 (limits.toml)`."""
        check = self.check
        fact = check.reason
        if self.state == STILL:
            fact = f"{fact}, since step {self.since}"
        elif self.state == OVER:
            fact = f"{self._within} again, after an alarm since step {self.since}"
        return f"{check.quantity} at step {self.step}: {fact} ({check.limits})"

    @property
    def _within(self) -> str:
        """How the step that ends an alarm is within the limit: by all of its interval, or by its
        value, where few prompts give none.
        """
        return "holds" if self.check.status == HOLDS else "is within the limit by its value"

    @property
    def is_alarm(self) -> bool:
        """Whether the limit does not hold, which the bell and the user's command are for."""
        return self.state != OVER

    def to_json(self) -> dict[str, Any]:
        """The check with its step, and the state of the alarm."""
        return {"step": self.step, "state": self.state, "since": self.since, **to_json(self.check)}


class Alarms:
    """The alarms of a run, in the order in which they began."""

    def __init__(self, alarms: Iterable[Alarm] = ()) -> None:
        self.all = list(alarms)
        self._newest = {limit_of(alarm.check): alarm for alarm in self.all}

    def update(self, step: int, checks: Sequence[Check]) -> list[Event]:
        """Take in the checks of a step; return what the user hears. Of the same step again, as
        after a kill, that is nothing.
        """
        events: list[Event] = []
        for check in checks:
            if not check.is_judged:
                continue
            event = self._change(step, check)
            if event is not None:
                events.append(event)
        return events

    def _change(self, step: int, check: Check) -> Event | None:
        row = check_row(check)
        alarm = self._newest.get(limit_of(row))
        if alarm is not None and alarm.over is not None and step >= alarm.over:
            alarm = None  # what is exceeded after its end is another alarm
        if alarm is None:
            return None if check.holds else self._begin(step, row)
        if alarm.over is not None or step < alarm.last:
            # Steps of a dump may arrive out of order: an earlier one changes nothing.
            return None
        if not check.holds:
            return self._continue(alarm, step, row)
        if _is_undecided(check):
            return None
        alarm.over = step
        return Event(OVER, step, alarm.since, row)

    @staticmethod
    def _continue(alarm: Alarm, step: int, row: CheckRow) -> Event | None:
        alarm.last = step
        if step - alarm.told < EVERY:
            return None
        alarm.told = step
        return Event(STILL, step, alarm.since, row)

    def _begin(self, step: int, row: CheckRow) -> Event:
        alarm = Alarm(step, row, last=step, told=step)
        self.all.append(alarm)
        self._newest[limit_of(row)] = alarm
        return beginning(alarm)

    def of(self, sets: Sequence[LimitSet]) -> list[Alarm]:
        """The alarms of these limits only: an earlier session may have had others."""
        keys = {limit.key for limit in SetLimit.all_of(sets)}
        return [alarm for alarm in self.all if alarm.check.key in keys]

    def to_json(self) -> list[dict[str, Any]]:
        return [asdict(alarm) for alarm in self.all]


def beginning(alarm: Alarm) -> Event:
    """The event with which an alarm began."""
    return Event(BEGINS, alarm.since, alarm.since, alarm.check)


def _is_undecided(check: Check) -> bool:
    """Whether the limit is within an interval; the few prompts of a step may give none, and then
    its value decides.
    """
    return check.status == UNDECIDED and check.measured.has_interval


def limit_of(check: CheckRow) -> str:
    """A short name of a limit on a pair, the same in every process."""
    names = map(str, (*check.key, check.pair))
    return sha256("\0".join(names).encode()).hexdigest()[:16]
