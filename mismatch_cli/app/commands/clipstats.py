"""`mismatch-cli clipstats`: what every trust region blocks on the tokens of a trace, and what
that loses.
"""

from pathlib import Path
from typing import Annotated

from mismatch_cli.app.common import TRACES, Judging
from mismatch_cli.app.completions import algorithms
from mismatch_cli.base import registry
from mismatch_cli.base.options import flags, saying, setting

PANEL, PLACE = "Explain", 3


@flags()
def command(
    *,
    traces: list[Path] | None = TRACES,
    algorithm: list[str] | None = setting(
        None,
        "Analyse only this one: NAME, NAME:PARAMETER=VALUE,… or a file such as my_mask.py. "
        "Repeatable.",
        short="-a",
        metavar="ALGORITHM",
        completes=algorithms,
        typed=registry.names_file,
        show_default="all in `mismatch-cli algorithms`",
    ),
    compare: tuple[str, str] | None = setting(
        None,
        "Two algorithms whose regions are drawn and whose blocked tokens are shown side by side.",
        metavar="NAME NAME",
        completes=algorithms,
        typed=registry.names_file,
        show_default="grpo-clip-higher dppo-binary-tv",
    ),
    theory: bool = setting(
        False, "Add the paper's bounds on the policy improvement; needs rewards."
    ),
    common: Annotated[Judging, saying("output", show_default="clipstats, in the run or here")],
) -> None:
    """Show which tokens each trust region blocks, how much update mass that drops, and how many
    updates are bad.

    Examples:
      mismatch-cli clipstats
      mismatch-cli clipstats probe-model -a grpo-clip-higher -a dppo-binary-tv:delta=0.1
      mismatch-cli clipstats probe-model -a my_mask.py --compare my_mask.py dppo-binary-tv
    """
    from functools import partial

    from mismatch_cli.library import asked

    folder = common.report_folder(traces, "clipstats")
    common.check(traces, folder)
    meant = common.meant([*(algorithm or ()), *(compare or ())])
    chosen, beside = meant[: len(algorithm or ())], meant[len(algorithm or ()) :]
    judged, compared = asked.algorithms(chosen, beside)
    from mismatch_cli.studies.clipping import ClippingAnalysis, analyse_clipping

    opened = common.opened(
        traces, "No trace named: analysing the bundled one, a few steps of training SmolLM2."
    )
    arguments = asked.clipping_arguments(chosen, beside, theory=theory)
    analyse = partial(
        analyse_clipping, algorithms=judged, asked=compared, arguments=arguments, theory=theory
    )
    common.report(analyse, ClippingAnalysis.FORMAT, opened, folder, "Analysing")
