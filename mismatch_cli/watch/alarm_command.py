"""Runs the user's command at an alarm; it may fail or hang without stopping `watch`.

It has no keeper, which would end it with `watch`: an alarm is called once, so a call that has begun
must end by itself, and what it leaves running is the user's.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from mismatch_cli.base.child_python import users_environment
from mismatch_cli.processes.child import end_group, in_own_group
from mismatch_cli.watch.alarms import Event

SECONDS = 60.0  # time limit of a command
_FOLDER = "alarms"
# The call that creates the folder is the only one: a kill between a call and its record does not
# repeat the call.
_ONCE = 'mkdir "$0" 2>/dev/null || exit 0; eval "$1"'


class AlarmCommand:
    """Runs a shell command once per alarm, one at a time, without waiting for it."""

    def __init__(self, command: str, run: Path, folder: Path, say: Callable[[str], None]) -> None:
        self._command = command
        self._run = run
        self._folder = folder / _FOLDER
        self._say = say
        self._waiting: deque[Event] = deque()
        # The call under way: its process, its alarm, and when it began
        self._call: tuple[subprocess.Popen[bytes], Event, float] | None = None

    def add(self, alarm: Event) -> None:
        """Queue an alarm; its call follows the calls before it."""
        self._waiting.append(alarm)

    def look(self, record: Callable[[Event], None]) -> bool:
        """Check on the running call, or start and `record` the next; return whether there is
        anything left to do.
        """
        if self._call is not None and not self._has_ended():
            return True
        if not self._waiting:
            return False
        alarm = self._waiting.popleft()
        self._start(alarm)
        record(alarm)
        return True

    def finish(self, record: Callable[[Event], None]) -> None:
        """Make the remaining calls, each within its time limit."""
        while self.look(record):
            time.sleep(0.02)

    def _start(self, alarm: Event) -> None:
        check = alarm.check
        variables = {
            "ALARM_RUN": str(self._run.absolute()),
            "ALARM_STEP": str(alarm.step),
            "ALARM_METRIC": check.metric,
            "ALARM_PAIR": check.pair,
            "ALARM_VALUE": str(check.value),
            "ALARM_LIMIT": str(check.allowed),
            "ALARM_BOUND": check.bound,
            "ALARM_TEXT": alarm.text,
            "ALARM_STANDING": json.dumps(alarm.to_json()),
        }
        try:
            self._folder.mkdir(exist_ok=True)
            process = in_own_group(
                ["/bin/sh", "-c", _ONCE, str(self._folder.absolute() / alarm.key), self._command],
                env=users_environment() | variables,
            )
        except OSError as error:
            self._say(
                f"--on-alarm could not be called at step {alarm.step} ({error.strerror}). "
                "Watching continues."
            )
            return
        self._call = process, alarm, time.monotonic()

    def _has_ended(self) -> bool:
        assert self._call is not None
        process, alarm, began = self._call
        code = process.poll()
        if code is None and time.monotonic() - began < SECONDS:
            return False
        fault = f"ended with exit code {code}"
        if code is None:
            end_group(process)
            fault = f"took over {SECONDS:g} seconds and was stopped"
        if code != 0:
            self._say(f"--on-alarm {fault} at step {alarm.step}. Watching continues.")
        self._call = None
        return True
