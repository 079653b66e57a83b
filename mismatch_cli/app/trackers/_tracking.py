"""The process of a tracker, this file run as a program: it reads steps from stdin and answers each
one on stdout.

What a library prints goes to the tracker's log, what it raises becomes an answer, and a hang blocks
only this process.
"""

from __future__ import annotations

import fcntl
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

from mismatch_cli.base import registry
from mismatch_cli.base.errors import first_line
from mismatch_cli.trace.files import write_atomically

PACKAGE = "mismatch_cli.app.trackers"


@dataclass(frozen=True)
class TrackedRun:
    """What a tracker knows about a run before its first step."""

    folder: Path  # of this tracker
    project: str
    name: str
    id: str  # stays the same when the run is resumed
    config: Mapping[str, Any]
    resumed: bool = False


class _Memory:
    """The tracker's id of this run and the last step that it has: a resumed run continues after
    it.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._known = path, dict[str, Any]()
        if path.is_file():
            self._known = json.loads(path.read_text(encoding="utf-8"))

    def continued(self, run: TrackedRun) -> TrackedRun:
        """The run under the id of its first session."""
        if "id" not in self._known:
            self._save(id=run.id)
            return run
        return replace(run, id=self._known["id"], resumed=True)

    @property
    def step(self) -> int:
        return int(self._known.get("step", -1))

    def has(self, step: int) -> None:
        self._save(step=step)

    def _save(self, **known: Any) -> None:
        self._known |= known
        write_atomically(self._path, json.dumps(self._known))


def _track(name: str, steps: IO[bytes], answers: IO[bytes]) -> None:
    """Log steps until the other side closes the pipe, with an answer to each."""

    def answer(**message: Any) -> None:
        answers.write(json.dumps(message).encode() + b"\n")
        answers.flush()

    about = json.loads(steps.readline())
    folder = Path(about.pop("folder"))
    memory = _Memory(folder.with_name(f"{name}.json"))
    run = memory.continued(TrackedRun(folder, **about))
    folder.mkdir(parents=True, exist_ok=True)
    with registry.load(PACKAGE, name, "tracker").tracking(run) as log:
        for line in steps:
            given = json.loads(line)
            if given["step"] > memory.step:
                log(given["step"], given["metrics"])
                memory.has(given["step"])
            answer(step=given["step"])
    answer(done=True)


def _main(name: str) -> None:
    answers = open(os.dup(1), "wb")  # noqa: SIM115 - as long as the process
    os.dup2(2, 1)  # what a library prints belongs in its log, which is stderr
    fcntl.flock(2, fcntl.LOCK_EX)  # the process of a killed session may not have ended yet
    try:
        _track(name, sys.stdin.buffer, answers)
    except BaseException as error:
        answers.write(
            json.dumps({"error": f"{type(error).__name__}: {first_line(error)}"}).encode() + b"\n"
        )
        answers.flush()
        raise


if __name__ == "__main__":
    _main(sys.argv[1])
