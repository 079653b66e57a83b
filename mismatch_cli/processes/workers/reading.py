"""Runs a pass over traces with the chosen workers."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

from mismatch_cli.base.memory import map_buffer_of_products
from mismatch_cli.processes.workers import Workers
from mismatch_cli.processes.workers.executor import Executor, InThisProcess
from mismatch_cli.processes.workers.leaf import Progress
from mismatch_cli.processes.workers.portions import Part, TracePass
from mismatch_cli.trace.reader import Trace


def executor(workers: Workers, traces: Sequence[Trace]) -> AbstractContextManager[Executor]:
    """The chosen executor; this process if there is only one portion or one worker."""
    map_buffer_of_products()  # before the pass takes the memory
    if isinstance(workers.who, str):
        from mismatch_cli.processes.workers.on_ray import cluster

        return cluster(workers, traces)
    alone = InThisProcess(traces, workers)
    if min(workers.who, len(alone.portions)) <= 1:
        return nullcontext(alone)
    from mismatch_cli.processes.workers.processes import processes

    return processes(workers, traces)


def run_pass(
    traces: Sequence[Trace],
    question: TracePass[Part],
    workers: Workers,
    on_responses: Progress = lambda _: None,
) -> Part:
    """The result of one pass over some traces."""
    with executor(workers, traces) as reader:
        return reader.reduced(reader.portions, lambda _: question, on_responses)
