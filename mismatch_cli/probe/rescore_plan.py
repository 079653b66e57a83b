"""Which weights a rescoring uses, and what that means for each column of the trace: decided before
a model loads.

Versions (optimiser steps) in the trace say which weights sampled a response and which scored it.
Where they are equal, `logp_trainer` is log π at the weights that sampled, and readers serve it as
`logp_recomputed` too.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from mismatch_cli.base.errors import MismatchError, UsageError
from mismatch_cli.base.text import visible
from mismatch_cli.probe.config import EQUAL, NEWER, RescoreConfig
from mismatch_cli.probe.score import ScoringPass
from mismatch_cli.trace.columns import COLUMNS, Maker, made_by
from mismatch_cli.trace.reader import Trace

# Measured with the old trainer: none of it may be mixed with a new logp_trainer.
OF_TRAINER = made_by(Maker.TRAINER)
OF_RECOMPUTED = made_by(Maker.RECOMPUTED)
# Measured with the trainer at the weights that sampled, whichever column has its log π.
OF_ROUTERS = made_by(Maker.ROUTERS)


@dataclass(frozen=True)
class RescorePlan:
    """What to write: by which pass, at which version, replacing which columns."""

    scoring: ScoringPass
    version: int  # of the model that scores
    equal_weights: bool  # whether the finished trace compares equal weights only
    replaced: tuple[str, ...]  # columns of the source that the new trace drops
    carried: tuple[str, ...]  # columns that keep what the source knew at the weights that sampled
    written: tuple[str, ...]  # columns that every row group of the new trace has
    digest: str  # changes when the source does
    notes: tuple[str, ...]  # for the user

    def versions(self, table: pa.Table) -> dict[str, Any]:
        """The version columns, with the gaps of the source filled in."""
        filled = {"version_rollout": versions_of(table, "version_rollout", 0)}
        if self.scoring.column == "logp_recomputed":
            # The trace keeps its trainer, which scored at later weights. A response without its
            # version gets a later one than the version that sampled, or readers would take its
            # log π for the recomputed one.
            filled["version_trainer"] = versions_of(table, "version_trainer", self.version + 1)
        return filled


_SMALL_COLUMNS = (
    "step",
    "version_rollout",
    "version_trainer",
    "prompt_ids",
    "response_ids",
    "routes",
)


@dataclass
class _Source:
    """What one pass over the columns without log-probabilities shows of a trace."""

    columns: set[str]
    sampled_at: set[int] = field(default_factory=set)
    scored_at: set[int] = field(default_factory=set)
    steps: set[int] = field(default_factory=set)
    rows: int = 0
    # Rows that the trace's own trainer scored at the weights that sampled
    at_equal_weights: int = 0
    without_prompt: int = 0
    without_routes: int = 0

    @property
    def has_recomputed(self) -> bool:
        """Whether some responses have log π at the weights that sampled."""
        return self.at_equal_weights > 0 or "logp_recomputed" in self.columns

    @property
    def strangers(self) -> list[str]:
        """Columns that the schema does not have, so nobody knows who made them."""
        return sorted(self.columns - COLUMNS.keys())

    @classmethod
    def of(cls, trace: Trace) -> _Source:
        source = cls(trace.columns())
        for table in trace.tables(_SMALL_COLUMNS):
            rollout_S = versions_of(table, "version_rollout", 0)
            source.sampled_at |= set(rollout_S.tolist())
            if "version_trainer" in table.column_names and "logp_trainer" in source.columns:
                trainer_S = versions_of(table, "version_trainer", -1)
                source.scored_at |= set(trainer_S.tolist())
                source.at_equal_weights += int((rollout_S == trainer_S).sum())
            source.steps |= set(table.column("step").to_pylist())
            source.rows += len(table)
            has_prompt_S = _lengths(table, "prompt_ids") > 0
            has_response_S = _lengths(table, "response_ids") > 0
            source.without_prompt += int((has_response_S & ~has_prompt_S).sum())
            if "routes" in table.column_names:
                source.without_routes += table.column("routes").null_count
            else:
                source.without_routes += len(table)
        return source


def versions_of(table: pa.Table, name: str, unknown: int) -> np.ndarray:
    """A column of versions; `unknown` where it is absent or null."""
    if name not in table.column_names:
        return np.full(len(table), unknown, dtype=np.int32)
    return pc.fill_null(table.column(name), unknown).to_numpy().astype(np.int32)


def _lengths(table: pa.Table, name: str) -> np.ndarray:
    return pc.fill_null(pc.list_value_length(table.column(name)), 0).to_numpy()


def plan_rescoring(trace: Trace, config: RescoreConfig) -> RescorePlan:
    """Decide which weights score, and what becomes of each column; a `MismatchError` that says why
    the trace cannot be scored, or not at these weights.
    """
    trace.require_ids("A trainer scores")
    source = _Source.of(trace)
    if not source.rows:
        raise MismatchError(f"{trace.folder} has no responses to score. Name another trace.")
    if source.without_prompt:
        raise MismatchError(
            f"{trace.folder} lacks the prompt of {source.without_prompt} of its {source.rows} "
            "responses, and log π of a response depends on it. Record the prompts' token ids "
            "(prompt_ids) too."
        )
    if config.scorer.replay_routes and source.without_routes:
        raise MismatchError(
            f"{trace.folder} lacks the routes of {source.without_routes} of its {source.rows} "
            "responses, so they cannot be replayed. Record them: "
            f"MISMATCH_KEEP_ROUTES={source.rows} mismatch-cli probe --engine hf"
        )
    version = _version(trace, source, config)
    plan = _plan_recomputed if config.keep_trainer else _plan_trainer
    return plan(trace, source, version, config)


def _version(trace: Trace, source: _Source, config: RescoreConfig) -> int:
    """The version of the model that scores, as the trace counts versions."""
    if config.weights == NEWER:
        return max(source.sampled_at | source.scored_at) + 1
    if config.weights != EQUAL:
        return int(config.weights)
    if len(source.sampled_at) > 1:
        versions = sorted(source.sampled_at)
        raise UsageError(
            f"{trace.folder} was sampled at {len(versions)} versions of the weights "
            f"({versions[0]} to {versions[-1]}), and a model has only one. Say which: --weights "
            f"{versions[0]}, or --weights {NEWER}."
        )
    (version,) = source.sampled_at
    return version


def _plan_trainer(
    trace: Trace, source: _Source, version: int, config: RescoreConfig
) -> RescorePlan:
    """The model becomes the trainer; what the trace knew at the weights that sampled is kept as
    `logp_recomputed`.

    Except if the model has some of those weights: readers take logp_trainer wherever versions are
    equal, and a mismatch must not mix two trainers.
    """
    equal = source.sampled_at == {version}
    carries = source.has_recomputed and version not in source.sampled_at
    carried = _of_recomputed(source) if carries else ()
    written = ["logp_trainer", *carried]
    if "topk_ids" in source.columns:
        written.append("topk_logp_trainer")
    if config.scorer.noise_responses != 0:
        written.append("logp_trainer_repeat")
    if equal:
        written += _of_routers(source)
    replaced = [*OF_TRAINER, *OF_RECOMPUTED]
    if not carries:
        # The routers' columns go with log π at the weights that sampled: kept with it, or dropped.
        replaced += OF_ROUTERS
    replaced += source.strangers
    return RescorePlan(
        scoring=ScoringPass("logp_trainer", version_trainer=version, at_rollout_weights=equal),
        version=version,
        equal_weights=equal,
        replaced=tuple(filter(source.columns.__contains__, replaced)),
        carried=carried,
        written=tuple(written),
        digest=_digest(trace),
        notes=_trainer_notes(source, version, config),
    )


def _trainer_notes(source: _Source, version: int, config: RescoreConfig) -> tuple[str, ...]:
    """What the user should know of a new trainer's trace: what it assumes, lacks and leaves out."""
    notes = _steps_note(source, config)
    if not source.has_recomputed and config.weights == NEWER:
        notes.append(
            "The trace has no log π at the weights that sampled, so mismatch and staleness "
            "cannot be separated: rescore it with those weights first, then the result with "
            "these."
        )
    elif source.has_recomputed and len(source.sampled_at) > 1 and version in source.sampled_at:
        notes.append(
            "Only some responses were sampled at this model's weights. The trace's old log π at "
            "the weights that sampled is dropped, or two trainers would mix: the report gives "
            "the mismatch of those responses, and the total gap of all."
        )
    if source.strangers:
        notes.append(
            f"Left out: {', '.join(map(visible, source.strangers))}. The schema does not say who "
            "made it: if the old trainer did, it does not belong to the new log π."
        )
    return tuple(notes)


