"""`mismatch-cli gate`: exit code 3 where a trace exceeds limits, with summaries for CI."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mismatch_cli.commands._show import READ_BY, TRACES, Common, print_json, print_parts
from mismatch_cli.options import flags, setting

if TYPE_CHECKING:
    from rich.console import RenderableType

    from mismatch_cli.studies.gate import GateResult
    from mismatch_cli.studies.limits import LimitSet

_EXCEEDED = 3
of_limits, for_ci = partial(setting, panel="Limits"), partial(setting, panel="For CI")
LIMITS = partial(
    of_limits,
    None,
    "Published limits by their name, which `gate --list` shows, or a TOML file of your own. Repeatable.",
    metavar="NAME|FILE.toml",
)
BASELINE = of_limits(None, "Trace that relative limits start from.", metavar="TRACE")


@flags()
def command(
    *,
    traces: list[Path] | None = TRACES,
    limits: list[str] | None = LIMITS(show_default="prime-rl"),
    baseline: list[Path] | None = BASELINE,
    list_presets: bool = of_limits(False, "List the published limits with their sources.", "--list"),
    allow_partial: bool = of_limits(
        False, "Judge a trace that lacks shards, responses or scores by what is there, in place of failing it."
    ),
    junit: Path | None = for_ci(None, "Write JUnit XML with a test case per limit.", metavar="FILE"),
    markdown: Path | None = for_ci(None, "Write a Markdown table, for a job's summary or a comment.", metavar="FILE"),
    common: Annotated[Common, *READ_BY, "force", "full", "full_paths", "json", "quiet", "debug"],
) -> None:
    """Judge a trace by limits: exit code 0 if all hold, 3 if one is exceeded or cannot be measured.

    Limits are absolute, relative to the trainer's noise, or relative to another trace (--baseline). A partial trace
    fails too.

    Examples:
      mismatch-cli gate run --limits limits.toml
      mismatch-cli gate run --limits verl --limits nemo-rl --junit gate.xml --markdown gate.md
      mismatch-cli gate run --limits limits.toml --baseline last-release
    """
    from mismatch_cli.library.asked import limit_sets
    from mismatch_cli.recording.folder import check_file
    from mismatch_cli.studies.limits import DEFAULT, load_limits, presets
    from mismatch_cli.trace.files import write_named

    if list_presets:
        _show_presets([load_limits(name) for name in presets()], common.json)
        return
    common.check([*(traces or ()), *(baseline or ())])
    for summary in filter(None, (junit, markdown)):
        check_file(summary, common.force)
    sets = limit_sets(limits or (), has_baseline=bool(baseline))
    from mismatch_cli.report.pages import gate as forms
    from mismatch_cli.studies.gate import GateResult
    from mismatch_cli.trace.reader import Trace

    progress = common.progress
    found = common.opened(traces, "No trace was named: judging the bundled one.")
    if not limits:
        progress.say(f"No --limits: judging by those of {DEFAULT}.")
    progress.say("Measuring")
    before = [Trace.open(path, skip_broken=common.skip_broken) for path in baseline or []]
    result = GateResult.of(sets, found, before, allow_partial=allow_partial, workers=common.read_by)
    for path, form in ((junit, forms.junit), (markdown, forms.markdown)):
        if path is not None:
            write_named(path, form(result), replace=common.force)
            progress.say(f"Wrote {path}")
    _show(result, common)
    if not result.passed:
        raise typer.Exit(_EXCEEDED)


def _show(result: GateResult, common: Common) -> None:
    """Print; a reader that stops early (`| head`) does not turn a failure into a success."""
    try:
        common.print(result)
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _show_presets(sets: Sequence[LimitSet], as_json: bool) -> None:
    from dataclasses import asdict

    from rich.padding import Padding
    from rich.text import Text

    if as_json:
        print_json([asdict(limit_set) for limit_set in sets])
        return
    parts: list[RenderableType] = []
    for limit_set in sets:
        parts += [Text(limit_set.name, style="bold"), Padding(Text(limit_set.about), (0, 0, 0, 2))]
        for limit in limit_set.limits:
            line = Text.assemble(f"{limit.metric} {limit.text}", ("  " + limit.source, "dim"))
            parts.append(Padding(line, (0, 0, 0, 2)))
        parts.append(Text(""))
    print_parts(*parts, Text("Use: mismatch-cli gate TRACE --limits NAME --limits FILE.toml"))
