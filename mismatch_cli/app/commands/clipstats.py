"""`mismatch-cli clipstats`: what every trust region blocks on the tokens of a trace, and what
that loses.
"""

from dataclasses import dataclass

from mismatch_cli.app.common import JUDGING, Common
from mismatch_cli.app.completions import algorithms
from mismatch_cli.app.flags import flags
from mismatch_cli.app.shared_settings import AlgorithmSettings, TraceSettings
from mismatch_cli.base import registry
from mismatch_cli.base.options import override, setting, settings_group

PANEL, PLACE = "Explain", 3


@dataclass(frozen=True, kw_only=True)
class ClippingSettings:
    """What is analysed beside the algorithms."""

    compare: tuple[str, str] | None = setting(
        None,
        "Two algorithms to show side by side.",
        metavar="NAME NAME",
        completes=algorithms,
        typed=registry.names_file,
        show_default="grpo-clip-higher dppo-binary-tv",
    )
    theory: bool = setting(False, "Add the paper's bounds on improvement; needs rewards.")


@flags()
def command(
    *,
    read: TraceSettings = settings_group(TraceSettings),
    asked_for: AlgorithmSettings = settings_group(
        AlgorithmSettings, algorithms=override(show_default="all of them")
    ),
    clipping: ClippingSettings = settings_group(ClippingSettings),
    common: Common = settings_group(
        Common, *JUDGING, output=override(show_default="clipstats, in the run or here")
    ),
) -> None:
    """Show which tokens each trust region blocks, how much update mass that drops, and how many
    updates are bad.

    Examples:
      mismatch-cli clipstats
      mismatch-cli clipstats probe-model -a grpo-clip-higher -a dppo-binary-tv:delta=0.1
      mismatch-cli clipstats probe-model -a my_mask.py --compare my_mask.py dppo-binary-tv
    """
    from functools import partial

    from mismatch_cli.library import named_choices

    folder = common.report_folder(read.traces, "clipstats")
    listed = asked_for.algorithms or []
    # One call for both: a name that means several algorithms is explained once.
    meant = common.meant([*listed, *(clipping.compare or ())])
    chosen = meant[: len(listed)]
    beside = meant[len(listed) :]
    judged, compared = named_choices.algorithms(chosen, beside)
    from mismatch_cli.studies.clipping import ClippingAnalysis, analyse_clipping

    notice = "No trace named: analysing the bundled one, a few steps of training SmolLM2."
    opened = common.opened(read.traces, notice, command="clipstats")
    arguments = named_choices.clipping_arguments(chosen, beside, theory=clipping.theory)
    analyse = partial(
        analyse_clipping,
        algorithms=judged,
        compared=compared,
        arguments=arguments,
        theory=clipping.theory,
    )
    common.report(analyse, ClippingAnalysis.FORMAT, opened, folder, "Analysing")
