"""Runs one job in its own process with one thread: CPU seconds without imports, and peak memory.

Processes that a job starts count too: their CPU seconds with imports, and the peak of the largest.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from lab.traces import generate
from mismatch_cli.app.cli import ENVIRONMENT
from mismatch_cli.trace.columns import REQUIRED
from mismatch_cli.trace.reader import Trace

Job = Callable[[Trace, tuple[str, ...]], str | None]  # what it found, if that is to be compared
# The job, its label, its columns, its target ratio
Plan = tuple[tuple[str, str, tuple[str, ...], float | None], ...]


def decode(trace: Trace, columns: tuple[str, ...]) -> None:
    for path in trace.shards:
        shard = pq.ParquetFile(path, memory_map=True)
        for group in range(shard.num_row_groups):
            shard.read_row_group(group, columns=[*REQUIRED, *columns], use_threads=False)


def run_job(job: Job, folder: Path, columns: tuple[str, ...]) -> None:
    """The child process: one job, its seconds and peak memory as JSON, and a digest of what it
    found.
    """
    pa.set_cpu_count(1)
    trace = Trace.open(folder)
    if job is not decode:
        import mismatch_cli.studies.clipping
        import mismatch_cli.studies.diagnosis  # noqa: F401 - imports are not part of the job
    base = _peak_mb()
    with _Watch() as workers:
        cpu, wall = _cpu(), time.monotonic()
        answer = job(trace, columns)
        cpu, wall = _cpu() - cpu, time.monotonic() - wall
    digest = hashlib.sha256((answer or "").encode()).hexdigest()
    measured = {
        "cpu": cpu,
        "wall": wall,
        "peak_mb": _peak_mb(),
        "base_mb": base,
        "workers_mb": workers.peak_mb,
    }
    print(json.dumps(measured | {"digest": digest}))


def _cpu() -> float:
    # os.times counts in hundredths of a second
    waited_for = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + waited_for.ru_utime + waited_for.ru_stime


class _Watch(Thread):
    """The peak memory of the largest process that a job starts; 0 if it starts none or the
    system does not say.
    """

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak_mb, self._over = 0.0, Event()

    def run(self) -> None:
        while not self._over.wait(0.2):
            for task in Path("/proc/self/task").glob("*/children"):
                for pid in _text(task).split():
                    own = _high_water(_text(Path("/proc", pid, "status")))
                    self.peak_mb = max(self.peak_mb, own)

    def __enter__(self) -> _Watch:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self.join()


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # it has ended
        return ""


def _high_water(status: str) -> float:
    return int(status.split("VmHWM:")[1].split()[0]) / 1024 if "VmHWM:" in status else 0.0


def _peak_mb() -> float:
    # Getrusage would count the parent's memory at the fork
    own = _high_water(_text(Path("/proc/self/status")))
    if own:
        return own
    # macOS counts bytes, Linux kibibytes
    unit = 2**20 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


def environment_of(*, own: bool) -> dict[str, str]:
    """Make this checkout importable; our own jobs get the program's settings, a floor keeps its
    defaults.
    """
    root = str(Path(__file__).parents[1])
    path = os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])
    return os.environ | {"PYTHONPATH": path} | (ENVIRONMENT if own else {})


def measure(
    script: str, name: str, folder: Path, columns: tuple[str, ...], repeats: int
) -> dict[str, Any]:
    """The best of several runs."""
    threads = dict.fromkeys(
        ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "POLARS_MAX_THREADS"), "1"
    )
    flags = ["--job", name, "--folder", str(folder), "--columns", ",".join(columns)]
    environment = environment_of(own=name != "decode") | threads
    runs = []
    for _ in range(repeats):
        child = subprocess.run(
            [sys.executable, script, *flags], env=environment, check=True, capture_output=True
        )
        runs.append(json.loads(child.stdout))
    return min(runs, key=_cpu_of)


def _cpu_of(run: dict[str, Any]) -> float:
    seconds: float = run["cpu"]
    return seconds


def report(script: str, plan: Plan, folder: Path, tokens: int, repeats: int) -> Iterator[str]:
    """A line per job, next to decoding the same columns, run alternately: the best of each."""
    yield f"{'job':<28}{'CPU s / Mtok':>14}{'decode':>10}{'ratio':>8}{'target':>8}{'peak MB':>10}{'at start':>10}"
    for name, label, columns, target in plan:
        floors, jobs = [], []
        for _ in range(repeats):
            floors.append(measure(script, "decode", folder, columns, 1))
            jobs.append(measure(script, name, folder, columns, 1))
        floor, job = min(floors, key=_cpu_of), min(jobs, key=_cpu_of)
        limit = "" if target is None else f"≤ {target:g}"
        yield (
            f"{label:<28}{job['cpu'] / tokens * 1e6:>14.3f}{floor['cpu'] / tokens * 1e6:>10.3f}"
            f"{job['cpu'] / floor['cpu']:>8.1f}{limit:>8}{job['peak_mb']:>10.0f}{job['base_mb']:>10.0f}"
        )


def command_line(
    doc: str | None, jobs: Mapping[str, Job], *, top_k: int, repeats: int
) -> argparse.ArgumentParser:
    """The flags of every trace benchmark, and those with which it calls itself for one job."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--top-k", type=int, default=top_k)
    parser.add_argument("--repeats", type=int, default=repeats)
    parser.add_argument("--folder", type=Path, help="keep the generated trace here, and reuse it")
    parser.add_argument("--only", help="run the jobs of the plan whose label contains this")
    parser.add_argument("--job", choices=[*jobs, "decode"], help=argparse.SUPPRESS)
    parser.add_argument("--columns", help=argparse.SUPPRESS)
    return parser


def run_asked(options: argparse.Namespace, jobs: Mapping[str, Job]) -> None:
    """The child process: run the requested job."""
    run_job(
        (dict(jobs) | {"decode": decode})[options.job],
        options.folder,
        tuple(options.columns.split(",")),
    )


def main(
    script: str, doc: str | None, jobs: Mapping[str, Job], plan: Plan, *, top_k: int, updates: float
) -> None:
    """The command line of a benchmark: generate a trace and run the plan, or, as a child, one
    job.
    """
    parser = command_line(doc, jobs, top_k=top_k, repeats=2)
    parser.add_argument("--tokens", type=int, default=20_000_000)
    options = parser.parse_args()
    if options.job:
        run_asked(options, jobs)
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        if not (folder / "manifest.json").exists():
            folder.mkdir(parents=True, exist_ok=True)
            print(f"Generating {options.tokens:,} tokens in {folder} …", file=sys.stderr)
            generate(folder, options.tokens, options.top_k, updates)
        chosen = tuple(entry for entry in plan if options.only is None or options.only in entry[1])
        for line in report(script, chosen, folder, options.tokens, options.repeats):
            print(line, flush=True)
