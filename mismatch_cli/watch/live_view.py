"""The live view of a watched run: progress, its gap over the steps, and the alarms."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from mismatch_cli.app.curves import (
    LABEL,
    CurveLine,
    ViewLine,
    blank,
    curve,
    curves,
    duration,
    flow,
    labelled,
    plain,
)
from mismatch_cli.app.curves import most_important as fitting
from mismatch_cli.base.numbers import number, things
from mismatch_cli.base.text import visible
from mismatch_cli.studies.watch_state import alarm_count
from mismatch_cli.watch.history import gap

if TYPE_CHECKING:
    from rich.text import Text

    from mismatch_cli.studies.watch_state import Alarm
    from mismatch_cli.watch.history import History
    from mismatch_cli.watch.watcher import Watcher

Record = Mapping[str, Any]
_SHOWN = 3  # alarms: the newest
# Rank, label, key in a line of metrics.jsonl, and significant digits.
_OF_GAP = (
    (1, "|π − μ|", "abs_dp_mean", 2), (2, "k3", "k3", 2), (3, "outside", "ratio_outside", 2),
    (5, "ratio p1", "ratio_p01", 3), (4, "ratio p99", "ratio_p99", 3),
)  # fmt: skip
_OUTSIDE, _OF_BLOCKED = "ratio not in 0.8–1.28", "share of A ≠ 0"


class WatchView:
    """The screen of a terminal, and the lines of a log."""

    def __init__(self, name: str) -> None:
        self._name = visible(name)
        self._watcher: Watcher | None = None
        self._before = 0  # alarms of earlier sessions
        self.note = ""  # what it is doing
        self.waits_for = ""  # what it waits for, before there is anything to watch

    def show(self, watcher: Watcher) -> None:
        """Start to show a watcher. Alarms from now on are said above the screen, not in it."""
        self._watcher = watcher
        self._before = len(watcher.alarms)

    def lines(self, width: int, height: int) -> list[Text]:
        """The screen."""
        watcher = self._watcher
        if watcher is None:
            text = visible(self.waits_for) or f"{self._name}: waiting for it to start"
            return [plain(line, "") for line in flow(text.split(), width, " ")][:height]
        lines: list[ViewLine] = []
        for line in flow([self._name, *_progress(watcher)], width):
            lines.append(ViewLine(0, plain(line, "bold")))
        if len(watcher.history):
            drawn = curves(_curves(watcher.history, watcher.algorithm), width)
            lines += [blank(), *drawn, blank()]
        lines += self._alarms(watcher)
        now = self.note or watcher.source.waiting
        if now:
            first_line = flow(visible(now).split(), width - LABEL, " ")[0]
            lines.append(ViewLine(7, labelled("now", first_line)))
        return [line.text for line in fitting(lines, height)]

    def _alarms(self, watcher: Watcher) -> Iterator[ViewLine]:
        """The newest alarms under way, and where there is room for them those of earlier sessions
        that are over.
        """
        over = [alarm for alarm in watcher.alarms[: self._before] if alarm.over is not None]
        alarms = over + [alarm for alarm in watcher.alarms if alarm.over is None]
        for alarm in alarms[-_SHOWN:]:
            yield ViewLine(1, _alarm(alarm))
        if len(alarms) > _SHOWN:
            more = things(len(alarms) - _SHOWN, "earlier alarm")
            yield ViewLine(6, plain(f"  and {more}", "dim"))


def _alarm(alarm: Alarm) -> Text:
    """An alarm under way in red, one that is over in grey."""
    check = alarm.check
    text = visible(f"{check.quantity}, {alarm.when}: {check.reason} ({check.limits})")
    if alarm.over is None:
        return plain(f"✘ {text}", "red")
    return plain(f"✔ {text}", "dim")


def _progress(watcher: Watcher) -> list[str]:
    """The progress of a run, in a few words."""
    complete = max(watcher.state.reported, default=None)
    newest = watcher.source.newest
    items = ["no complete step yet" if complete is None else f"step {complete}"]
    if newest is not None and newest != complete:
        items.append(f"step {newest} has begun")
    items.append(f"grew {duration(watcher.since_growth)} ago")
    items.append(alarm_count(watcher.alarms))
    return items


def _curves(history: History, algorithm: str) -> list[tuple[int, CurveLine]]:
    """The metrics that are drawn over the steps, each with its rank."""
    pair = "equal weights" if history.at_equal_weights else "with staleness"
    blocked_by = f"by {visible(algorithm)}" if algorithm else _OF_BLOCKED
    notes = {"ratio_outside": _OUTSIDE, "abs_dp_mean": pair}
    drawn: list[tuple[int, CurveLine]] = []
    for rank, label, key, digits in _OF_GAP:
        drawn += curve(rank, label, history.of(key), notes.get(key, ""), digits)
    drawn += curve(3, "blocked", history.of("blocked"), blocked_by, 2)
    drawn += curve(6, "reward", history.of("reward"), "", 3)
    if not drawn:
        # Responses that nobody scored or graded are at least counted.
        responses = history.of("responses")[-1] or 0
        drawn.append((9, CurveLine("responses", responses, [0.0], 1.0)))
    return drawn


def line_of(record: Record) -> str:
    """A step in one line, for a log."""
    pair = gap(record)
    reward = f"reward {number(record.get('reward'))}"
    if not pair:
        responses = number(record.get("responses"))
        items = [f"step {record['step']}", f"responses {responses}", "no log π", reward]
        return "  ".join(items)
    low = number(pair.get("ratio_p01"), 3)
    high = number(pair.get("ratio_p99"), 3)
    items = [
        f"step {record['step']}",
        f"|π − μ| {number(pair.get('abs_dp_mean'), 2)}",
        f"k3 {number(pair.get('k3'), 2)}",
        f"outside {number(pair.get('ratio_outside'), 2)}",
        f"ratio {low}–{high}",
        f"blocked {number(record.get('blocked'), 2)}",
        reward,
    ]
    return "  ".join(items)
