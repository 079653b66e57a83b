"""`mismatch-cli bisect`: which setting, which layer, which side causes the gap of a trace."""

from pathlib import Path

import typer

from mismatch_cli.app.common import Common, recording
from mismatch_cli.app.flags import flags
from mismatch_cli.app.rank_flags import CAN_RESUME, RankSettings, shared_with_ranks
from mismatch_cli.base.options import override, settings_group
from mismatch_cli.base.values import Values
from mismatch_cli.bisect.search_config import BisectConfig
from mismatch_cli.processes.ranks.joined import joined

PANEL, PLACE = "Explain", 2


@flags(BisectConfig)
def command(
    context: typer.Context,
    values: Values,
    *,
    shared: RankSettings = settings_group(RankSettings, "nproc", sharded=override(flag=False)),
    common: Common = recording("bisect-RUN"),
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
    shared.check_sharded()
    shared.launch(context, CAN_RESUME)
    prepared = prepared_run(values, common, BisectConfig, "bisect", check)
    with (
        joined(CAN_RESUME) as world,
        shared_with_ranks(world, prepared) as (config, work, manifest),
    ):
        from mismatch_cli.bisect.search import open_or_probe, search
        from mismatch_cli.bisect.studies.bisection import BisectionAnalysis
        from mismatch_cli.models.rank_shares import Ranks
        from mismatch_cli.studies.diagnosis import named_faults
        from mismatch_cli.trace.recording_folder import put_in_place

        progress, ranks = common.progress_of(world), Ranks(world, shared.sharded)
        is_new = not common.resume
        source = open_or_probe(config, work, progress, ranks, fresh=is_new)
        search(config, source, work, progress, named_faults, ranks, manifest["flags"], fresh=is_new)
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
