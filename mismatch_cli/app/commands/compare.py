"""`mismatch-cli compare`: two or more traces side by side, paired on what they share."""

from dataclasses import dataclass

from mismatch_cli.app.common import READING, Common
from mismatch_cli.app.flags import flags
from mismatch_cli.app.shared_settings import TraceSettings
from mismatch_cli.base.errors import UsageError, suggest
from mismatch_cli.base.options import override, setting, settings_group

PANEL, PLACE = "Measure", 3


def _pairs() -> list[str]:
    from mismatch_cli.metrics.pairs import PAIRS

    return list(PAIRS)


@dataclass(frozen=True, kw_only=True)
class ComparisonSettings:
    """What is compared."""

    pair: str | None = setting(
        None,
        "Gap: at equal weights, with staleness, staleness alone, or the trainer's noise.",
        choices=("pair", _pairs),
        show_default="mismatch, or total if a trace lacks it",
    )


_TRACES = override(
    help="Run or trace folders; the first is compared with up to five others.",
    show_default="the two bundled traces",
)


@flags()
def command(
    *,
    read: TraceSettings = settings_group(TraceSettings, traces=_TRACES),
    comparison: ComparisonSettings = settings_group(ComparisonSettings),
    common: Common = settings_group(Common, *READING, output=override(show_default="compare")),
) -> None:
    """Show how traces differ: in every metric with intervals, token by token, and in their
    settings.

    Traces of the same responses (two trainers, two dtypes, before and after an upgrade) are paired
    token by token; traces of the same prompts, prompt by prompt.

    Examples:
      mismatch-cli compare
      mismatch-cli compare probe-before probe-after
      mismatch-cli compare probe-bf16 probe-fp16 probe-fp32 --json
    """
    from functools import partial

    from mismatch_cli.studies.settings_compared import check_trace_count

    traces = read.traces or []
    if len(traces) == 1:
        raise UsageError(
            "compare needs two traces, and one is named. Name a second: "
            f"{suggest('compare', traces[0], 'OTHER')}"
        )
    check_trace_count(len(traces))
    folder = common.report_folder(traces, "compare")
    from mismatch_cli.studies.comparison import ComparisonAnalysis, analyse_comparison

    notice = "No traces named: comparing the two bundled ones, an fp8 KV cache and float32."
    opened = common.opened(traces, notice, "fp8-kv", "float32")
    arguments = ["--pair", comparison.pair] if comparison.pair else []
    analyse = partial(analyse_comparison, pair_name=comparison.pair, arguments=arguments)
    common.report(analyse, ComparisonAnalysis.FORMAT, opened, folder, "Comparing", passes=2)
