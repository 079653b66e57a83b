"""Talk on stderr: a progress bar on a terminal, plain lines in a log, nothing when quiet."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

_SECONDS_BETWEEN_LINES = 10.0


class TerminalProgress:
    """Phases that count responses, each with its rate and the time left."""

    def __init__(self, quiet: bool) -> None:
        from rich.console import Console

        self._console = Console(stderr=True, quiet=quiet, highlight=False)
        self._bar: Any = None

    def say(self, message: str) -> None:
        self._console.print(message, markup=False, soft_wrap=True)

    def start(self, phase: str, done: int, total: int) -> Callable[[int], None]:
        if self._console.is_terminal and not self._console.quiet:
            return self._start_bar(phase, done, total)
        return self._start_lines(phase, done, total)

    def stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _start_bar(self, phase: str, done: int, total: int) -> Callable[[int], None]:
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        self._bar = Progress(
            TextColumn("{task.description:<9}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self._console,
        )
        self._bar.start()
        task = self._bar.add_task(phase, total=total, completed=done, rate="")
        began, finished = time.monotonic(), 0

        def advance(count: int) -> None:
            nonlocal finished
            finished += count
            rate = finished / max(time.monotonic() - began, 1e-9)
            self._bar.update(task, advance=count, rate=f"{rate:.0f} responses/s")

        return advance

    def _start_lines(self, phase: str, done: int, total: int) -> Callable[[int], None]:
        began = last = time.monotonic()
        finished = 0

        def advance(count: int) -> None:
            nonlocal last, finished
            finished += count
            now = time.monotonic()
            if now - last < _SECONDS_BETWEEN_LINES and done + finished < total:
                return
            last = now
            rate = finished / max(now - began, 1e-9)
            left = (total - done - finished) / max(rate, 1e-9)
            self.say(f"{phase}: {done + finished}/{total} responses, {rate:.0f}/s, {left:.0f} s left")

        return advance
