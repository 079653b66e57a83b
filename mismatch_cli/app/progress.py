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
    from rich.console import Console, Group
    from rich.progress import Progress
    from rich.text import Text

_SECONDS_BETWEEN_LINES = 10.0
_REFRESHES_PER_SECOND = 2.0
# Columns of a view: longer lines are hard to read, and break when the terminal is narrowed
_WIDEST = 80
_WIPE_ROW = "\x1b[2K\x1b[1A"  # clears the row of the cursor, and moves it up
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
        # A view is for a person who watches; rich calls some things interactive that are not.
        # So stderr must be a terminal too, of which the view needs the descriptor.
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
        from rich.console import Console
        from rich.live import Live

        usual = self._console
        # A copy of descriptor 2, since an engine redirects that one to its log while it loads.
        with open(os.dup(sys.stderr.fileno()), "w", encoding="utf-8", errors="replace") as terminal:
            console = Console(file=terminal, color_system=colour_system(), highlight=False)
            live = Live(
                console=console,
                get_renderable=_Drawing(console, terminal.fileno(), lines),
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
        """A phase with its elapsed time; call the yielded function with how much more is done, of a
        `total` if there is one.
        """
        from rich.text import Text

        if not self.on_terminal:
            self.say(phase)
        began = time.monotonic()
        done = 0

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
        if self._has_bar:
            with self._bar(counted=False) as bar:
                task = bar.add_task(phase, total=None, rate="", count=f"{done}/{total}")

                def draw(meter: SamplingMeter) -> None:
                    reached = meter.sampled or meter.finished
                    bar.update(
                        task,
                        completed=reached,
                        total=reached + meter.left,
                        count=f"{done + meter.finished}/{total}",
                        rate=meter.describe(),
                    )

                yield SamplingMeter(total - done, most_tokens, draw)
            return
        log = _LogLines(total)

        def write_line(meter: SamplingMeter) -> None:
            reached = done + meter.finished
            if log.is_due(reached):
                self.say(f"{phase}: {reached}/{total} responses, {meter.describe()}")

        yield SamplingMeter(total - done, most_tokens, write_line)

    @contextmanager
    def counting(
        self, phase: str, total: int, done: int = 0, *, unit: str = "responses"
    ) -> Iterator[Callable[[int], None]]:
        """A phase that lasts as long as its block; call the yielded function with how many more
        are finished.
        """
        began = time.monotonic()
        finished = 0

        def rate() -> float:
            return finished / max(time.monotonic() - began, 1e-9)

        if self._has_bar:
            with self._bar() as bar:
                task = bar.add_task(phase, total=total, completed=done, rate="")

                def advance(count: int) -> None:
                    nonlocal finished
                    finished += count
                    bar.update(task, advance=count, rate=f"{short(rate())} {unit}/s")

                yield advance
            return
        log = _LogLines(total)

        def write_line(count: int) -> None:
            nonlocal finished
            finished += count
            reached = done + finished
            if log.is_due(reached):
                left = (total - reached) / max(rate(), 1e-9)
                progress = f"{reached:,}/{total:,} {unit}, {short(rate())} {unit}/s"
                self.say(f"{phase}: {progress}, {duration(left)} left")

        yield write_line

    @property
    def _has_bar(self) -> bool:
        """Whether progress is a bar; else it is lines of a log."""
        return self._console.is_terminal and not self._console.quiet

    def _bar(self, counted: bool = True) -> Progress:
        """A bar with the rate of its task. `counted`: the bar counts what is done, and estimates
        the time left; else the task says both, as `count` and within `rate`.
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
        self._total = total
        self._last = time.monotonic()
        self._said_complete = False

    def is_due(self, reached: int) -> bool:
        """Whether to write a line now that so much is done; after a yes, the next is due later."""
        now = time.monotonic()
        is_complete = reached >= self._total
        is_time = now - self._last >= _SECONDS_BETWEEN_LINES
        is_end = is_complete and not self._said_complete
        if is_time or is_end:
            self._last = now
            self._said_complete = is_complete
        return is_time or is_end


class _Drawing:
    """Draws the lines of a view for the present size of a terminal; rich calls it to refresh."""

    def __init__(
        self, console: Console, descriptor: int, lines: Callable[[int, int], list[Text]]
    ) -> None:
        self._console = console
        self._descriptor = descriptor
        self._lines = lines
        self._drawn: list[Text] = []

    def __call__(self) -> Group:
        from rich.console import ConsoleDimensions, Group

        columns, rows = os.get_terminal_size(self._descriptor)
        # A terminal that does not know its size says 0.
        self._console.size = ConsoleDimensions(columns or 80, rows or 25)
        self._wipe_broken_lines()
        width = max(1, min(self._console.width, _WIDEST) - _ECHO)
        self._drawn = self._lines(width, self._console.height - 1)
        for line in self._drawn:
            line.truncate(width, overflow="ellipsis")
        return Group(*self._drawn)

    def _wipe_broken_lines(self) -> None:
        """Wipe the extra rows into which a narrowed terminal has broken the last lines, which rich
        does not know about.
        """
        for line in self._drawn:
            extra_rows = max(0, line.cell_len - 1) // self._console.width
            self._console.file.write(_WIPE_ROW * extra_rows)
