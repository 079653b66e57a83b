"""`mismatch-cli diagnose`: what is wrong with a trace, before suspecting numerics."""

from pathlib import Path
from typing import Annotated

import typer

from mismatch_cli.commands._ranks import NPROC, SHARDED, check_sharded, launch_ranks
from mismatch_cli.commands._show import BUNDLED, TRACES, Diagnosing
from mismatch_cli.errors import UsageError
from mismatch_cli.options import flags, saying, setting
from mismatch_cli.ranks.joined import joined

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
    from functools import partial

    from mismatch_cli.models import check_models

    if nproc > 1 and not (earlier_model or trainer_model):
        raise UsageError(
            "--nproc spreads the scoring of a model. Name one with --trainer-model or "
            "--earlier-model."
        )
    check_sharded(sharded, nproc)
    check_models((earlier_model, trainer_model), "`diagnose` with a model")
    folder = common.report_folder(traces, "diagnosis")
    common.check(traces, folder)
    launch_ranks(context, nproc, _KEPT)
    from mismatch_cli.dealing import Ranks
    from mismatch_cli.studies.diagnosis import DiagnosisAnalysis, analyse_diagnosis

    with joined(_KEPT) as world:
        shown = common if world.first else replace(common, quiet=True)
        found = shown.opened(traces, f"No trace named: diagnosing {BUNDLED}")
        ranks = Ranks(world, sharded)
        analyse = partial(
            analyse_diagnosis,
            earlier_model=earlier_model,
            trainer_model=trainer_model,
            reading_tokens=reading_tokens,
            ranks=ranks,
        )
        if world.first:
            common.report(analyse, DiagnosisAnalysis.FORMAT, found, folder, "Reading")
        else:
            analyse(found)
