"""`mismatch-cli gate`: exit code 3 where a trace exceeds limits, with summaries for CI."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mismatch_cli.commands._common_flags import Debug, Force, FullPaths, Json, Quiet, Traces
from mismatch_cli.errors import MismatchError, UsageError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from mismatch_cli.studies.gate import GateResult
    from mismatch_cli.studies.limits import LimitSet

_LIMITS, _CI = "Limits", "For CI"
_EXCEEDED = 3


def command(
    traces: Traces = None,
    limits: Annotated[
        list[str] | None,
        typer.Option(
            "--limits",
            help="A TOML file (docs/gate.md), or the name of published limits: see --list. May be given several times; "
            "without it, prime-rl.",
            rich_help_panel=_LIMITS,
            show_default=False,
        ),
    ] = None,
    baseline: Annotated[
        list[Path] | None,
        typer.Option("--baseline", help="The trace that relative limits start from.", rich_help_panel=_LIMITS),
    ] = None,
    list_presets: Annotated[
        bool, typer.Option("--list", help="Show the published limits and where they stand.", rich_help_panel=_LIMITS)
    ] = False,
    allow_partial: Annotated[
        bool,
        typer.Option(
            "--allow-partial",
            help="Judge a trace that lacks shards, responses or scores by what is there; without it, it fails.",
            rich_help_panel=_LIMITS,
        ),
    ] = False,
    junit: Annotated[
        Path | None, typer.Option("--junit", help="Write a JUnit XML file: a test case per limit.", rich_help_panel=_CI)
    ] = None,
    markdown: Annotated[
        Path | None,
        typer.Option("--markdown", help="Write a table for a job's summary or a comment.", rich_help_panel=_CI),
    ] = None,
    force: Force = False,
    full_paths: FullPaths = False,
    json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Judge a trace by limits: exit code 0 if they hold, 3 if one is exceeded or cannot be measured.

    Limits are absolute, relative to the trainer's noise floor, or relative to another trace (--baseline). A partial
    trace fails, too.

    Examples:

      mismatch-cli gate run --limits limits.toml

      mismatch-cli gate run --limits verl --limits nemo-rl --junit gate.xml --markdown gate.md

      mismatch-cli gate run --limits limits.toml --baseline last-release
    """
    from mismatch_cli.commands._progress import TerminalProgress
    from mismatch_cli.commands._show import opened
    from mismatch_cli.places import show_full
    from mismatch_cli.studies.gate import GateResult
    from mismatch_cli.studies.limits import DEFAULT, OF_BASELINE, load_limits, presets
    from mismatch_cli.trace.reader import Trace

    show_full(full_paths)
    if list_presets:
        _show_presets([load_limits(name) for name in presets()], json)
        return
    sets = [load_limits(name) for name in dict.fromkeys(limits or [DEFAULT])]
    relative = [limit for limit_set in sets for limit in limit_set.limits if limit.bound in OF_BASELINE]
    if relative and not baseline:
        raise UsageError(f"{relative[0].metric} {relative[0].text} needs a trace to start from: give --baseline TRACE.")
    for path in (junit, markdown):
        _check_free(path, force)
        _check_writable(path)
    progress = TerminalProgress(quiet)
    found = opened(traces, progress, "No trace was named: judging the bundled one.")
    if not limits:
        progress.say(f"No --limits: judging by those of {DEFAULT}.")
    progress.say("Measuring")
    before = [Trace.open(path) for path in baseline or []]
    result = GateResult.of(sets, found, before, allow_partial=allow_partial)
    _write(result, junit, markdown, force)
    for path in (junit, markdown):
        if path is not None:
            progress.say(f"Wrote {path}")
    _show(result, json)
    if not result.passed:
        raise typer.Exit(_EXCEEDED)


def _check_free(path: Path | None, force: bool) -> None:
    """An empty file is free: CI systems make one to be filled."""
    if path is None or force:
        return
    if path.is_dir() or (path.exists() and path.stat().st_size):
        raise MismatchError(f"{path} is already there. Replace it with --force, or name another file.")


def _check_writable(path: Path | None) -> None:
    """Said before the traces are read: a gate must not fail for the sake of its summary."""
    folder = next((parent for parent in path.absolute().parents if parent.exists()), None) if path else None
    if folder is not None and not (folder.is_dir() and os.access(folder, os.W_OK)):
        raise MismatchError(f"{path} cannot be written: {folder} takes no files. Name another file.")


def _write(result: GateResult, junit: Path | None, markdown: Path | None, force: bool) -> None:
    from mismatch_cli.report.pages import gate as forms
    from mismatch_cli.trace.files import write_named

    for path, form in ((junit, forms.junit), (markdown, forms.markdown)):
        if path is not None:
            write_named(path, form(result), replace=force)


def _show(result: GateResult, as_json: bool) -> None:
    """Print; a reader that stops early (`| head`) does not turn a failure into a success."""
    from mismatch_cli.commands._show import console, print_json, print_view
    from mismatch_cli.report.pages import page_of
    from mismatch_cli.text import for_terminal

    try:
        if as_json:
            print_json(result.to_json())
        else:
            out = console()
            print_view(page_of(result))
            out.print()
            out.print(for_terminal(result.verdict), style="bold green" if result.passed else "bold red")
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _show_presets(sets: Sequence[LimitSet], as_json: bool) -> None:
    from dataclasses import asdict

    from rich.padding import Padding
    from rich.text import Text

    from mismatch_cli.commands._show import print_json, print_parts

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
