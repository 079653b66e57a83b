"""Refreshes the report of a training run from time to time, in a child.

Neither training nor `watch` waits for it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from mismatch_cli.app.common import Common
from mismatch_cli.base.errors import MismatchError
from mismatch_cli.base.text import visible
from mismatch_cli.processes.child import LATE, Child, Reply
from mismatch_cli.trace.drafts import remove_unfinished

_SHARE = 0.02  # of CPU time at most, for drawing
_LOWEST = 19  # niceness: only what other processes leave
_RELOAD_SECONDS = 60  # after which an open page reloads itself
_LONGEST = 3600.0  # seconds for a report


class Refresher:
    """Draws the report of these runs into `output`, at most once every `every` seconds, one
    process at a time.
    """

    def __init__(
        self,
        folders: Sequence[Path],
        output: Path,
        every: float,
        say: Callable[[str], None],
        *,
        draws: bool = True,
    ) -> None:
        pictures = "pictures" if draws else ""
        self.child = Child(_drawer, pictures, str(output), *map(str, folders))
        self._output = output
        self._every = every
        self._say = say
        self._last_complaint = ""
        self.next_at = time.monotonic() + every

    def step_done(self) -> None:
        """Check on the process that draws, and start the next when it is time."""
        if not self._every or self._is_drawing() or time.monotonic() < self.next_at:
            return
        self.next_at = time.monotonic() + self._every
        try:
            self.child.tell({"reload_seconds": _RELOAD_SECONDS})
        except OSError as error:
            self._complain(str(error))

    def finish(self) -> None:
        """Draw the final report, which no longer reloads itself, and wait for it."""
        if not self._every:
            return
        self.stop()
        try:
            self._end(self.child.ask({"reload_seconds": 0}, _LONGEST))
        except (OSError, MismatchError) as error:
            self._complain(str(error))

    def stop(self) -> None:
        """End the process that draws, whatever its progress."""
        if self.child.runs:
            self.child.stop()
            # It writes under temporary names first, and what it had begun has such a name.
            remove_unfinished(self._output)

    def _is_drawing(self) -> bool:
        if not self.child.runs:
            return False
        reply = self.child.receive(0.0)
        if reply is None and self.child.silence > _LONGEST:
            reply = LATE
        # An empty reply says that the child has started and is ready to draw.
        if reply is None or reply == Reply():
            return True
        self._end(reply)
        return False

    def _end(self, reply: Reply) -> None:
        """End the process, and let the next one wait until drawing has its share of CPU time."""
        before = _seconds_of_children()
        if reply is LATE:
            self.stop()
        self.child.stop()
        used = _seconds_of_children() - before
        self.next_at = max(self.next_at, time.monotonic() + used / _SHARE)
        if reply.error:
            self._complain(reply.error)

    def _complain(self, reason: str) -> None:
        """Say why it failed, each reason once: it will be tried again."""
        if reason != self._last_complaint:
            self._last_complaint = reason
            self._say(f"The report could not be refreshed, training continues: {visible(reason)}")


def _seconds_of_children() -> float:
    """CPU time of children that have ended, and of theirs."""
    used = os.times()
    return used.children_user + used.children_system


def _drawer(pictures: str, output: str, *folders: str) -> Callable[[dict[str, int]], bool]:
    """Draws the report of the runs that have started; True says that it is there."""
    os.nice(_LOWEST)
    os.environ["OMP_NUM_THREADS"] = "1"

    def draw(page: dict[str, int]) -> bool:
        from mismatch_cli.studies.programs import training_study
        from mismatch_cli.studies.watch_state import watch_state
        from mismatch_cli.trace.training_folder import METRICS

        begun = [run for run in map(Path, folders) if (run / METRICS).is_file()]
        common = Common(quiet=True, no_plots=not pictures)
        # The report that `train` draws of itself has no state of a watch; that of `watch` has.
        study = training_study(begun).study_of(begun, watched=watch_state(Path(output)))
        common.show(study, Path(output), reload_seconds=page["reload_seconds"])
        return True

    return draw
