"""`mismatch-cli diagnose`: what is wrong with a trace, before any numerics."""

from pathlib import Path
from typing import Annotated

from mismatch_cli.commands._show import BUNDLED, TRACES, Diagnosing
from mismatch_cli.options import flags, saying, setting


@flags()
def command(
    *,
    traces: list[Path] | None = TRACES,
    earlier_model: str | None = setting(
        None, "Earlier checkpoint, or the base model: does the engine agree better with that one?", metavar="MODEL"
    ),
    trainer_model: str | None = setting(
        None,
        "The trainer's model at the weights that sampled: it scores responses again, which tells the side at fault.",
        metavar="MODEL",
    ),
    common: Annotated[Diagnosing, saying("output", show_default="diagnosis, in the run or here")],
) -> None:
    """Look for faults that no precision explains: shifts, temperature, placeholders, stale weights, and more.

    Each finding comes with its evidence, its size, the likely cause and the setting to change.

    Examples:
      mismatch-cli diagnose
      mismatch-cli diagnose probe-model
      mismatch-cli diagnose import-prime-rl --earlier-model ./step-90
    """
    from functools import partial

    from mismatch_cli.models import check_models

    check_models((earlier_model, trainer_model), "`diagnose` with a model")
    folder = common.report_folder(traces, "diagnosis")
    common.check(traces, folder)
    from mismatch_cli.studies.diagnosis import DiagnosisAnalysis, analyse_diagnosis

    found = common.opened(traces, f"No trace named: diagnosing {BUNDLED}")
    analyse = partial(analyse_diagnosis, earlier_model=earlier_model, trainer_model=trainer_model)
    common.report(analyse, DiagnosisAnalysis.FORMAT, found, folder, "Reading")
