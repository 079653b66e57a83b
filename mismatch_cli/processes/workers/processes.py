"""Reads in several processes on this machine, which end with the block and are replaced if one
dies.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from itertools import islice
from multiprocessing import active_children, get_context
from multiprocessing.process import BaseProcess
from signal import SIG_DFL, SIG_IGN, SIGINT, signal
from threading import current_thread, main_thread
from typing import Any

from mismatch_cli.base.child_python import safe_path
from mismatch_cli.base.errors import MismatchError
from mismatch_cli.base.memory import map_buffer_of_products
from mismatch_cli.processes.workers import Workers
from mismatch_cli.processes.workers.cache import Cache
from mismatch_cli.processes.workers.executor import Executor
from mismatch_cli.processes.workers.leaf import Progress, read_portion
from mismatch_cli.processes.workers.portions import Leaf, Part, Portion, TracePass
from mismatch_cli.processes.workers.reduction import LocalGroup, Reduction
from mismatch_cli.trace.reader import Trace

_WAITING = 2  # portions per worker that are being read or wait to be merged
_ATTEMPTS = 3  # for a portion whose worker dies


class _Processes(Executor):
    """Reads a few portions ahead in a pool of processes, and merges them in order."""

    def __init__(self, workers: Workers, traces: Sequence[Trace]) -> None:
        super().__init__(traces, workers)
        self._number = min(int(workers.who), len(self.portions))
        self.pool = self._new_pool()

    def _new_pool(self) -> ProcessPoolExecutor:
        return ProcessPoolExecutor(
            self._number, mp_context=get_context("spawn"), initializer=_start_worker
        )

    def reduced(
        self,
        subset: Sequence[Portion],
        pass_over: Callable[[Portion], TracePass[Part]],
        on_responses: Progress = lambda _: None,
        on_parts: Callable[[Iterator[Part]], None] | None = None,
    ) -> Part:
        tree: Reduction[Part] = Reduction(LocalGroup)
        for portion, leaf in self._leaves(subset, pass_over):
            self.note_broken(portion, leaf)
            tree.add(leaf.part)
            if on_parts and not self.cache:
                on_parts(tree.nodes())
            on_responses(leaf.responses)
        return tree.result()

    def _leaves(
        self, subset: Sequence[Portion], pass_over: Callable[[Portion], TracePass[Any]]
    ) -> Iterator[tuple[Portion, Leaf[Any]]]:
        unread = iter(subset)
        waiting: deque[tuple[Portion, Future[bytes]]] = deque()

        def submit(batch: Iterable[Portion]) -> None:
            for portion in batch:
                waiting.append((portion, self._submit(pass_over, portion)))

        submit(islice(unread, _WAITING * self._number))
        attempts = _ATTEMPTS
        while waiting:
            portion, future = waiting[0]
            try:
                leaf = pickle.loads(future.result())
            except BrokenProcessPool as error:
                attempts -= 1
                if not attempts:
                    raise MismatchError(
                        f"A worker process died {_ATTEMPTS} times, perhaps for lack of memory. "
                        "Use fewer --workers."
                    ) from error
                self.pool.shutdown(wait=False)
                self.pool = self._new_pool()
                # One dead worker breaks the whole pool, and with it all that waits.
                retried = [portion for portion, _ in waiting]
                waiting.clear()
                submit(retried)
                continue
            waiting.popleft()
            attempts = _ATTEMPTS
            yield portion, leaf
            submit(islice(unread, 1))

    def _submit(
        self, pass_over: Callable[[Portion], TracePass[Any]], portion: Portion
    ) -> Future[bytes]:
        try:
            # Inherited: a worker that is still importing shows no traceback
            with safe_path(), _deaf_to_interrupts():
                return self.pool.submit(
                    _read_alone, pass_over(portion), portion, self.cache, self.skip_broken
                )
        except BrokenProcessPool as error:
            # A worker died after its last answer: the error is raised when this portion is due.
            broken: Future[bytes] = Future()
            broken.set_exception(error)
            return broken


def _read_alone(
    question: TracePass[Any], portion: Portion, cache: Cache | None, skip_broken: bool
) -> bytes:
    """In a worker: read a portion; the result stays pickled, and small, until its turn."""
    leaf = read_portion(question, portion, cache, skip_broken=skip_broken)
    return pickle.dumps(leaf, pickle.HIGHEST_PROTOCOL)


@contextmanager
def processes(workers: Workers, traces: Sequence[Trace]) -> Iterator[Executor]:
    """Worker processes, which are terminated at once if anything goes wrong."""
    children_before = set(active_children())
    reader = _Processes(workers, traces)
    try:
        yield reader
    except BaseException:
        _terminate(reader.pool, set(active_children()) - children_before)
        raise
    finally:
        reader.pool.shutdown()


def _terminate(pool: ProcessPoolExecutor, workers: Collection[BaseProcess]) -> None:
    """End the workers of a pool at once."""
    results = pool._result_queue
    pool.shutdown(wait=False, cancel_futures=True)
    for worker in workers:
        worker.terminate()
    for worker in workers:
        worker.join()
    # A worker that ended in the middle of a result leaves half of it in the pipe. The pool's thread
    # would wait for the rest, and Python for the thread when it exits: now the pipe ends there.
    if results is not None:
        results._writer.close()  # type: ignore[attr-defined]


@contextmanager
def _deaf_to_interrupts() -> Iterator[None]:
    """Shield processes that are started meanwhile from Ctrl-C; does nothing outside the main
    thread.
    """
    if current_thread() is not main_thread():
        yield
        return
    before = signal(SIGINT, SIG_IGN)
    try:
        yield
    finally:
        signal(SIGINT, before)


def _start_worker() -> None:
    signal(SIGINT, SIG_DFL)  # Ctrl-C ends a worker without a traceback; the parent reports it
    map_buffer_of_products()