def _of_recomputed(source: _Source) -> tuple[str, ...]:
    """The columns of log π at the weights that sampled: the sampled tokens', and that of the top K
    where the source has their ids.
    """
    return OF_RECOMPUTED if "topk_ids" in source.columns else OF_RECOMPUTED[:1]


def _of_routers(source: _Source) -> tuple[str, ...]:
    """The router columns to write, so that every row group of the new trace has them."""
    return OF_ROUTERS if "routes" in source.columns else ()


def _steps_note(source: _Source, config: RescoreConfig) -> list[str]:
    """Dumps rarely say which weights sampled: all their steps then share one version, which
    deserves a note.
    """
    if config.weights != EQUAL or len(source.steps) < 2:
        return []
    return [
        f"The trace has {len(source.steps)} steps and one version of the weights: this assumes "
        "that the model's weights sampled all of them."
    ]


def _plan_recomputed(
    trace: Trace, source: _Source, version: int, config: RescoreConfig
) -> RescorePlan:
    """The model adds log π at the weights that sampled, and the trace's own trainer stays."""
    if source.sampled_at != {version}:
        raise UsageError(
            "--keep-trainer adds log π at the weights that sampled, so it needs --weights equal. "
            "Leave out --keep-trainer or --weights."
        )
    if "logp_trainer" not in source.columns:
        raise UsageError(f"{trace.folder} has no logp_trainer to keep. Leave out --keep-trainer.")
    if source.at_equal_weights:
        raise UsageError(
            f"The trainer of {trace.folder} scored {source.at_equal_weights} responses at the "
            "weights that sampled, so it already has what --keep-trainer would add. Leave out "
            "--keep-trainer to replace it."
        )
    replaced = filter(source.columns.__contains__, (*OF_RECOMPUTED, *OF_ROUTERS))
    return RescorePlan(
        scoring=ScoringPass("logp_recomputed"),
        version=version,
        equal_weights=False,
        replaced=tuple(replaced),
        carried=(),
        written=(*_of_recomputed(source), *_of_routers(source)),
        digest=_digest(trace),
        notes=tuple(_steps_note(source, config)),
    )


def _digest(trace: Trace) -> str:
    """A hash of the shards' names and sizes: enough to notice that a trace was recorded again or
    grew.
    """
    shards = [(path.name, path.stat().st_size) for path in trace.shards]
    return hashlib.sha256(repr(shards).encode()).hexdigest()[:16]
