"""Scores a recorded trace again: log π of its responses by another model, dtype or checkpoint,
into a new trace.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, partial
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
_SCORERS = ("trainer", "recomputed")
_BEFORE = (*_SCORERS, "equal_weights", "threads", "libraries", "imported", "rescored")
# What the manifest of a dump says of its log π, which is not that of a trace scored again
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
    work = _Rescoring.of(config, run_folder / "trace", progress)
    threads = set_threads(config.cpu.threads, config.scoring_model)
    begun = "rescored" in manifest
    if begun:
        _check_unchanged(work.plan, manifest, work.source)
    done = ranks.world.broadcast(work.done())
    if begun and all(done):
        return
    trainer = load_trainer(
        config.scoring_model, config.scorer_adapter, config.scorer, work.sampling, progress, ranks
    )
    of_run = {"command": manifest["command"], "flags": manifest["flags"]}
    described = of_run | work.description(trainer) | {"threads": threads}
    with ranks.first_before_others() as first:
        if first and not begun:
            # Only now that the model has loaded: a failure before leaves an old run as it was.
            remove_results(run_folder)
            work.write_vocabulary(trainer)
        if first:
            write_manifest(work.folder, described)
    score = partial(work.score_shard, trainer=trainer, ranks=ranks)
    noise_responses = work.plan.scoring.noise_of(config.scorer.noise_responses)
    score_shards(score, work.source.shards, done, noise_responses, progress, ranks)


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

    @classmethod
    def of(cls, config: RescoreConfig, folder: Path, progress: RecordingProgress) -> _Rescoring:
        """Plan the rescoring, and say what the user should know of it; raises for what cannot be
        done, before a model loads.
        """
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
        return cls(config, source, folder, plan, sampling, progress)

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
        taken_over = _without(old, (*_SCORERS, *_OF_RUN))
        if "imported" in old and not (self.config.keep_trainer or plan.carried):
            taken_over["imported"] = _without(old["imported"], _OF_DUMPED_PI)
        return taken_over | {
            "config": old.get("config", {}) | {"trainer": trainer_json(self.config)},
            **self._scorers(trainer),
            "equal_weights": plan.equal_weights,
            **shard_entries(self._promised_rows()),
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

    def _scorers(self, trainer: Trainer) -> dict[str, Any]:
        """What scored the new trace: `trainer`, and `recomputed` if the trace also has log π at the
        weights that sampled.
        """
        old = self.source.manifest
        described = trainer.describe() | _scored_with(self.sampling, old)
        scorers = {"trainer": described, "recomputed": None}
        if self.config.keep_trainer:
            scorers = {"trainer": old.get("trainer"), "recomputed": described}
        elif self.plan.carried:
            # A trace at equal weights names no `recomputed`: its trainer's log π is carried over.
            scorers["recomputed"] = old.get("recomputed", old.get("trainer"))
        return {name: scorer for name, scorer in scorers.items() if scorer}

    def _promised_rows(self) -> dict[str, int | None]:
        """The rows of each shard, by name: what the source lacks, the new trace lacks too."""
        rows: dict[str, int | None] = dict(self.rows)
        for name, count in (promised_rows(self.source.manifest) or {}).items():
            if count is not None or name not in rows:
                rows[name] = count
        return dict(sorted(rows.items()))

    def write_vocabulary(self, trainer: Trainer) -> None:
        """Write the text of tokens: from the source, or else from the model's tokenizer, if it
        has one.
        """
        vocabulary = self.source.folder / VOCABULARY
        if vocabulary.is_file():
            with replacing(self.folder / VOCABULARY) as temporary:
                temporary.write_bytes(vocabulary.read_bytes())
            return
        try:
            tokenizer = load_tokenizer(self.config.scoring_model)
        except MismatchError as error:
            self.progress.say(f"Tokens will be shown as numbers: {error}")
            return
        # A model without a tokenizer gets one of transformers' with special tokens only.
        # It is told by its size: a model's own has about as many tokens as the head has logits.
        if len(tokenizer) < trainer.head.vocabulary / 2:
            self.progress.say("Tokens will be shown as numbers: the model has no tokenizer.")
            return
        write_vocabulary(self.folder, tokenizer)

    def score_shard(
        self,
        path: Path,
        *,
        trainer: Trainer,
        ranks: Ranks,
        repeat: Sequence[bool],
        on_scored: Callable[[int], None],
        **_: int,
    ) -> None:
        """Write the new trace's shard for one of the source; `repeat` as in `score_rows`."""
        tables = self._score(path, trainer, repeat, on_scored)
        if ranks.writes:
            write_shard_parts(self.folder / path.name, tables)
        else:
            # Tables are scored when they are asked for, and a model that is spread over ranks
            # needs all of them: this rank asks too, and drops what it gets.
            deque(tables, maxlen=0)

    def _score(
        self, path: Path, trainer: Trainer, repeat: Sequence[bool], on_scored: Callable[[int], None]
    ) -> Iterator[pa.Table]:
        """The row groups of a shard, scored one after the other."""
        start = 0
        for table in self.source.tables(shards=[path]):
            columns = score_rows(
                table,
                trainer,
                self.plan.scoring,
                token_budget=self.config.scorer.token_budget,
                repeat=repeat[start : start + len(table)],
                on_scored=on_scored,
            )
            columns |= self.plan.versions(table) | _carried(table, self.plan)
            # Row groups of a shard have the same columns, whatever was measured in each.
            for name in self.plan.written:
                columns.setdefault(name, [None] * len(table))
            replaced = set(self.plan.replaced).intersection(table.column_names)
            yield with_columns(table.drop_columns(list(replaced)), columns)
            start += len(table)


