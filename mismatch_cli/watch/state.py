"""The state of a `watch`, in a folder of its own: reported steps, alarms, and parts of a dump.

Killed at any moment, it continues where it was: `watch.json` is replaced atomically, and a step is
reported only once its alarms and its line are on disk.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mismatch_cli.base.errors import MismatchError, first_line
from mismatch_cli.base.json_form import from_json
from mismatch_cli.base.text import parse_json
from mismatch_cli.limits.limit_sets import Limit, LimitSet
from mismatch_cli.studies.gate import Check
from mismatch_cli.studies.watch_state import Alarm, SetLimit
from mismatch_cli.trace.files import could_not_write, open_to_append, replacing, write_atomically
from mismatch_cli.trace.training_folder import METRICS, WATCH_FILE
from mismatch_cli.watch.alarms import Alarms, Event, beginning
from mismatch_cli.watch.folders import FORMAT, VERSION, state_in
from mismatch_cli.watch.training_run import Lines

Record = dict[str, Any]
_PART = re.compile(r"part-\d{5,}")


class State:
    """The state; `asked` is what is measured of every step: steps measured differently are
    measured again.
    """

    def __init__(self, folder: Path, run: Path, asked: Mapping[str, Any], *, lines: bool) -> None:
        """`lines`: keep the line of each step in our own metrics.jsonl, since the run has none."""
        self.folder, self._run, self._asked, self._lines = (
            folder,
            run,
            json.loads(json.dumps(asked)),
            lines,
        )
        try:
            self._continue(state_in(folder))
            if lines:
                self._check_lines()
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
            raise MismatchError(
                f"{folder} is damaged ({first_line(error)}). Remove the folder, or choose "
                "another --output."
            ) from error
        self.save()

    def _continue(self, found: Mapping[str, Any]) -> None:
        """Take over what an earlier process has saved; raises anything if it is not of these
        types.
        """
        before = found.get("asked", {})
        same = before == self._asked
        self.parts: list[dict[str, Any]] = [_part(**row) for row in found.get("parts", [])]
        # An alarm is about its limit, and a relative limit about the baseline too
        same_baseline = before.get("baseline") == self._asked.get("baseline")
        alarms = found.get("alarms", []) if same_baseline else []
        self.alarms = Alarms(from_json(Alarm, row) for row in alarms)
        self._called: set[str] = set(map(str, found.get("called", [])))
        self._known: set[str] = set(map(str, found.get("known", []))) if same else set()
        told = found.get("told", {}).items() if same else ()
        self.told: dict[int, str] = {int(step): str(shards) for step, shards in told}

    def save(self) -> None:
        """Save everything but the lines, with one rename."""
        content = {
            "format": FORMAT,
            "version": VERSION,
            "run": str(self._run.absolute()),
            "asked": self._asked,
            "parts": self.parts,
            "told": {str(step): shards for step, shards in self.told.items()},
            "alarms": self.alarms.to_json(),
            "called": sorted(self._called),
            "known": sorted(self._known),
        }
        write_atomically(self.folder / WATCH_FILE, json.dumps(content, indent=1) + "\n")

    def judged(self, step: int, checks: Sequence[Check]) -> list[Event]:
        """Record what the limits say of a step before anybody hears of it; return what is to be
        told.
        """
        self._known |= {_key(check.limits, check.limit) for check in checks if check.is_judged}
        events = self.alarms.judged(step, checks)
        if events:
            self.save()
        return events

    def put(self, step: int, record: Record, shards: str) -> None:
        """Record a step; once saved, it is not read again unless it grows."""
        if self._lines:
            self._rewrite_lines({step: record}) if step in self.told else self._append(record)
        self.told[step] = shards

    def unmeasured(self, sets: Sequence[LimitSet]) -> list[SetLimit]:
        """The limits that could not be measured at any step."""
        limits = SetLimit.all_of(sets)
        return [limit for limit in limits if limit.state_key not in self._known]

    @property
    def uncalled(self) -> list[Event]:
        """Alarms at whose beginning the user's command has not run."""
        beginnings = map(beginning, self.alarms.all)
        return [event for event in beginnings if event.key not in self._called]

    def called(self, event: Event) -> None:
        """Record that the command has started."""
        self._called.add(event.key)
        self.save()

    def lines(self) -> Iterator[tuple[int, Record]]:
        """The steps with their lines in our own metrics.jsonl, read again: a long run has too
        many to keep.
        """
        if not self._lines:
            return
        unread = Lines(self.folder / METRICS)
        while lines := unread.new():
            for line in lines:
                record = dict(parse_json(line))
                yield int(record["step"]), record

    def _check_lines(self) -> None:
        """Keep the lines of reported steps and nothing else; a step without its line is to be
        read again.
        """
        steps = {step for step, _ in self.lines()}
        self.told = {step: shards for step, shards in self.told.items() if step in steps}
        if (self.folder / METRICS).exists():
            self._rewrite_lines({})

    def _rewrite_lines(self, changed: Mapping[int, Record]) -> None:
        """Write the lines of reported steps again, some of them changed."""
        with replacing(self.folder / METRICS) as new, new.open("w", encoding="utf-8") as file:
            for step, record in self.lines():
                if step in self.told:
                    file.write(json.dumps(changed.get(step, record)) + "\n")

    def _append(self, record: Record) -> None:
        path = self.folder / METRICS
        try:
            with open_to_append(path) as lines:
                lines.write(json.dumps(record).encode() + b"\n")
                lines.flush()
                os.fsync(lines.fileno())
        except OSError as error:
            raise could_not_write(path, error) from error


def _part(name: str, files: Mapping[str, Any]) -> dict[str, Any]:
    """A part of a dump; a ValueError for a name that is not ours, since its folder may be
    removed.
    """
    if not _PART.fullmatch(name):
        raise ValueError(f"{name} is not the name of a part")
    return {
        "name": name,
        "files": {file: [int(begin), int(end)] for file, (begin, end) in files.items()},
    }


def _key(of: str, limit: Limit) -> str:
    return SetLimit(**vars(limit), limits=of).state_key
