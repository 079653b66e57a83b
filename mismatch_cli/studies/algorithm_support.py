"""Which algorithms traces support, with which columns, and why the others are left out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mismatch_cli.base.errors import MismatchError, quoted
from mismatch_cli.metrics.clipping.masked_slice import Needs
from mismatch_cli.metrics.pairs import weights_are_equal
from mismatch_cli.rules.algorithms.algorithm import Algorithm
from mismatch_cli.rules.algorithms.table import TABLE
from mismatch_cli.studies.remedies import has_fixed_models
from mismatch_cli.trace.reader import Trace

PAPER = ("grpo-clip-higher", "dppo-binary-tv")  # the two of its first figure
_EQUAL = (
    "not applicable: the trainer has the weights that sampled, so the recomputed policy is the "
    "trainer itself. Score with later weights: mismatch-cli rescore {run} --trainer-model LATER "
    "--weights newer"
)
_NO_RECOMPUTED = (
    "the trace has no {column}. Fill it in with: mismatch-cli rescore {run} --keep-trainer "
    "--trainer-model SAMPLER"
)
_RECOMPUTED_IN_PART = (
    "π′ is recorded for {rows} of {responses} responses only: record it for all with recompute = "
    "true in the file of `train --config`, or judge those that have it by naming only algorithms "
    "that need it"
)
_NO_BATCHES = (
    "it needs whole batches, but some imported rows do not name their optimiser step. Record it "
    "with the trace: as a column minibatch (mismatch-cli import --schema), or with "
    "Recorder.add(minibatch=…)"
)


@dataclass(frozen=True)
class AvailableColumns:
    """What traces have for algorithms to judge by."""

    advantages: bool
    rewards: bool
    entropy: bool
    full: bool  # the divergences over the whole vocabulary
    top_k: int  # 0: none
    recomputed: str  # measured, equal weights or absent
    lacks_recomputed: str  # why no algorithm that needs it is judged; empty if any is
    topk_recomputed: bool
    average: bool  # of the trainer's weights
    batches: bool  # whether rows name their optimiser step


@dataclass(frozen=True)
class Support:
    """The algorithms that can be judged, the columns they need, and why the others are left out."""

    judged: tuple[Algorithm, ...]
    needs: Needs
    skipped: dict[str, str]  # algorithm → reason
    has: AvailableColumns

    @classmethod
    def of(cls, traces: Sequence[Trace], algorithms: Sequence[Algorithm]) -> Support:
        """Sort algorithms by what traces support; raises a `MismatchError` if none can be
        judged.
        """
        columns = set[str].union(*(trace.columns() for trace in traces))
        if "logp_trainer" not in columns:
            raise MismatchError(
                f"{traces[0].folder} has no log-probabilities of a trainer to compare the "
                f"rollout with. {traces[0].how_to_score}"
            )
        run = quoted(traces[0].run_folder)
        has = _available(traces, columns, run)
        all_need_it = all(algorithm.needs_recomputed for algorithm in algorithms)
        if all_need_it and has.recomputed == "measured":
            # No other algorithm would lose tokens, so all are judged on the responses that have it.
            has = replace(has, lacks_recomputed="")
        judged = []
        skipped = {}
        for algorithm in algorithms:
            reason = _why_skipped(algorithm, has, run, traces[0].manifest)
            if reason:
                skipped[algorithm.name] = reason
            else:
                judged.append(algorithm)
        if not judged:
            name, reason = next(iter(skipped.items()))
            raise MismatchError(
                f"No algorithm can be judged on {traces[0].folder}. {name}: {reason}"
            )
        needs = replace(Needs.of(judged), advantages=has.advantages, full=has.full)
        if needs.top_k:  # all that was recorded is read, also beyond what they need
            needs = replace(needs, top_k=has.top_k)
        return cls(tuple(judged), needs, skipped, has)

    @classmethod
    def of_paper(cls, traces: Sequence[Trace]) -> Support | None:
        """The paper's two algorithms, or the one that can be judged; None if neither can."""
        try:
            return cls.of(traces, [TABLE[name] for name in PAPER])
        except MismatchError:
            return None


