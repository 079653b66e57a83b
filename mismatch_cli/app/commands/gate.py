"""`mismatch-cli gate`: exit code 3 if a trace exceeds limits, with summaries for CI."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from mismatch_cli.app.common import READ_BY, Common, console, print_json, print_parts
from mismatch_cli.app.flags import flags
from mismatch_cli.app.shared_settings import (
    LimitSettings,
    ListSettings,
    TraceSettings,
    of_limits,
)
from mismatch_cli.base.errors import MismatchError, UsageError, suggest
from mismatch_cli.base.options import override, setting, settings_group, values_by_key
from mismatch_cli.base.places import FAULTY
from mismatch_cli.limits.published_sets import default_set

if TYPE_CHECKING:
    from rich.console import RenderableType

    from mismatch_cli.limits.limit_sets import LimitSet
    from mismatch_cli.studies.gate import GateAnalysis
    from mismatch_cli.studies.mismatch import MismatchResult

PANEL, PLACE = "Use elsewhere", 3

EXCEEDED = 3  # exit code
for_ci = partial(setting, panel="For CI", metavar="FILE")


@dataclass(frozen=True, kw_only=True)
class GateSettings:
    """How strictly traces are judged, or what is written instead."""

    allow_partial: bool = of_limits(
        False,
        "Judge partial traces by what they have, instead of failing them.",
    )
    init: Path | None = of_limits(
        None,
        "Write limits derived from good runs into this file; each trace is a run.",
        metavar="FILE.toml",
    )


@dataclass(frozen=True, kw_only=True)
class SummarySettings:
    """The summaries that a CI shows."""

    junit: Path | None = for_ci(None, "JUnit XML, a test case per limit.")
    markdown: Path | None = for_ci(None, "Markdown table for a job summary or comment.")
    annotations: Path | None = for_ci(
        None, "GitHub Actions annotations of limits that do not hold."
    )


@flags()
def command(
    *,
    read: TraceSettings = settings_group(TraceSettings),
    by: LimitSettings = settings_group(LimitSettings, limits=override(show_default=default_set())),
    listing: ListSettings = settings_group(ListSettings, panel="Limits"),
    gate: GateSettings = settings_group(GateSettings),
    summaries: SummarySettings = settings_group(SummarySettings),
    common: Common = settings_group(Common, *READ_BY, "force", "full", "json", "quiet", "debug"),
) -> None:
    """Check a trace against limits: exit code 0 if all hold, 3 if one is exceeded or cannot be
    measured.

    Limits are absolute, relative to the trainer's noise, or relative to another trace (--baseline).
    A partial trace fails too. `--init` derives your own limits from good runs.

    Examples:
      mismatch-cli gate run --limits limits.toml
      mismatch-cli gate run --limits verl --limits nemo-rl --junit gate.xml --markdown gate.md
      mismatch-cli gate run --limits limits.toml --baseline last-release
      mismatch-cli gate good-run another-good-run --init limits.toml
    """
    from mismatch_cli.trace.run_folder import check_file

    if listing.list:
        from mismatch_cli.limits.limit_sets import load_limits, presets

        _show_presets([load_limits(name) for name in presets()], common.json)
        return
    summary_files = values_by_key(summaries)
    baseline = by.baseline or []
    common.check([*(read.traces or ()), *baseline])
    for file in filter(None, (gate.init, *summary_files.values())):
        check_file(file, common.force)
    if gate.init is not None:
        _refuse_beside_init({"limits": by.limits, "baseline": baseline, **summary_files})
        _init(gate.init, read.traces, common, gate.allow_partial)
        return
    from mismatch_cli.library.named_choices import limit_sets

    sets = limit_sets(by.limits or (), has_baseline=bool(baseline))
    from mismatch_cli.studies.gate import GateAnalysis
    from mismatch_cli.trace.reader import Trace

    notice = "No trace named: judging fp8-kv, a bundled one."
    traces = common.opened(read.traces, notice, FAULTY, command="gate")
    if not by.limits:
        common.progress.say(f"No --limits: using those of {default_set()}.")
    common.progress.say("Measuring")
    before = [Trace.open(path, skip_broken=common.skip_broken) for path in baseline]
    result = GateAnalysis.of(
        sets, traces, before, allow_partial=gate.allow_partial, workers=common.read_by
    )
    _write_summaries(result, summary_files, common)
    _show(result, common)
    if not result.passed:
        raise typer.Exit(EXCEEDED)


def _write_summaries(result: GateAnalysis, files: dict[str, Path | None], common: Common) -> None:
    """Write each summary that has a file; a function of its name in the page's module forms it."""
    from mismatch_cli.report.pages import gate as forms
    from mismatch_cli.trace.files import write_named

    for name, path in files.items():
        if path is not None:
            write_named(path, getattr(forms, name)(result), replace=common.force)
            common.progress.say(f"Wrote {path}")


def _refuse_beside_init(values: dict[str, Any]) -> None:
    """A `UsageError` for the first flag with a value: with --init, nothing is judged."""
    for name, value in values.items():
        if value:
            raise UsageError(f"--init writes limits and judges nothing: leave out --{name}.")


def _init(path: Path, traces: list[Path] | None, common: Common, allow_partial: bool) -> None:
    """Measure each run by itself, and write the limits that follow from them."""
    from mismatch_cli.limits.limit_sets import load_limits
    from mismatch_cli.report.limits_file import limits_file
    from mismatch_cli.studies.good_runs import limits_from
    from mismatch_cli.studies.mismatch import analyse_mismatch
    from mismatch_cli.trace.files import write_named

    notice = "No trace named: taking fp8-kv, a bundled one, as a good run."
    # A run that is named twice is one run.
    runs = {str(run.folder): run for run in common.opened(traces, notice, FAULTY)}
    common.progress.say("Measuring")
    results = {}
    for folder, run in runs.items():
        results[folder] = analyse_mismatch([run], 0, common.read_by).result
    if not allow_partial:
        _check_complete(results.values())
    limits = limits_from([result.pairs for result in results.values()])
    text = limits_file(limits, results, path.name)
    write_named(path, text, replace=common.force)
    common.progress.say(f"Wrote {path}")
    _show_presets([load_limits(str(path))], common.json, suggest("gate", "RUN", "--limits", path))


def _check_complete(results: Iterable[MismatchResult]) -> None:
    for result in results:
        for part in result.about.partial:
            raise MismatchError(
                f"{part.trace} is partial ({', '.join(part.reasons)}): limits need complete runs. "
                "Name a complete one, or add --allow-partial."
            )


def _show(result: GateAnalysis, common: Common) -> None:
    """Print the result; a reader that stops early (`| head`) must not turn a failure into a
    success.
    """
    try:
        common.print(result)
        sys.stdout.flush()
    except BrokenPipeError:
        # What is left in Python's buffer is flushed at exit: into /dev/null, it cannot fail.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _show_presets(
    sets: Sequence[LimitSet],
    as_json: bool,
    use: str = "mismatch-cli gate TRACE --limits NAME --limits FILE.toml",
) -> None:
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
    print_parts(*parts)
    console().print(Text(f"Use: {use}"), soft_wrap=True)  # never break a line that users copy
