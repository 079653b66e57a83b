"""The search from top to bottom; each stage ends it once the gap is explained."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from mismatch_cli.bisect.baseline_stage import Diagnose, bookkeeping, legs_of_both
from mismatch_cli.bisect.experiments import AS_RECORDED, LEGS
from mismatch_cli.bisect.module_stage import compare_modules
from mismatch_cli.bisect.ranking import NO_GAP, RECORDED
from mismatch_cli.bisect.search_config import STAGES, BisectConfig
from mismatch_cli.bisect.search_state import Searching
from mismatch_cli.bisect.settings_stage import turn_settings, turn_together
from mismatch_cli.models.rank_shares import ALL_HERE, Ranks
from mismatch_cli.models.torch_settings import prepare_imports
from mismatch_cli.probe.record import record
from mismatch_cli.probe.rollouts import RecordingProgress
from mismatch_cli.trace.manifest import FILE_NAME, read_manifest
from mismatch_cli.trace.ownership import remove_results
from mismatch_cli.trace.reader import Trace
from mismatch_cli.trace.recording_folder import final_folder

PROBE = "probe"  # folder of the probe run inside that of a search


def open_or_probe(
    config: BisectConfig,
    folder: Path,
    progress: RecordingProgress,
    ranks: Ranks = ALL_HERE,
    *,
    fresh: bool = False,
) -> Trace:
    """The trace to search; for a model, that of a probe of it in the folder, which resumes where it
    stopped.

    `fresh`: remove what an earlier search left in the folder before the probe.
    """
    chosen = folder / LEGS / AS_RECORDED
    if not fresh and (chosen / FILE_NAME).is_file():
        # The run folder has all that is left to read, even if the source is gone.
        return Trace.open(chosen)
    if not config.is_model:
        return Trace.open(Path(config.trace))
    with ranks.first_before_others() as first:
        if first and fresh:
            remove_results(folder)
    run_folder = folder / PROBE
    manifest: dict[str, Any] = {"command": "probe", "flags": {}}
    begun = run_folder / "trace"
    if (begun / FILE_NAME).is_file():
        manifest = read_manifest(begun)
    record(config.probe(), run_folder, manifest, progress, ranks)
    return Trace.open(run_folder)


def search(
    config: BisectConfig,
    source: Trace,
    folder: Path,
    progress: RecordingProgress,
    diagnose: Diagnose,
    ranks: Ranks = ALL_HERE,
    flags: Mapping[str, Any] | None = None,
    *,
    fresh: bool = False,
) -> None:
    """Write `folder/legs/` and `folder/search.json`; existing legs are not measured again, except
    for a `fresh` start.

    The caller holds the folder's lock. `diagnose` returns the faults of a trace, the one that
    explains most first; `flags` are kept for a resumed run.
    """
    prepare_imports()
    run = Searching.begin(config, source, folder, progress, ranks, fresh)
    run.search.flags = dict(flags or {})
    if source.manifest.get("command") == "probe" and "flags" in source.manifest:
        probed = source.run_folder
        # The run folder has a working name until the search ends; its last name is recorded.
        if probed == folder / PROBE:
            probed = final_folder(folder) / PROBE
        run.search.like = str(probed.resolve())
    run.search.gap = run.measured().sums(RECORDED).mean()
    run.save()
    if run.search.gap < NO_GAP:
        progress.say("The gap is below what float32 resolves: there is nothing to search.")
        run.leave_out(STAGES, "not needed", "the gap is below what float32 resolves")
        return
    run.stage(0, partial(bookkeeping, diagnose=diagnose), turn_together)
    run.stage(1, legs_of_both)
    run.stage(2, turn_settings, turn_together)
    run.stage(3, compare_modules)
