"""`mismatch-cli rescore`: log π of a trace from another model, dtype or checkpoint, in a new run
folder.
"""

from pathlib import Path

import typer

from mismatch_cli.app.common import Common, recording
from mismatch_cli.app.flags import flags
from mismatch_cli.app.rank_flags import CAN_RESUME, RankSettings, shared_with_ranks
from mismatch_cli.base.options import settings_group
from mismatch_cli.base.values import Values
from mismatch_cli.probe.config import RescoreConfig
from mismatch_cli.processes.ranks.joined import joined

PANEL, PLACE = "Use elsewhere", 2


@flags(RescoreConfig)
def command(
    context: typer.Context,
    values: Values,
    *,
    shared: RankSettings = settings_group(RankSettings, "nproc", "sharded"),
    common: Common = recording("rescore-RUN", "worst", "open"),
) -> None:
    """Score the responses of a trace with another model, dtype or checkpoint, and report the gap.

    The new trace goes into its own run folder. Without arguments the bundled model scores the
    bundled float32 trace in its own dtype.

    Examples:
      mismatch-cli rescore
      mismatch-cli rescore run --trainer-model ./model --trainer-dtype float32
      mismatch-cli rescore run --trainer-model ./checkpoint-40 --weights newer
    """
    from mismatch_cli.app.prepared import prepared_run

    shared.check_sharded()
    shared.launch(context, CAN_RESUME)
    prepared = prepared_run(values, common, RescoreConfig, "rescore", _check)
    with (
        joined(CAN_RESUME) as world,
        shared_with_ranks(world, prepared) as (config, work, manifest),
    ):
        from mismatch_cli.models.rank_shares import Ranks
        from mismatch_cli.probe.rescore import rescore
        from mismatch_cli.trace.reader import Trace
        from mismatch_cli.trace.recording_folder import put_in_place

        rescore(config, work, manifest, common.progress_of(world), Ranks(world, shared.sharded))
        if world.first:
            folder = put_in_place(work)
            common.study_mismatch([Trace.open(folder)], folder)


def _check(config: RescoreConfig, folder: Path) -> None:
    from mismatch_cli.trace.manifest import run_folder_of, trace_folder
    from mismatch_cli.trace.run_folder import check_apart

    check_apart(folder, run_folder_of(trace_folder(Path(config.trace))))
