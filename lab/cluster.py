"""A Ray cluster compared with one and two processes: seconds, memory, lost workers, and many small
shards.

    python -m lab.cluster [--tokens 20] [--shards 10000] [--tasks 1000] [--kills 10] [--check]

Two nodes of one CPU each run on this machine. `report` reads a generated trace with one process,
two, and the cluster, alternately, each in its own process; then workers of the cluster are killed
with SIGKILL while it reads; then it reads a trace of many small shards, and one of fewer shards
that are a task each: three levels of the tree. Every answer must equal that of one process to the
bit.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import resource
import signal
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

from lab.traces import generate

_ROUNDS = 3
_TARGET = 1.5  # times the seconds of two processes


@contextmanager
def cluster() -> Iterator[str]:
    """The address of a head and another node."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    from ray.cluster_utils import Cluster

    room = 512 * 2**20
    made = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 1, "object_store_memory": room, "include_dashboard": False},
    )
    made.add_node(num_cpus=1, object_store_memory=room)
    try:
        yield made.address
    finally:
        made.shutdown()


def measured(
    folder: Path, who: int | str, address: str, portion: int | None, kills: int, answer: Any
) -> None:
    """In its own process: the JSON of `report`, seconds, and the peak memory of this process and
    of a worker.
    """
    from mismatch_cli.processes.workers import Workers, portions
    from mismatch_cli.studies.mismatch import analyse_mismatch
    from mismatch_cli.trace.reader import Trace

    if portion is not None:
        # Small portions give a short trace many tasks, of which some are lost
        portions.PORTION_BYTES = portion
    if who == "ray":
        import ray

        ray.init(address, log_to_driver=False, logging_level=logging.ERROR)
    watched = Watched(kills)
    watched.start()
    began = time.perf_counter()
    result = json.dumps(analyse_mismatch([Trace.open(folder)], workers=Workers(who)).to_json())
    seconds = time.perf_counter() - began
    watched.done.set()
    watched.join()
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    answer.send(Measured(result, seconds, own, watched.largest / 1024, watched.killed))


class Measured(NamedTuple):
    """The JSON of `report`, its seconds, the peak MB here and of a worker, and workers killed."""

    result: str
    seconds: float
    own_mb: float
    worker_mb: float
    killed: int


class Watched(threading.Thread):
    """The largest resident memory of a reading process, KiB; now and then one of them is killed."""

    def __init__(self, kills: int) -> None:
        super().__init__()
        self.done = threading.Event()
        self.largest = self.killed = 0
        self._kills = kills

    def run(self) -> None:
        rng, last = random.Random(0), time.monotonic()
        while not self.done.wait(0.05):
            reading = list(workers())
            self.largest = max([self.largest, *map(resident, reading)])
            if self.killed < self._kills and reading and time.monotonic() - last > 0.7:
                os.kill(rng.choice(reading), signal.SIGKILL)
                self.killed += 1
                last = time.monotonic()


def workers() -> Iterator[int]:
    """Processes that read portions, on a cluster (`ray::_read_there`) or as children
    (`spawn_main`).
    """
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes()
        except OSError:
            continue
        is_child = b"spawn_main" in line and parent(path.parent) == os.getpid()
        if is_child or line.startswith(b"ray::_"):
            yield int(path.parent.name)


def parent(process: Path) -> int:
    try:
        return int(process.joinpath("stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def resident(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    for line in lines:
        if line.startswith("VmRSS:"):
            return int(line.split()[1])
    return 0


def apart(
    folder: Path, who: int | str, address: str, portion: int | None = None, kills: int = 0
) -> Measured:
    context = get_context("spawn")
    received, answer = context.Pipe(duplex=False)
    process = context.Process(target=measured, args=(folder, who, address, portion, kills, answer))
    process.start()
    # Otherwise a death would go unnoticed
    answer.close()
    result: Measured = received.recv()
    process.join()
    return result


def race(folder: Path, address: str, tokens: int) -> float:
    """The seconds of the cluster as a multiple of those of two processes."""
    ways: tuple[int | str, ...] = (1, 2, "ray")
    runs: dict[int | str, list[Measured]] = {who: [] for who in ways}
    for _ in range(_ROUNDS):
        for who in ways:
            runs[who].append(apart(folder, who, address))
    expected = runs[1][0].result
    for who, own_runs in runs.items():
        assert all(run.result == expected for run in own_runs)
        seconds = [run.seconds for run in own_runs]
        own, worker = max(run.own_mb for run in own_runs), max(run.worker_mb for run in own_runs)
        typical, spread = statistics.median(seconds), f"({min(seconds):.2f}–{max(seconds):.2f})"
        memory = f"{own:.0f} MB here, {worker:.0f} MB in a worker"
        print(
            f"--workers {who}: {typical:.2f} s {spread}, {typical / tokens:.3f} s per million "
            f"tokens; {memory}"
        )
    pairs = zip(runs["ray"], runs[2], strict=True)
    return statistics.median(shared.seconds / two.seconds for shared, two in pairs)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=20, help="million tokens")
    parser.add_argument("--shards", type=int, default=10_000)
    parser.add_argument("--tasks", type=int, default=1_000)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument(
        "--check", action="store_true", help=f"exit code 1 above {_TARGET:g} times two processes"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, cluster() as address:
        trace = Path(folder) / "trace"
        generate(trace, options.tokens * 10**6, top_k=0, updates=1.0, workers=2)
        ratio = race(trace, address, options.tokens)
        print(f"the cluster takes {ratio:.2f} times the seconds of two processes")
        expected = apart(trace, 1, address, portion=2**20).result
        run = apart(trace, "ray", address, portion=2**20, kills=options.kills)
        assert run.result == expected, "lost workers changed the answer"
        print(f"{run.killed} workers killed while it read: the same bits, {run.seconds:.1f} s")
        small(Path(folder) / "small", options.shards, address, None)
        small(Path(folder) / "tasks", options.tasks, address, 1)
    if options.check and ratio > _TARGET:
        raise SystemExit(1)


def small(folder: Path, shards: int, address: str, portion: int | None) -> None:
    """Many files of 512 tokens, read in portions as usual, or with a task each."""
    if not folder.exists():
        generate(folder, shards * 512, top_k=0, updates=1.0, workers=2, shard_tokens=512)
    alone = apart(folder, 1, address, portion=portion)
    shared = apart(folder, "ray", address, portion=portion)
    assert shared.result == alone.result
    tasks = "a task each" if portion else "in portions"
    print(
        f"{shards:,} small shards, {tasks}: {shared.seconds:.0f} s on the cluster, "
        f"{alone.seconds:.0f} s in one process"
    )
    print(
        f"memory: {shared.own_mb:.0f} MB here against {alone.own_mb:.0f} in one process, "
        f"{shared.worker_mb:.0f} MB in a worker"
    )


if __name__ == "__main__":
    main()