def _available(traces: Sequence[Trace], columns: set[str], run: str) -> AvailableColumns:
    recomputed = "absent"
    if weights_are_equal(traces):
        recomputed = "equal weights"
    elif "logp_recomputed" in columns:
        recomputed = "measured"
    has_topk = "topk_logp_trainer" in columns
    return AvailableColumns(
        advantages="advantage" in columns,
        rewards="reward" in columns,
        entropy="entropy_trainer" in columns,
        full={"tv_full", "kl_full"} <= columns,
        top_k=min(trace.top_k for trace in traces) if has_topk else 0,
        recomputed=recomputed,
        lacks_recomputed=_lacks_recomputed(traces, recomputed, run),
        topk_recomputed=recomputed == "equal weights" or "topk_logp_recomputed" in columns,
        average="logp_average" in columns,
        batches=all(_knows_batches(trace.manifest) for trace in traces),
    )


def _lacks_recomputed(traces: Sequence[Trace], recomputed: str, run: str) -> str:
    """Why no algorithm that needs a recomputed policy is judged; empty if more than half of the
    responses have one.

    All algorithms are judged on the same tokens: one that needs what few tokens have would leave
    the others with these. `train` records π′ in every step's first update, where it is π.
    """
    if recomputed == "absent":
        return _NO_RECOMPUTED.format(column="logp_recomputed", run=run)
    responses = lacking = 0
    for trace in traces:
        responses += trace.num_responses
        lacking += trace.rows_without_recomputed
    if recomputed == "equal weights" or 2 * lacking < responses:
        return ""
    return _RECOMPUTED_IN_PART.format(rows=responses - lacking, responses=responses)


def _knows_batches(manifest: Mapping[str, Any]) -> bool:
    """Whether rows name their optimiser step: always if recorded here, in imports only if the
    dump has it.
    """
    imported = manifest.get("imported")
    return imported is None or imported.get("rows_without_minibatch") == 0


def _way_to_top_k(manifest: Mapping[str, Any], run: str, k: int) -> str:
    """How to get the top K of both sides: again from a probe, else from whoever recorded it."""
    if "imported" in manifest:
        return (
            "Record them with the trace: columns topk_ids, topk_logp_rollout and "
            "topk_logp_trainer (mismatch-cli import --schema)"
        )
    source = "MODEL"
    if manifest.get("command") == "probe" and "flags" in manifest:
        source = f"--like {run}"
    return f"Record with: MISMATCH_TOP_LOGPROBS={k} mismatch-cli probe {source}"


def _way_to_entropy(manifest: Mapping[str, Any], run: str) -> str:
    """The trainer scores again; a trace that names no model for its weights needs one."""
    line = f"mismatch-cli rescore {run}"
    if not has_fixed_models(manifest):
        line += " --trainer-model SAMPLER"
    return f"Fill it in with: {line}"


def _why_skipped(
    algorithm: Algorithm, has: AvailableColumns, run: str, manifest: Mapping[str, Any]
) -> str:
    """Why a trace does not support an algorithm; empty if it does."""
    if has.recomputed == "equal weights" and _measures_from_itself(algorithm):
        return _EQUAL.format(run=run)
    if algorithm.needs_recomputed and has.lacks_recomputed:
        return has.lacks_recomputed
    if algorithm.needs_top_k > has.top_k:
        return _why_too_few(algorithm, has.top_k, run, manifest)
    if algorithm.needs_average and not has.average:
        return "the trace has no logp_average, which `train` records with average_decay"
    if algorithm.needs_entropy and not has.entropy:
        return f"the trace has no entropy of the trainer. {_way_to_entropy(manifest, run)}"
    if algorithm.batch_masks:
        if not has.advantages:
            return "it judges whole batches with their advantages, but the trace has no advantages"
        if not has.batches:
            return _NO_BATCHES
    if algorithm.needs_top_k and algorithm.needs_recomputed and not has.topk_recomputed:
        return _NO_RECOMPUTED.format(column="topk_logp_recomputed", run=run)
    return ""


def _measures_from_itself(algorithm: Algorithm) -> bool:
    """Whether, at equal weights, its masks compare the trainer with the trainer, and block
    nothing.
    """
    if algorithm.anchor != "recomputed":
        return False
    return not any(getattr(mask.module, "MEASURES_NO_DISTANCE", False) for mask in algorithm.masks)


def _why_too_few(algorithm: Algorithm, top_k: int, run: str, manifest: Mapping[str, Any]) -> str:
    """What an algorithm needs of the top K, what the trace has, and the ways out."""
    k = algorithm.needs_top_k
    recorded, smaller = "none", ""
    if top_k:
        recorded = f"the top {top_k}"
        smaller = f", or name {algorithm.name.partition(':')[0]}:k={top_k}"
    lacks = f"needs the top {k} log-probs, but the trace has {recorded}. "
    return f"{lacks}{_way_to_top_k(manifest, run, k)}{smaller}"
