"""A pass over traces, portion by portion, in this process or in several: any number gives the same bits.

A portion is a few shards of a trace that lie behind each other. Where one ends follows from the files alone, whoever
reads it starts with an empty accumulator, and what comes of it is merged in the order of the portions.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import groupby, islice
from multiprocessing import active_children, get_context
from pathlib import Path
from signal import SIG_DFL, SIG_IGN, SIGINT, signal
from threading import current_thread, main_thread
from typing import Any, Protocol, TypeVar, cast

from mismatch_cli.errors import MismatchError
from mismatch_cli.trace.reader import RowGroup, Trace

PORTION_BYTES = 2**25  # of files; sending and merging what is counted of it take less than a tenth of the counting
_WAITING = 2  # portions per worker that are read, or wait for their turn to be merged

Progress = Callable[[int], None]


@dataclass(frozen=True)
class Portion:
    """Shards of one trace that are read together."""

    trace: int  # its number among the traces of the pass
    folder: Path
    shards: tuple[Path, ...]


def portions(traces: Sequence[Trace]) -> list[Portion]:
    """All shards in order; each portion ends with the shard that makes it large enough."""
    found: list[Portion] = []
    for number, trace in enumerate(traces):
        shards, size = [], 0
        for path in trace.shards:
            shards.append(path)
            size += path.stat().st_size
            if size >= PORTION_BYTES or path == trace.shards[-1]:
                found.append(Portion(number, trace.folder, tuple(shards)))
                shards, size = [], 0
    return found


Part = TypeVar("Part")
Part_co = TypeVar("Part_co", covariant=True)


class Pass(Protocol[Part_co]):
    """What is read of each portion alone, in whatever process: it can be pickled, and so can what it finds."""

    @property
    def columns(self) -> Sequence[str] | None:
        """Those that are read beside the row keys, lengths and log μ; None: all."""

    def read(self, portion: Portion, groups: Iterator[RowGroup]) -> Part_co:
        """What is found in the row groups of a portion, an accumulator for one."""


class Executor(Protocol):
    """Who reads."""

    def parts(
        self, asked: Sequence[Portion], pass_over: Callable[[Portion], Pass[Part]], on_responses: Progress = ...
    ) -> Iterator[Part]:
        """What is found in each portion, in order.

        What `pass_over` gives for a portion may know what has been found in those before, but must find the same.
        """


def executor(workers: int, asked: Sequence[Portion]) -> AbstractContextManager[Executor]:
    """This process, where one portion or one worker is all there is, else processes that end with the block."""
    workers = min(workers, len(asked))
    return nullcontext(_ThisProcess()) if workers <= 1 else _processes(workers)


def parts_of(
    traces: Sequence[Trace], asked: Pass[Part], workers: int = 1, on_responses: Progress = lambda _: None
) -> Iterator[Part]:
    """What one pass finds in each portion of some traces, in order."""
    every = portions(traces)
    with executor(workers, every) as reader:
        yield from reader.parts(every, lambda _: asked, on_responses)


class _ThisProcess:
    """The next row group is read meanwhile."""

    def parts(
        self,
        asked: Sequence[Portion],
        pass_over: Callable[[Portion], Pass[Part]],
        on_responses: Progress = lambda _: None,
    ) -> Iterator[Part]:
        for (_, folder), of_trace in groupby(asked, key=lambda portion: (portion.trace, portion.folder)):
            yield from self._of_trace(Trace(folder), list(of_trace), pass_over, on_responses)

    def _of_trace(
        self, trace: Trace, asked: Sequence[Portion], pass_over: Callable[[Portion], Pass[Part]], tell: Progress
    ) -> Iterator[Part]:
        place = {path: number for number, portion in enumerate(asked) for path in portion.shards}
        groups = trace.row_groups(pass_over(asked[0]).columns, list(place))
        done = 0
        for number, own in groupby(groups, key=lambda group: place[group.path]):
            for empty in asked[done:number]:
                yield pass_over(empty).read(empty, iter(()))
            yield pass_over(asked[number]).read(asked[number], _told(own, tell))
            done = number + 1
        for empty in asked[done:]:
            yield pass_over(empty).read(empty, iter(()))


def _told(groups: Iterator[RowGroup], tell: Progress) -> Iterator[RowGroup]:
    """The same row groups; of each it is told how many responses were read once the next one is asked for."""
    for group in groups:
        yield group
        tell(group.batch.num_responses)


class _Processes:
    def __init__(self, pool: ProcessPoolExecutor, workers: int) -> None:
        self._pool, self._workers = pool, workers

    def parts(
        self,
        asked: Sequence[Portion],
        pass_over: Callable[[Portion], Pass[Part]],
        on_responses: Progress = lambda _: None,
    ) -> Iterator[Part]:
        left = iter(asked)
        submit = partial(self._submit, pass_over)
        waiting = deque(map(submit, islice(left, _WAITING * self._workers)))
        while waiting:
            try:
                pickled, responses = waiting.popleft().result()
            except BrokenProcessPool as error:
                raise MismatchError(
                    "A worker process died, perhaps because the memory ran out. Use fewer --workers."
                ) from error
            yield pickle.loads(pickled)
            on_responses(responses)
            waiting.extend(map(submit, islice(left, 1)))

    def _submit(self, pass_over: Callable[[Portion], Pass[Any]], portion: Portion) -> Future[tuple[bytes, int]]:
        with _deaf_to_interrupts():  # inherited: a worker that is still importing does not show a traceback
            return self._pool.submit(_read_alone, pass_over(portion), portion)


def _read_alone(asked: Pass[Any], portion: Portion) -> tuple[bytes, int]:
    """In a worker: what is found, pickled until its turn has come, when it is large again; and how many responses."""
    seen: list[int] = []
    groups = Trace(portion.folder).row_groups(asked.columns, portion.shards)
    return pickle.dumps(asked.read(portion, _told(groups, seen.append)), pickle.HIGHEST_PROTOCOL), sum(seen)


@contextmanager
def _processes(workers: int) -> Iterator[Executor]:
    """Workers that are ended with whatever goes wrong: nobody waits for what they are at."""
    others = set(active_children())
    pool = ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=_start_worker)
    try:
        yield cast("Executor", _Processes(pool, workers))
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        for worker in set(active_children()) - others:
            worker.terminate()
        raise
    finally:
        pool.shutdown()


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
    signal(SIGINT, SIG_DFL)  # Ctrl-C ends a worker without a traceback; the parent says what happened
