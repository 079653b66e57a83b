"""Legs: log-probabilities of the fixed tokens by one side under one change, each kept as a trace of
its own.

A leg's trace has one shard per portion: what the leg read, and the other side as recorded. Existing
shards are not read again; the manifest of a leg that stops early lists only what it has, so that
its trace is complete.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from mismatch_cli.bisect.experiments import AS_RECORDED, LEGS, Change, Leg
from mismatch_cli.bisect.fixed_tokens import FixedTokens
from mismatch_cli.models.engines import Engine, ForcedResponse, prefill_checked, replay_checked
from mismatch_cli.models.rank_shares import ALL_HERE, Ranks
from mismatch_cli.probe.rollouts import RecordingProgress, is_whole
from mismatch_cli.probe.score import requests_of, with_columns
from mismatch_cli.trace.files import replacing
from mismatch_cli.trace.manifest import (
    FILE_NAME,
    VOCABULARY,
    library_versions,
    read_manifest,
    shard_entries,
    write_manifest,
)
from mismatch_cli.trace.shards import open_shard
from mismatch_cli.trace.writer import shard_path, write_shard

if TYPE_CHECKING:
    from mismatch_cli.models.scoring.trainer import Trainer

# Columns for the rows of a table
Read = Callable[[pa.Table, Callable[[int], None]], dict[str, Any]]
_OF_SHARDS = ("format", "format_version", "shard_rows")
# Sections of a recording that are not those of the chosen responses
_OF_SOURCE = ("flags", "rescored", "imported", "recomputed")


@dataclass(frozen=True)
class Legs:
    """The legs of a run on disk."""

    run_folder: Path
    tokens: FixedTokens
    progress: RecordingProgress
    ranks: Ranks = ALL_HERE
    _columns: dict[tuple[str, str, int], np.ndarray] = field(default_factory=dict, repr=False)

    def folder(self, name: str) -> Path:
        return self.run_folder / LEGS / name

    def portions(self, name: str) -> int:
        """How many portions a leg has read."""
        shards = [shard_path(self.folder(name), i) for i in range(len(self.tokens.portions))]
        return sum(map(is_whole, shards, self.tokens.portions))

    def is_done(self, name: str) -> bool:
        """Whether a leg is complete; every rank answers like the first."""
        return self.ranks.world.broadcast(self._is_done(name))

    def _is_done(self, name: str) -> bool:
        manifest = self.folder(name) / FILE_NAME
        return manifest.is_file() and bool(read_manifest(self.folder(name))["bisect"]["done"])

    def about(self, name: str) -> dict[str, Any]:
        """The leg's section of its manifest: side, change, seconds, responses."""
        return dict(read_manifest(self.folder(name))["bisect"])

    def described(self, name: str, side: str) -> dict[str, Any]:
        """How a side described itself when it read a leg, from the leg's manifest."""
        return dict(read_manifest(self.folder(name)).get(side) or {})

    def column(self, leg: str, side: str) -> np.ndarray:
        """A leg's log μ or log π of all tokens, float64; NaN where it has not read them."""
        key = leg, side, self.portions(leg)
        if key not in self._columns:
            self._columns[key] = self.tokens.flat(self.folder(leg), f"logp_{side}")
        return self._columns[key]

    def read(
        self, leg: Leg, read: Read, described: Mapping[str, Any], enough: Callable[[], bool]
    ) -> None:
        """Read portions until there are no more or `enough` says so; a finished leg is kept."""
        if self.is_done(leg.name):
            return
        world, rows = self.ranks.world, self.tokens.portions
        begun, seconds = self._begun(leg.name)
        clock = _clock(described)
        with self.progress.counting(
            leg.what, self.tokens.num_responses, sum(rows[:begun])
        ) as on_read:
            for i in range(begun, len(rows)):
                # Only the first rank looks at what was read; its answer ends the loop on all.
                if i and world.broadcast(world.first and enough()):
                    break
                table = open_shard(self.tokens.shards[i]).read()
                if i == begun:
                    # Kernels are compiled and caches filled before the clock starts.
                    read(table.slice(0, 1), lambda _: None)
                started = clock()
                columns = self._by_ranks(table, read, on_read)
                seconds += clock() - started
                self._write_portion(leg, described, seconds, i, table, columns)
        if world.first:
            self._write_manifest(leg, described, seconds, self.portions(leg.name), done=True)
        world.barrier()

    def _begun(self, name: str) -> tuple[int, float]:
        """The portions that an interrupted leg has, on all ranks, and their seconds, on the
        first.
        """
        portions = self.ranks.world.broadcast(self.portions(name))
        if not (portions and self.ranks.world.first):
            return portions, 0.0
        return portions, self.about(name)["seconds"]

    def _by_ranks(
        self, table: pa.Table, read: Read, on_read: Callable[[int], None]
    ) -> dict[str, Any]:
        """Every rank reads its share of the rows; if the model is sharded, all ranks read all
        rows.
        """
        world = self.ranks.world
        if self.ranks.spreads or world.size == 1:
            return read(table, on_read)
        share = world.share(len(table))
        own: dict[str, Any] = {}
        # With more ranks than rows, some have none.
        if share:
            own = read(table.slice(share.start, len(share)), on_read)
        columns = defaultdict[str, list[Any]](list)
        for of_rank in world.gather(own):
            for name, values in of_rank.items():
                columns[name].extend(values)
        return dict(columns)

    def _write_portion(
        self,
        leg: Leg,
        described: Mapping[str, Any],
        seconds: float,
        portion: int,
        table: pa.Table,
        columns: dict[str, Any],
    ) -> None:
        if self.ranks.world.first:
            self._write_manifest(leg, described, seconds, portion + 1, done=False)
            path = shard_path(self.folder(leg.name), portion)
            write_shard(path, with_columns(table, columns))
        self.ranks.world.barrier()

    def write_selected(
        self,
        leg: Leg,
        rows: Sequence[int],
        columns: Mapping[str, Sequence[Any]],
        described: Mapping[str, Any],
        seconds: float,
    ) -> None:
        """Write a leg of selected responses, given by their index among the fixed ones."""
        tables = [open_shard(path).read() for path in self.tokens.shards]
        table = pa.concat_tables(tables, promote_options="default").take(list(rows))
        self._write_manifest(leg, described, seconds, 1, done=True, rows=[len(rows)])
        write_shard(shard_path(self.folder(leg.name), 0), with_columns(table, dict(columns)))

    def _write_manifest(
        self,
        leg: Leg,
        described: Mapping[str, Any],
        seconds: float,
        portions: int,
        *,
        done: bool,
        rows: Sequence[int] | None = None,
    ) -> None:
        folder = self.folder(leg.name)
        rows = (rows or self.tokens.portions)[:portions]
        about = {
            "name": leg.name,
            "side": leg.side,
            "what": leg.what,
            "change": dict(leg.change),
            "done": done,
            "seconds": seconds,
            "responses": sum(rows),
        }
        manifest = _without(read_manifest(self.folder(AS_RECORDED)), _OF_SHARDS)
        manifest[leg.side] = dict(described)
        manifest |= shard_entries({shard_path(folder, i).name: n for i, n in enumerate(rows)})
        write_manifest(folder, manifest | {"libraries": library_versions(), "bisect": about})
        _copy_vocabulary(self.folder(AS_RECORDED) / VOCABULARY, folder)


