"""The end of every run, whatever was studied: make the study, print it, and write summary.json, plots and report.html.

Numbers come first: pictures take seconds.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mismatch_cli.commands._progress import TerminalProgress

if TYPE_CHECKING:
    from rich.console import RenderableType

    from mismatch_cli.report.view import ReportView
    from mismatch_cli.studies.study import Study
    from mismatch_cli.trace.reader import Trace

SUMMARY_FILE, HTML_FILE, PLOTS_FOLDER = "summary.json", "report.html", "plots"
_WORST_IN_HTML = 10


def opened(named: Sequence[Path] | None, progress: TerminalProgress, said: str, *names: str) -> list[Trace]:
    """The traces that were named; where there are none, those of the package by their `names`, as is `said`."""
    from mismatch_cli.places import bundled, bundled_trace
    from mismatch_cli.trace.reader import Trace

    own = [bundled("traces") / name for name in names] or [bundled_trace()]
    traces = [Trace.open(path) for path in named or own]
    if not named:
        progress.say(said)
    return traces


def folder_of(named: Sequence[Path] | None, traces: Sequence[Trace], name: str) -> Path:
    """Where a report goes that was given no folder: into the run, if there is one alone, else here."""
    return (traces[0].run_folder if named and len(traces) == 1 else Path()) / name


def study_traces(
    analyse: Callable[..., Study],
    traces: Sequence[Trace],
    folder: Path,
    phase: str,
    *,
    as_json: bool,
    progress: TerminalProgress,
    passes: int = 1,
    **page: Any,
) -> None:
    """Make a study of traces with a bar that counts their responses, each read in so many passes, and show it."""
    with progress.counting(phase, passes * sum(trace.num_responses for trace in traces)) as advance:
        study = analyse(traces, on_responses=advance)
    show(study, folder, as_json=as_json, progress=progress, **page)


def study_mismatch(
    traces: Sequence[Trace], folder: Path, *, worst: int, as_json: bool, progress: TerminalProgress
) -> None:
    """What `probe`, `rescore` and `report` end with; the page shows some of the worst tokens in any case."""
    from functools import partial

    from mismatch_cli.studies.mismatch import analyse

    kept = partial(analyse, worst=max(worst, _WORST_IN_HTML))
    study_traces(kept, traces, folder, "Measuring", as_json=as_json, progress=progress, worst=worst)


def show(study: Study, folder: Path, *, as_json: bool, progress: TerminalProgress, **page: Any) -> None:
    """Print a study, or its JSON, on stdout, and write everything into a folder; `page` is for its page alone.

    Files are written also where whoever read the numbers has left (`| head`).
    """
    from mismatch_cli.report.pages import page_of

    view, unread = page_of(study, **page), None
    try:
        if as_json:
            print_json(study.result)
        else:
            print_view(view)
        sys.stdout.flush()
    except OSError as error:
        unread = error
    progress.say("Drawing")
    _write(study, view, folder)
    progress.say(f"Wrote {folder / HTML_FILE}, {SUMMARY_FILE} and {PLOTS_FOLDER}/")
    if unread is not None:
        raise unread


def _write(study: Study, view: ReportView, folder: Path) -> None:
    from mismatch_cli.report.figures import figure_views
    from mismatch_cli.report.html import write_html
    from mismatch_cli.trace.files import write_atomically

    write_atomically(folder / SUMMARY_FILE, json.dumps(study.result, indent=2) + "\n")
    write_html(folder / HTML_FILE, replace(view, figures=figure_views(study.plot_data, folder / PLOTS_FOLDER)))


def print_json(content: Any) -> None:
    """What `--json` prints on stdout."""
    json.dump(content, sys.stdout, indent=2)
    print()


def print_view(view: ReportView) -> None:
    """Print a page on stdout."""
    from mismatch_cli.report.terminal import print_report

    print_report(view, console())


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
