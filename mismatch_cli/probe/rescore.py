"""Scores a recorded trace again: log π of its responses by another model, dtype or checkpoint,
into a new trace.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from mismatch_cli.base.errors import MismatchError
from mismatch_cli.base.sampling import SamplingSettings
from mismatch_cli.models.adapters import read_adapter
from mismatch_cli.models.loading import check_model_folder, load_tokenizer
from mismatch_cli.models.rank_shares import ALL_HERE, Ranks
from mismatch_cli.models.scoring.trainer import Trainer
from mismatch_cli.models.torch_settings import prepare_imports, set_threads
from mismatch_cli.probe.config import EQUAL, RescoreConfig, trainer_json
from mismatch_cli.probe.from_manifest import sampler_of
from mismatch_cli.probe.rescore_plan import RescorePlan, plan_rescoring
from mismatch_cli.probe.rollouts import RecordingProgress, is_whole
from mismatch_cli.probe.score import load_trainer, score_rows, score_shards, with_columns
from mismatch_cli.trace.files import replacing
from mismatch_cli.trace.manifest import (
    VOCABULARY,
    library_versions,
    promised_rows,
    shard_entries,
    write_manifest,
)
from mismatch_cli.trace.ownership import remove_results
from mismatch_cli.trace.reader import Trace, table_to_batch
from mismatch_cli.trace.shards import open_shard
from mismatch_cli.trace.vocabulary import write_vocabulary
from mismatch_cli.trace.writer import write_shard_parts

_OF_RUN = ("command", "flags", "rescored")
_BEFORE = ("trainer", "recomputed", "equal_weights", "threads", "libraries", "imported", "rescored")
# Of a π that is replaced
_OF_DUMPED_PI = ("pi", "holds", "rows_with_trainer", "rows_with_newer_trainer")


def rescore(
    config: RescoreConfig,
    run_folder: Path,
    manifest: dict[str, Any],
    progress: RecordingProgress,
    ranks: Ranks = ALL_HERE,
) -> None:
    """Write `run_folder/trace`: the responses of `config.trace`, which is only read, with log π by
    another trainer.

    Memory holds one row group at a time. A shard is renamed into place once complete, so an
    existing one is done: a killed run leaves a readable trace, and a manifest with `rescored` means
    a run to resume. The caller holds the folder.
    """
    prepare_imports()
    source = Trace.open(Path(config.trace))
    plan = plan_rescoring(source, config)
    if source.completeness.partial:
        lacks = "; ".join(source.completeness.reasons)
        progress.say(f"{source.folder} is partial, so the new trace is too: {lacks}.")
    for note in plan.notes:
        progress.say(note)
    check_model_folder(config.scoring_model)
    _warn_of_adapters(config, source.manifest, progress)
    sampling = _sampling(config, source.manifest, progress)
    work = _Rescoring(config, source, run_folder / "trace", plan, sampling, progress)
    threads = set_threads(config.cpu.threads, config.scoring_model)
    begun = "rescored" in manifest
    if begun:
        _check_unchanged(plan, manifest, source)
    done = ranks.world.told(work.done())
    if begun and all(done):
        return
    trainer = load_trainer(
        config.scoring_model, config.scorer_adapter, config.scorer, sampling, progress, ranks
    )
    kept = {name: manifest[name] for name in ("command", "flags")}
    described = kept | work.description(trainer) | {"threads": threads}
    with ranks.first_before_others() as first:
        if first and not begun:
            remove_results(run_folder)  # once the model has loaded
            work.write_vocabulary(trainer)
        if first:
            write_manifest(work.folder, described)

    def score(path: Path, repeat: list[bool], on_scored: Callable[[int], None], **_: int) -> None:
        tables = work.score(path, trainer, repeat, on_scored)
        if ranks.writes:
            write_shard_parts(work.folder / path.name, tables)
        else:
            deque(tables, maxlen=0)

    score_shards(score, source.shards, done, config.scorer.noise_responses, progress, ranks)


def _warn_of_adapters(
    config: RescoreConfig, manifest: dict[str, Any], progress: RecordingProgress
) -> None:
    """Weights that are said to be equal but lack the adapter that sampled would show up as
    mismatch.
    """
    sampled = manifest.get("rollout", {}).get("adapter_digest")
    scored = None if config.scorer_adapter is None else read_adapter(config.scorer_adapter).digest
    if config.weights == EQUAL and sampled is not None and sampled != scored:
        progress.say(
            f"The trace was sampled with the adapter {manifest['rollout']['adapter']}, and the "
            "trainer does not have it: name it with --trainer-adapter, unless it is merged into "
            "the trainer's model."
        )


@dataclass(frozen=True)
class _Rescoring:
    """One trace being rescored into another."""

    config: RescoreConfig
    source: Trace
    folder: Path
    plan: RescorePlan
    sampling: SamplingSettings
    progress: RecordingProgress

    @cached_property
    def rows(self) -> dict[str, int]:
        """Responses in each shard of the source."""
        return {path.name: open_shard(path).metadata.num_rows for path in self.source.shards}

    def done(self) -> list[bool]:
        """Which shards of the source are done; those without responses always are."""
        return [
            not count or is_whole(self.folder / name, count) for name, count in self.rows.items()
        ]

    def description(self, trainer: Trainer) -> dict[str, Any]:
        """The source's manifest with the new trainer; its old entries are kept under `rescored`."""
        old, plan = self.source.manifest, self.plan
        scorer = trainer.describe() | _scored_with(self.sampling, old)
        before = old.get("recomputed", old.get("trainer"))
        sides = {"trainer": scorer, "recomputed": before if plan.carried else None}
        if self.config.keep_trainer:
            sides = {"trainer": old.get("trainer"), "recomputed": scorer}
        taken_over = {name: value for name, value in old.items() if name not in (*sides, *_OF_RUN)}
        if "imported" in old and not (self.config.keep_trainer or plan.carried):
            taken_over["imported"] = {
                name: value for name, value in old["imported"].items() if name not in _OF_DUMPED_PI
            }
        # What the source lacks, the new trace lacks too
        promised = self.rows | (promised_rows(old) or {})
        rows = {
            name: self.rows.get(name) if count is None else count
            for name, count in promised.items()
        }
        return taken_over | {
            "config": old.get("config", {}) | {"trainer": trainer_json(self.config)},
            **{name: side for name, side in sides.items() if side},
            "equal_weights": plan.equal_weights,
            **shard_entries(dict(sorted(rows.items()))),
            "libraries": library_versions(),
            "rescored": {
                "trace": str(self.source.folder),
                "digest": plan.digest,
                "weights": plan.version if self.config.weights.isdecimal() else self.config.weights,
                "version": plan.version,
                "replaced": list(plan.replaced),
                "carried": list(plan.carried),
                "before": {name: old[name] for name in _BEFORE if name in old},
            },
        }

    def write_vocabulary(self, trainer: Trainer) -> None:
        """Write the text of tokens: from the source, or else from the model's tokenizer, if it
        has one.
        """
        known = self.source.folder / VOCABULARY
        if known.is_file():
            with replacing(self.folder / VOCABULARY) as temporary:
                temporary.write_bytes(known.read_bytes())
            return
        try:
            tokenizer = load_tokenizer(self.config.scoring_model)
        except MismatchError as error:
            self.progress.say(f"Tokens will be shown as numbers: {error}")
            return
        # transformers invents one of special tokens only
        if len(tokenizer) < trainer.head.vocabulary / 2:
            self.progress.say("Tokens will be shown as numbers: the model has no tokenizer.")
            return
        write_vocabulary(self.folder, tokenizer)

    def score(
        self, path: Path, trainer: Trainer, repeat: Sequence[bool], on_scored: Callable[[int], None]
    ) -> Iterator[pa.Table]:
        """The row groups of a shard, scored one after the other."""
        start = 0
        for table in self.source.tables(shards=[path]):
            columns = score_rows(
                table,
                trainer,
                self.plan.score,
                token_budget=self.config.scorer.token_budget,
                repeat=repeat[start : start + len(table)],
                on_scored=on_scored,
            )
            columns |= self.plan.versions(table) | _carried(table, self.plan)
            unknown = {
                name: [None] * len(table) for name in self.plan.written if name not in columns
            }
            kept = table.drop_columns(
                [name for name in self.plan.replaced if name in table.column_names]
            )
            yield with_columns(kept, columns | unknown)
            start += len(table)


