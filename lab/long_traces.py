"""Very long traces: time per million tokens, whether memory stays flat, and the gain from a second
process.

    python -m lab.long_traces                            # 200 million tokens: 4 GB of disk, half an hour
    python -m lab.long_traces --sizes 5 10 --only six    # a quick run
    python -m lab.long_traces --top-k 20 --sizes 5 10 20 # with top-K columns: 0.3 GB per million tokens

Every measurement is its own process; CPU and wall time exclude its imports, but not those of the
workers it starts. `decode` reads the same columns as the job and does nothing with them. The line
for a billion tokens is extrapolated by a straight line through the measured sizes, with the largest
distance of one of them from it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from lab.child import Job, command_line, measure, run_asked
from lab.traces import SHARD_TOKENS, generate
from mismatch_cli.processes.workers import Workers
from mismatch_cli.rules.algorithms.algorithm import Algorithm
from mismatch_cli.rules.algorithms.table import TABLE
from mismatch_cli.trace import columns as trace_columns
from mismatch_cli.trace.reader import Trace

BILLION = 1000.0  # million tokens
_SIX = ("grpo-clip-higher", "minirl", "dppo-binary-tv", "dppo-binary-kl", "mask-0.5", "relax-both")
SIX = tuple(TABLE[name] for name in _SIX)
ALL = tuple(TABLE.values())
COLUMNS = (
    "version_rollout", "version_trainer", "reward", "loss_mask", "logp_trainer", "logp_recomputed",
    "entropy_trainer",
    "advantage",
)  # fmt: skip
TOPK = ("topk_ids", "topk_logp_rollout", "topk_logp_trainer", "topk_logp_recomputed")


def report(workers: int, trace: Trace, _columns: tuple[str, ...]) -> str:
    """What `report` measures, to its JSON: three pairs of policies, the floor, and the samples."""
    from mismatch_cli.studies.mismatch import analyse_mismatch

    return json.dumps(analyse_mismatch([trace], 10, Workers(workers)).to_json())


def clipstats(
    algorithms: Sequence[Algorithm], workers: int, trace: Trace, _columns: tuple[str, ...]
) -> str:
    """Everything that `clipstats` counts, to its JSON."""
    from mismatch_cli.studies.clipping import analyse_clipping

    return json.dumps(analyse_clipping([trace], algorithms, workers=Workers(workers)).to_json())


def diagnose(workers: int, trace: Trace, _columns: tuple[str, ...]) -> str:
    """What `diagnose` reads and finds, to its JSON."""
    from mismatch_cli.studies.diagnosis import analyse_diagnosis

    return json.dumps(analyse_diagnosis([trace], workers=Workers(workers)).to_json())


def compare(workers: int, trace: Trace, _columns: tuple[str, ...]) -> str:
    """A trace against itself: three passes, the last one token by token."""
    from mismatch_cli.studies.comparison import analyse_comparison

    return json.dumps(analyse_comparison([trace, trace], workers=Workers(workers)).to_json())


STUDIES: dict[str, Callable[..., str]] = {
    "report": report,
    "diagnose": diagnose,
    "compare": compare,
    "six": partial(clipstats, SIX),
    "table": partial(clipstats, ALL),
}
JOBS: dict[str, Job] = {
    f"{name}-{n}": partial(study, n) for name, study in STUDIES.items() for n in (1, 2)
}
PLAN = (
    ("report", ("report-1", "report-2"), [*trace_columns.COLUMNS]),
    ("diagnose", ("diagnose-1", "diagnose-2"), [*trace_columns.COLUMNS]),
    ("compare, with itself", ("compare-1", "compare-2"), [*trace_columns.COLUMNS]),
    ("clipstats, six masks", ("six-1", "six-2"), COLUMNS),
    ("clipstats, whole table", ("table-1", "table-2"), COLUMNS),
)


def first_shards(whole: Path, millions: float, folder: Path) -> float:
    """Links to the first shards of a trace, as a trace, and their number of tokens in millions."""
    folder.mkdir()
    shards = Trace.open(whole).shards[: _shards(millions)]
    for path in (whole / "manifest.json", *shards):
        (folder / path.name).symlink_to(path.resolve())
    return len(shards) * SHARD_TOKENS / 1e6


def _shards(millions: float) -> int:
    return max(1, round(millions * 1e6 / SHARD_TOKENS))


def lines(
    label: str,
    jobs: Sequence[str],
    columns: Sequence[str],
    parts: Sequence[tuple[float, Path]],
    repeats: int,
) -> Iterator[str]:
    """One line for each size and number of workers, and one for a billion tokens."""
    runs_by_job: dict[str, list[dict[str, Any]]] = {name: [] for name in jobs}
    for millions, folder in parts:
        floor = measure(__file__, "decode", folder, tuple(columns), repeats)
        for name in jobs:
            run = measure(__file__, name, folder, tuple(columns), repeats)
            runs_by_job[name].append(run)
            yield (
                f"{label:<24}{_workers(name):>3}{millions:>8.1f}{run['cpu'] / millions:>9.3f}"
                f"{run['wall'] / millions:>9.3f}{floor['cpu'] / millions:>9.3f}{run['cpu'] / floor['cpu']:>7.1f}"
                f"{run['peak_mb']:>7.0f}{run['workers_mb']:>8.0f}"
            )
    sizes = [millions for millions, _ in parts]
    digests = set()
    for name, runs in runs_by_job.items():
        yield from _billion(f"{label:<24}{_workers(name):>3}  ", sizes, runs)
        digests.add(tuple(run["digest"] for run in runs))
    if len(jobs) > 1:
        answer = "the same" if len(digests) == 1 else "DIFFERENT"
        yield f"{label:<24}     JSON of any number of workers: {answer}"


def _workers(job: str) -> str:
    return job.partition("-")[2]


def _billion(head: str, millions: Sequence[float], runs: Sequence[dict[str, Any]]) -> Iterator[str]:
    # Two points are always on a line, which then says nothing of its error
    if len(runs) < 3:
        return
    for kind in ("cpu", "wall"):
        seconds = np.array([run[kind] for run in runs])
        slope, start = np.polyfit(millions, seconds, 1)
        off = np.abs(slope * np.array(millions) + start - seconds).max()
        yield (
            f"{head}10^9 tokens: {start + slope * BILLION:.0f} s {kind} = {start:.1f} + "
            f"{slope:.4f} a million; no measured size is further than {off:.1f} s from the line"
        )


def main() -> None:
    parser = command_line(__doc__, JOBS, top_k=0, repeats=1)
    parser.add_argument(
        "--sizes",
        type=float,
        nargs="+",
        default=[10, 50, 200],
        help="million tokens, in whole shards",
    )
    options = parser.parse_args()
    if options.job:
        run_asked(options, JOBS)
        return
    with tempfile.TemporaryDirectory() as temporary:
        whole = options.folder or Path(temporary) / "whole"
        if not (whole / "manifest.json").exists():
            whole.mkdir(parents=True, exist_ok=True)
            tokens = _shards(max(options.sizes)) * SHARD_TOKENS
            print(f"Generating {tokens:,} tokens in {whole} …", file=sys.stderr)
            generate(whole, tokens, options.top_k, updates=0.15, workers=os.cpu_count() or 1)
        parts = []
        for number, size in enumerate(sorted(options.sizes)):
            folder = Path(temporary) / f"part-{number}"
            parts.append((first_shards(whole, size, folder), folder))
        print(
            f"{'':<24}{'':>3}{'Mtok':>8}{'CPU/M':>9}{'wall/M':>9}{'decode':>9}{'ratio':>7}{'MB':>7}{'worker':>8}"
        )
        for line in measured(options, parts):
            print(line, flush=True)


def measured(options: argparse.Namespace, parts: list[tuple[float, Path]]) -> Iterator[str]:
    """The lines of every job that was chosen."""
    for label, jobs, columns in PLAN:
        if options.only is None or options.only in label:
            if options.top_k and label == "clipstats, whole table":
                columns = [*columns, *TOPK]
            yield from lines(label, jobs, columns, parts, options.repeats)


if __name__ == "__main__":
    main()