def write_as_recorded(
    folder: Path,
    tables: Sequence[pa.Table],
    manifest: Mapping[str, Any],
    vocabulary: Path,
    *,
    equal: bool,
) -> None:
    """Write the trace of the chosen responses, one shard per portion, with which every other leg is
    compared.

    `equal`: their log π is that at the weights that sampled.
    """
    rows = {shard_path(folder, i).name: len(table) for i, table in enumerate(tables)}
    about = {
        "name": AS_RECORDED,
        "side": "",
        "what": "as recorded",
        "change": {},
        "done": True,
        "seconds": 0.0,
        "responses": sum(rows.values()),
    }
    own = _without(manifest, (*_OF_SHARDS, *_OF_SOURCE))
    if equal:
        # One log π is left, of the trainer that computed it at those weights.
        own["equal_weights"] = True
        own["trainer"] = manifest.get("recomputed") or manifest.get("trainer") or {}
        own = {name: value for name, value in own.items() if value != {}}
    _copy_vocabulary(vocabulary, folder)
    for i, table in enumerate(tables):
        write_shard(shard_path(folder, i), table)
    write_manifest(folder, own | {"command": "bisect"} | shard_entries(rows) | {"bisect": about})


def _without(manifest: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    return {name: value for name, value in manifest.items() if name not in names}


def _clock(described: Mapping[str, Any]) -> Callable[[], float]:
    """The clock for a side: on a CPU that of the process, since CPUs may be shared."""
    return time.process_time if described.get("device") == "cpu" else time.perf_counter


def _copy_vocabulary(vocabulary: Path, folder: Path) -> None:
    """Copy the text of tokens, if the source trace has it."""
    own = folder / VOCABULARY
    if vocabulary.is_file() and not own.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        with replacing(own) as temporary:
            temporary.write_bytes(vocabulary.read_bytes())


def forced_responses(table: pa.Table) -> list[ForcedResponse]:
    """The recorded tokens of each row, for an engine to read again."""
    prompts, responses = table["prompt_ids"].to_pylist(), table["response_ids"].to_pylist()
    return list(map(ForcedResponse, prompts, responses))


def engine_reads(engine: Engine, change: Change) -> Read:
    """How an engine reads a table's responses again: by forced decoding, or each whole response
    at once.
    """
    alone, cached = bool(change.get("alone")), bool(change.get("cached", True))

    def read(table: pa.Table, on_read: Callable[[int], None]) -> dict[str, Any]:
        forced = forced_responses(table)
        prompt_id_S = table["prompt_id"].to_pylist()
        if change.get("prefill"):
            return {"logp_rollout": prefill_checked(engine, forced, prompt_id_S, on_read)}
        rollouts = replay_checked(engine, forced, prompt_id_S, on_read, alone=alone, cached=cached)
        return {
            "logp_rollout": [rollout.logp_rollout_T for rollout in rollouts],
            "rank_rollout": [rollout.rank_rollout_T for rollout in rollouts],
        }

    return read


def trainer_reads(trainer: Trainer, token_budget: int, other_shape: bool) -> Read:
    """How a trainer scores a table's responses, in its usual micro-batches or in another shape."""
    score = trainer.score_again if other_shape else trainer.score

    def read(table: pa.Table, on_read: Callable[[int], None]) -> dict[str, Any]:
        scores = score(
            requests_of(table, trainer.routing.layers),
            token_budget=token_budget,
            on_scored=lambda rows: on_read(len(rows)),
        )
        return {
            "logp_trainer": [response.logp_T for response in scores],
            "entropy_trainer": [response.entropy_T for response in scores],
            "rank_trainer": [response.rank_T for response in scores],
        }

    return read
