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
    """The state; `request` is what is measured of every step: steps measured differently are
    measured again.

    `alarms`, `parts` and `reported`, the shards of each reported step, are on disk after `save`.
    """

    def __init__(self, folder: Path, run: Path, request: Mapping[str, Any], *, lines: bool) -> None:
        """`lines`: keep the line of each step in our own metrics.jsonl, since the run has none."""
        self.folder = folder
        self._run = run
        # As JSON gives it back: tuples are lists there, and it is compared with what was saved.
        self._request = json.loads(json.dumps(request))
        self._has_lines = lines
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

    def _continue(self, saved: Mapping[str, Any]) -> None:
        """Take over what an earlier process has saved; raises anything if it is not of these
        types.
        """
        before = saved.get("asked", {})
        self.parts: list[dict[str, Any]] = [_checked_part(**row) for row in saved.get("parts", [])]
        # An alarm is about its limit, and a relative limit about the baseline too.
        same_baseline = before.get("baseline") == self._request.get("baseline")
        alarms = saved.get("alarms", []) if same_baseline else []
        self.alarms = Alarms(from_json(Alarm, row) for row in alarms)
        self._called: set[str] = set(map(str, saved.get("called", [])))
        self._measured: set[str] = set()  # limits
        self.reported: dict[int, str] = {}
        if before == self._request:
            self._measured.update(map(str, saved.get("known", [])))
            for step, shards in saved.get("told", {}).items():
                self.reported[int(step)] = str(shards)

    def save(self) -> None:
        """Save everything but the lines, with one rename."""
        content = {
            "format": FORMAT,
            "version": VERSION,
            "run": str(self._run.absolute()),
            "asked": self._request,
            "parts": self.parts,
            "told": {str(step): shards for step, shards in self.reported.items()},
            "alarms": self.alarms.to_json(),
            "called": sorted(self._called),
            "known": sorted(self._measured),
        }
        write_atomically(self.folder / WATCH_FILE, json.dumps(content, indent=1) + "\n")

    def update_alarms(self, step: int, checks: Sequence[Check]) -> list[Event]:
        """Record what the limits say of a step before anybody hears of it; return what the user
        then hears.
        """
        for check in checks:
            if check.is_judged:
                self._measured.add(_key(check.limits, check.limit))
        events = self.alarms.update(step, checks)
        if events:
            self.save()
        return events

    def add_step(self, step: int, record: Record, shards: str) -> None:
        """Record a step; once saved, it is not read again unless it grows."""
        if self._has_lines and step in self.reported:
            self._rewrite_lines({step: record})
        elif self._has_lines:
            self._append(record)
        self.reported[step] = shards

    def unmeasured(self, sets: Sequence[LimitSet]) -> list[SetLimit]:
        """The limits that could not be measured at any step."""
        limits = SetLimit.all_of(sets)
        return [limit for limit in limits if limit.state_key not in self._measured]

    @property
    def uncalled(self) -> list[Event]:
        """Alarms at whose beginning the user's command has not run."""
        beginnings = map(beginning, self.alarms.all)
        return [event for event in beginnings if event.key not in self._called]

    def record_call(self, event: Event) -> None:
        """Record that the command has started for an alarm."""
        self._called.add(event.key)
        self.save()

    def lines(self) -> Iterator[tuple[int, Record]]:
        """The steps with their lines in our own metrics.jsonl, read again: a long run has too
        many to keep.
        """
        if not self._has_lines:
            return
        for line in Lines(self.folder / METRICS).all_new():
            record = dict(parse_json(line))
            yield int(record["step"]), record

    def _check_lines(self) -> None:
        """Keep the lines of reported steps and nothing else; a step without its line is to be
        read again.
        """
        steps = {step for step, _ in self.lines()}
        for step in self.reported.keys() - steps:
            del self.reported[step]
        if (self.folder / METRICS).exists():
            self._rewrite_lines({})

    def _rewrite_lines(self, changed: Mapping[int, Record]) -> None:
        """Write the lines of reported steps again, some of them changed."""
        with replacing(self.folder / METRICS) as new, new.open("w", encoding="utf-8") as file:
            for step, record in self.lines():
                if step in self.reported:
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


def _checked_part(name: str, files: Mapping[str, Any]) -> dict[str, Any]:
    """A part of a dump; a ValueError for a name that is not ours, since its folder may be
    removed.
    """
    if not _PART.fullmatch(name):
        raise ValueError(f"{name} is not the name of a part")
    spans = {file: [int(begin), int(end)] for file, (begin, end) in files.items()}
    return {"name": name, "files": spans}


def _key(limits: str, limit: Limit) -> str:
    """The key of a limit of a set."""
    return SetLimit(**vars(limit), limits=limits).state_key
