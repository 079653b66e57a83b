"""A `train` run in progress: the new lines of its metrics.jsonl, and the steps whose traces it
keeps.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from mismatch_cli.base.errors import MismatchError
from mismatch_cli.base.text import parse_json
from mismatch_cli.trace.reader import Trace
from mismatch_cli.trace.training_folder import CONFIG, METRICS, read_config

_AT_ONCE = 2**22  # bytes


class CompleteStep(NamedTuple):
    """A complete step: a line of `train`, or traces that contain it."""

    step: int
    record: dict[str, Any] | None
    traces: list[Trace]
    shards: str = ""  # a digest of the shards: when it changes, the step has grown


@dataclass
class Lines:
    """The complete lines of a growing file, each once; a rewritten file is read again from its
    start.
    """

    path: Path
    _end: int = field(default=0, init=False)
    _last: bytes = field(default=b"", init=False)  # the line that ends there

    def new(self) -> list[bytes]:
        """The next new lines, a few megabytes of them; empty once all have been read."""
        try:
            with self.path.open("rb") as file:
                # While the last line that was read is unchanged, so are those before it.
                file.seek(self._end - len(self._last))
                if file.read(len(self._last)) != self._last:
                    self._end, self._last = 0, b""
                file.seek(self._end)
                lines = file.readlines(_AT_ONCE)
        except FileNotFoundError:
            return []
        if lines and not lines[-1].endswith(b"\n"):
            lines.pop()
        if lines:
            self._end += sum(map(len, lines))
            self._last = lines[-1]
        return lines

    def all_new(self) -> Iterator[bytes]:
        """All new lines, one by one; memory holds a few megabytes of them."""
        lines = self.new()
        while lines:
            yield from lines
            lines = self.new()


class GrowingTraining:
    """What `train` writes: a step is complete once its line exists, since its trace is written
    first.
    """

    kind = "train"

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lines = Lines(folder / METRICS)
        self.algorithm = str(read_config(folder / CONFIG).get("algorithm", ""))
        self.newest: int | None = None
        self.waiting = ""

    @property
    def is_over(self) -> bool:
        """Whether it has reached its last step."""
        planned = read_config(self._folder / CONFIG).get("steps")
        return isinstance(planned, int) and self.newest is not None and self.newest >= planned

    @property
    def changed(self) -> float:
        """When the run last wrote a line, in seconds since 1970; 0 before the first one."""
        return changed(self._folder / METRICS)

    # `final` changes nothing: the file of a run that is over has whole lines
    def look(self, *, final: bool) -> Iterator[CompleteStep]:  # noqa: ARG002
        """The new steps since the last look."""
        for record in map(self._parse, self._lines.all_new()):
            step = record.get("step")
            # Step 0 is an evaluation before the first update.
            if isinstance(step, int) and step > 0:
                self.newest = step
                yield CompleteStep(step, record, self._traces(step))

    def _parse(self, line: bytes) -> dict[str, Any]:
        try:
            return dict(parse_json(line))
        except (ValueError, TypeError) as error:
            raise MismatchError(
                f"{self._lines.path} is damaged: a line is not a JSON object. Type the command "
                "that started the run with --resume: it cuts the file back to the newest "
                "checkpoint and continues."
            ) from error

    def _traces(self, step: int) -> list[Trace]:
        """The trace of a step, if `train --trace-every` kept one."""
        folder = self._folder / "traces" / f"step-{step}"
        if not (folder / "manifest.json").is_file():
            return []
        return [Trace.open(folder)]


def changed(path: Path) -> float:
    """When a file was last written, in seconds since 1970; 0 if it does not exist."""
    try:
        return os.stat(path).st_mtime
    except OSError:
        return 0.0
