"""`mismatch-cli report`: everything that `probe` printed and drew, again, from traces alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mismatch_cli.commands._common_flags import Debug, Force, FullPaths, Json, Output, Quiet, Worst
from mismatch_cli.errors import UsageError

if TYPE_CHECKING:
    from mismatch_cli.commands._progress import TerminalProgress
    from mismatch_cli.trace.reader import Trace

_REPORT = Path("report")  # the folder where no run is named


def command(
    traces: Annotated[
        list[Path] | None,
        typer.Argument(
            help="Run folders or trace folders, pooled; without one, the latest run here, else the bundled trace.",
            show_default=False,
        ),
    ] = None,
    worst: Worst = 10,
    export: Annotated[
        str | None,
        typer.Option(
            "--export",
            help="Write one row per token (csv, parquet), or per response as `import` reads it (jsonl).",
        ),
    ] = None,
    dialect: Annotated[
        str | None,
        typer.Option(
            "--as",
            metavar="FRAMEWORK",
            help="Only print what this framework's dashboard would show: verl, nemo-rl, trl, … or all.",
        ),
    ] = None,
    output: Output = None,
    force: Force = False,
    full_paths: FullPaths = False,
    json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Print and draw the report of a trace, or of training runs, again, without a model.

    Examples:

      mismatch-cli report probe-model

      mismatch-cli report probe-model --worst 20 --export parquet

      mismatch-cli report train-miniature

      mismatch-cli report probe-model --as verl
    """
    from mismatch_cli.commands._progress import TerminalProgress
    from mismatch_cli.commands._show import show, study_mismatch
    from mismatch_cli.places import show_full
    from mismatch_cli.studies.runs import read_runs
    from mismatch_cli.studies.training import TrainingAnalysis

    show_full(full_paths)
    if export not in (None, "csv", "parquet", "jsonl"):
        raise UsageError(f"--export {export} is not known. Choose one of: csv, parquet, jsonl.")
    progress = TerminalProgress(quiet)
    if dialect is not None:
        if export is not None or output is not None:
            raise UsageError(f"--as {dialect} only prints: leave out {'--export' if export else '--output'}.")
        _print_as(dialect, traces, json, progress)
        return
    training = [run for path in traces or [] for run in _training_runs(path)]
    if training:
        own = traces[0] if traces and len(traces) == 1 else None
        with _held_of_training(training, own, output, force) as folder:
            show(TrainingAnalysis.of(read_runs(training)), folder, as_json=json, progress=progress)
        return
    named = traces or _latest_run(progress)
    found = _opened(named, progress)
    own = found[0].run_folder if named and len(found) == 1 else None
    with _held(own, output, force, export) as folder:
        study_mismatch(found, folder, worst=worst, as_json=json, progress=progress)
        if export is not None:
            from mismatch_cli.trace.export import export_responses, export_tokens

            wrote = export_responses(found, folder) if export == "jsonl" else export_tokens(found, folder, export)
            progress.say(f"Wrote {wrote}")


def _opened(named: Sequence[Path], progress: TerminalProgress) -> list[Trace]:
    """The traces that were named; the bundled one where there is none."""
    from mismatch_cli.commands._show import opened

    return opened(named, progress, "There is no run in this folder: reporting on the bundled trace.")


def _print_as(name: str, traces: list[Path] | None, as_json: bool, progress: TerminalProgress) -> None:
    """The same tokens in another framework's words, or in those of all."""
    from mismatch_cli.commands._show import print_json, print_view
    from mismatch_cli.report import dialects

    dialects.asked(name)  # before anything is read
    result = dialects.as_json(_opened(traces or _latest_run(progress), progress), name)
    if as_json:
        print_json(result)
    else:
        print_view(dialects.build_view(result, name))


def _training_runs(path: Path) -> list[Path]:
    """The folder of a training run, or those in a folder of several."""
    return (
        [path] if (path / "metrics.jsonl").is_file() else sorted(file.parent for file in path.glob("*/metrics.jsonl"))
    )


def _latest_run(progress: TerminalProgress) -> list[Path]:
    """The run in this folder that was written last, if there is one; it is named, for nobody else did."""
    runs = [path.parent.parent for path in Path().glob("*/trace/manifest.json")]
    latest = sorted(runs, key=lambda run: (run / "trace" / "manifest.json").stat().st_mtime)[-1:]
    if latest:
        progress.say(f"No trace was named: reporting on {latest[0]}, the latest run in this folder.")
    return latest


@contextmanager
def _held(own: Path | None, output: Path | None, force: bool, export: str | None) -> Iterator[Path]:
    """Hold the folder of the report: the run that it is about, unless another one is named."""
    from mismatch_cli.recording.folder import report_folder
    from mismatch_cli.studies.mismatch import MismatchAnalysis
    from mismatch_cli.trace.export import file_name

    folder = output or own or _REPORT
    files = () if export is None else (file_name(export),)
    with report_folder(
        folder, MismatchAnalysis.FORMAT, force=force, own=output is None and own is not None, files=files
    ):
        yield folder


@contextmanager
def _held_of_training(runs: list[Path], own: Path | None, output: Path | None, force: bool) -> Iterator[Path]:
    """The same for training runs: the run itself, or the folder of several."""
    from mismatch_cli.recording.folder import report_folder, training_folder
    from mismatch_cli.studies.training import TrainingAnalysis

    folder = output or own or _REPORT
    if output is None and own is not None and runs != [own]:
        with training_folder(folder):
            yield folder
    else:
        with report_folder(folder, TrainingAnalysis.FORMAT, force=force, own=output is None and own is not None):
            yield folder
