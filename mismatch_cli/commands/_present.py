"""The end of every run: analyse the trace, print it, and write summary.json, plots and report.html.

Numbers come first: pictures take seconds.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mismatch_cli.commands._progress import TerminalProgress
from mismatch_cli.places import shown

if TYPE_CHECKING:
    from rich.console import RenderableType

    from mismatch_cli.algorithms.algorithm import Algorithm
    from mismatch_cli.metrics.curation import Curation
    from mismatch_cli.report.figures import Drawable, FigureView
    from mismatch_cli.report.view import ReportView
    from mismatch_cli.trace.reader import Trace

SUMMARY_FILE, HTML_FILE, PLOTS_FOLDER = "summary.json", "report.html", "plots"
_WORST_IN_HTML = 10


def present(traces: Sequence[Trace], folder: Path, *, worst: int, as_json: bool, progress: TerminalProgress) -> None:
    """Print the report of traces (or its JSON) on stdout, and write everything into a folder."""
    from mismatch_cli.report.excerpts import worst_excerpts
    from mismatch_cli.report.pages.mismatch import build_view
    from mismatch_cli.studies.mismatch import analyse, plot_data, summary_json

    shown = max(worst, _WORST_IN_HTML)
    with progress.counting("Measuring", sum(trace.num_responses for trace in traces)) as advance:
        analysis = analyse(traces, shown, advance)
    summary = summary_json(analysis)
    tokens, responses = worst_excerpts(traces, analysis.main_pair, summary["worst"], shown)
    with _shown(summary, build_view(summary, [], tokens[:worst], responses[:worst]), as_json, progress):
        data = plot_data(analysis, summary)
        _write(folder, summary, data, lambda drawn: build_view(summary, drawn, tokens, responses), progress)


def present_clipping(
    traces: Sequence[Trace],
    folder: Path,
    judged: Sequence[Algorithm],
    compared: Sequence[Algorithm],
    *,
    arguments: Sequence[str],
    theory: bool,
    workers: int,
    as_json: bool,
    progress: TerminalProgress,
) -> None:
    """The same for `clipstats`: what every algorithm blocks, and two of them in pictures and examples."""
    from mismatch_cli.report.pages.clipping import build_view
    from mismatch_cli.report.pages.clipping_examples import chosen_pair, example_excerpts
    from mismatch_cli.studies.clipping import analyse_clipping, clipping_json, clipping_plot_data

    with progress.counting("Judging", sum(trace.num_responses for trace in traces)) as advance:
        analysis = analyse_clipping(traces, judged, theory=theory, workers=workers, on_responses=advance)
    pair = chosen_pair(analysis, compared)
    result = clipping_json(analysis, pair, shown(arguments))
    examples = example_excerpts(traces, result, pair)
    with _shown(result, build_view(result, [], examples), as_json, progress):
        data = clipping_plot_data(analysis, result, pair)
        _write(folder, result, data, lambda drawn: build_view(result, drawn, examples), progress)


def present_comparison(
    traces: Sequence[Trace], folder: Path, pair: str | None, *, as_json: bool, progress: TerminalProgress
) -> None:
    """The same for `compare`: traces beside each other, and what differs."""
    from mismatch_cli.report.pages.comparison import build_view
    from mismatch_cli.studies.comparison import analyse_comparison, comparison_json, comparison_plot_data

    with progress.counting("Comparing", 2 * sum(trace.num_responses for trace in traces)) as advance:
        analysis = analyse_comparison(traces, pair, advance)
    result = comparison_json(analysis, ["--pair", pair] if pair else [])
    with _shown(result, build_view(result, []), as_json, progress):
        data = comparison_plot_data(analysis, result)
        _write(folder, result, data, lambda drawn: build_view(result, drawn), progress)


def present_diagnosis(
    traces: Sequence[Trace],
    folder: Path,
    *,
    earlier_model: str | None,
    trainer_model: str | None,
    as_json: bool,
    progress: TerminalProgress,
) -> None:
    """The same for `diagnose`: what is wrong, and everything that was looked at."""
    from mismatch_cli.report.pages.diagnosis import build_view
    from mismatch_cli.studies.diagnosis import analyse_diagnosis, diagnosis_json

    with progress.counting("Reading", sum(trace.num_responses for trace in traces)) as advance:
        analysis = analyse_diagnosis(traces, earlier_model, trainer_model, advance)
    result = diagnosis_json(analysis)
    with _shown(result, build_view(analysis, result, []), as_json, progress):
        _write(folder, result, analysis, lambda drawn: build_view(analysis, result, drawn), progress)


def present_training(
    folders: Sequence[Path], output: Path, *, as_json: bool, progress: TerminalProgress, reload_seconds: int = 0
) -> None:
    """The same for runs of `train`: algorithms and seeds beside each other, on a page that may reload itself."""
    from mismatch_cli.report.pages.training import build_view
    from mismatch_cli.studies.runs import read_runs
    from mismatch_cli.studies.training import summary_json
    from mismatch_cli.studies.training_plot_data import TrainingPlotData

    runs = read_runs(folders)
    data, summary = TrainingPlotData.of(runs), summary_json(runs)
    with _shown(summary, build_view(runs, []), as_json, progress):
        _write(output, summary, data, lambda drawn: build_view(runs, drawn, reload_seconds=reload_seconds), progress)


def present_curation(
    curation: Curation,
    config: dict[str, Any],
    folder: Path,
    *,
    confirm: bool,
    as_json: bool,
    progress: TerminalProgress,
) -> None:
    """The same for `curate`: which problems were kept, and how good they are."""
    from mismatch_cli.report.pages.curation import build_view
    from mismatch_cli.studies.curation import CurationAnalysis, summary_json

    analysis = CurationAnalysis(curation, shown(config), confirm)
    summary, command = summary_json(analysis), shown(sys.argv[1:])
    with _shown(summary, build_view(analysis, [], command), as_json, progress):
        _write(folder, summary, analysis, lambda drawn: build_view(analysis, drawn, command), progress)


@contextmanager
def _shown(summary: dict[str, Any], view: ReportView, as_json: bool, progress: TerminalProgress) -> Iterator[None]:
    """Print, then the block: files are written also where whoever read the numbers has left (`| head`)."""
    from mismatch_cli.report.terminal import print_report

    unread = None
    try:
        if as_json:
            json.dump(summary, sys.stdout, indent=2)
            print()
        else:
            print_report(view, console())
        sys.stdout.flush()
    except OSError as error:
        unread = error
    progress.say("Drawing")
    yield
    if unread is not None:
        raise unread


def _write(
    folder: Path,
    summary: dict[str, Any],
    data: Drawable,
    page: Callable[[list[FigureView]], ReportView],
    progress: TerminalProgress,
) -> None:
    from mismatch_cli.report.figures import figure_views
    from mismatch_cli.report.html import write_html
    from mismatch_cli.trace.files import write_atomically

    write_atomically(folder / SUMMARY_FILE, json.dumps(summary, indent=2) + "\n")
    write_html(folder / HTML_FILE, page(figure_views(data, folder / PLOTS_FOLDER)))
    progress.say(f"Wrote {folder / HTML_FILE}, {SUMMARY_FILE} and {PLOTS_FOLDER}/")


def print_parts(*parts: RenderableType) -> None:
    """Print on stdout, as reports do."""
    console().print(*parts, sep="\n")


def console() -> Any:
    """A rich console on stdout that lets its reader stop early (`| head`)."""
    from rich.console import Console

    class PipeableConsole(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError  # rich would exit with 1; for `| head` that is no failure

    return PipeableConsole(highlight=False, emoji=False, markup=False)
