"""`mismatch-cli bisect`: which setting, which layer, which side causes the gap of a trace."""

from pathlib import Path
from typing import Annotated

import typer

from mismatch_cli.app.common import Recording
from mismatch_cli.app.rank_flags import (
    KEPT,
    NPROC,
    SHARDED,
    check_sharded,
    launch_ranks,
    told_to_all,
)
from mismatch_cli.base.options import flags, saying
from mismatch_cli.bisect.search_config import BisectConfig
from mismatch_cli.processes.ranks.joined import joined

PANEL, PLACE = "Explain", 2


@flags(BisectConfig)
def command(
    context: typer.Context,
    *,
    nproc: int = NPROC,
    sharded: bool = SHARDED,
    common: Annotated[Recording, saying("output", show_default="bisect-RUN")],
) -> None:
    """Find what causes the gap: change one setting at a time on the same tokens, and rank how much
    of it each removes.

    The tokens of a trace stay fixed: the engine and the trainer score them again under other
    settings. Every experiment is kept as a trace.

    Examples:
      mismatch-cli bisect
      mismatch-cli bisect probe-model --budget 10
      mismatch-cli bisect ./model --prompts prompts.jsonl
      mismatch-cli bisect import-verl --model ./step-40 --engine vllm --trainer-model ./step-40
    """
    from mismatch_cli.app.prepared import prepared_run

    check = _no_check if common.resume else _check
    check_sharded(sharded, nproc)
    launch_ranks(context, nproc, KEPT)
    with (
        joined(KEPT) as world,
        told_to_all(world, prepared_run(context, common, BisectConfig, check)) as prepared,
    ):
        from mismatch_cli.bisect.search import search, traced
        from mismatch_cli.bisect.studies.bisection import BisectionAnalysis
        from mismatch_cli.models.dealing import Ranks
        from mismatch_cli.studies.diagnosis import faults
        from mismatch_cli.trace.work import put_in_place

        config, work, manifest = prepared
        progress, ranks, is_new = (
            common.progress_of(world),
            Ranks(world, sharded),
            not common.resume,
        )
        source = traced(config, work, progress, ranks, fresh=is_new)
        search(config, source, work, progress, faults, ranks, manifest["flags"], fresh=is_new)
        if world.first:
            folder = put_in_place(work)
            common.show(BisectionAnalysis.read(folder), folder)


def _no_check(_config: BisectConfig, _folder: Path) -> None:
    """Accept anything: a resumed search needs only its folder."""


def _check(config: BisectConfig, folder: Path) -> None:
    from mismatch_cli.trace.manifest import run_folder_of, trace_folder
    from mismatch_cli.trace.run_folder import check_apart

    if not config.is_model:
        check_apart(folder, run_folder_of(trace_folder(Path(config.trace))))
