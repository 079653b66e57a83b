"""`mismatch-cli diagnose`: what is wrong with a trace, before suspecting numerics."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from mismatch_cli.app.common import READING, Common
from mismatch_cli.app.flags import flags
from mismatch_cli.app.rank_flags import RankSettings
from mismatch_cli.app.shared_settings import TraceSettings
from mismatch_cli.base.errors import UsageError
from mismatch_cli.base.options import override, setting, settings_group
from mismatch_cli.base.places import FAULTY
from mismatch_cli.probe.settings import ScorerSettings
from mismatch_cli.processes.ranks.joined import joined

if TYPE_CHECKING:
    from mismatch_cli.studies.diagnosis import DiagnosisAnalysis, Preparation

PANEL, PLACE = "Explain", 1

_NO_DIAGNOSIS = "There is no diagnosis."  # the consequence of a rank that is lost
_TRAINER = override(
    help="The trainer's model at the weights that sampled: tells which side is at fault.",
    panel=None,
)


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """Models that score some responses again."""

    earlier_model: str | None = setting(
        None,
        "Earlier checkpoint or base model: does the engine agree better with it?",
        metavar="MODEL",
    )
    reading_tokens: int | None = setting(
        None,
        "Tokens that --trainer-model may read again in search of a misreading.",
        flag=False,
        least=1,
        show_default="8 times those of the responses",
    )


@flags()
def command(
    context: typer.Context,
    *,
    read: TraceSettings = settings_group(TraceSettings),
    models: ModelSettings = settings_group(ModelSettings),
    scorer: ScorerSettings = settings_group(ScorerSettings, "model", model=_TRAINER),
    shared: RankSettings = settings_group(RankSettings, "nproc", "sharded"),
    common: Common = settings_group(
        Common,
        "trust_remote_code",
        *READING,
        output=override(show_default="diagnosis, in the run or here"),
    ),
) -> None:
    """Look for faults that precision cannot explain: shifts, temperature, placeholders, stale
    weights, and more.

    Each finding comes with its evidence, its size, its likely cause and the setting to change.

    Examples:
      mismatch-cli diagnose
      mismatch-cli diagnose probe-model
      mismatch-cli diagnose import-prime-rl --earlier-model ./step-90
    """
    from dataclasses import replace

    from mismatch_cli.models.adapters import base_model_of_adapter
    from mismatch_cli.models.loading import check_models

    named = [name for name in (models.earlier_model, scorer.model) if name]
    if shared.nproc > 1 and not named:
        raise UsageError(
            "--nproc spreads the scoring of a model. Name one with --trainer-model or "
            "--earlier-model."
        )
    shared.check_sharded()
    check_models([base_model_of_adapter(name) or name for name in named], "`diagnose` with a model")
    folder = common.report_folder(read.traces, "diagnosis")
    shared.launch(context, _NO_DIAGNOSIS)
    from mismatch_cli.models.rank_shares import Ranks
    from mismatch_cli.studies.diagnosis import DiagnosisAnalysis, Preparation

    with joined(_NO_DIAGNOSIS) as world:
        # All ranks read the traces and score with the models; only the first prints and writes.
        if not world.first:
            common = replace(common, quiet=True)
            folder = None
        notice = "No trace named: diagnosing a bundled one, a short run with an fp8 KV cache."
        traces = common.opened(read.traces, notice, FAULTY, command="diagnose")
        ranks = Ranks(world, shared.sharded)
        with common.held(folder, DiagnosisAnalysis.FORMAT):
            total = sum(trace.num_responses for trace in traces)
            with common.progress.counting("Reading", total) as advance:
                prepared = Preparation.of(traces, common.read_by, advance, ranks)
            prepared = prepared.with_models(
                models.earlier_model, scorer.model, models.reading_tokens
            )
            analysis = _diagnose(prepared, common)
            if world.first:
                _show(analysis, common, folder)


def _show(analysis: DiagnosisAnalysis, common: Common, folder: Path | None) -> None:
    """Print and write a diagnosis; after Ctrl-C only print it, and end as interrupted."""
    common.show(analysis, None if analysis.is_interrupted else folder)
    if analysis.is_interrupted:
        raise KeyboardInterrupt


def _diagnose(prepared: Preparation, common: Common) -> DiagnosisAnalysis:
    """Run the checks, with a bar over the tokens that models may read at most."""
    if not prepared.most_tokens:
        return prepared.diagnosed()
    phase = "Reading again, at most"
    with common.progress.counting(phase, prepared.most_tokens, unit="tokens") as advance:
        analysis = prepared.diagnosed(advance)
    if analysis.is_interrupted:
        common.progress.say("Interrupted: this is what the readings so far show.")
    return analysis
