"""`mismatch-cli probe`: sample with the rollout engine, score with the trainer, report the gap."""

from dataclasses import dataclass
from pathlib import Path

import typer

from mismatch_cli.app.common import Common, recording
from mismatch_cli.app.flags import flags
from mismatch_cli.app.rank_flags import CAN_RESUME, RankSettings, shared_with_ranks
from mismatch_cli.base.options import of_running, override, settings_group
from mismatch_cli.base.values import Values
from mismatch_cli.probe.config import ProbeConfig
from mismatch_cli.processes.ranks.joined import joined

PANEL, PLACE = "Measure", 1


@dataclass(frozen=True, kw_only=True)
class LikeSettings:
    """The run that a probe repeats."""

    like: Path | None = of_running(None, "Take the other settings from this probe.", metavar="RUN")


@flags(ProbeConfig)
def command(
    context: typer.Context,
    values: Values,
    *,
    repeated: LikeSettings = settings_group(LikeSettings),
    shared: RankSettings = settings_group(RankSettings, "nproc", sharded=override(flag=False)),
    common: Common = recording("probe-MODEL", "worst", "open"),
) -> None:
    """Sample with the rollout engine, recompute with the trainer, and report how far they disagree.

    Without arguments it runs the bundled model.

    Examples:
      mismatch-cli probe
      mismatch-cli probe Qwen/Qwen2.5-0.5B-Instruct --prompts problems.jsonl
      mismatch-cli probe ./checkpoint --trainer-dtype float32 --json
      mismatch-cli probe ./checkpoint --adapter ./lora
      mismatch-cli probe --like probe-model --engine-arg enforce_eager=true
    """
    from mismatch_cli.app.prepared import prepared_run

    shared.check_sharded()
    shared.launch(context, CAN_RESUME)
    prepared = prepared_run(values, common, ProbeConfig, "probe", like=repeated.like)
    with (
        joined(CAN_RESUME) as world,
        shared_with_ranks(world, prepared) as (config, work, manifest),
    ):
        from mismatch_cli.models.rank_shares import Ranks
        from mismatch_cli.probe.record import record
        from mismatch_cli.trace.reader import Trace
        from mismatch_cli.trace.recording_folder import put_in_place

        record(config, work, manifest, common.progress_of(world), Ranks(world, shared.sharded))
        if world.first:
            folder = put_in_place(work)
            common.study_mismatch([Trace.open(folder)], folder)
