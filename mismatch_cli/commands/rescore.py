"""`mismatch-cli rescore`: log π of a recorded trace by another model, dtype or checkpoint, into a new run folder."""

from __future__ import annotations

from typing import Any

import typer

from mismatch_cli.commands._common_flags import Debug, Force, Json, Output, Quiet, Resume, TrustRemoteCode, Worst
from mismatch_cli.errors import suggest
from mismatch_cli.options import flags
from mismatch_cli.recording.config import RescoreConfig


@flags(RescoreConfig)
def command(
    context: typer.Context,
    trust_remote_code: TrustRemoteCode = False,
    resume: Resume = False,
    output: Output = None,
    worst: Worst = 0,
    force: Force = False,
    json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
    **_settings: Any,
) -> None:
    """Score the responses of a trace anew, and report the gap.

    The trace is only read; the new one goes into its own run folder. Without arguments the bundled model scores the
    bundled float32 trace in its own dtype. See docs/rescore.md.

    Examples:

      mismatch-cli rescore

      mismatch-cli rescore run --trainer-model ./model --trainer-dtype float32

      mismatch-cli rescore run --trainer-model ./checkpoint-40 --weights newer
    """
    from pathlib import Path

    from mismatch_cli.commands._progress import TerminalProgress
    from mismatch_cli.commands._run import prepared_run
    from mismatch_cli.commands._show import study_mismatch
    from mismatch_cli.recording.folder import check_apart
    from mismatch_cli.recording.rescore import rescore
    from mismatch_cli.trace.reader import Trace

    def check(config: RescoreConfig, folder: Path) -> None:
        check_apart(folder, Trace.open(Path(config.trace)).run_folder)

    progress = TerminalProgress(quiet)
    with prepared_run(context, RescoreConfig, check) as (config, folder, manifest):
        rescore(config, folder, manifest, progress)
        study_mismatch([Trace.open(folder)], folder, worst=worst, as_json=json, progress=progress)
    progress.say(f"Next: {suggest('report', folder, '--worst', '10')}")
