"""`mismatch-cli rescore`: log π of a trace from another model, dtype or checkpoint, in a new run
folder.
"""

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
from mismatch_cli.base.options import flags, saying
from mismatch_cli.probe.config import RescoreConfig
from mismatch_cli.processes.ranks.joined import joined

PANEL, PLACE = "Use elsewhere", 2


@flags(RescoreConfig)
def command(
    context: typer.Context,
    *,
    vary: list[str] | None = VARY,
    devices: str | None = DEVICES,
    nproc: int = NPROC,
    sharded: bool = SHARDED,
    common: Annotated[Probing, saying("output", show_default="rescore-RUN")],
) -> None:
    """Score the responses of a trace with another model, dtype or checkpoint, and report the gap.

    The new trace goes into its own run folder. Without arguments the bundled model scores the
    bundled float32 trace in its own dtype.

    Examples:
      mismatch-cli rescore
      mismatch-cli rescore run --trainer-model ./model --trainer-dtype float32
      mismatch-cli rescore run --trainer-model ./checkpoint-40 --weights newer
      mismatch-cli rescore run --vary trainer-model=./step-20,./step-40 --devices 0,1
    """
    if vary:
        run_varied(context, common, RescoreConfig, vary, devices)
        return
    from mismatch_cli.app.prepared import prepared_run

    check_sharded(sharded, nproc)
    launch_ranks(context, nproc, KEPT)
    with (
        joined(KEPT) as world,
        told_to_all(world, prepared_run(context, common, RescoreConfig, _check)) as prepared,
    ):
        from mismatch_cli.models.dealing import Ranks
        from mismatch_cli.probe.rescore import rescore
        from mismatch_cli.trace.reader import Trace
        from mismatch_cli.trace.work import put_in_place

        config, work, manifest = prepared
        rescore(config, work, manifest, common.progress_of(world), Ranks(world, sharded))
        if world.first:
            folder = put_in_place(work)
            common.study_mismatch([Trace.open(folder)], folder)


def _check(config: RescoreConfig, folder: Path) -> None:
    from mismatch_cli.trace.manifest import run_folder_of, trace_folder
    from mismatch_cli.trace.run_folder import check_apart

    check_apart(folder, run_folder_of(trace_folder(Path(config.trace))))
