"""Reads on a Ray cluster: one task per portion and per group of the tree; tasks that die are
retried elsewhere.

The driver holds only references, and the final result.
"""

from __future__ import annotations

import logging
import os
import pickle
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import chdir, contextmanager
from importlib.metadata import version
from typing import Any

from mismatch_cli.base.child_python import safe_path
from mismatch_cli.base.errors import MismatchError, first_line
from mismatch_cli.base.extras import require
from mismatch_cli.processes.workers import RAY, Workers
from mismatch_cli.processes.workers.cache import Cache
from mismatch_cli.processes.workers.executor import Executor
from mismatch_cli.processes.workers.leaf import Progress, read_portion
from mismatch_cli.processes.workers.portions import Leaf, Part, Portion, TracePass
from mismatch_cli.processes.workers.reduction import Reduction
from mismatch_cli.rules import trust_regions
from mismatch_cli.trace.reader import Trace

_WAITING = 4  # portions in flight per CPU of the cluster
_ATTEMPTS = 3
_NO_MEMORY = (
    "A node ran out of memory, also when the task was retried. Start it with fewer CPUs: ray "
    "start --num-cpus N"
)


class _OnRay(Executor):
    """Sends portions to the cluster, a few more than it has CPUs, in the order of the tree."""

    def __init__(self, workers: Workers, traces: Sequence[Trace]) -> None:
        import ray

        super().__init__(traces, workers)
        self.portions = [portion.absolute() for portion in self.portions]
        self._window = _WAITING * max(1, int(ray.cluster_resources().get("CPU", 1)))
        options: dict[str, Any] = {
            "num_cpus": 1,
            "max_retries": _ATTEMPTS,
            "retry_exceptions": [OSError],
        }
        self._read: Any = ray.remote(**options, num_returns=2, scheduling_strategy="SPREAD")(
            _read_there
        )
        self._combine: Any = ray.remote(**options)(_merge_pickled)

    def reduced(
        self,
        subset: Sequence[Portion],
        pass_over: Callable[[Portion], TracePass[Part]],
        on_responses: Progress = lambda _: None,
        # The driver sees no parts.
        on_parts: Callable[[Iterator[Part]], None] | None = None,  # noqa: ARG002
    ) -> Part:
        import ray

        tree: Reduction[Any] = Reduction(lambda: _References(self._combine))
        waiting: dict[Any, Portion] = {}
        settings = (version("mismatch-cli"), self.cache, self.skip_broken)
        with errors_of_tasks():
            for portion in subset:
                if len(waiting) >= self._window:
                    self._take(waiting, on_responses)
                question = pass_over(portion)
                files = getattr(question, "files", ())
                texts = {str(path): trust_regions.source_text(path) for path in files}
                facts, part = self._read.remote(question, portion, *settings, texts)
                waiting[facts] = portion
                tree.add(part)
            while waiting:
                self._take(waiting, on_responses)
            total: Part = pickle.loads(ray.get(tree.result()))
            return total

    def _take(self, waiting: dict[Any, Portion], on_responses: Progress) -> None:
        """Wait until one of the portions is read, and remove it from those that wait."""
        import ray

        (done,), _ = ray.wait(list(waiting), num_returns=1)
        portion = waiting.pop(done)
        leaf = ray.get(done)
        self.note_broken(portion, leaf)
        on_responses(leaf.responses)


class _References:
    """A group of the tree as references, merged by a task of the cluster."""

    def __init__(self, combine: Any) -> None:
        self._nodes: list[Any] = []
        self._combine = combine

    def take(self, node: Any) -> None:
        self._nodes.append(node)

    def merged(self) -> Any:
        if len(self._nodes) == 1:
            return self._nodes[0]
        return self._combine.remote(*self._nodes)


def _read_there(
    question: TracePass[Any],
    portion: Portion,
    expected: str,
    cache: Cache | None,
    skip_broken: bool,
    texts: dict[str, str],
) -> tuple[Leaf[Any], bytes]:
    """On a node: read a portion; the facts go to the driver, the part stays; `texts` are users'
    files.
    """
    installed = version("mismatch-cli")
    if installed != expected:
        raise MismatchError(
            f"A node of the cluster has mismatch-cli {installed}, this machine {expected}. "
            "Install one version on all."
        )
    trust_regions.register_texts(texts)
    leaf = read_portion(question, portion, cache, skip_broken=skip_broken)
    facts: Leaf[Any] = Leaf(None, leaf.responses, leaf.broken)
    return facts, pickle.dumps(leaf.part, pickle.HIGHEST_PROTOCOL)


def _merge_pickled(first: bytes, *others: bytes) -> bytes:
    """On a node: pickled parts merged from left to right, one at a time."""
    total = pickle.loads(first)
    for other in others:
        total.merge(pickle.loads(other))
    return pickle.dumps(total, pickle.HIGHEST_PROTOCOL)


@contextmanager
def cluster(workers: Workers, traces: Sequence[Trace]) -> Iterator[Executor]:
    """An executor on a cluster, until the end of the block."""
    require("ray", f"--workers {workers.who}")
    with _connected(str(workers.who)):
        yield _OnRay(workers, traces)


@contextmanager
def _connected(address: str) -> Iterator[Any]:
    """An existing cluster, at `ray://HOST:PORT`, RAY_ADDRESS or on this machine; else a new one
    on this machine.
    """
    import ray

    ours = not ray.is_initialized()
    if ours:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        try:
            # A driver puts its own current directory in front of the path of all workers.
            # Warnings are hidden since the error below explains more.
            with safe_path(), chdir("/"), warnings.catch_warnings(action="ignore"):
                ray.init(
                    None if address == RAY else address,
                    log_to_driver=False,
                    logging_level=logging.ERROR,
                )
        except (ConnectionError, OSError, ValueError, RuntimeError) as error:
            raise MismatchError(
                f"No Ray cluster answers at {os.environ.get('RAY_ADDRESS', address)} "
                f"({first_line(error)}). Start one with: ray start --head"
            ) from error
    try:
        yield ray
    finally:
        if ours:
            ray.shutdown()


@contextmanager
def errors_of_tasks() -> Iterator[None]:
    """Raise the error of a task on the cluster as if it had happened here."""
    from ray.exceptions import OutOfMemoryError, RayError, RayTaskError

    try:
        yield
    except RayTaskError as error:
        cause = error.cause
        if isinstance(cause, MismatchError):
            raise cause from None
        if isinstance(cause, MemoryError):
            raise MismatchError(_NO_MEMORY) from error
        raise MismatchError(
            f"A task of the cluster failed: {type(cause).__name__}: {first_line(cause)}."
        ) from error
    except OutOfMemoryError as error:
        raise MismatchError(_NO_MEMORY) from error
    except RayError as error:
        raise MismatchError(
            f"The cluster failed {_ATTEMPTS + 1} times on one task ({first_line(error)}). Check "
            "its nodes with: ray status"
        ) from error
