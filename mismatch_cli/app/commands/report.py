"""`mismatch-cli report`: prints and draws again what `probe` did, from traces alone."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from mismatch_cli.app.common import REPORTING, Common, latest_run
from mismatch_cli.app.completions import frameworks
from mismatch_cli.app.flags import flags
from mismatch_cli.app.one_figure import (
    FigurePlace,
    check_figure,
    draw_traces,
    draw_training,
    figure_names,
)
from mismatch_cli.app.shared_settings import AlgorithmSettings, TraceSettings
from mismatch_cli.base.errors import UsageError, suggest
from mismatch_cli.base.options import override, setting, settings_group

if TYPE_CHECKING:
    from mismatch_cli.studies.study import Study
    from mismatch_cli.trace.reader import Trace

PANEL, PLACE = "Measure", 2

_ALL = "all"  # frameworks
_REPORT = Path("report")  # the folder if no run is named
_NO_RUN = "No run in this folder: reporting on the bundled trace."
_TRACES = override(
    help="Run or trace folders (several are pooled), or training runs.",
    show_default="the latest run here, or the bundled trace",
)
_TWO = override(help="Of training runs, typed twice: does the first learn faster?")


@dataclass(frozen=True, kw_only=True)
class ReportSettings:
    """What is made of the traces beside the report, or instead of it."""

    export: str | None = setting(
        None,
        "Also write a row per token (csv, parquet) or per response (jsonl, for `import`).",
        choices=("format", ("csv", "parquet", "jsonl")),
    )
    dialect: str | None = setting(
        None,
        "Only print what this framework's dashboard would show, or all.",
        key="as",
        metavar="FRAMEWORK",
        choices=("framework", lambda: [*frameworks(), _ALL]),
    )
    figure: str | None = setting(
        None,
        "Only draw this figure into plots/: a name from `mismatch-cli guide report`, or paper-5 "
        "for the paper's figure 5.",
        metavar="NAME",
        completes=figure_names,
    )


@flags()
def command(
    *,
    read: TraceSettings = settings_group(TraceSettings, traces=_TRACES),
    report: ReportSettings = settings_group(ReportSettings),
    rivals: AlgorithmSettings = settings_group(AlgorithmSettings, algorithms=_TWO),
    common: Common = settings_group(
        Common, *REPORTING, output=override(show_default="the run itself, or report")
    ),
) -> None:
    """Print and draw the report of traces or training runs again; no model is needed.

    Examples:
      mismatch-cli report probe-model
      mismatch-cli report probe-model --worst 20 --export parquet
      mismatch-cli report train-miniature
      mismatch-cli report two -a dppo-binary-tv -a pg-is
      mismatch-cli report train-miniature --figure paper-5 --plots pdf --plot-width 3.25in
      mismatch-cli report probe-model --as verl
    """
    from mismatch_cli.library import named_choices

    traces = read.traces or []
    figure = report.figure
    claimed = named_choices.two_algorithms(common.meant(rivals.algorithms))
    if figure is not None:
        _check_alone(figure, report.export, report.dialect, common)
    if report.dialect is not None:
        _check_only_printed(report.dialect, report.export, claimed, common)
        _print_as(report.dialect, traces, common)
        return
    training = _training_runs(traces)
    if training:
        _check_no_tokens(report.export, common)
        own = traces[0] if len(traces) == 1 else None
        _report_training(training, own, claimed, figure, common)
        return
    if claimed is not None:
        line = suggest("clipstats", *traces, "-a", claimed[0], "-a", claimed[1])
        raise UsageError(
            "--algorithm compares training runs, and none was named. What both block in a trace: "
            f"{line}"
        )
    traces = traces or _latest_run(common)
    if figure is not None:
        _draw_traces(traces, figure, common)
    else:
        _report_traces(traces, report.export, common)


def _check_alone(figure: str, export: str | None, dialect: str | None, common: Common) -> None:
    """A `UsageError` for an unknown figure, and for flags of what is not written beside it."""
    check_figure(figure)
    others = {
        "export": export,
        "as": dialect,
        "json": common.json,
        "no-plots": common.no_plots,
        "full": common.full,
        "worst": common.worst,
        "open": common.open,
    }
    for flag, value in others.items():
        if value:
            raise UsageError(f"--figure only draws one figure: leave out --{flag}.")


def _check_only_printed(
    dialect: str, export: str | None, claimed: tuple[str, str] | None, common: Common
) -> None:
    """A `UsageError` for algorithms, and for flags of files and pages, which --as does not
    write.
    """
    if claimed is not None:
        raise UsageError(f"--as {dialect} compares no algorithms: leave out --algorithm.")
    if common.worst is not None:
        raise UsageError(f"--as {dialect} shows no single tokens: leave out --worst.")
    for flag, value in {"export": export, "output": common.output, "open": common.open}.items():
        if value:
            raise UsageError(
                f"--as {dialect} only prints: leave out --{flag}. "
                f"To write a file: --as {dialect} --json > FILE"
            )


def _training_runs(named: list[Path]) -> list[Path]:
    """The training runs that are named, or in folders that are; a `UsageError` for what is none
    beside them.
    """
    from mismatch_cli.trace.training_folder import training_runs

    runs_in = {path: training_runs(path) for path in named}
    others = [path for path, runs in runs_in.items() if not runs]
    if others and len(others) < len(runs_in):
        raise UsageError(
            f"{others[0]} is not a training run, as others that are named are: a report is of "
            "training runs or of traces. Leave it out."
        )
    return list(chain.from_iterable(runs_in.values()))


def _check_no_tokens(export: str | None, common: Common) -> None:
    """A `UsageError` for flags of single tokens, which the report of training runs has none of."""
    for flag, value in {"export": export, "worst": common.worst}.items():
        if value is not None:
            raise UsageError(f"--{flag} is for traces, not for training runs: leave it out.")


def _place(own: Path | None, common: Common) -> FigurePlace:
    """Where a report or one figure goes: into --output, the run itself, or report/."""
    if common.output is not None:
        return FigurePlace(common.output, own=False)
    return FigurePlace(own or _REPORT, own=own is not None)


def _draw_traces(named: list[Path], figure: str, common: Common) -> None:
    place = _place(_own_folder(named), common)
    common.check(named, place.folder, own=place.own)
    draw_traces(lambda: common.opened(named, _NO_RUN), figure, place, common)


def _own_folder(named: list[Path]) -> Path | None:
    """The folder of the only run that is named, if reports may go there."""
    from mismatch_cli.base.places import is_bundled
    from mismatch_cli.trace.manifest import run_folder_of, trace_folder
    from mismatch_cli.trace.stores import is_store

    if len(named) != 1:
        return None
    run = run_folder_of(trace_folder(named[0]))
    if is_bundled(run) or is_store(run):
        return None
    return run


def _study_of(runs: list[Path], claimed: tuple[str, str] | None) -> Study:
    """The study of training runs; `claimed`: and of whether the first algorithm learns faster."""
    from mismatch_cli.studies.programs import training_study

    study: Study = training_study(runs).study_of(runs, claimed)
    return study


def _report_training(
    runs: list[Path],
    own: Path | None,
    claimed: tuple[str, str] | None,
    figure: str | None,
    common: Common,
) -> None:
    """Report into the folder of the run or runs, unless --output names another; with a `figure`,
    draw only that.
    """
    from mismatch_cli.trace.run_folder import folder_of_runs, report_folder

    place = _place(own, common)
    if figure is not None:
        draw_training(partial(_study_of, runs, claimed), figure, place, common)
        return
    folder, in_own = place
    study = _study_of(runs, claimed)
    if common.only_numbers:
        common.show(study, None)
        return
    # The folder that was named may contain runs, instead of being one.
    if in_own and runs != [own]:
        held = folder_of_runs(folder, study.FORMAT)
    else:
        held = report_folder(folder, study.FORMAT, force=common.force, own=in_own)
    with held:
        common.show(study, folder)


def _report_traces(named: list[Path], export: str | None, common: Common) -> None:
    """Report into the folder of the run, unless --output names another; if only numbers are
    wanted, into none.
    """
    from mismatch_cli.trace.run_folder import report_folder

    folder, in_own = _place(_own_folder(named), common)
    report_into = None if common.only_numbers else folder
    # An export needs the folder too, also where the numbers are only printed.
    needs_folder = report_into is not None or export is not None
    common.check(named, folder if needs_folder else None, own=in_own)
    from mismatch_cli.studies.mismatch import MismatchAnalysis

    traces = common.opened(named, _NO_RUN)
    if not needs_folder:
        common.study_mismatch(traces, None)
        return
    files: tuple[str, ...] = ()
    if export is not None:
        from mismatch_cli.trace.export import file_name

        files = (file_name(export),)
    with report_folder(
        folder, MismatchAnalysis.FORMAT, force=common.force, own=in_own, files=files
    ):
        common.study_mismatch(traces, report_into)
        if export is not None:
            common.progress.say(f"Wrote {_export(traces, folder, export)}")


def _export(traces: list[Trace], folder: Path, kind: str) -> Path:
    from mismatch_cli.studies.tokens import token_tables
    from mismatch_cli.trace.export import export_responses, export_tokens

    if kind == "jsonl":
        return export_responses(traces, folder)
    return export_tokens(token_tables(traces), folder, kind)


def _print_as(name: str, named: list[Path], common: Common) -> None:
    """Print the metrics that a framework, or each of them, would show for the same tokens."""
    common.check(named)
    from mismatch_cli.studies.translation import Translation

    traces = common.opened(named or _latest_run(common), _NO_RUN)
    common.print(Translation.of(traces, name, common.read_by))


def _latest_run(common: Common) -> list[Path]:
    """The latest run in this folder, if there is one; it says which."""
    latest = latest_run()
    if latest is None:
        return []
    common.progress.say(f"No trace named: reporting on {latest}, the latest run in this folder.")
    return [latest]
