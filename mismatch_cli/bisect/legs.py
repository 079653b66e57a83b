"""Legs: log-probabilities of the fixed tokens by one side under one change, each kept as a trace of
its own.

A leg's trace has one shard per portion: what the leg read, and the other side as recorded. Existing
shards are not read again; the manifest of a leg that stops early lists only what it has, so that
its trace is complete.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
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
        rows = self.tokens.portions
        return sum(
            is_whole(shard_path(self.folder(name), i), count) for i, count in enumerate(rows)
        )

    def is_done(self, name: str) -> bool:
        """Whether a leg is complete; every rank answers like the first."""
        return self.ranks.world.told(self._is_done(name))

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
        begun = self.ranks.world.told(self.portions(leg.name))
        seconds = self.about(leg.name)["seconds"] if begun and world.first else 0.0
        # CPUs may be shared
        clock = time.process_time if described.get("device") == "cpu" else time.perf_counter
        with self.progress.counting(
            leg.what, self.tokens.num_responses, sum(rows[:begun])
        ) as on_read:
            for i, path in enumerate(self.tokens.shards):
                if i >= begun:
                    table = open_shard(path).read()
                    if i == begun:  # compile kernels and fill caches before the clock starts
                        read(table.slice(0, 1), lambda _: None)
                    started = clock()
                    columns = self._by_ranks(table, read, on_read)
                    seconds += clock() - started
                    if world.first:
                        self._write_manifest(leg, described, seconds, i + 1, done=False)
                        write_shard(
                            shard_path(self.folder(leg.name), i), with_columns(table, columns)
                        )
                    world.barrier()
                if world.told(world.first and i + 1 < len(rows) and enough()):
                    break
        if world.first:
            self._write_manifest(leg, described, seconds, self.portions(leg.name), done=True)
        world.barrier()

    def _by_ranks(
        self, table: pa.Table, read: Read, on_read: Callable[[int], None]
    ) -> dict[str, Any]:
        """Every rank reads its share of the rows; if the model is sharded, all ranks read all
        rows.
        """
        if self.ranks.spreads or self.ranks.world.size == 1:
            return read(table, on_read)
        share = self.ranks.world.share(len(table))
        parts = self.ranks.world.gather(
            read(table.slice(share.start, len(share)), on_read) if share else {}
        )
        names = next(part for part in parts if part)
        return {
            name: list(chain.from_iterable(part[name] for part in parts if part)) for name in names
        }

    def write_selected(
        self,
        leg: Leg,
        rows: Sequence[int],
        columns: Mapping[str, Sequence[Any]],
        described: Mapping[str, Any],
        seconds: float,
    ) -> None:
        """Write a leg of selected responses, given by their index among the fixed ones."""
        table = pa.concat_tables(
            [open_shard(path).read() for path in self.tokens.shards], promote_options="default"
        )
        self._write_manifest(leg, described, seconds, 1, done=True, rows=[len(rows)])
        write_shard(
            shard_path(self.folder(leg.name), 0),
            with_columns(table.take(list(rows)), dict(columns)),
        )

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
        folder, rows = self.folder(leg.name), rows or self.tokens.portions
        source = read_manifest(self.folder(AS_RECORDED))
        about = {
            "name": leg.name,
            "side": leg.side,
            "what": leg.what,
            "change": dict(leg.change),
            "done": done,
        }
        about |= {"seconds": seconds, "responses": sum(rows[:portions])}
        kept = {
            name: value
            for name, value in source.items()
            if name not in ("format", "format_version", "shard_rows")
        }
        names = {shard_path(folder, i).name: rows[i] for i in range(portions)}
        libraries = {"libraries": library_versions()}
        write_manifest(
            folder,
            kept
            | {leg.side: dict(described)}
            | shard_entries(names)
            | libraries
            | {"bisect": about},
        )
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
    names = {shard_path(folder, i).name: len(table) for i, table in enumerate(tables)}
    about = {
        "name": AS_RECORDED,
        "side": "",
        "what": "as recorded",
        "change": {},
        "done": True,
        "seconds": 0.0,
    }
    about["responses"] = sum(names.values())
    dropped = (
        "format",
        "format_version",
        "shard_rows",
        "flags",
        "rescored",
        "imported",
        "recomputed",
    )
    kept = {name: value for name, value in manifest.items() if name not in dropped}
    if equal:
        kept |= {
            "equal_weights": True,
            "trainer": manifest.get("recomputed") or manifest.get("trainer") or {},
        }
        kept = {name: value for name, value in kept.items() if value != {}}
    _copy_vocabulary(vocabulary, folder)
    for i, table in enumerate(tables):
        write_shard(shard_path(folder, i), table)
    write_manifest(folder, kept | {"command": "bisect"} | shard_entries(names) | {"bisect": about})


def _copy_vocabulary(vocabulary: Path, folder: Path) -> None:
    """Copy the text of tokens, if the source trace has it."""
    own = folder / VOCABULARY
    if vocabulary.is_file() and not own.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        with replacing(own) as temporary:
            temporary.write_bytes(vocabulary.read_bytes())


def engine_reads(engine: Engine, change: Change) -> Read:
    """How an engine reads a table's responses again: by forced decoding, or each whole response
    at once.
    """

    def read(table: pa.Table, on_read: Callable[[int], None]) -> dict[str, Any]:
        prompts, responses = table["prompt_ids"].to_pylist(), table["response_ids"].to_pylist()
        forced = [
            ForcedResponse(prompt, response)
            for prompt, response in zip(prompts, responses, strict=True)
        ]
        prompt_id_S = table["prompt_id"].to_pylist()
        if change.get("prefill"):
            return {"logp_rollout": prefill_checked(engine, forced, prompt_id_S, on_read)}
        alone, cached = bool(change.get("alone")), bool(change.get("cached", True))
        rollouts = replay_checked(engine, forced, prompt_id_S, on_read, alone=alone, cached=cached)
        logp, rank = (
            [getattr(r, name) for r in rollouts] for name in ("logp_rollout_T", "rank_rollout_T")
        )
        return {"logp_rollout": logp, "rank_rollout": rank}

    return read


def trainer_reads(trainer: Trainer, token_budget: int, other_shape: bool) -> Read:
    """How a trainer scores a table's responses, in its usual micro-batches or in another shape."""

    def read(table: pa.Table, on_read: Callable[[int], None]) -> dict[str, Any]:
        requests = requests_of(table, trainer.routing.layers)
        if other_shape:
            scores = trainer.score_again(
                requests, token_budget=token_budget, on_scored=lambda rows: on_read(len(rows))
            )
        else:
            scores = trainer.score(
                requests, token_budget=token_budget, on_scored=lambda rows: on_read(len(rows))
            )
        return {
            "logp_trainer": [s.logp_T for s in scores],
            "entropy_trainer": [s.entropy_T for s in scores],
            "rank_trainer": [s.rank_T for s in scores],
        }

    return read
