"""Refreshes the report of a training run from time to time, in another process: this file run as a
program.

Neither training nor `watch` waits for it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from mismatch_cli.app.common import Common
from mismatch_cli.base.child_python import command
from mismatch_cli.base.errors import MismatchError
from mismatch_cli.base.text import visible
from mismatch_cli.trace.drafts import remove_unfinished

_SHARE = 0.02  # of CPU time at most, for drawing
_LOWEST = 19  # niceness: only what other processes leave
_RELOAD_SECONDS = 60  # after which an open page reloads itself


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
        program, drawn = command(__name__), [str(output), *map(str, folders)]
        words = "pictures" if draws else ""
        self._command, self._last_command = (
            [*program, words, *drawn],
            [*program, f"final,{words}", *drawn],
        )
        self._output, self._every, self._say, self._last_complaint = output, every, say, ""
        self._next = time.monotonic() + every
        self._child: subprocess.Popen[bytes] | None = None
        # Not a pipe: nobody reads it before the process ends, and a full one would block the
        # process.
        self._errors = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - as long as this object

    def step_done(self) -> None:
        """Check on the process that draws, and start the next when it is time."""
        if not self._every or not self._is_free() or time.monotonic() < self._next:
            return
        self._next = time.monotonic() + self._every
        try:
            self._child = self._begun(self._command)
            os.setpriority(os.PRIO_PROCESS, self._child.pid, _LOWEST)
        except OSError as error:
            self._complain(str(error))

    def finish(self) -> None:
        """Draw the final report, which no longer reloads itself, and wait for it."""
        if not self._every:
            return
        self._end_child()
        try:
            self._child = self._begun(self._last_command)
            if self._child.wait():
                self._complain(self._read_errors())
        except OSError as error:
            self._complain(str(error))

    def _begun(self, command: Sequence[str]) -> subprocess.Popen[bytes]:
        self._errors.seek(0)
        self._errors.truncate()
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=self._errors,
            # Ctrl-C must not reach it
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )

    def stop(self) -> None:
        """End the process that draws, whatever its progress."""
        self._end_child()
        self._errors.close()

    def _end_child(self) -> None:
        if self._child is not None and self._child.poll() is None:
            self._child.kill()  # it writes under temporary names first
            self._child.wait()
            remove_unfinished(self._output)
        self._child = None

    def _is_free(self) -> bool:
        if self._child is None:
            return True
        # `poll` does not report CPU time
        pid, status, usage = os.wait4(self._child.pid, os.WNOHANG)
        if pid == 0:
            return False
        self._child.returncode = os.waitstatus_to_exitcode(status)
        self._next = max(self._next, time.monotonic() + (usage.ru_utime + usage.ru_stime) / _SHARE)
        self._child = None
        if status:
            self._complain(self._read_errors())
        return True

    def _read_errors(self) -> str:
        self._errors.seek(0)
        return self._errors.read().decode(errors="replace")

    def _complain(self, error: str) -> None:
        """Say why it failed, each reason once: it will be tried again."""
        reason = next(
            (line.strip() for line in reversed(error.splitlines()) if line.strip()),
            "no reason given",
        )
        if reason != self._last_complaint:
            self._last_complaint = reason
            self._say(f"The report could not be refreshed, training continues: {visible(reason)}")


def _draw(output: Path, folders: Sequence[Path], *, pictures: bool, final: bool) -> None:
    """Draw the report of the runs that have started."""
    from mismatch_cli.studies.programs import training_study
    from mismatch_cli.studies.watch_state import watch_state
    from mismatch_cli.trace.training_folder import METRICS

    begun = [folder for folder in folders if (folder / METRICS).is_file()]
    common = Common(quiet=True, no_plots=not pictures)
    # Of `train`, there is no watch
    study = training_study(begun).study_of(begun, watched=watch_state(output))
    common.show(study, output, reload_seconds=0 if final else _RELOAD_SECONDS)


def _end_with_parent() -> None:
    """End when stdin closes: its owner holds the folder, and once it is gone another process may
    write there.
    """
    os.read(0, 1)
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        asked = sys.argv[1].split(",")
        _draw(
            Path(sys.argv[2]),
            list(map(Path, sys.argv[3:])),
            pictures="pictures" in asked,
            final="final" in asked,
        )
    except MismatchError as error:
        sys.exit(str(error))
