"""`mismatch-cli diagnose`: what is wrong with a trace, before suspecting numerics."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mismatch_cli.app.common import TRACES, Common, Diagnosing
from mismatch_cli.app.rank_flags import NPROC, SHARDED, check_sharded, launch_ranks
from mismatch_cli.base.errors import UsageError
from mismatch_cli.base.options import flags, saying, setting
from mismatch_cli.base.places import FAULTY
from mismatch_cli.processes.ranks.joined import joined

if TYPE_CHECKING:
    from mismatch_cli.studies.diagnosis import DiagnosisAnalysis, Preparation

PANEL, PLACE = "Explain", 1

_KEPT = "There is no diagnosis."


@flags()
def command(
    context: typer.Context,
    *,
    traces: list[Path] | None = TRACES,
    earlier_model: str | None = setting(
        None,
        "Earlier checkpoint, or the base model: tests whether the engine agrees better with it.",
        metavar="MODEL",
    ),
    trainer_model: str | None = setting(
        None,
        "The trainer's model at the weights that sampled: scores some responses again to tell "
        "which side is at fault.",
        metavar="MODEL",
    ),
    reading_tokens: int | None = setting(
        None,
        "Tokens that --trainer-model may read again in search of a misreading; by default 8 times "
        "those of the responses.",
        flag=False,
        min=1,
    ),
    nproc: int = NPROC,
    sharded: bool = SHARDED,
    common: Annotated[Diagnosing, saying("output", show_default="diagnosis, in the run or here")],
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

    from mismatch_cli.models.adapters import base_of
    from mismatch_cli.models.loading import check_models

    if nproc > 1 and not (earlier_model or trainer_model):
        raise UsageError(
            "--nproc spreads the scoring of a model. Name one with --trainer-model or "
            "--earlier-model."
        )
    check_sharded(sharded, nproc)
    named = filter(None, (earlier_model, trainer_model))
    check_models([base_of(name) or name for name in named], "`diagnose` with a model")
    folder = common.report_folder(traces, "diagnosis")
    common.check(traces, folder)
    launch_ranks(context, nproc, _KEPT)
    from mismatch_cli.models.dealing import Ranks
    from mismatch_cli.studies.diagnosis import DiagnosisAnalysis, Preparation

    with joined(_KEPT) as world:
        own, models = common, (earlier_model, trainer_model, reading_tokens)
        if not world.first:
            own, folder = replace(common, quiet=True), None
        notice = "No trace named: diagnosing a bundled one, a short run with an fp8 KV cache."
        opened = own.opened(traces, notice, FAULTY)
        ranks = Ranks(world, sharded)
        with own.held(folder, DiagnosisAnalysis.FORMAT):
            total = sum(trace.num_responses for trace in opened)
            with own.progress.counting("Reading", total) as advance:
                prepared = Preparation.of(opened, own.read_by, advance, ranks)
            analysis = _diagnosed(prepared.with_models(*models), own)
            if world.first:
                _show(analysis, own, folder)


def _show(analysis: DiagnosisAnalysis, common: Common, folder: Path | None) -> None:
    """Print and write a diagnosis; after Ctrl-C only print it, and end as interrupted."""
    common.show(analysis, None if analysis.is_interrupted else folder)
    if analysis.is_interrupted:
        raise KeyboardInterrupt


def _diagnosed(prepared: Preparation, common: Common) -> DiagnosisAnalysis:
    """Run the checks, with a bar over the tokens that models may read at most."""
    if not prepared.most_tokens:
        return prepared.diagnosed()
    phase = "Reading again, at most"
    with common.progress.counting(phase, prepared.most_tokens, unit="tokens") as advance:
        analysis = prepared.diagnosed(advance)
    if analysis.is_interrupted:
        common.progress.say("Interrupted: this is what the readings so far show.")
    return analysis
