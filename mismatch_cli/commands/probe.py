"""`mismatch-cli probe`: sample with the rollout engine, score with the trainer, report the gap."""

from __future__ import annotations

from typing import Any

import typer

from mismatch_cli.commands._common_flags import Debug, Force, Json, Output, Quiet, Resume, TrustRemoteCode, Worst
from mismatch_cli.errors import suggest
from mismatch_cli.options import flags
from mismatch_cli.recording.config import ProbeConfig


@flags(ProbeConfig)
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
    """Sample with the rollout engine, recompute with the trainer, and report how far they disagree.

    Without arguments it runs on the bundled model.

    Examples:

      mismatch-cli probe

      mismatch-cli probe Qwen/Qwen2.5-0.5B-Instruct --prompts problems.jsonl --num-prompts 128

      mismatch-cli probe ./checkpoint --trainer-dtype float32 --kv-cache-dtype fp8 --json

      mismatch-cli probe Qwen/Qwen2.5-0.5B-Instruct --adapter ./lora --merge-adapter
    """
    from mismatch_cli.commands._progress import TerminalProgress
    from mismatch_cli.commands._run import prepared_run
    from mismatch_cli.commands._show import study_mismatch
    from mismatch_cli.recording.record import record
    from mismatch_cli.trace.reader import Trace

    progress = TerminalProgress(quiet)
    with prepared_run(context, ProbeConfig) as (config, folder, manifest):
        record(config, folder, manifest, progress)
        study_mismatch([Trace.open(folder)], folder, worst=worst, as_json=json, progress=progress)
    progress.say(f"Next: {suggest('report', folder, '--worst', '10')}")
