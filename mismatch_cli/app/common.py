"""What commands share: flags, opening traces, and showing the result of a study.

A study is printed, and then written as summary.json, plots and report.html: pictures take seconds.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mismatch_cli.app.progress import TerminalProgress, colour_system
from mismatch_cli.base import custom_code, places
from mismatch_cli.base.errors import UsageError, suggest
from mismatch_cli.base.options import names_cluster, of_running, override, setting, settings_group
from mismatch_cli.base.text import with_signs_of
from mismatch_cli.processes.ranks import World
from mismatch_cli.processes.workers import Workers
from mismatch_cli.trace.stores import is_store

if TYPE_CHECKING:
    from rich.console import RenderableType

    from mismatch_cli.report.outline import Outline
    from mismatch_cli.report.picture_files import PictureFiles
    from mismatch_cli.studies.study import Study
    from mismatch_cli.trace.reader import Trace

_PIPE_WIDTH = 10_000  # characters: wider than any table

of_output = partial(setting, panel="Output")


@dataclass(frozen=True, kw_only=True)
class Common:
    """Flags that are the same in every command that has them, and methods that show results
    accordingly.
    """

    trust_remote_code: bool = of_running(
        False, "Run Python code that comes with a model.", typed=True
    )
    resume: bool = of_running(False, "Resume the run in --output.")
    workers: str = of_running(
        "1",
        "Processes that read, or a Ray cluster; identical results.",
        metavar="N|ray",
        numeric=True,
        completes=("ray",),
        typed=names_cluster,
    )
    cache: Path | None = of_running(
        None,
        "Folder that caches partial results.",
        metavar="DIR",
        typed=True,
    )
    skip_broken: bool = of_running(False, "Skip and count unreadable shards.")
    output: Path | None = of_output(
        None,
        "Folder for summary.json and report.html.",
        short="-o",
        show_default="in the run or here, named after the command",
    )
    worst: int | None = of_output(
        None,
        "Show the N worst tokens and responses.",
        least=0,
        show_default="1 on the screen, 10 on the page",
    )
    open: bool = of_output(False, "Open the page in the browser.")
    plots: str | None = of_output(
        None,
        "Also write figures into plots/: any of png,svg,pdf.",
        metavar="FORMATS",
        completes=("png", "svg", "pdf"),
        show_default="only on the page",
    )
    plot_width: str | None = of_output(
        None,
        "Width of figures: 3.25in, 8.5cm or 234pt.",
        metavar="WIDTH",
        show_default="as on the page",
    )
    no_plots: bool = of_output(False, "Draw no figures.")
    force: bool = of_output(
        False,
        "Replace a run, or write beside other files.",
    )
    full: bool = of_output(False, "Print all measurements.")
    json: bool = of_output(False, "Print JSON.")
    quiet: bool = of_output(False, "Only errors on stderr.", short="-q")
    # `Command` reads it for `cli.run`, which catches the error.
    debug: bool = of_output(False, "Show tracebacks of errors.")

    def __post_init__(self) -> None:
        # Only what was typed for this run may allow foreign code to run.
        # A folder that is resumed may come from somebody else: what it says is not asked.
        custom_code.allow(self.trust_remote_code)
        if self.output is not None and is_store(self.output):
            raise UsageError(
                "--output is a local folder. How to copy it to a store afterwards: "
                f"{suggest('guide', 'scale')}"
            )
        self._check_drawing()
        # Both are computed once and kept: invalid --plots and --workers are reported here, before
        # anything is read.
        _ = self.files, self.read_by

    def _check_drawing(self) -> None:
        """A `UsageError` for settings of pictures and pages that will not be made."""
        for flag, value in {"plots": self.plots, "plot_width": self.plot_width}.items():
            if value and self.no_plots:
                raise UsageError(f"--no-plots draws nothing: leave out {flag}.")
            if value and self.only_numbers:
                raise UsageError(
                    f"--json without --output draws nothing: leave out {flag}, or name --output."
                )
        if self.open and self.only_numbers:
            raise UsageError(
                "--json without --output writes no page: leave out open, or name --output."
            )

    @cached_property
    def files(self) -> PictureFiles:
        """Formats and size of the files in plots/."""
        from mismatch_cli.report.picture_files import PictureFiles

        return PictureFiles.asked(self.plots, self.plot_width)

    @cached_property
    def read_by(self) -> Workers:
        """The processes that read traces."""
        return Workers.parsed(self.workers, self.cache, skip_broken=self.skip_broken)

    @property
    def only_numbers(self) -> bool:
        """Whether only JSON is wanted: with --json and no folder, nothing waits for pictures."""
        return self.json and self.output is None

    @cached_property
    def progress(self) -> TerminalProgress:
        """Progress on stderr."""
        return TerminalProgress(self.quiet)

    def progress_of(self, world: World) -> TerminalProgress:
        """The progress of a rank: only the first one prints."""
        return self.progress if world.first else TerminalProgress(quiet=True)

    def meant(self, algorithms: Sequence[str] | None) -> list[str]:
        """The algorithms that typed names mean. A name of several, such as `dppo`, means the usual
        one; which that is, and what the others are, is said once.
        """
        if not algorithms:
            return []
        from mismatch_cli.rules.algorithms.parse import usual_meaning
        from mismatch_cli.rules.algorithms.table import MEANINGS

        for spec in dict.fromkeys(algorithms):
            usual = usual_meaning(spec)
            if usual != spec:
                _, *others = MEANINGS[spec.partition(":")[0].lower()]
                self.progress.say(f"{spec} is {usual}; others are {' and '.join(others)}.")
        return list(map(usual_meaning, algorithms))

    def check(
        self, named: Sequence[Path] | None, folder: Path | None = None, *, own: bool = False
    ) -> None:
        """Refuse invalid traces and report folders before importing anything that reads and draws.

        `own`: the folder is the run's, which a report may go into.
        """
        from mismatch_cli.trace.manifest import trace_folder
        from mismatch_cli.trace.run_folder import check_report_folder

        for path in named or ():
            trace_folder(path)
        if folder is not None:
            check_report_folder(folder, force=own or self.force)

    def report_folder(self, named: Sequence[Path] | None, name: str) -> Path | None:
        """Where a report goes: --output, else the only run named, else the current folder; None if
        only numbers are wanted. Refuses invalid traces and folders, as `check` does.
        """
        folder = self._report_folder(named, name)
        self.check(named, folder)
        return folder

    def _report_folder(self, named: Sequence[Path] | None, name: str) -> Path | None:
        from mismatch_cli.trace.manifest import run_folder_of, trace_folder

        if self.output is not None or self.only_numbers:
            return self.output
        if not named or len(named) > 1:
            return Path(name)
        trace = trace_folder(named[0])
        # The bundled traces are part of the installation, and a store takes no report.
        if places.is_bundled(trace) or is_store(trace):
            return Path(name)
        return run_folder_of(trace) / name

    def opened(
        self, named: Sequence[Path] | None, notice: str, *names: str, command: str = ""
    ) -> list[Trace]:
        """The named traces; if there are none, the bundled ones called `names` (the training
        run), after printing `notice`, and how a `command` reads the latest run in this folder.
        """
        from mismatch_cli.trace.reader import Trace
        from mismatch_cli.trace.recording_folder import begun_replacement

        bundled = map(places.bundled_trace, names or (places.TRAINING,))
        paths = named or list(bundled)
        traces = [Trace.open(path, skip_broken=self.skip_broken) for path in paths]
        if not named:
            self.progress.say(notice)
            latest = latest_run() if command else None
            if latest is not None:
                self.progress.say(f"{latest} is here: {suggest(command, latest)}")
        for run in {trace.run_folder for trace in traces if not is_store(trace.folder)}:
            if begun_replacement(run):
                self.progress.say(
                    f"This reads the older run in {run}: the one that replaces it is unfinished. "
                    "Continue that with --resume, or begin it again with --force."
                )
        return traces

    def report(
        self,
        analyse: Callable[..., Study],
        study_format: str,
        traces: Sequence[Trace],
        folder: Path | None,
        phase: str,
        **how: Any,
    ) -> None:
        """Study traces into the folder of a report, as `study` does; without a folder, only
        print the result.
        """
        with self.held(folder, study_format):
            self.study(analyse, traces, folder, phase, **how)

    def held(self, folder: Path | None, study_format: str) -> AbstractContextManager[None]:
        """Hold the folder of a report in this format while it is made; nothing without a folder."""
        from mismatch_cli.trace.run_folder import report_folder

        if folder is None:
            return nullcontext()
        return report_folder(folder, study_format, force=self.force)

    def study(
        self,
        analyse: Callable[..., Study],
        traces: Sequence[Trace],
        folder: Path | None,
        phase: str,
        passes: int = 1,
        **page: Any,
    ) -> None:
        """Study traces in so many passes, with a bar that counts their responses, each once, and
        show the result.
        """
        with self.progress.counting(phase, sum(trace.num_responses for trace in traces)) as advance:
            study = analyse(traces, workers=self.read_by, on_responses=_once_in(passes, advance))
        self.show(study, folder, **page)

    def study_mismatch(self, traces: Sequence[Trace], folder: Path | None) -> None:
        """Study the mismatch and show it: the end of `probe`, `rescore` and `report`. The page
        always shows some of the worst tokens.
        """
        from mismatch_cli.studies.mismatch import WORST, analyse_mismatch

        analyse = partial(analyse_mismatch, worst=max(self.worst or 0, WORST))
        self.study(analyse, traces, folder, "Measuring", worst=self.worst)

    def show(self, study: Study, folder: Path | None, **page: Any) -> None:
        """Print a study, or its JSON, on stdout, and write everything into a folder; `page`
        configures its page.

        Files are written even if the reader of stdout has left (`| head`). If only numbers are
        wanted, a run folder still gets its summary.json, but a report folder gets no files.
        """
        from mismatch_cli.report.pages import page_of

        view = None if self.only_numbers else page_of(study, **page)
        failure = None
        try:
            self.print(study, view)
            sys.stdout.flush()
        except OSError as error:
            failure = error
        if folder is not None:
            self._write(study, view, folder)
        if failure is not None:
            raise failure

    def _write(self, study: Study, view: Outline | None, folder: Path) -> None:
        from mismatch_cli.report.output_files import (
            HTML_FILE,
            PLOTS_FOLDER,
            SUMMARY_FILE,
            write_numbers,
            write_report,
        )

        if view is None:
            self.progress.say(f"Wrote {write_numbers(study, folder)}")
            return
        files = None if self.no_plots else self.files
        has_plots = write_report(study, view, folder, files, self.progress.working)
        others = f", {SUMMARY_FILE} and {PLOTS_FOLDER}/" if has_plots else f" and {SUMMARY_FILE}"
        self.progress.say(f"Wrote {folder / HTML_FILE}{others}")
        if self.open:
            self._open(folder / HTML_FILE)

    def _open(self, page: Path) -> None:
        """Open a page of this machine in the default browser, or say where it is."""
        import webbrowser

        if not webbrowser.open(page.absolute().as_uri()):
            self.progress.say(f"No browser can be opened here. The page: {page.absolute()}")

    def print(self, study: Study, view: Outline | None = None) -> None:
        """Print a study on stdout, as JSON or as its page; `view` is that page if it already
        exists.
        """
        from mismatch_cli.report.pages import page_of
        from mismatch_cli.report.screen import print_view

        if self.json:
            print_json(study.to_json())
        else:
            print_view(view or page_of(study), console(), full=self.full)


# Parts of `Common`, by the names of its fields, for commands that draw, read, judge and report.
DRAWING = ("plots", "plot_width", "no_plots")
READ_BY = ("workers", "cache", "skip_broken")
_LOOKING = (*DRAWING, "force", "full", "json", "quiet", "debug")
READING = (*READ_BY, "output", *_LOOKING)
JUDGING = (*READ_BY, "output", "open", *_LOOKING)
REPORTING = (*READ_BY, "output", "worst", "open", *_LOOKING)
KEY = override(flag=False)  # what the commands with many settings leave to `--config`


def latest_run() -> Path | None:
    """The latest run in the current folder, if there is one."""
    manifests = sorted(
        Path().glob("*/trace/manifest.json"), key=lambda manifest: manifest.stat().st_mtime
    )
    return manifests[-1].parent.parent if manifests else None


def recording(show_default: str, *more: str, **changes: dict[str, Any]) -> Any:
    """The part of `Common` for a command that writes a run folder, with `more` fields as keys of
    `--config`; `changes` say what else differs there.
    """
    names = ("trust_remote_code", "resume", "output", *more, *_LOOKING)
    keys = dict.fromkeys(("plots", "plot_width", "debug", *more), KEY)
    folder = override(help="Run folder.", show_default=show_default)
    differences: dict[str, Any] = {"output": folder, **keys, **changes}
    return settings_group(Common, *names, **differences)


def print_json(content: Any) -> None:
    """Print JSON on stdout, as `--json` does."""
    json.dump(content, sys.stdout, indent=2)
    print()


def print_parts(*parts: RenderableType) -> None:
    """Print rich renderables on stdout."""
    console().print(*parts, sep="\n")


def console() -> Any:
    """A rich console on stdout whose reader may stop early (`| head`).

    A pipe has unlimited width, and no line ends with blanks. NO_COLOR removes all styles.
    """
    from rich.console import Console

    class PipeableConsole(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError  # rich would exit with 1, but `| head` is not a failure

    stdout: Any = _Unpadded(sys.stdout)
    has_width = sys.stdout.isatty() or "COLUMNS" in os.environ
    # Token text may look like rich's markup, an emoji's name or a number: rich interprets nothing.
    # Its terminal escapes are made visible by `base/text.py` before it gets here.
    return PipeableConsole(
        file=stdout,
        width=None if has_width else _PIPE_WIDTH,
        color_system=colour_system(),
        highlight=False,
        emoji=False,
        markup=False,
    )


class _Unpadded:
    """A stream without blanks at the ends of lines, and with our own signs in ASCII where its
    encoding lacks them. What is written to it must be whole lines.
    """

    # Blanks and escape sequences of styles: rich pads a line before it ends its style.
    # Only the blanks are removed, since a style must end.
    _ENDS = re.compile(r"(?: |\x1b\[[\d;]*m)+$", re.MULTILINE)

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> None:
        unpadded = self._ENDS.sub(lambda end: end.group().replace(" ", ""), text)
        self._stream.write(with_signs_of(self._stream.encoding, unpadded))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _once_in(passes: int, advance: Callable[[int], None]) -> Callable[[int], None]:
    """An `advance` for work that reads every response in each of so many passes, and counts it
    once.
    """
    read = 0

    def on_responses(count: int) -> None:
        nonlocal read
        before = read // passes
        read += count
        advance(read // passes - before)

    return on_responses
