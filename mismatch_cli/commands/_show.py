"""What commands share: flags, traces that are opened, and the end of every run, whatever was studied.

A study is printed and written as summary.json, plots and report.html. Numbers come first: pictures take seconds.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from mismatch_cli import custom_code, places
from mismatch_cli.commands._progress import TerminalProgress
from mismatch_cli.options import setting

if TYPE_CHECKING:
    from rich.console import RenderableType

    from mismatch_cli.report.view import ReportView
    from mismatch_cli.studies.study import Study
    from mismatch_cli.trace.reader import Trace

SUMMARY_FILE, HTML_FILE, PLOTS_FOLDER = "summary.json", "report.html", "plots"
BUNDLED = "the bundled one, a short training run with an fp8 KV cache."
_WORST_IN_HTML = 10
_PIPE_WIDTH = 10_000  # characters: more than any table has

of_output = partial(setting, panel="Output")
TRACES = setting(None, "Run folders or trace folders, pooled; without one, the bundled trace.", argument=True)
REPORT_FOLDER = of_output(
    None, "Folder for summary.json, report.html and plots.", "--output", short="-o",
    show_default="in the run, or here; named after the command",
)  # fmt: skip
WORST = "Show the N worst tokens and responses in their context."


@dataclass(frozen=True, kw_only=True)
class Common:
    """Flags that look and read the same in every command that has them, and what is shown as they want it."""

    trust_remote_code: bool = setting(False, "Run the code that a model brings; it is refused without.")
    resume: bool = setting(False, "Go on with the run in --output where it was stopped.")
    workers: int = setting(
        1, "Processes that read 32 MB of shards at a time; the numbers stay the same to the bit.", min=1
    )
    output: Path | None = of_output(  # noqa: RUF009
        None, "Run folder for the trace, summary.json, report.html, plots and log.", short="-o"
    )
    worst: int = of_output(0, WORST, min=0)
    page_responses: int = of_output(200, "Responses whose tokens the page shows, as many as it holds; 0 = none.", min=0)
    force: bool = of_output(False, "Replace a run that is already there.")
    full: bool = of_output(False, "Print everything that was measured, not only what decides.")
    full_paths: bool = of_output(False, "Show absolute paths as they are, in place of …/NAME.")
    json: bool = of_output(False, "Print JSON on stdout instead of tables (schemas: docs/).")
    quiet: bool = of_output(False, "No talk on stderr, only errors.", short="-q")
    debug: bool = of_output(False, "Show the traceback of an error.")  # read by cli.run, which catches the error

    def __post_init__(self) -> None:
        custom_code.allow(self.trust_remote_code)  # never by what a folder to resume says
        places.show_full(self.full_paths)

    @cached_property
    def progress(self) -> TerminalProgress:
        """Talk on stderr."""
        return TerminalProgress(self.quiet)

    def check(self, named: Sequence[Path] | None, folder: Path | None = None, *, own: bool = False) -> None:
        """Refuse traces, and the folder of a report, that will not do, before anything is imported to read and draw.

        `own`: it is the folder of the run, which a report may go into.
        """
        from mismatch_cli.recording.folder import check_report_folder
        from mismatch_cli.trace.manifest import trace_folder

        for path in named or ():
            trace_folder(path)
        if folder is not None:
            check_report_folder(folder, force=own or self.force)

    def opened(self, named: Sequence[Path] | None, said: str, *names: str) -> list[Trace]:
        """The traces that were named; where there are none, those of the package by their `names`, as is `said`."""
        from mismatch_cli.places import bundled, bundled_trace
        from mismatch_cli.trace.reader import Trace

        own = [bundled("traces") / name for name in names] or [bundled_trace()]
        traces = [Trace.open(path) for path in named or own]
        if not named:
            self.progress.say(said)
        return traces

    def report(
        self,
        analyse: Callable[..., Study],
        study_format: str,
        traces: Sequence[Trace],
        folder: Path,
        phase: str,
        **how: Any,
    ) -> None:
        """Study traces into the folder of a report, as `study` does."""
        from mismatch_cli.recording.folder import report_folder

        with report_folder(folder, study_format, force=self.force):
            self.study(analyse, traces, folder, phase, **how)

    def study(
        self,
        analyse: Callable[..., Study],
        traces: Sequence[Trace],
        folder: Path,
        phase: str,
        passes: int = 1,
        **page: Any,
    ) -> None:
        """Make a study of traces with a bar that counts their responses, each read in so many passes, and show it."""
        with self.progress.counting(phase, passes * sum(trace.num_responses for trace in traces)) as advance:
            study = analyse(traces, workers=self.workers, on_responses=advance)
        self.show(study, folder, **page)

    def study_mismatch(self, traces: Sequence[Trace], folder: Path, worst: int) -> None:
        """What `probe`, `rescore` and `report` end with; the page shows some of the worst tokens in any case."""
        from mismatch_cli.studies.mismatch import analyse

        self.study(partial(analyse, worst=max(worst, _WORST_IN_HTML)), traces, folder, "Measuring", worst=worst)

    def show(self, study: Study, folder: Path, **page: Any) -> None:
        """Print a study, or its JSON, on stdout, and write everything into a folder; `page` is for its page alone.

        Files are written also where whoever read the numbers has left (`| head`).
        """
        from mismatch_cli.report.pages import page_of

        view, unread = page_of(study, **page), None
        try:
            self.print(study, view)
            sys.stdout.flush()
        except OSError as error:
            unread = error
        with self.progress.working("Drawing"):
            _write(study, view, folder, self.page_responses)
        self.progress.say(f"Wrote {folder / HTML_FILE}, {SUMMARY_FILE} and {PLOTS_FOLDER}/")
        if unread is not None:
            raise unread

    def print(self, study: Study, view: ReportView | None = None) -> None:
        """The numbers of a study on stdout, as JSON or as its page; `view` is that page where it is already made."""
        from mismatch_cli.report.pages import page_of
        from mismatch_cli.report.screen import print_screen
        from mismatch_cli.report.terminal import print_report

        if self.json:
            print_json(study.result)
            return
        view = view or page_of(study)
        if self.full or view.screen is None:
            print_report(view, console())
        else:
            print_screen(view.screen, console())


Reading = Annotated[Common, "workers", "force", "full", "full_paths", "json", "quiet", "debug"]
Recording = Annotated[Common, "trust_remote_code", "resume", "output", "force", "full", "json", "quiet", "debug"]
Probing = Annotated[
    Common,
    "trust_remote_code",
    "resume",
    "output",
    "worst",
    "page_responses",
    "force",
    "full",
    "json",
    "quiet",
    "debug",
]


def folder_of(named: Sequence[Path] | None, name: str) -> Path:
    """Where a report goes that was given no folder: into the run, if there is one alone, not bundled, or here."""
    from mismatch_cli.trace.manifest import run_folder_of, trace_folder

    own = trace_folder(named[0]) if named and len(named) == 1 else None
    return (Path() if own is None or places.is_bundled(own) else run_folder_of(own)) / name


def _write(study: Study, view: ReportView, folder: Path, responses: int) -> None:
    from mismatch_cli.report.explorer import explorer_view
    from mismatch_cli.report.figures import figure_views
    from mismatch_cli.report.html import write_html
    from mismatch_cli.trace.files import write_atomically

    write_atomically(folder / SUMMARY_FILE, json.dumps(study.result, indent=2) + "\n")
    figures = figure_views(study.plot_data, folder / PLOTS_FOLDER)
    explored = study.exploration(responses) if responses else None
    explorer = None if explored is None else explorer_view(explored)
    write_html(folder / HTML_FILE, replace(view, figures=figures, explorer=explorer))


def print_json(content: Any) -> None:
    """What `--json` prints on stdout."""
    json.dump(content, sys.stdout, indent=2)
    print()


def print_parts(*parts: RenderableType) -> None:
    """Print on stdout, as reports do."""
    console().print(*parts, sep="\n")


def console() -> Any:
    """A rich console on stdout that lets its reader stop early (`| head`); a pipe has no width, and gets no padding."""
    from rich.console import Console

    class PipeableConsole(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError  # rich would exit with 1; for `| head` that is no failure

    piped = not sys.stdout.isatty()
    width = _PIPE_WIDTH if piped and "COLUMNS" not in os.environ else None
    file: Any = _Unpadded(sys.stdout) if piped else None
    return PipeableConsole(file=file, width=width, highlight=False, emoji=False, markup=False)


class _Unpadded:
    """A stream whose lines lose the blanks at their ends; whole lines are written to it."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> None:
        self._stream.write("\n".join(line.rstrip(" ") for line in text.split("\n")))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
