"""`mismatch-cli clipstats`: what every trust region blocks on the tokens of a trace, and what is lost."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from mismatch_cli.commands._show import BUNDLED, TRACES, Judging
from mismatch_cli.errors import UsageError
from mismatch_cli.options import flags, saying, setting

if TYPE_CHECKING:
    from mismatch_cli.algorithms.algorithm import Algorithm


@flags()
def command(
    *,
    traces: list[Path] | None = TRACES,
    algorithm: list[str] | None = setting(
        None,
        "Judge only this one: NAME, NAME:PARAMETER=VALUE,… or a file such as my_mask.py. Repeatable.",
        short="-a",
        metavar="ALGORITHM",
        show_default="all that `mismatch-cli algorithms` lists",
    ),
    compare: tuple[str, str] | None = setting(
        None,
        "Two algorithms to draw as regions and to show examples of.",
        metavar="NAME NAME",
        show_default="grpo-clip-higher dppo-binary-tv",
    ),
    theory: bool = setting(False, "Add the paper's bounds on the improvement, which need rewards."),
    common: Annotated[Judging, saying("output", show_default="clipstats, in the run or here")],
) -> None:
    """Show which tokens every trust region blocks, what they are, what is lost, and how many updates are bad.

    Examples:
      mismatch-cli clipstats
      mismatch-cli clipstats probe-model -a grpo-clip-higher -a dppo-binary-tv:delta=0.1
      mismatch-cli clipstats probe-model -a my_mask.py --compare my_mask.py dppo-binary-tv
    """
    from functools import partial

    folder = common.report_folder(traces, "clipstats")
    common.check(traces, folder)
    judged, compared = _algorithms(algorithm, compare)
    from mismatch_cli.studies.clipping import ClippingAnalysis, analyse_clipping

    found = common.opened(traces, f"No trace named: judging {BUNDLED}")
    arguments = [*(part for spec in algorithm or () for part in ("--algorithm", spec))]
    arguments += ["--compare", *compare] if compare else []
    arguments += ["--theory"] if theory else []
    analyse = partial(analyse_clipping, algorithms=judged, asked=compared, arguments=arguments, theory=theory)
    common.report(analyse, ClippingAnalysis.FORMAT, found, folder, "Judging")


def _algorithms(asked: list[str] | None, compare: tuple[str, str] | None) -> tuple[list[Algorithm], list[Algorithm]]:
    """The algorithms to judge, each once, and those to compare: as asked, else the two of the paper's first figure."""
    from mismatch_cli.algorithms.parse import find
    from mismatch_cli.algorithms.table import TABLE

    compared = [find(spec) for spec in compare or ()]
    listed = [find(spec) for spec in asked] if asked else list(TABLE.values())
    judged = list(dict.fromkeys([*listed, *compared]))
    names = [algorithm.name for algorithm in judged]
    if repeated := next((name for name in names if names.count(name) > 1), None):
        raise UsageError(f"Two different algorithms are called {repeated}. Rename one of the mask files.")
    from mismatch_cli.metrics.clipping.overlap import MOST_ALGORITHMS

    if len(judged) > MOST_ALGORITHMS:
        raise UsageError(f"{len(judged)} algorithms are too many at once: name at most {MOST_ALGORITHMS}.")
    return judged, compared
