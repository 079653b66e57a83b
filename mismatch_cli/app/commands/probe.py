"""`mismatch-cli probe`: sample with the rollout engine, score with the trainer, report the gap."""

from pathlib import Path
from typing import Annotated

import typer

from mismatch_cli.app.common import Probing
from mismatch_cli.app.rank_flags import (
    KEPT,
    NPROC,
    SHARDED,
    check_sharded,
    launch_ranks,
    told_to_all,
)
from mismatch_cli.app.vary import DEVICES, VARY, run_varied
from mismatch_cli.base.options import flags, saying, setting
from mismatch_cli.probe.config import ProbeConfig
from mismatch_cli.processes.ranks.joined import joined

PANEL, PLACE = "Measure", 1


@flags(ProbeConfig)
def command(
    context: typer.Context,
    *,
    vary: list[str] | None = VARY,
    devices: str | None = DEVICES,
    like: Path | None = setting(
        None, "Take all settings from this `probe` run, except those you type.", metavar="RUN"
    ),
    nproc: int = NPROC,
    sharded: bool = SHARDED,
    common: Annotated[Probing, saying("output", show_default="probe-MODEL")],
) -> None:
    """Sample with the rollout engine, recompute with the trainer, and report how far they disagree.

    Without arguments it runs the bundled model.

    Examples:
      mismatch-cli probe
      mismatch-cli probe Qwen/Qwen2.5-0.5B-Instruct --prompts problems.jsonl --num-prompts 128
      mismatch-cli probe ./checkpoint --trainer-dtype float32 --kv-cache-dtype fp8 --json
      mismatch-cli probe Qwen/Qwen2.5-0.5B-Instruct --adapter ./lora --merge-adapter
      mismatch-cli probe --like probe-model --eager --output eager
      mismatch-cli probe --vary kv-cache-dtype=auto,fp8 --vary rollout-dtype=bfloat16,float32
      mismatch-cli probe ./large-model --nproc 8 --sharded
    """
    if vary:
        run_varied(context, common, ProbeConfig, vary, devices)
        return
    from mismatch_cli.app.prepared import prepared_run

    check_sharded(sharded, nproc)
    launch_ranks(context, nproc, KEPT)
    with (
        joined(KEPT) as world,
        told_to_all(world, prepared_run(context, common, ProbeConfig, like=like)) as prepared,
    ):
        from mismatch_cli.models.dealing import Ranks
        from mismatch_cli.probe.record import record
        from mismatch_cli.trace.reader import Trace
        from mismatch_cli.trace.work import put_in_place

        config, work, manifest = prepared
        record(config, work, manifest, common.progress_of(world), Ranks(world, sharded))
        if world.first:
            folder = put_in_place(work)
            common.study_mismatch([Trace.open(folder)], folder)
