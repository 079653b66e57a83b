"""Executors: this process, several processes, or a Ray cluster, all with the same result to the
bit.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from mismatch_cli.processes.workers import Workers
from mismatch_cli.processes.workers.cache import Cache
from mismatch_cli.processes.workers.leaf import Progress, read_portion
from mismatch_cli.processes.workers.portions import Leaf, Part, Portion, TracePass, portions
from mismatch_cli.processes.workers.reduction import LocalGroup, Reduction
from mismatch_cli.trace.reader import Trace


class Executor(ABC):
    """Reads portions, merges their results, and reports the number of responses in each."""

    def __init__(self, traces: Sequence[Trace], workers: Workers) -> None:
        for trace in traces:
            trace.leave_out({})  # earlier readers may have found broken shards
        self.traces = traces
        self.portions = portions(traces)
        self.cache = None if workers.cache is None else Cache(workers.cache.absolute())
        self.skip_broken = workers.skip_broken

    @abstractmethod
    def reduced(
        self,
        subset: Sequence[Portion],
        pass_over: Callable[[Portion], TracePass[Part]],
        on_responses: Progress = ...,
        on_parts: Callable[[Iterator[Part]], None] | None = None,
    ) -> Part:
        """The merged results of a subset of the portions, in their order.

        The pass from `pass_over` may use the results of earlier portions, which `on_parts` receives
        where possible, but its own result must be the same without them.
        """

    def note_broken(self, portion: Portion, leaf: Leaf[Any]) -> None:
        """Tell the trace of a portion which shards its reader left out."""
        if leaf.broken:
            self.traces[portion.trace].leave_out(leaf.broken)


class InThisProcess(Executor):
    """Reads one portion after the other, and prefetches the next row group."""

    def reduced(
        self,
        subset: Sequence[Portion],
        pass_over: Callable[[Portion], TracePass[Part]],
        on_responses: Progress = lambda _: None,
        on_parts: Callable[[Iterator[Part]], None] | None = None,
    ) -> Part:
        # The tree of many workers: merged one after the other, float sums would have other bits.
        tree: Reduction[Part] = Reduction(LocalGroup)
        for portion in subset:
            leaf = read_portion(
                pass_over(portion),
                portion,
                self.cache,
                skip_broken=self.skip_broken,
                on_responses=on_responses,
            )
            self.note_broken(portion, leaf)
            tree.add(leaf.part)
            # A part in the cache must not depend on which portions were read before it.
            if on_parts and not self.cache:
                on_parts(tree.nodes())
        return tree.result()