def _without(section: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    return {name: value for name, value in section.items() if name not in names}


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
    recorded = sampler_of(manifest.get("config", {}).get("sampling"))
    typed = config.sampler.stated
    if "temperature" not in recorded | typed:
        progress.say(
            "The trace does not say how its responses were sampled: assuming temperature 1 and "
            "no truncation. If that is wrong, set temperature, top_p, top_k or min_p."
        )
    recorded.pop("max_tokens", None)  # which does nothing to the logits
    for name, value in recorded.items():
        if name in typed and typed[name] != value:
            progress.say(
                f"Sampled with {name.replace('_', '-')} {value:g}, scored with {typed[name]:g}: "
                "the gap will include this difference."
            )
    return SamplingSettings(**(recorded | typed))


def _scored_with(sampling: SamplingSettings, old: dict[str, Any]) -> dict[str, Any]:
    """The sampling settings of the trainer, if they differ from what the trace says of the
    engine.
    """
    used = _without(asdict(sampling), ("max_tokens",))
    recorded = old.get("config", {}).get("sampling") or {}
    return {} if used.items() <= recorded.items() else used


def _carried(table: pa.Table, plan: RescorePlan) -> dict[str, Any]:
    """log π of the source at the weights that sampled, whichever of its columns has it, as columns
    of its own; null for a response without it.
    """
    if not plan.carried:
        return {}
    batch = table_to_batch(table.combine_chunks())
    cuts = batch.offset_S1[1:-1]
    columns: dict[str, Any] = {}
    if batch.logp_recomputed_T is not None:
        columns["logp_recomputed"] = _measured(np.split(batch.logp_recomputed_T, cuts))
    if batch.topk_logp_recomputed_TK is not None:
        columns["topk_logp_recomputed"] = _measured(np.split(batch.topk_logp_recomputed_TK, cuts))
    return columns


def _measured(rows: Sequence[np.ndarray]) -> list[np.ndarray | None]:
    """The values of each response; None where all of them are NaN, which is "not measured"."""
    return [None if np.isnan(values).all() else values for values in rows]
