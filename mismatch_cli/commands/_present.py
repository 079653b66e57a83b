"""The end of every run: analyse the trace, print it, and write summary.json, plots and report.html."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mismatch_cli.commands._progress import TerminalProgress

if TYPE_CHECKING:
    from mismatch_cli.trace.reader import Trace

SUMMARY_FILE, HTML_FILE, PLOTS_FOLDER = "summary.json", "report.html", "plots"
_WORST_IN_HTML = 10


def present(
    traces: Sequence[Trace], folder: Path | None, *, worst: int, as_json: bool, progress: TerminalProgress
) -> None:
    """Print the report of traces (or its JSON) on stdout; with a folder also write everything into it."""
    from mismatch_cli.report.analysis import analyse, plot_data, summary_json
    from mismatch_cli.report.build import build_view
    from mismatch_cli.report.excerpts import worst_excerpts

    progress.say("Measuring")
    shown = max(worst, _WORST_IN_HTML)
    analysis = analyse(traces, shown)
    summary = summary_json(analysis)
    tokens, responses = worst_excerpts(traces, analysis.main_pair, summary["worst"], shown)
    if folder is not None:
        progress.say("Drawing")
        _write(folder, summary, plot_data(analysis, summary), tokens, responses)
    if as_json:
        json.dump(summary, sys.stdout, indent=2)
        print()
    else:
        _print(build_view(summary, [], tokens[:worst], responses[:worst]))
    if folder is not None:
        progress.say(f"Wrote {folder / HTML_FILE}, {SUMMARY_FILE} and {PLOTS_FOLDER}/")


def _write(folder: Path, summary: dict[str, Any], data: Any, tokens: Sequence[Any], responses: Sequence[Any]) -> None:
    from mismatch_cli.report.build import build_view
    from mismatch_cli.report.figures import figure_views, write_plots
    from mismatch_cli.report.html import write_html
    from mismatch_cli.trace.files import write_atomically

    write_atomically(folder / SUMMARY_FILE, json.dumps(summary, indent=2) + "\n")
    write_plots(folder / PLOTS_FOLDER, data)
    write_html(folder / HTML_FILE, build_view(summary, figure_views(data), tokens, responses))


def _print(view: Any) -> None:
    from rich.console import Console

    from mismatch_cli.report.terminal import print_report

    class PipeableConsole(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError  # rich would exit with 1; for `| head` that is no failure

    print_report(view, PipeableConsole(highlight=False, emoji=False, markup=False))
