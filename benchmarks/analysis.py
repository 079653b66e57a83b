"""What the analysis of a trace costs: CPU seconds per million tokens, beside decoding the same columns, and peak
memory.

    python benchmarks/analysis.py                     # 20 million tokens, top-20: about 5 GB of disk, five minutes
    python benchmarks/analysis.py --tokens 1000000    # a quick run

Every job runs in a process of its own with one thread; the CPU time excludes imports. `decode` reads the columns that
the job beside it reads and does nothing with them.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from mismatch_cli.metrics.cells import MU_EDGES
from mismatch_cli.trace.manifest import write_manifest
from mismatch_cli.trace.reader import Trace
from mismatch_cli.trace.schema import REQUIRED, column_order
from mismatch_cli.trace.writer import rows_to_table, shard_path, write_shard

SHARD_TOKENS, SAMPLES, VOCABULARY = 2**20, 16, 151_936
TOKENS = ("loss_mask", "logp_trainer", "version_rollout", "version_trainer", "reward", "entropy_trainer")
TOPK = ("topk_ids", "topk_logp_rollout", "topk_logp_trainer")
REPEAT = ("logp_trainer_repeat",)


def generate(folder: Path, tokens: int, top_k: int) -> None:
    """A trace with top-K columns of a peaked model whose trainer differs by a little noise in the logits."""
    rng = np.random.default_rng(0)
    write_manifest(folder, {"top_logprobs": top_k})
    for index in range(-(-tokens // SHARD_TOKENS)):
        size = min(SHARD_TOKENS, tokens - index * SHARD_TOKENS)
        write_shard(shard_path(folder, index), _shard(rng, index, size, top_k))


def _shard(rng: np.random.Generator, index: int, tokens: int, top_k: int) -> pa.Table:
    cuts = np.cumsum(np.maximum(rng.lognormal(6.7, 0.6, tokens // 200 + 2), 1).astype(np.int64))
    offsets = np.concatenate([[0], cuts[cuts < tokens], [tokens]])
    count = len(offsets) - 1
    prompt = index * 10_000 + np.arange(count) // SAMPLES
    columns = _token_columns(rng, tokens, top_k)
    repeated = np.repeat(prompt % 8 == 0, np.diff(offsets))
    arrays = {name: _lists(values, offsets) for name, values in columns.items()}
    arrays["logp_trainer_repeat"] = _some_lists(columns["logp_trainer"], repeated, offsets, prompt % 8 == 0, rng)
    keys: dict[str, Any] = {
        "step": np.zeros(count, np.int32),
        "epoch": np.zeros(count, np.int32),
        "minibatch": np.zeros(count, np.int32),
        "prompt_id": prompt,
        "sample_index": np.arange(count, dtype=np.int32) % SAMPLES,
        "version_rollout": np.zeros(count, np.int32),
        "version_trainer": np.zeros(count, np.int32),
        "reward": rng.integers(0, 2, count).astype(np.float32),
        "finish_reason": ["stop"] * count,
        "prompt_ids": [np.zeros(20, np.int32)] * count,
    }
    rows = rows_to_table(keys)
    table = {name: rows.column(name) for name in rows.column_names} | arrays
    return pa.table({name: table[name] for name in column_order() if name in table})


def _token_columns(rng: np.random.Generator, tokens: int, top_k: int) -> dict[str, np.ndarray]:
    scale = rng.gamma(2.0, 1.0, (tokens, 1)).astype(np.float32) + np.float32(0.3)
    parts = rng.standard_exponential((tokens, top_k + 1), dtype=np.float32) * scale
    parts.sort(axis=1)
    parts[:, 1:] += rng.standard_exponential((tokens, 1), dtype=np.float32) * 6  # most tokens are nearly certain
    rollout = _log_softmax(-parts)
    trainer = _log_softmax(rng.standard_normal(parts.shape, dtype=np.float32) * np.float32(0.03) - parts)
    ids = rng.integers(0, VOCABULARY, (tokens, top_k + 1), dtype=np.int32)
    chosen = (np.exp(rollout).cumsum(axis=1) < rng.random((tokens, 1), dtype=np.float32)).sum(axis=1, keepdims=True)
    chosen = np.minimum(chosen, top_k)
    sampled = {
        name: np.take_along_axis(x, chosen, 1)[:, 0] for name, x in (("ids", ids), ("q", rollout), ("p", trainer))
    }
    return {
        "response_ids": sampled["ids"],
        "loss_mask": np.ones(tokens, dtype=bool),
        "logp_rollout": sampled["q"],
        "rank_rollout": chosen[:, 0].astype(np.int32) + 1,
        "logp_trainer": sampled["p"],
        "entropy_trainer": -(np.exp(trainer) * trainer).sum(axis=1),
        "rank_trainer": chosen[:, 0].astype(np.int32) + 1,
        "topk_ids": ids[:, :-1].reshape(-1),
        "topk_logp_rollout": rollout[:, :-1].reshape(-1),
        "topk_logp_trainer": trainer[:, :-1].reshape(-1),
    }


def _log_softmax(x: np.ndarray) -> np.ndarray:
    x = x - x.max(axis=1, keepdims=True)
    return np.minimum(x - np.log(np.exp(x).sum(axis=1, keepdims=True)), np.float32(-1e-7))


def _lists(values: np.ndarray, offsets: np.ndarray) -> pa.ListArray:
    width = len(values) // int(offsets[-1])
    return pa.ListArray.from_arrays(pa.array((offsets * width).astype(np.int32)), pa.array(values))


def _some_lists(
    values: np.ndarray, chosen: np.ndarray, offsets: np.ndarray, rows: np.ndarray, rng: np.random.Generator
) -> pa.ListArray:
    kept = values[chosen]
    kept = np.minimum(kept + rng.standard_normal(len(kept), dtype=np.float32) * np.float32(1e-3), np.float32(-1e-7))
    starts = np.concatenate([[0], np.cumsum(np.where(rows, np.diff(offsets), 0))])
    lengths = pa.array(starts.astype(np.int32), mask=np.append(~rows, False))
    return pa.ListArray.from_arrays(lengths, pa.array(kept))


def decode(trace: Trace, columns: tuple[str, ...]) -> None:
    for path in trace.shards:
        shard = pq.ParquetFile(path, memory_map=True)
        for group in range(shard.num_row_groups):
            shard.read_row_group(group, columns=[*REQUIRED, *columns], use_threads=False)


def summary(trace: Trace, columns: tuple[str, ...]) -> None:
    """Everything about the pair `mismatch`, with intervals."""
    from mismatch_cli.metrics.pairs import PAIRS
    from mismatch_cli.metrics.summary import MismatchSummary

    total = MismatchSummary(PAIRS["mismatch"])
    for batch in trace.batches(columns):
        total.update(batch)
    json.dumps(total.result())


def everything(trace: Trace, columns: tuple[str, ...]) -> None:
    """The pair `mismatch`, the floor, the worst tokens, the scatter sample and the lattice."""
    from mismatch_cli.metrics.lattice import Lattice
    from mismatch_cli.metrics.pairs import PAIRS
    from mismatch_cli.metrics.scatter import ScatterSample
    from mismatch_cli.metrics.summary import MismatchSummary
    from mismatch_cli.metrics.worst import WorstTokens

    mismatch, floor = MismatchSummary(PAIRS["mismatch"]), MismatchSummary(PAIRS["floor"])
    lattice, worst, sample = Lattice(), WorstTokens(), ScatterSample()
    for batch in trace.batches(columns):
        mismatch.update(batch, lattice, worst, sample)
        floor.update(batch)
    json.dumps([mismatch.result(), floor.result(), worst.result(), sample.result()])
    lattice.result()


def polars(trace: Trace, _columns: tuple[str, ...]) -> None:
    """The same bins, deviations and quantiles, exact, without intervals."""
    import polars as pl

    q, p = pl.col("logp_rollout"), pl.col("logp_trainer")
    d, tv = (p - q).alias("d"), (p.exp() - q.exp()).abs().alias("tv")
    edges = np.log(np.array(MU_EDGES))
    bins = pl.sum_horizontal([(q >= float(edge)).cast(pl.UInt8) for edge in edges]).alias("bin")
    tokens = (
        pl.scan_parquet(trace.folder / "shard-*.parquet")
        .select("logp_rollout", "logp_trainer")
        .explode("logp_rollout", "logp_trainer")
        .select(bins, d, d.exp().alias("r"), tv)
    )
    r, tv = pl.col("r"), pl.col("tv")
    by_bin = tokens.group_by("bin").agg(
        pl.len(),
        *(r.std(), r.quantile(0.01).alias("r01"), r.quantile(0.99).alias("r99"), r.max().alias("r_max")),
        *(tv.std(), tv.quantile(0.99).alias("tv99"), tv.max().alias("tv_max")),
    )
    size = pl.col("d").abs()
    overall = tokens.select(
        *(size.mean().alias("mean"), tv.mean()),
        *(size.quantile(x).alias(f"q{x}") for x in (0.5, 0.95, 0.99)),
        *(r.quantile(x).alias(f"r{x}") for x in (0.01, 0.5, 0.99)),
    )
    pl.collect_all([by_bin, overall], engine="streaming")


Job = Callable[[Trace, tuple[str, ...]], None]
JOBS: dict[str, Job] = {f.__name__: f for f in (decode, summary, everything, polars)}
PLAN: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("summary", "one pair, no top-K", TOKENS),
    ("everything", "all, no top-K", (*TOKENS, *REPEAT)),
    ("summary", "one pair, top-K", (*TOKENS, *TOPK)),
    ("everything", "all, top-K", (*TOKENS, *TOPK, *REPEAT)),
    ("polars", "polars: bins and quantiles", ("logp_trainer",)),
)


def run_job(name: str, folder: Path, columns: tuple[str, ...]) -> None:
    """The child process: one job, its CPU seconds and peak memory as JSON."""
    import torch

    torch.set_num_threads(1)
    pa.set_cpu_count(1)
    trace = Trace.open(folder)
    if name != "decode":
        import mismatch_cli.metrics.summary  # noqa: F401 - its import is not part of the job
    base = _peak_mb()
    start = time.process_time()
    JOBS[name](trace, columns)
    print(json.dumps({"cpu": time.process_time() - start, "peak_mb": _peak_mb(), "base_mb": base}))


def _peak_mb() -> float:
    status = Path("/proc/self/status")
    if status.exists():  # getrusage would count the parent's memory at the fork
        return int(status.read_text().split("VmHWM:")[1].split()[0]) / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 1024)


def measure(name: str, folder: Path, columns: tuple[str, ...], repeats: int) -> dict[str, float]:
    """The best of several runs."""
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "POLARS_MAX_THREADS"), "1")
    command = [sys.executable, __file__, "--job", name, "--folder", str(folder), "--columns", ",".join(columns)]
    root = str(Path(__file__).parents[1])
    environment = os.environ | threads | {"PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])}
    runs = [
        json.loads(subprocess.run(command, env=environment, check=True, capture_output=True).stdout)
        for _ in range(repeats)
    ]
    return min(runs, key=lambda run: run["cpu"])


def report(folder: Path, tokens: int, repeats: int) -> Iterator[str]:
    yield f"{'job':<28}{'CPU s / Mtok':>14}{'decode':>10}{'ratio':>8}{'peak MB':>10}{'at start':>10}"
    for name, label, columns in PLAN:
        floor, job = measure("decode", folder, columns, repeats), measure(name, folder, columns, repeats)
        per_million = [run["cpu"] / tokens * 1e6 for run in (job, floor)]
        yield (
            f"{label:<28}{per_million[0]:>14.3f}{per_million[1]:>10.3f}{job['cpu'] / floor['cpu']:>8.1f}"
            f"{job['peak_mb']:>10.0f}{job['base_mb']:>10.0f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=20_000_000)
    parser.add_argument("--top-k", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--folder", type=Path, help="keep the generated trace here, and use it if it is there")
    parser.add_argument("--job", choices=JOBS, help=argparse.SUPPRESS)
    parser.add_argument("--columns", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job:
        run_job(options.job, options.folder, tuple(options.columns.split(",")))
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        if not (folder / "manifest.json").exists():
            folder.mkdir(parents=True, exist_ok=True)
            print(f"Generating {options.tokens:,} tokens in {folder} …", file=sys.stderr)
            generate(folder, options.tokens, options.top_k)
        for line in report(folder, options.tokens, options.repeats):
            print(line, flush=True)


if __name__ == "__main__":
    main()
