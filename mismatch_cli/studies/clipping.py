"""One pass over traces, by one process or several: every algorithm that the traces can support, on the same tokens."""

from __future__ import annotations

import re
import unicodedata
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from multiprocessing import get_context
from pathlib import Path
from signal import SIG_DFL, SIG_IGN, SIGINT, signal
from threading import current_thread, main_thread
from typing import Any, ClassVar

import numpy as np

from mismatch_cli.algorithms.algorithm import Algorithm
from mismatch_cli.errors import MismatchError, UsageError
from mismatch_cli.metrics.clipping.result import clipping_result
from mismatch_cli.metrics.clipping.summary import ClippingSummary, Question
from mismatch_cli.places import shown
from mismatch_cli.studies.clipping_support import Support
from mismatch_cli.studies.study import Study, about, check_poolable, who_is_compared
from mismatch_cli.trace.reader import Trace

_BLOCKED_TOKENS = 50
_PAPER = ("grpo-clip-higher", "dppo-binary-tv")  # the two of its first figure
_COLUMNS = (
    "version_rollout", "version_trainer", "reward", "response_ids", "loss_mask", "logp_trainer", "entropy_trainer",
)  # fmt: skip


_NONE = np.zeros(0, dtype=np.float32)


@dataclass(frozen=True)
class ClippingPlotData:
    """`_N` the tokens of the sample, `_NA` the same × the compared algorithms; log-probabilities in nats."""

    STUDY: ClassVar[str] = "clipping"

    result: Mapping[str, Any]  # what docs/clipstats.md describes
    subject: str = ""  # who is compared, in one line
    compared: tuple[Algorithm, ...] = ()  # at most two: the columns of the mask regions
    logp_rollout_N: np.ndarray = field(default_factory=lambda: _NONE)
    logp_trainer_N: np.ndarray = field(default_factory=lambda: _NONE)  # -inf: out of the trainer's support
    logp_recomputed_N: np.ndarray | None = None
    advantage_N: np.ndarray | None = None  # None: the trace has no advantages, every token stands for both signs
    blocked_NA: np.ndarray = field(default_factory=lambda: np.zeros((0, 0), dtype=bool))

    @property
    def rows(self) -> Sequence[Mapping[str, Any]]:
        """The algorithms of the result, in the order of the table."""
        rows: Sequence[Mapping[str, Any]] = self.result.get("algorithms", ())
        return rows

    @property
    def blocking(self) -> list[Mapping[str, Any]]:
        """Those that block at least one token."""
        return [row for row in self.rows if any(part and part["value"] for part in row["blocked"].values())]

    @property
    def has_advantages(self) -> bool:
        return bool(self.result.get("has", {}).get("advantages"))

    def when(self, sign: str) -> str:
        """How the tokens of a sign (`>` or `<`) are called: without advantages the question is hypothetical."""
        return f"A {sign} 0" if self.has_advantages else f"if A {sign} 0"


