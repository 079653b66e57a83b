"""`mismatch-cli compare`: two traces or more beside each other, paired on what they share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mismatch_cli.commands._common_flags import Debug, Force, FullPaths, Json, Quiet
from mismatch_cli.errors import UsageError, suggest


def command(
    traces: Annotated[
        list[Path] | None,
        typer.Argument(
            help="Run folders or trace folders; the first is what the others, up to five, are compared with. Without "
            "any, the two bundled traces.",
            show_default=False,
        ),
    ] = None,
    pair: Annotated[
        str | None,
        typer.Option(
            "--pair",
            help="Which gap: mismatch, total, staleness or floor.",
            show_default="the first of mismatch and total that all traces have",
        ),
    ] = None,
    output: Annotated[
        Path,
        typer.Option("--output", "-o", help="Folder for summary.json, report.html and plots."),
    ] = Path("compare"),
    force: Force = False,
    full_paths: FullPaths = False,
    json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Show how traces differ: in every metric, with intervals, on the same tokens, and in their settings.

    Traces of the same responses (two trainers, two dtypes, before and after an upgrade) are paired token by token,
    traces of the same prompts prompt by prompt.

    Examples:

      mismatch-cli compare

      mismatch-cli compare probe-before probe-after

      mismatch-cli compare probe-bf16 probe-fp16 probe-fp32 --json
    """
    from functools import partial

    from mismatch_cli import registry
    from mismatch_cli.commands._progress import TerminalProgress
    from mismatch_cli.commands._show import opened, study_traces
    from mismatch_cli.metrics.pairs import PAIRS
    from mismatch_cli.places import show_full
    from mismatch_cli.recording.folder import report_folder
    from mismatch_cli.studies.comparison import NAMES, ComparisonAnalysis, analyse_comparison

    show_full(full_paths)
    if traces and len(traces) == 1:
        raise UsageError(
            f"One trace has nothing to be compared with. Name a second: {suggest('compare', traces[0], 'OTHER')}"
        )
    if traces and len(traces) > len(NAMES):
        raise UsageError(f"{len(traces)} traces are too many at once: name at most {len(NAMES)}.")
    if pair is not None and pair not in PAIRS:
        raise UsageError(registry.unknown("pair", pair, PAIRS))
    progress = TerminalProgress(quiet)
    said = "No traces named: comparing the two bundled ones, an fp8 KV cache and float32."
    found = opened(traces, progress, said, "fp8-kv", "float32")
    analyse = partial(analyse_comparison, pair_name=pair, arguments=["--pair", pair] if pair else [])
    with report_folder(output, ComparisonAnalysis.FORMAT, force=force):
        study_traces(analyse, found, output, "Comparing", passes=2, as_json=json, progress=progress)
