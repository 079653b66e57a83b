"""Racers that take turns: programs that are all loaded, one of which does a step at a time when
told to.

This times two programs step by step on the same machine in the same minutes, without start-up. The
driver writes a line to a racer's stdin, and the racer answers with a line of JSON on its stdout;
lines that are not JSON are ignored.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

_MARK = "turn "


class Turn:
    """The racer's side: `wait` until it may start; `done` reports the step and its time."""

    def __init__(self) -> None:
        self._out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # what a library prints goes to stderr
        self._began = self._cpu = 0.0

    def wait(self) -> bool:
        """Returns False when the race is over."""
        line = sys.stdin.readline()
        self._began, self._cpu = time.perf_counter(), time.process_time()
        return line.strip() == "go"

    def done(self, **facts: Any) -> None:
        taken = {
            "seconds": time.perf_counter() - self._began,
            "cpu": time.process_time() - self._cpu,
        }
        # Of the whole process, so far
        taken["peak_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        facts = taken | facts
        print(_MARK + json.dumps(facts), file=self._out, flush=True)


class Died(Exception):
    """A racer ended during a race."""


class Racer:
    """The driver's side: a program that waits for its turns."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            command, env=dict(environment), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def step(self) -> dict[str, Any]:
        """Run one turn; raises `Died` with the exit code if the program has ended."""
        assert self._process.stdin and self._process.stdout
        with suppress(BrokenPipeError):
            self._process.stdin.write("go\n")
            self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith(_MARK):
                found: dict[str, Any] = json.loads(line.removeprefix(_MARK))
                return found
        raise Died(f"exit code {self._process.wait()}")

    def stop(self) -> None:
        assert self._process.stdin
        try:
            self._process.stdin.close()
            self._process.wait(60)
        except (OSError, subprocess.TimeoutExpired):
            self._process.kill()