def _check_unchanged(plan: RescorePlan, manifest: dict[str, Any], source: Trace) -> None:
    if manifest.get("rescored", {}).get("digest", plan.digest) != plan.digest:
        raise MismatchError(
            f"{source.folder} has changed since this run began, so it cannot be resumed. "
            "Start again in another --output, or with --force."
        )


def _sampling(
    config: RescoreConfig, manifest: dict[str, Any], progress: RecordingProgress
) -> SamplingSettings:
    """How the trainer transforms its logits: as typed, or else as the trace says that it was
    sampled.
    """
    known = sampler_of(manifest.get("config", {}).get("sampling"))
    asked = config.sampler.stated
    if "temperature" not in known | asked:
        progress.say(
            "The trace does not say how its responses were sampled: assuming temperature 1 and "
            "no truncation. If that is wrong, set temperature, top_p, top_k or min_p."
        )
    known.pop("max_tokens", None)  # which does nothing to the logits
    differing = [name for name in known if name in asked and asked[name] != known[name]]
    for name in differing:
        progress.say(
            f"Sampled with {name.replace('_', '-')} {known[name]:g}, scored with {asked[name]:g}: "
            "the gap will include this difference."
        )
    return SamplingSettings(**(known | asked))


def _scored_with(sampling: SamplingSettings, old: dict[str, Any]) -> dict[str, Any]:
    """The sampling settings of the trainer, if they differ from what the trace says of the
    engine.
    """
    used = {name: value for name, value in asdict(sampling).items() if name != "max_tokens"}
    known = old.get("config", {}).get("sampling") or {}
    return {} if used == {name: known.get(name) for name in used} else used


def _carried(table: pa.Table, plan: RescorePlan) -> dict[str, Any]:
    """What the source's reader knows at the weights that sampled, as separate columns; null
    where nothing.
    """
    if not plan.carried:
        return {}
    batch = table_to_batch(table.combine_chunks())
    cuts = batch.offset_S1[1:-1]
    flat = {
        "logp_recomputed": batch.logp_recomputed_T,
        "topk_logp_recomputed": batch.topk_logp_recomputed_TK,
    }
    rows = {name: np.split(values, cuts) for name, values in flat.items() if values is not None}
    return {
        name: [None if np.isnan(values).all() else values for values in column]
        for name, column in rows.items()
    }
