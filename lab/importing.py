"""The cost of an import: CPU seconds per million tokens, compared with a fast parser of the same
file, and peak memory.

    python -m lab.importing                    # 10 million tokens: about 4 GB of disk, ten minutes
    python -m lab.importing --tokens 1000000   # a quick run

Three files: token exports in prime-rl's layout (17 arrays per token), plain JSONL and plain
Parquet. The bar for JSONL is the fastest of three parsers that read the whole file: polars, pyarrow
(which gets the columns that the import reads) and orjson if installed. For Parquet it is pyarrow
decoding the same columns; `rewrite` also writes them as a trace. Each job runs in its own process,
jobs take turns, and each uses its default threads: polars and the import several, the others one.
Loading modules is not counted. Memory is measured at this size and at a quarter of it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from lab.child import _peak_mb, environment_of
from lab.traces import VOCABULARY

RESPONSE, PROMPT = 900, 100  # tokens
BLOCK = 2**24  # bytes to parse at a time
PLAIN = (
    "prompt_ids",
    "response_ids",
    "logp_rollout",
    "logp_trainer",
    "advantage",
    "reward",
    "prompt_id",
    "step",
)


def token_ids(rng: np.random.Generator, count: int) -> list[int]:
    """Token ids as uneven as the words of a text."""
    return [int(i) for i in rng.zipf(1.2, count) % VOCABULARY]


def write_prime(path: Path, tokens: int) -> None:
    """Token exports in prime-rl's layout."""
    rng = np.random.default_rng(0)
    with path.open("w", encoding="utf-8") as file:
        for row in range(tokens // RESPONSE):
            size = PROMPT + RESPONSE
            mu = -rng.exponential(0.5, size).astype(np.float32)
            pi = np.minimum(mu + rng.normal(0, 0.03, size).astype(np.float32), np.float32(-1e-6))
            mask = np.arange(size) >= PROMPT
            floats = {
                "advantages": np.full(size, rng.choice([-0.5, 0.5]), np.float32),
                "inference_logprobs": np.where(mask, mu, np.float32(0)),
                "trainer_logprobs": pi,
                "entropy": -mu,
                "mismatch_kl": np.exp(pi - mu) - 1 - (pi - mu),
                "log_importance_ratio": pi - mu,
                "importance_ratio": np.exp(pi - mu),
                "prob_delta": np.exp(pi) - np.exp(mu),
            }
            off = [False] * size
            arrays = {
                "token_ids": token_ids(rng, size),
                "position_ids": list(range(size)),
                "loss_mask": mask.tolist(),
                **{name: values.tolist() for name, values in floats.items()},
                **dict.fromkeys(("is_masked", "is_masked_high", "is_masked_low"), off),
                **dict.fromkeys(("rl_weights", "ce_weights", "ref_kl_weights"), [None] * size),
            }
            scalars = {
                "schema_version": 1,
                "step": row // 512,
                "rank": 0,
                "micro_step": 0,
                "micro_sequence_idx": 0,
            }
            record = scalars | {"export_sequence_idx": row, "env_name": "math"} | arrays
            file.write(json.dumps(record, separators=(",", ":")) + "\n")


def plain_rows(tokens: int) -> Iterator[dict[str, object]]:
    rng = np.random.default_rng(0)
    for row in range(tokens // RESPONSE):
        mu = -rng.exponential(0.5, RESPONSE).astype(np.float32)
        yield {
            "prompt_ids": token_ids(rng, PROMPT),
            "response_ids": token_ids(rng, RESPONSE),
            "logp_rollout": mu.tolist(),
            "logp_trainer": np.minimum(
                mu + rng.normal(0, 0.03, RESPONSE).astype(np.float32), 0
            ).tolist(),
            "advantage": float(rng.choice([-0.5, 0.5])),
            "reward": float(rng.integers(0, 2)),
            "prompt_id": row // 8,
            "step": row // 512,
        }


def write_plain_jsonl(path: Path, tokens: int) -> None:
    with path.open("w", encoding="utf-8") as file:
        for row in plain_rows(tokens):
            file.write(json.dumps(row) + "\n")


def write_plain_parquet(path: Path, tokens: int) -> None:
    from mismatch_cli.trace.columns import COLUMNS

    kinds = pa.schema(
        {name: pa.float32() if name == "advantage" else COLUMNS[name].type for name in PLAIN}
    )
    rows, writer = plain_rows(tokens), pq.ParquetWriter(path, kinds, compression="zstd")
    with writer:
        while some := [row for row, _ in zip(rows, range(1000), strict=False)]:
            writer.write_table(pa.Table.from_pylist(some, schema=kinds))


def blocks_of(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            yield block + file.readline()


def by_polars(path: Path) -> None:
    """Every field, with types that polars finds in the first hundred lines."""
    import polars as pl

    first = b"".join(line for line, _ in zip(path.open("rb"), range(100), strict=False))
    schema = pl.read_ndjson(first).schema
    for block in blocks_of(path):
        pl.read_ndjson(block, schema=schema)


def by_pyarrow(path: Path) -> None:
    """Only the fields that the import reads, with their types."""
    import pyarrow.json as paj

    from mismatch_cli.frameworks.plain import importer as plain
    from mismatch_cli.frameworks.prime_rl import importer as prime_rl

    record = json.loads(next(path.open("rb")))
    schema = prime_rl._SCHEMA if "token_ids" in record else plain._schema(record, {})
    options = paj.ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore")
    for block in blocks_of(path):
        paj.read_json(
            pa.BufferReader(block),
            read_options=paj.ReadOptions(use_threads=False, block_size=len(block) + 1),
            parse_options=options,
        )


def by_orjson(path: Path) -> None:
    """Every field, as Python objects."""
    import orjson

    for line in path.open("rb"):
        orjson.loads(line)


def by_decoding(path: Path) -> None:
    """The same columns of Parquet, a row group at a time."""
    file = pq.ParquetFile(path, memory_map=True)
    for group in range(file.num_row_groups):
        file.read_row_group(group, use_threads=False)


def by_rewriting(path: Path) -> None:
    """The same, and written again like shards: the rest of an import's time is its own."""
    from mismatch_cli.trace.writer import write_shard

    file = pq.ParquetFile(path, memory_map=True)
    groups = range(file.num_row_groups)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        for first in groups[::2]:  # two of them are about a shard
            table = file.read_row_groups(list(groups[first : first + 2]), use_threads=False)
            write_shard(Path(folder) / f"{first}.parquet", table)


def by_import(path: Path) -> None:
    from mismatch_cli.app.progress import TerminalProgress
    from mismatch_cli.frameworks.importing.driver import Import, import_dump

    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        import_dump(Import([path]), Path(folder), TerminalProgress(quiet=True))


JOBS: dict[str, Callable[[Path], None]] = {
    "import": by_import,
    "polars": by_polars,
    "pyarrow": by_pyarrow,
    "orjson": by_orjson,
    "decode": by_decoding,
    "rewrite": by_rewriting,
}
FILES: dict[str, tuple[Callable[[Path, int], None], tuple[str, ...]]] = {
    "prime-rl.jsonl": (write_prime, ("polars", "pyarrow", "orjson")),
    "plain.jsonl": (write_plain_jsonl, ("polars", "pyarrow", "orjson")),
    "plain.parquet": (write_plain_parquet, ("decode", "rewrite")),
}


def run_job(name: str, path: Path) -> None:
    """The child process: one job, its CPU and wall seconds and peak memory as JSON."""
    # Once on a small file, so that loading is not timed
    with tempfile.TemporaryDirectory() as folder:
        small = Path(folder) / path.name
        FILES[path.name.removeprefix("quarter-")][0](small, 10 * RESPONSE)
        JOBS[name](small)
    base, cpu, wall = _peak_mb(), time.process_time(), time.perf_counter()
    JOBS[name](path)
    seconds = {"cpu": time.process_time() - cpu, "wall": time.perf_counter() - wall}
    print(json.dumps(seconds | {"peak_mb": _peak_mb(), "base_mb": base}))


def measure(name: str, path: Path) -> dict[str, float] | None:
    """One run in its own process; None for a parser that is not installed."""
    environment = environment_of(own=name == "import")
    done = subprocess.run(
        [sys.executable, __file__, "--job", name, "--file", str(path)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode and "No module named" in done.stderr:
        return None
    if done.returncode:
        raise SystemExit(done.stderr)
    return dict(json.loads(done.stdout))


def compare(path: Path, bars: tuple[str, ...], tokens: int, repeats: int) -> Iterator[str]:
    """The import and each parser, taking turns; then the import compared with the fastest."""
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in ("import", *bars)}
    for _ in range(repeats):
        for name, its in runs.items():
            if (run := measure(name, path)) is not None:
                its.append(run)
    medians = {}
    for name, its in runs.items():
        if not its:
            yield f"{path.name:<16}{name:<10}not installed"
            continue
        wall = sorted(run["wall"] / tokens * 1e6 for run in its)
        cpu = statistics.median(run["cpu"] / tokens * 1e6 for run in its)
        medians[name] = statistics.median(wall)
        times = "".join(f"{seconds:>9.3f}" for seconds in (wall[0], medians[name], wall[-1], cpu))
        yield f"{path.name:<16}{name:<10}{times}{max(run['peak_mb'] for run in its):>10.0f}{its[0]['base_mb']:>10.0f}"
    bar = min((name for name in medians if name != "import"), key=medians.__getitem__)
    yield (
        f"{path.name:<16}import / {bar} = {medians['import'] / medians[bar]:.2f} (medians of "
        "wall time)"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--tokens", type=int, default=10_000_000, help="tokens of responses, without prompts"
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", help="files whose name contains this")
    parser.add_argument("--job", choices=JOBS, help=argparse.SUPPRESS)
    parser.add_argument("--file", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job:
        run_job(options.job, options.file)
        return
    print("Seconds per million tokens")
    print(
        f"{'file':<16}{'job':<10}{'min':>9}{'median':>9}{'max':>9}{'CPU':>9}{'peak MB':>10}{'at start':>10}"
    )
    for name, (write, bars) in FILES.items():
        if options.only and options.only not in name:
            continue
        with tempfile.TemporaryDirectory() as folder:
            small, path = Path(folder) / f"quarter-{name}", Path(folder) / name
            write(small, options.tokens // 4)
            quarter = measure("import", small)
            small.unlink()
            write(path, options.tokens)
            size = path.stat().st_size / 2**20
            for line in compare(path, bars, options.tokens, options.repeats):
                print(line, flush=True)
            peak = quarter["peak_mb"] if quarter else float("nan")
            print(
                f"{name:<16}{size:,.0f} MB; the import of a quarter of it peaks at {peak:.0f} MB",
                flush=True,
            )


if __name__ == "__main__":
    main()
