"""`mismatch-cli watch`: follows a run while it trains, step by step, with limits as alarms."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import typer

from mismatch_cli.app.commands.gate import EXCEEDED
from mismatch_cli.app.common import Common
from mismatch_cli.app.completions import runs
from mismatch_cli.app.flags import flags
from mismatch_cli.app.shared_settings import (
    AlgorithmSettings,
    FormatSettings,
    FrameworkSettings,
    LimitSettings,
    PageSettings,
)
from mismatch_cli.base.errors import UsageError
from mismatch_cli.base.memory import collect_often
from mismatch_cli.base.options import override, setting, settings_group
from mismatch_cli.base.places import FAULTY, bundled_trace, resolve_bundled

if TYPE_CHECKING:
    from mismatch_cli.watch.alarm_command import AlarmCommand
    from mismatch_cli.watch.watcher import MeasureRequest, StepReport, Watcher

PANEL, PLACE = "Use elsewhere", 4

_SLICE = 0.1  # seconds between checks on commands and pages
_NAMED = 4  # alarms named in the last message
_FOLDER = override(
    help="Folder of page and state; watching again continues.",
    show_default="watch-NAME",
)
_LINES = override(help="Print one JSON line per step.")
at_alarm = partial(setting, panel="Alarms")
at_end = partial(setting, panel="When it ends")


@dataclass(frozen=True, kw_only=True)
class WatchSettings:
    """What is followed, and how often."""

    run: Path | None = setting(
        None,
        "A training run, a Recorder's trace, or a framework's dump folder; it may not exist yet.",
        argument=True,
        show_default="the bundled trace",
        completes=runs,
    )
    every: float = setting(5.0, "Seconds between checks for new data.", least=0.01)


@dataclass(frozen=True, kw_only=True)
class AlarmSettings:
    """What an alarm does."""

    on_alarm: str | None = at_alarm(
        None,
        "Shell command at each alarm; $ALARM_TEXT and others describe it.",
        metavar="COMMAND",
        typed=True,
    )
    stop_on_alarm: bool = at_alarm(False, "Exit with code 3 at the first alarm.")


@dataclass(frozen=True, kw_only=True)
class EndSettings:
    """How long to watch."""

    once: bool = at_end(False, "Read what exists and exit.")
    until_step: int | None = at_end(None, "Exit once this step is complete.", least=0)
    minutes: float | None = at_end(
        None,
        "Exit after these minutes without data.",
        key="idle",
        metavar="MINUTES",
        least=0.0,
    )

    @property
    def idle(self) -> float | None:
        """The longest time without new data, in seconds."""
        return None if self.minutes is None else 60 * self.minutes


_BLOCKED = override(
    help="Of traces and dumps: the share that this algorithm blocks.",
    show_default="the one that trains, or grpo-clip-higher",
)


@flags()
def command(
    *,
    watched: WatchSettings = settings_group(WatchSettings),
    blocking: AlgorithmSettings = settings_group(AlgorithmSettings, algorithms=_BLOCKED),
    of_format: FormatSettings = settings_group(FormatSettings),
    named: FrameworkSettings = settings_group(FrameworkSettings),
    by: LimitSettings = settings_group(
        LimitSettings, limits=override(show_default="none: no alarms")
    ),
    at_alarms: AlarmSettings = settings_group(AlarmSettings),
    end: EndSettings = settings_group(EndSettings),
    page: PageSettings = settings_group(PageSettings),
    common: Common = settings_group(
        Common, "output", "no_plots", "json", "quiet", "debug", output=_FOLDER, json=_LINES
    ),
) -> None:
    """Follow a run while it trains: its gap step by step, limits as alarms, and a page that stays
    current.

    It ends with the run or as the flags say; exit code 3 if a limit was exceeded, or could not be
    measured at any step. Killed and restarted, it continues: no step is reported twice, and no
    alarm is raised twice.

    Examples:
      mismatch-cli watch train-miniature
      mismatch-cli watch recorded --limits limits.toml --on-alarm 'notify-send "$ALARM_TEXT"'
      mismatch-cli watch runs/math/token_exports --json --idle 30
      mismatch-cli watch recorded --limits verl --once
      mismatch-cli watch recorded --as verl
    """
    from mismatch_cli.library.named_choices import limit_sets
    from mismatch_cli.trace.stores import is_store
    from mismatch_cli.watch.folders import check_there, check_watch_folder, watch_folder

    run = resolve_bundled(watched.run) if watched.run else bundled_trace(FAULTY)
    if is_store(run):
        raise UsageError(
            f"{run} is not on this machine, but watch follows local files. Start it where the "
            "run writes."
        )
    common.check(by.baseline)
    check_there(run)
    folder = common.output or Path(f"watch-{run.resolve().name}")
    check_watch_folder(folder, run)
    if not by.limits and (at_alarms.on_alarm or at_alarms.stop_on_alarm or by.baseline):
        raise UsageError(
            "Without limits there are no alarms. Add --limits with a name of gate --list or a "
            "TOML file."
        )
    sets = limit_sets(by.limits, has_baseline=bool(by.baseline)) if by.limits else []
    algorithm = _algorithm(common.meant(blocking.algorithms))
    from mismatch_cli.watch.watcher import MeasureRequest

    request = MeasureRequest(sets, by.baseline or [], algorithm, of_format.format, named.name)
    plan = _WatchPlan(watched.every, end, at_alarms, page)
    try:
        with watch_folder(folder, run):
            exceeded = _WatchSession(run, folder, request, plan, common).watch()
    except KeyboardInterrupt:
        common.progress.say(
            f"Stopped watching {run}. The state is kept in {folder}: the same command continues."
        )
        raise
    if exceeded:
        raise typer.Exit(EXCEEDED)


def _algorithm(specs: list[str]) -> str | None:
    """The algorithm whose blocked tokens are shown; a `UsageError` for an unknown one, or for
    several.
    """
    if not specs:
        return None
    if len(specs) > 1:
        raise UsageError(f"watch shows one algorithm, and {len(specs)} are named. Name one.")
    from mismatch_cli.rules.algorithms.parse import parse_algorithm

    parse_algorithm(specs[0])
    return specs[0]


class _WatchPlan(NamedTuple):
    """How often to look, how long, and what to do at an alarm and with the page."""

    every: float  # seconds
    end: EndSettings
    alarms: AlarmSettings
    page: PageSettings


class _WatchSession:
    """One session of `watch`, from before the run starts to the last message."""

    def __init__(
        self, run: Path, folder: Path, request: MeasureRequest, plan: _WatchPlan, common: Common
    ) -> None:
        from mismatch_cli.watch.live_view import WatchView

        self._run = run
        self._folder = folder
        self._request = request
        self._plan = plan
        self._common = common
        self._progress = common.progress
        self._view = WatchView(run.name or str(run))

    def watch(self) -> bool:
        """Watch until the end; return whether a limit was exceeded, or never measured."""
        from mismatch_cli.app.refresher import Refresher

        say = self._progress.say
        if not self._progress.on_terminal:
            say(f"Watching {self._run} into {self._folder}")
        with self._progress.view(self._view.lines):
            watcher = self._wait_for_run()
            self._view.show(watcher)
            self._calls = self._command_of(watcher)
            every = 0 if self._common.only_numbers else self._plan.page.report_every
            draws = not self._common.no_plots
            self._pages = Refresher(
                [watcher.folder_of_lines], self._folder, every, say, draws=draws
            )
            try:
                self._follow(watcher)
                self._view.note = "finishing"
                if self._calls is not None:
                    self._calls.finish(watcher.state.record_call)
                if watcher.state.reported:
                    self._pages.finish()
            finally:
                self._pages.stop()
        return self._conclude(watcher)

    def _wait_for_run(self) -> Watcher:
        """The watcher, once there is something to watch."""
        from mismatch_cli.base.errors import MismatchError
        from mismatch_cli.watch.folders import awaited, kind_of
        from mismatch_cli.watch.watcher import Watcher

        began = time.monotonic()
        while not kind_of(self._run):
            if not self._view.waits_for:
                self._view.waits_for = awaited(self._run)
                if not self._progress.on_terminal:
                    self._progress.say(self._view.waits_for)
            idle = self._plan.end.idle
            is_overdue = idle is not None and time.monotonic() - began > idle
            if self._plan.end.once or is_overdue:
                raise MismatchError(
                    f"{self._run} has nothing to watch yet: no step, no trace, no dump. Without "
                    "--once and --idle, watch waits for it."
                )
            time.sleep(min(self._plan.every, 1.0))
        return Watcher(self._run, self._folder, self._request, self._progress.say)

    def _command_of(self, watcher: Watcher) -> AlarmCommand | None:
        """The user's command, if there is one."""
        from mismatch_cli.watch.alarm_command import AlarmCommand

        command = self._plan.alarms.on_alarm
        if not command:
            return None
        calls = AlarmCommand(command, self._run, self._folder, self._progress.say)
        # An earlier session may have been killed between an alarm and its call.
        for alarm in watcher.uncalled:
            calls.add(alarm)
        return calls

    def _follow(self, watcher: Watcher) -> None:
        collect_often()
        end = self._plan.end
        if watcher.has_reached(end.until_step):
            return
        while True:
            ends_here = self._report_new(watcher, final=False)
            if ends_here or watcher.is_done(end.until_step, end.idle):
                break
            # A file that changed since the last look may be whole: `--once` gives it another.
            is_settled = not watcher.source.waiting or watcher.idle > 2 * self._plan.every
            if end.once and is_settled:
                break
            self._sleep(watcher)
        if end.once or watcher.is_done(None, end.idle):
            self._report_new(watcher, final=True)

    def _report_new(self, watcher: Watcher, *, final: bool) -> bool:
        """Look once and report what is new; return whether that ends the session."""
        until_step = self._plan.end.until_step
        for report in watcher.look(final=final):
            self._print(report)
            if self._calls is not None:
                for event in report.alarms:
                    if event.is_alarm:
                        self._calls.add(event)
            if report.raises and self._plan.alarms.stop_on_alarm:
                return True
            self._check_background(watcher)
            if until_step is not None and report.step >= until_step:
                return True
        return False

    def _sleep(self, watcher: Watcher) -> None:
        """Wait until the next look, in slices, between which calls and pages are attended to."""
        until = time.monotonic() + self._plan.every
        left = self._plan.every
        while left > 0:
            self._check_background(watcher)
            time.sleep(min(left, _SLICE))
            left = until - time.monotonic()

    def _check_background(self, watcher: Watcher) -> None:
        """Check on the user's command and the page; both run in the background."""
        if self._calls is not None:
            self._calls.look(watcher.state.record_call)
        if watcher.state.reported:
            self._pages.step_done()

    def _print(self, report: StepReport) -> None:
        from mismatch_cli.watch.live_view import line_of

        if self._common.json:
            alarms = [event.to_json() for event in report.alarms]
            line = {**report.record, "alarms": alarms, "again": report.again}
            print(json.dumps(line), flush=True)
        elif not self._progress.on_terminal:
            again = "  (again: it has grown)" if report.again else ""
            self._progress.say(f"{line_of(report.record)}{again}")
        for event in report.alarms:
            mark = "✘" if event.is_alarm else "✔"
            self._progress.say(f"{mark} {event.text}")
        if report.raises and self._progress.on_terminal:
            print("\a", end="", file=sys.stderr, flush=True)

    def _conclude(self, watcher: Watcher) -> bool:
        """Print the last message; return whether the exit code is that of exceeded limits."""
        from mismatch_cli.base.numbers import things
        from mismatch_cli.studies.watch_state import alarm_count, under_way_first

        alarms = under_way_first(watcher.alarms)
        unmeasured = watcher.unmeasured()
        steps = watcher.state.reported
        last = f", the last {max(steps)}" if steps else ""
        sentences = [f"{things(len(steps), 'step')} of {self._run}{last}."]
        waiting = watcher.source.waiting
        if waiting:
            sentences.append(f"Left out: {waiting}.")
        if alarms:
            named = [f"{alarm.check.metric} {alarm.when}" for alarm in alarms[:_NAMED]]
            if len(alarms) > _NAMED:
                named.append("…")
            sentences.append(f"{alarm_count(alarms)}: {', '.join(named)}.")
        if unmeasured:
            sentences.append(f"Never measured, which counts as exceeded: {', '.join(unmeasured)}.")
        self._progress.say(" ".join(sentences))
        return bool(alarms or unmeasured)
