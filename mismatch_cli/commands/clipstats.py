"""`mismatch-cli clipstats`: what every trust region blocks on the tokens of a trace, and what is lost."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from mismatch_cli.commands._common_flags import BUNDLED, Debug, Force, FullPaths, Json, Quiet, ReportFolder, Traces
from mismatch_cli.errors import UsageError

if TYPE_CHECKING:
    from mismatch_cli.algorithms.algorithm import Algorithm


def command(
    traces: Traces = None,
    algorithm: Annotated[
        list[str] | None,
        typer.Option(
            "--algorithm",
            "-a",
            help="Judge only this one; repeatable. NAME, NAME:PARAMETER=VALUE,… or a file my_mask.py. "
            "Without it, the whole table of `mismatch-cli algorithms`.",
            show_default=False,
        ),
    ] = None,
    compare: Annotated[
        tuple[str, str] | None,
        typer.Option(
            "--compare",
            help="The two algorithms to draw as regions and to show examples of.",
            metavar="NAME NAME",
            show_default="grpo-clip-higher dppo-binary-tv",
        ),
    ] = None,
    theory: Annotated[
        bool, typer.Option("--theory", help="Also the paper's bounds on the improvement; needs rewards.")
    ] = False,
    workers: Annotated[
        int, typer.Option("--workers", min=1, help="Processes that read shards; the numbers stay the same to the bit.")
    ] = 1,
    output: ReportFolder = None,
    force: Force = False,
    full_paths: FullPaths = False,
    json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Show which tokens every trust region blocks, what they are, what is lost, and how many updates are bad.

    Examples:

      mismatch-cli clipstats

      mismatch-cli clipstats probe-model -a grpo-clip-higher -a dppo-binary-tv:max_tv=0.1

      mismatch-cli clipstats probe-model -a my_mask.py --compare my_mask.py dppo-binary-tv
    """
    from functools import partial

    from mismatch_cli.commands._progress import TerminalProgress
    from mismatch_cli.commands._show import folder_of, opened, study_traces
    from mismatch_cli.places import show_full
    from mismatch_cli.recording.folder import report_folder
    from mismatch_cli.studies.clipping import ClippingAnalysis, analyse_clipping

    show_full(full_paths)
    judged, compared = _algorithms(algorithm, compare)
    progress = TerminalProgress(quiet)
    found = opened(traces, progress, f"No trace named: judging {BUNDLED}")
    folder = output or folder_of(traces, found, "clipstats")
    arguments = [*(part for spec in algorithm or () for part in ("--algorithm", spec))]
    arguments += ["--compare", *compare] if compare else []
    arguments += ["--theory"] if theory else []
    analyse = partial(
        analyse_clipping, algorithms=judged, asked=compared, arguments=arguments, theory=theory, workers=workers
    )
    with report_folder(folder, ClippingAnalysis.FORMAT, force=force):
        study_traces(analyse, found, folder, "Judging", as_json=json, progress=progress)


def _algorithms(asked: list[str] | None, compare: tuple[str, str] | None) -> tuple[list[Algorithm], list[Algorithm]]:
    """The algorithms to judge, each once, and those to compare: as asked, else the two of the paper's first figure."""
    from mismatch_cli.algorithms.parse import find
    from mismatch_cli.algorithms.table import TABLE
    from mismatch_cli.metrics.clipping.overlap import MOST_ALGORITHMS

    compared = [find(spec) for spec in compare or ()]
    listed = [find(spec) for spec in asked] if asked else list(TABLE.values())
    judged = list(dict.fromkeys([*listed, *compared]))
    names = [algorithm.name for algorithm in judged]
    if repeated := next((name for name in names if names.count(name) > 1), None):
        raise UsageError(f"Two different algorithms are called {repeated}. Rename one of the mask files.")
    if len(judged) > MOST_ALGORITHMS:
        raise UsageError(f"{len(judged)} algorithms are too many at once: name at most {MOST_ALGORITHMS}.")
    return judged, compared
