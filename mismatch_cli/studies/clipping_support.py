"""Which algorithms a trace can support, on which columns, and what to run for the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mismatch_cli.algorithms.algorithm import Algorithm
from mismatch_cli.errors import MismatchError
from mismatch_cli.metrics.clipping.masked import Needs
from mismatch_cli.metrics.pairs import weights_are_equal
from mismatch_cli.suggest import quoted
from mismatch_cli.trace.reader import Trace

_EQUAL = (
    "not applicable: the trainer has the weights that sampled, so the recomputed policy is the trainer itself. "
    "Score with later weights: mismatch-cli rescore {run} --trainer-model LATER --weights newer"
)
_NO_RECOMPUTED = (
    "the trace has no {column}. Fill it in with: mismatch-cli rescore {run} --keep-trainer --trainer-model SAMPLER"
)


@dataclass(frozen=True)
class Support:
    """The algorithms that can be judged, the columns they need, and why the others are left out."""

    judged: tuple[Algorithm, ...]
    needs: Needs
    skipped: dict[str, str]  # algorithm → reason
    has: dict[str, Any]

    @classmethod
    def of(cls, traces: Sequence[Trace], algorithms: Sequence[Algorithm]) -> Support:
        """Raises a `MismatchError` where nothing can be judged."""
        columns = set[str].union(*(trace.columns() for trace in traces))
        if "logp_trainer" not in columns:
            raise MismatchError(
                f"{traces[0].folder} has no log-probabilities of a trainer, so there is nothing to hold against the "
                f"rollout. {traces[0].how_to_score}"
            )
        has = _what_is_there(traces, columns)
        run = quoted(traces[0].run_folder)
        skipped = {a.name: reason for a in algorithms if (reason := _reason(a, has, run))}
        judged = tuple(a for a in algorithms if a.name not in skipped)
        if not judged:
            name, reason = next(iter(skipped.items()))
            raise MismatchError(f"No algorithm can be judged on {traces[0].folder}. {name}: {reason}")
        needs = Needs(
            advantages=has["advantages"],
            recomputed=any(a.needs_recomputed for a in judged),
            top_k=has["top_k"] if any(a.needs_top_k for a in judged) else 0,
            full=has["full"],
            topk_recomputed=any(a.needs_top_k and a.needs_recomputed for a in judged),
        )
        return cls(judged, needs, skipped, has)


def _what_is_there(traces: Sequence[Trace], columns: set[str]) -> dict[str, Any]:
    recomputed = "measured" if "logp_recomputed" in columns else "absent"
    if weights_are_equal(traces):
        recomputed = "equal weights"
    return {
        "advantages": "advantage" in columns,
        "rewards": "reward" in columns,
        "entropy": "entropy_trainer" in columns,
        "full": {"tv_full", "kl_full"} <= columns,
        "top_k": min(trace.top_k for trace in traces) if "topk_logp_trainer" in columns else 0,
        "recomputed": recomputed,
        "topk_recomputed": recomputed == "equal weights" or "topk_logp_recomputed" in columns,
    }


def _reason(algorithm: Algorithm, has: dict[str, Any], run: str) -> str:
    """Why a trace cannot support an algorithm; empty where it can."""
    recomputed, k = has["recomputed"], algorithm.needs_top_k
    if recomputed == "equal weights" and algorithm.anchor == "recomputed":
        return _EQUAL.format(run=run)
    if recomputed == "absent" and algorithm.needs_recomputed:
        return _NO_RECOMPUTED.format(column="logp_recomputed", run=run)
    if k > has["top_k"]:
        there = f"the top {has['top_k']}" if has["top_k"] else "none"
        ask = f", or ask for {algorithm.name.partition(':')[0]}:k={has['top_k']}" if has["top_k"] else ""
        lacks = f"needs the top {k} log-probs, and the trace has {there}. "
        return f"{lacks}Record with: mismatch-cli probe MODEL --top-logprobs {k}{ask}"
    if k and algorithm.needs_recomputed and not has["topk_recomputed"]:
        return _NO_RECOMPUTED.format(column="topk_logp_recomputed", run=run)
    return ""
