"""A child process that answers a line with a line, and cannot hang whoever asks."""

from __future__ import annotations

import select
import subprocess
import sys
from collections.abc import Iterable

from mismatch_cli.errors import MismatchError

_SECONDS_TO_START = 60.0  # importing sympy on a slow disk


class Child:
    """Runs `python -m module arguments…`, which prints "ready" and then one line for each line.

    A question that takes longer than `seconds` is given up: the child is killed, the next question starts another, and
    the same question is not tried again. `cannot_start` is what a person is told when there is no "ready".
    """

    def __init__(self, module: str, *arguments: str, seconds: float, cannot_start: str) -> None:
        self._command = [sys.executable, "-m", module, *arguments]
        self._seconds, self._cannot_start = seconds, cannot_start
        self._given_up: set[str] = set()
        self._process: subprocess.Popen[str] | None = None

    @property
    def given_up(self) -> list[str]:
        """The questions that took too long: a run that is resumed with them goes on as the unbroken one did."""
        return sorted(self._given_up)

    def give_up(self, questions: Iterable[str]) -> None:
        """Do not try these again."""
        self._given_up |= set(questions)

    def ask(self, question: str) -> str | None:
        """The answer; None where it was given up, empty where the child died of it (out of memory, a crash)."""
        if question in self._given_up:
            return None
        if self._process is not None and self._process.poll() is not None:
            self.stop()  # it died between two questions (out of memory): this one is not to blame
        try:
            child = self._process or self.start()
            print(question, file=child.stdin, flush=True)
            answer = _read_line(child, self._seconds)
        except OSError:
            answer = ""
        if answer is None:
            self._given_up.add(question)
        if not answer:
            self.stop()
        return answer

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
        self._process = None

    def start(self) -> subprocess.Popen[str]:
        """Start the process, as the first question does; a `MismatchError` where it is not ready."""
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        reply = _read_line(self._process, _SECONDS_TO_START)
        if reply != "ready":
            self.stop()
            raise MismatchError(reply or self._cannot_start)
        return self._process


def _read_line(child: subprocess.Popen[str], seconds: float) -> str | None:
    """One short line; the child writes it whole, so it is there whole once there is anything."""
    assert child.stdout is not None
    readable, _, _ = select.select([child.stdout], [], [], seconds)
    return child.stdout.readline().strip() if readable else None
