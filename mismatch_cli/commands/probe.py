"""`mismatch-cli probe`: sample with the rollout engine, score with the trainer, report the gap."""

import typer

from mismatch_cli.commands._show import Probing
from mismatch_cli.options import flags
from mismatch_cli.recording.config import ProbeConfig


@flags(ProbeConfig)
def command(context: typer.Context, *, common: Probing) -> None:
    """Sample with the rollout engine, recompute with the trainer, and report how far they disagree.

    Without arguments it runs on the bundled model.

    Examples:

      mismatch-cli probe

      mismatch-cli probe Qwen/Qwen2.5-0.5B-Instruct --prompts problems.jsonl --num-prompts 128

      mismatch-cli probe ./checkpoint --trainer-dtype float32 --kv-cache-dtype fp8 --json

      mismatch-cli probe Qwen/Qwen2.5-0.5B-Instruct --adapter ./lora --merge-adapter
    """
    from mismatch_cli.commands._prepared import prepared_run

    with prepared_run(context, common, ProbeConfig) as (config, folder, manifest):
        from mismatch_cli.recording.record import record
        from mismatch_cli.trace.reader import Trace

        record(config, folder, manifest, common.progress)
        common.study_mismatch([Trace.open(folder)], folder, common.worst)