@dataclass(frozen=True)
class ClippingAnalysis(Study):
    """What was counted, and what the traces could not support."""

    STUDY, FORMAT = "clipping", "mismatch-cli clipstats"

    traces: Sequence[Trace]
    support: Support
    summary: ClippingSummary
    asked: tuple[Algorithm, ...] = ()  # the two to compare; empty: those that tell the most
    arguments: tuple[str, ...] = ()  # what was asked for besides the traces

    @property
    def algorithms(self) -> tuple[Algorithm, ...]:
        """Those that were judged."""
        return self.summary.question.algorithms

    @cached_property
    def compared(self) -> tuple[Algorithm, ...]:
        """Two to compare, at most: as asked, else those of the paper, else the first that block anything."""
        if self.asked:
            return self.asked
        by_name = {algorithm.name: algorithm for algorithm in self.algorithms}
        paper = [by_name[name] for name in _PAPER if name in by_name]
        cells = self.summary.cells.by_mu[1:]
        blocking = [algorithm for algorithm, counts in zip(self.algorithms, cells, strict=True) if counts.any()]
        return tuple(dict.fromkeys([*paper, *blocking, *self.algorithms]))[:2]

    def to_json(self) -> dict[str, Any]:
        """What `clipstats --json` prints (docs/clipstats.md)."""
        result = clipping_result(self.summary, _BLOCKED_TOKENS)
        vocabulary = self.traces[0].vocabulary
        for algorithm in result["algorithms"]:
            for rows in algorithm["blocked_tokens"].values():
                for row in rows:
                    row["text"] = vocabulary.decode([row["token_id"]])
                    row["class"] = token_class(row["text"])
        return {
            "format": self.FORMAT,
            "version": self.VERSION,
            "traces": shown([str(trace.folder) for trace in self.traces]),
            "arguments": shown(list(self.arguments)),
            "compared": [algorithm.name for algorithm in self.compared],
            "about": about(self.traces, self.summary.lacking.get("logp_trainer", 0)),
            "has": self.support.has,
            "skipped": [{"algorithm": name, "reason": reason} for name, reason in self.support.skipped.items()],
            **result,
        }

    @cached_property
    def plot_data(self) -> ClippingPlotData:
        """What the plots draw: the numbers, and the sample of tokens under two algorithms."""
        rows = self.summary.sample.result()
        bits = [np.uint64(self.algorithms.index(algorithm)) for algorithm in self.compared]
        blocked = [(rows["blocked_by"] >> bit) & np.uint64(1) == 1 for bit in bits]
        return ClippingPlotData(
            result=self.result,
            subject=f"{who_is_compared(self.traces[0].manifest)} · {self.result['counts']['tokens']:,} tokens",
            compared=self.compared,
            logp_rollout_N=rows["logp_rollout"],
            logp_trainer_N=rows["logp_trainer"],
            logp_recomputed_N=rows["logp_recomputed"] if self.support.needs.recomputed else None,
            advantage_N=rows["advantage"],
            blocked_NA=np.stack(blocked, axis=1),
        )


def analyse_clipping(
    traces: Sequence[Trace],
    algorithms: Sequence[Algorithm],
    asked: Sequence[Algorithm] = (),
    *,
    theory: bool = False,
    workers: int = 1,
    arguments: Sequence[str] = (),
    on_responses: Callable[[int], None] = lambda _: None,
) -> ClippingAnalysis:
    """Judge every token with every algorithm, shard by shard; any number of workers gives the same numbers to the bit.

    Raises a `MismatchError` where the traces hold nothing that an algorithm could judge.
    """
    check_poolable(traces)
    support = Support.of(traces, algorithms)
    for algorithm in asked:
        if algorithm.name in support.skipped:
            raise UsageError(f"{algorithm.name} cannot be compared: {support.skipped[algorithm.name]}")
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
    return ClippingAnalysis(traces, support, summary, tuple(asked), tuple(arguments))


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


# Words that open or turn a step of reasoning: the examples in the appendix of arXiv 2602.04879, and their like.
_CONNECTIVE = re.compile(
    "wait|thus|since|so|therefore|hence|however|but|then|next|also|because|instead|first|second|finally|now|if|let|"
    "alternatively|and|or|while|as|for|given|suppose|assume|note|recall|here|this|that|we|when|where"
)
_OPERATORS = frozenset("+-*/=<>^%×÷·±≤≥≠≈√∑∏∫−→|&")
_OPERATOR_COMMANDS = re.compile(r"\\(times|cdot|div|frac|sqrt|sum|prod|int|pm|leq|geq|neq|approx|equiv|to|le|ge)")


def token_class(text: str) -> str:
    """digit, operator, connective (Wait, Thus, Since …), structure (punctuation, spaces, markup), or other."""
    core = text.strip()
    if core and all(unicodedata.category(c) == "Nd" for c in core):
        return "digit"
    if core and (all(c in _OPERATORS for c in core) or _OPERATOR_COMMANDS.fullmatch(core)):
        return "operator"
    if _CONNECTIVE.fullmatch(core.lower()):
        return "connective"
    if not any(c.isalnum() for c in core) or re.fullmatch(r"<[^<>\s]*>|\\[a-z]*", core):
        return "structure"
    return "other"
