"""One pass over traces, by one process or several: every algorithm that the traces can support, on the same tokens."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from signal import SIG_DFL, SIG_IGN, SIGINT, signal
from threading import current_thread, main_thread
from typing import Any

import numpy as np

from mismatch_cli.algorithms.algorithm import Algorithm
from mismatch_cli.errors import MismatchError
from mismatch_cli.metrics.clipping.result import clipping_result
from mismatch_cli.metrics.clipping.summary import ClippingSummary, Question
from mismatch_cli.places import shown
from mismatch_cli.studies.clipping_plot_data import ClippingPlotData
from mismatch_cli.studies.clipping_support import Support
from mismatch_cli.studies.mismatch import about, check_poolable, who_is_compared
from mismatch_cli.studies.token_classes import token_class
from mismatch_cli.trace.reader import Trace

FORMAT, VERSION = "mismatch-cli clipstats", 1
_BLOCKED_TOKENS = 50
_COLUMNS = (
    "version_rollout", "version_trainer", "reward", "response_ids", "loss_mask", "logp_trainer", "entropy_trainer",
)  # fmt: skip


@dataclass(frozen=True)
class ClippingAnalysis:
    """What was counted, and what the traces could not support."""

    traces: Sequence[Trace]
    support: Support
    summary: ClippingSummary

    @property
    def algorithms(self) -> tuple[Algorithm, ...]:
        """Those that were judged."""
        return self.summary.question.algorithms


def analyse_clipping(
    traces: Sequence[Trace],
    algorithms: Sequence[Algorithm],
    *,
    theory: bool = False,
    workers: int = 1,
    on_responses: Callable[[int], None] = lambda _: None,
) -> ClippingAnalysis:
    """Judge every token with every algorithm, shard by shard; any number of workers gives the same numbers to the bit.

    Raises a `MismatchError` where the traces hold nothing that an algorithm could judge.
    """
    check_poolable(traces)
    support = Support.of(traces, algorithms)
    question = Question(support.judged, support.needs, theory)
    summary = ClippingSummary(question)
    tasks = [_Task(trace.folder, number, tuple(trace.shards), question) for number, trace in enumerate(traces)]
    for part in _summaries(tasks, workers):
        summary.merge(part)
        on_responses(part.seen)
    if summary.seen == sum(summary.lacking.values()):
        raise MismatchError(
            f"No response in {traces[0].folder} has every column that these algorithms need "
            f"({', '.join(summary.lacking)} is missing). Choose others with --algorithm, or record it again."
        )
    return ClippingAnalysis(traces, support, summary)


@dataclass(frozen=True)
class _Task:
    """Shards of one trace, and the question: what a process needs to summarise them."""

    folder: Path
    trace: int
    shards: tuple[Path, ...]
    question: Question

    def split(self) -> list[_Task]:
        """One for each shard, the unit of work."""
        return [replace(self, shards=(path,)) for path in self.shards]


def _summarise(task: _Task) -> Iterator[ClippingSummary]:
    """A summary of each shard, in order."""
    columns = (*_COLUMNS, *(name.rsplit("_", 1)[0] for name in task.question.needs.columns))
    if task.question.needs.top_k:
        columns = (*columns, "topk_ids")
    if task.question.needs.full:
        columns = (*columns, "tv_full", "kl_full")
    for _, batches in Trace(task.folder).batches_by_shard(columns, task.shards):
        summary = ClippingSummary(task.question)
        for batch in batches:
            summary.update(batch)
        summary.overlap.examples["trace"] = task.trace
        yield summary


def _summarise_one(task: _Task) -> list[ClippingSummary]:
    return list(_summarise(task))


def _summaries(tasks: Sequence[_Task], workers: int) -> Iterator[ClippingSummary]:
    """The summary of each shard in order; at most two per worker wait for their turn."""
    single = [part for task in tasks for part in task.split()]
    workers = min(workers, len(single))
    if workers <= 1:  # the next shard is read meanwhile
        for task in tasks:
            yield from _summarise(task)
        return
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=_start_worker) as pool:
        with _deaf_to_interrupts():  # inherited: a worker that is still importing does not show a traceback
            waiting = deque(pool.submit(_summarise_one, part) for part in single[: 2 * workers])
        for part in [*single[2 * workers :], *[None] * len(waiting)]:
            try:
                yield from waiting.popleft().result()
            except BrokenProcessPool as error:
                raise MismatchError(
                    "A worker process died, perhaps because the memory ran out. Use fewer --workers."
                ) from error
            if part is not None:
                waiting.append(pool.submit(_summarise_one, part))


@contextmanager
def _deaf_to_interrupts() -> Iterator[None]:
    """No Ctrl-C for the processes that are started meanwhile; elsewhere than in the main thread nothing changes."""
    if current_thread() is not main_thread():
        yield
        return
    before = signal(SIGINT, SIG_IGN)
    try:
        yield
    finally:
        signal(SIGINT, before)


def _start_worker() -> None:
    import torch

    torch.set_num_threads(1)
    signal(SIGINT, SIG_DFL)  # Ctrl-C ends a worker without a traceback; the parent says what happened


def clipping_json(
    analysis: ClippingAnalysis, compared: Sequence[Algorithm] = (), arguments: Sequence[str] = ()
) -> dict[str, Any]:
    """What `clipstats --json` prints (docs/clipstats.md): of two compared algorithms, and the flags asked for."""
    result = clipping_result(analysis.summary, _BLOCKED_TOKENS)
    vocabulary = analysis.traces[0].vocabulary
    for algorithm in result["algorithms"]:
        for rows in algorithm["blocked_tokens"].values():
            for row in rows:
                row["text"] = vocabulary.decode([row["token_id"]])
                row["class"] = token_class(row["text"])
    return {
        "format": FORMAT,
        "version": VERSION,
        "traces": shown([str(trace.folder) for trace in analysis.traces]),
        "arguments": list(arguments),
        "compared": [algorithm.name for algorithm in compared],
        "about": about(analysis.traces, analysis.summary.lacking.get("logp_trainer", 0)),
        "has": analysis.support.has,
        "skipped": [{"algorithm": name, "reason": reason} for name, reason in analysis.support.skipped.items()],
        **result,
    }


def clipping_plot_data(
    analysis: ClippingAnalysis, result: dict[str, Any], compared: Sequence[Algorithm]
) -> ClippingPlotData:
    """What the plots draw: the numbers, and the sample of tokens under two algorithms."""
    rows = analysis.summary.sample.result()
    bits = [np.uint64(analysis.algorithms.index(algorithm)) for algorithm in compared]
    blocked = [(rows["blocked_by"] >> bit) & np.uint64(1) == 1 for bit in bits]
    return ClippingPlotData(
        result=result,
        subject=f"{who_is_compared(analysis.traces[0].manifest)} · {result['counts']['tokens']:,} tokens",
        compared=tuple(compared),
        logp_rollout_N=rows["logp_rollout"],
        logp_trainer_N=rows["logp_trainer"],
        logp_recomputed_N=rows["logp_recomputed"] if analysis.support.needs.recomputed else None,
        advantage_N=rows["advantage"],
        blocked_NA=np.stack(blocked, axis=1) if blocked else np.zeros((len(rows), 0), dtype=bool),
    )
