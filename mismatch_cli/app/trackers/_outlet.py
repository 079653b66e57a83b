"""A tracker as the run sees it: another process, free to hang, print or die."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from mismatch_cli.app.trackers._tracking import PACKAGE
from mismatch_cli.base.child_python import command

STEP_SECONDS = 180.0  # time limit of a step; libraries wait up to 90 s for a network
END_SECONDS = 60.0  # time limit of everything left at the end


class TrackerError(Exception):
    """The reason to give up a tracker."""


class Outlet:
    """Steps go into a pipe that never blocks; each send also reads the answers."""

    def __init__(self, name: str, folder: Path, about: Mapping[str, Any]) -> None:
        self.log_file = folder / f"{name}.log"
        self._unsent, self._unread = bytearray(), b""
        self._answered, self._sent, self._heard = 0, 0, time.monotonic()
        folder.mkdir(parents=True, exist_ok=True)
        with self.log_file.open("ab") as log:
            self._child = subprocess.Popen(
                command(f"{PACKAGE}._tracking", name),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                # Ctrl-C is not for it
                stderr=log,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
                start_new_session=True,
            )
        assert self._child.stdin is not None and self._child.stdout is not None
        self._input, self._output = self._child.stdin.fileno(), self._child.stdout.fileno()
        os.set_blocking(self._input, False)
        os.set_blocking(self._output, False)
        self._put({"folder": str(folder / name), **about})
        self._answered -= 1  # the first message gets no answer

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send a step; a `TrackerError` if the tracker has failed, or does not answer."""
        self._read()
        if self._answered < self._sent and time.monotonic() - self._heard > STEP_SECONDS:
            raise TrackerError(f"it has not responded for {STEP_SECONDS:g} s")
        self._put({"step": step, "metrics": dict(metrics)})

    def close(self) -> None:
        """Send what is left and wait for its end; a `TrackerError` if that fails or takes too
        long.
        """
        until = time.monotonic() + END_SECONDS
        with selectors.DefaultSelector() as ready:
            ready.register(self._output, selectors.EVENT_READ)
            while self._unsent and time.monotonic() < until:
                ready.select(0.05)
                self._read()
                self._push()
            self._child.stdin.close()  # type: ignore[union-attr]
            while self._read() and time.monotonic() < until:
                ready.select(0.05)
        try:
            self._child.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise TrackerError(f"it did not finish within {END_SECONDS:g} s") from None

    def give_up(self) -> None:
        """Kill the process and everything that it has started."""
        with suppress(ProcessLookupError):
            os.killpg(self._child.pid, signal.SIGKILL)
        self._child.wait()
        for pipe in (self._child.stdin, self._child.stdout):
            with suppress(OSError):
                pipe.close()  # type: ignore[union-attr]

    def _put(self, message: Mapping[str, Any]) -> None:
        if self._answered >= self._sent:
            self._heard = time.monotonic()  # from now on an answer is due
        self._unsent += json.dumps(message).encode() + b"\n"
        self._push()

    def _push(self) -> None:
        try:
            written = os.write(self._input, self._unsent)
        except BlockingIOError:
            return
        except BrokenPipeError:
            self._read()
            raise TrackerError(f"its process ended with code {self._child.wait()}") from None
        self._sent += self._unsent[:written].count(b"\n")
        del self._unsent[:written]

    def _read(self) -> bool:
        """Read its answers; return whether there may be more.

        A `TrackerError` if it reports a failure.
        """
        with suppress(BlockingIOError):
            while found := os.read(self._output, 2**16):
                *lines, self._unread = (self._unread + found).split(b"\n")
                for answer in map(json.loads, lines):
                    if "error" in answer:
                        raise TrackerError(answer["error"])
                    self._answered, self._heard = self._answered + 1, time.monotonic()
            return False
        return True
