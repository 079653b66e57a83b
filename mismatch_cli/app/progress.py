"""Progress on stderr: a bar or a live view on a terminal, plain lines in a log, nothing with
--quiet.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from mismatch_cli.app.curves import duration
from mismatch_cli.app.sampling_meter import SamplingMeter, short
from mismatch_cli.base.text import for_terminal

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress
    from rich.text import Text

_SECONDS_BETWEEN_LINES = 10.0
_REFRESHES_PER_SECOND = 2.0
# Columns of a view: longer lines are hard to read, and break when the terminal is narrowed
_WIDEST = 80
_ECHO = 3  # columns left free for the ^C that a terminal prints


def colour_system() -> Any:
    """The `color_system` of a rich console: None under NO_COLOR, where rich would still print
    bold and dim.
    """
    return None if os.environ.get("NO_COLOR") else "auto"


class TerminalProgress:
    """Shows phases of work, each with its count, rate and time left."""

    def __init__(self, quiet: bool) -> None:
        from rich.console import Console

        self._console = Console(
            stderr=True, quiet=quiet, color_system=colour_system(), highlight=False
        )
        # A person watches
        self.on_terminal = not quiet and self._console.is_interactive and sys.stderr.isatty()

    @property
    def width(self) -> int:
        """Columns of the terminal."""
        return self._console.width

    def say(self, message: str) -> None:
        for line in message.splitlines():
            self._console.print(for_terminal(line), soft_wrap=True)

    @contextmanager
    def view(self, lines: Callable[[int, int], list[Text]]) -> Iterator[None]:
        """Keep lines, drawn for a width and a height, at the bottom of the terminal; messages go
        above them.

        A log has no view.
        """
        if not self.on_terminal:
            yield
            return
        from rich.console import Console, ConsoleDimensions, Group
        from rich.live import Live

        usual = self._console
        # A copy of descriptor 2, since an engine redirects that one to its log while it loads.
        with open(os.dup(sys.stderr.fileno()), "w", encoding="utf-8", errors="replace") as terminal:
            console = Console(file=terminal, color_system=colour_system(), highlight=False)
            drawn: list[Text] = []

            def draw() -> Group:
                columns, rows = os.get_terminal_size(terminal.fileno())
                console.size = ConsoleDimensions(columns or 80, rows or 25)  # 0: unknown
                _take_back_broken_lines(console, drawn)
                width = min(console.width, _WIDEST) - _ECHO
                drawn[:] = lines(max(width, 1), console.height - 1)
                for line in drawn:
                    line.truncate(max(width, 1), overflow="ellipsis")
                return Group(*drawn)

            live = Live(
                console=console,
                get_renderable=draw,
                refresh_per_second=_REFRESHES_PER_SECOND,
                transient=True,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            try:
                with live:
                    self._console = console
                    yield
            finally:
                self._console = usual

    @contextmanager
    def working(self, phase: str, total: int = 0) -> Iterator[Callable[[int], None]]:
        """A phase with its elapsed time, and how much is done if the yielded function is called
        with it.
        """
        from rich.text import Text

        if not self.on_terminal:
            self.say(phase)
        began, done = time.monotonic(), 0

        def advance(count: int) -> None:
            nonlocal done
            done += count

        def line(*_: int) -> list[Text]:
            counted = f" {done}/{total}" if total else ""
            return [Text(f"{phase}{counted}, {time.monotonic() - began:.0f} s")]

        with self.view(line):
            yield advance

    @contextmanager
    def sampling(
        self, phase: str, total: int, done: int, most_tokens: int
    ) -> Iterator[SamplingMeter]:
        """A phase that samples responses: its rate and the time left are those of tokens, as far
        as they are known.
        """
        if self._console.is_terminal and not self._console.quiet:
            with self._bar(counted=False) as bar:
                task = bar.add_task(phase, total=None, rate="", count=f"{done}/{total}")

                def draw(meter: SamplingMeter) -> None:
                    count, reached = (
                        f"{done + meter.finished}/{total}",
                        meter.sampled or meter.finished,
                    )
                    bar.update(
                        task,
                        completed=reached,
                        total=reached + meter.left,
                        count=count,
                        rate=meter.words(),
                    )

                yield SamplingMeter(total - done, most_tokens, draw)
            return
        due = _LogLines(total)

        def tell(meter: SamplingMeter) -> None:
            reached = done + meter.finished
            if due.after(reached):
                self.say(f"{phase}: {reached}/{total} responses, {meter.words()}")

        yield SamplingMeter(total - done, most_tokens, tell)

    @contextmanager
    def counting(
        self, phase: str, total: int, done: int = 0, *, unit: str = "responses"
    ) -> Iterator[Callable[[int], None]]:
        """A phase that lasts as long as its block; call the yielded function with how many more
        are finished.
        """
        began, finished = time.monotonic(), 0

        def rate() -> float:
            return finished / max(time.monotonic() - began, 1e-9)

        if self._console.is_terminal and not self._console.quiet:
            with self._bar() as bar:
                task = bar.add_task(phase, total=total, completed=done, rate="")

                def advance(count: int) -> None:
                    nonlocal finished
                    finished += count
                    bar.update(task, advance=count, rate=f"{short(rate())} {unit}/s")

                yield advance
            return
        due = _LogLines(total)

        def tell(count: int) -> None:
            nonlocal finished
            finished += count
            reached = done + finished
            if due.after(reached):
                left = (total - reached) / max(rate(), 1e-9)
                done_of_all = f"{reached:,}/{total:,} {unit}, {short(rate())} {unit}/s"
                self.say(f"{phase}: {done_of_all}, {duration(left)} left")

        yield tell

    def _bar(self, counted: bool = True) -> Progress:
        """A bar; with what is done of all and its own estimate, unless the task has them as
        `count` and `rate`.
        """
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        return Progress(
            TextColumn("{task.description:<9}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn() if counted else TextColumn("{task.fields[count]}"),
            TextColumn("{task.fields[rate]}"),
            TimeElapsedColumn(),
            *((TextColumn("left"), TimeRemainingColumn()) if counted else ()),
            console=self._console,
        )


class _LogLines:
    """When a log gets a line of progress: every ten seconds, and once when all is done."""

    def __init__(self, total: int) -> None:
        self._total, self._last, self._complete = total, time.monotonic(), False

    def after(self, reached: int) -> bool:
        """Whether a line is due now that this much is done; if so, the next is due later."""
        now, complete = time.monotonic(), reached >= self._total
        due = now - self._last >= _SECONDS_BETWEEN_LINES or (complete and not self._complete)
        if due:
            self._last, self._complete = now, complete
        return due


def _take_back_broken_lines(console: Console, drawn: list[Text]) -> None:
    """Wipe the extra rows into which a narrowed terminal has broken the lines; rich does not
    know about them.
    """
    width = console.width
    for _ in range(sum((line.cell_len - 1) // width for line in drawn if line.cell_len)):
        console.file.write("\x1b[2K\x1b[1A")
