"""`mismatch-cli diagnose`: what is wrong with a trace, before any numerics."""

from __future__ import annotations

from typing import Annotated

import typer

from mismatch_cli.commands._common_flags import (
    BUNDLED,
    Debug,
    Force,
    FullPaths,
    Json,
    Quiet,
    ReportFolder,
    Traces,
    TrustRemoteCode,
)


def command(
    traces: Traces = None,
    earlier_model: Annotated[
        str | None,
        typer.Option(
            "--earlier-model",
            help="An earlier checkpoint, or the base model: does the engine agree with that one better?",
        ),
    ] = None,
    trainer_model: Annotated[
        str | None,
        typer.Option(
            "--trainer-model",
            help="Trainer's model at the weights that sampled: it reads responses again and tells which side differs.",
        ),
    ] = None,
    trust_remote_code: TrustRemoteCode = False,
    output: ReportFolder = None,
    force: Force = False,
    full_paths: FullPaths = False,
    json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Look for faults that no precision explains: shifts, temperature, placeholders, stale weights, and more.

    Each finding comes with its evidence, its size, the likely cause and the setting to change.

    Examples:

      mismatch-cli diagnose

      mismatch-cli diagnose probe-model

      mismatch-cli diagnose import-prime-rl --earlier-model ./step-90
    """
    from functools import partial

    from mismatch_cli import custom_code
    from mismatch_cli.commands._progress import TerminalProgress
    from mismatch_cli.commands._show import folder_of, opened, study_traces
    from mismatch_cli.models import check_model_folder
    from mismatch_cli.places import show_full
    from mismatch_cli.recording.folder import report_folder
    from mismatch_cli.studies.diagnosis import DiagnosisAnalysis, analyse_diagnosis

    show_full(full_paths)
    custom_code.allow(trust_remote_code)
    for model in filter(None, (earlier_model, trainer_model)):
        check_model_folder(model)
    progress = TerminalProgress(quiet)
    found = opened(traces, progress, f"No trace named: diagnosing {BUNDLED}")
    folder = output or folder_of(traces, found, "diagnosis")
    analyse = partial(analyse_diagnosis, earlier_model=earlier_model, trainer_model=trainer_model)
    with report_folder(folder, DiagnosisAnalysis.FORMAT, force=force):
        study_traces(analyse, found, folder, "Reading", as_json=json, progress=progress)
