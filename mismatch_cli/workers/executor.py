"""Who reads: this process, several, or a Ray cluster; what comes of it is the same to the bit."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from mismatch_cli.trace.reader import Trace
from mismatch_cli.workers import Workers
from mismatch_cli.workers.cache import Cache
from mismatch_cli.workers.leaf import Leaf, Progress, read_portion
from mismatch_cli.workers.portions import Part, Pass, Portion, portions
from mismatch_cli.workers.reduction import Parts, Reduction


class Executor(ABC):
    """Reads portions and merges what is found, and says of each how many responses there were."""

    def __init__(self, traces: Sequence[Trace], workers: Workers) -> None:
        for trace in traces:
            trace.leave_out({})  # whoever looked into it before may have found shards that are broken
        self.traces = traces
        self.portions = portions(traces)
        self.cache = None if workers.cache is None else Cache(workers.cache.absolute())
        self.skip_broken = workers.skip_broken

    @abstractmethod
    def reduced(
        self,
        asked: Sequence[Portion],
        pass_over: Callable[[Portion], Pass[Part]],
        on_responses: Progress = ...,
        on_parts: Callable[[Iterator[Part]], None] | None = None,
    ) -> Part:
        """What is found in these portions, in order, merged.

        What `pass_over` gives for a portion may know what has been found in those before, which `on_parts` is told
        where it can be, but must find the same.
        """

    def took(self, portion: Portion, leaf: Leaf[Any]) -> None:
        """A portion is read: broken shards are noted in their trace."""
        if leaf.broken:
            self.traces[portion.trace].leave_out(leaf.broken)


class InThisProcess(Executor):
    """One portion after the other, and the next row group is read meanwhile."""

    def reduced(
        self,
        asked: Sequence[Portion],
        pass_over: Callable[[Portion], Pass[Part]],
        on_responses: Progress = lambda _: None,
        on_parts: Callable[[Iterator[Part]], None] | None = None,
    ) -> Part:
        tree: Reduction[Part] = Reduction(Parts)
        for portion in asked:
            leaf = read_portion(
                pass_over(portion), portion, self.cache, skip_broken=self.skip_broken, tell=on_responses
            )
            self.took(portion, leaf)
            tree.add(leaf.part)
            if on_parts and not self.cache:  # what is kept does not depend on what lies before it
                on_parts(tree.nodes())
        return tree.result()
