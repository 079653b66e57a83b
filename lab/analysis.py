"""The cost of analysing a trace: CPU seconds per million tokens, compared with decoding the same
columns, and peak memory.

    python -m lab.analysis                     # 20 million tokens, top-20: about 5 GB of disk, five minutes
    python -m lab.analysis --tokens 1000000    # a quick run

Every job runs in its own process with one thread; CPU time excludes imports. `decode` reads the
same columns as the job and does nothing with them.
"""

from __future__ import annotations

import json

import numpy as np

from lab.child import Job, Plan, main
from mismatch_cli.metrics.volatility import MU_EDGES
from mismatch_cli.trace.reader import Trace

TOKENS = (
    "loss_mask",
    "logp_trainer",
    "version_rollout",
    "version_trainer",
    "reward",
    "entropy_trainer",
)
TOPK = ("topk_ids", "topk_logp_rollout", "topk_logp_trainer")
REPEAT = ("logp_trainer_repeat",)


def summary(trace: Trace, columns: tuple[str, ...]) -> None:
    """All metrics of the pair `mismatch`, with intervals."""
    from mismatch_cli.metrics.pairs import PAIRS
    from mismatch_cli.metrics.summary import MismatchSummary

    total = MismatchSummary(PAIRS["mismatch"])
    for batch in trace.batches(columns):
        total.update(batch)
    json.dumps(total.result())


def everything(trace: Trace, columns: tuple[str, ...]) -> None:
    """The pair `mismatch`, the floor, the worst tokens, the scatter sample and the lattice."""
    from mismatch_cli.base.json_form import to_json
    from mismatch_cli.metrics.kept_rows import ScatterSample, WorstTokens
    from mismatch_cli.metrics.lattice import Lattice
    from mismatch_cli.metrics.pairs import PAIRS
    from mismatch_cli.metrics.summary import MismatchSummary

    mismatch, floor = MismatchSummary(PAIRS["mismatch"]), MismatchSummary(PAIRS["floor"])
    lattice, worst, sample = Lattice(), WorstTokens(), ScatterSample()
    for batch in trace.batches(columns):
        mismatch.update(batch, lattice, worst, sample)
        floor.update(batch)
    results = [mismatch.result(), floor.result(), worst.result(), sample.result()]
    json.dumps(to_json(results))
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
        *(
            r.std(),
            r.quantile(0.01).alias("r01"),
            r.quantile(0.99).alias("r99"),
            r.max().alias("r_max"),
        ),
        *(tv.std(), tv.quantile(0.99).alias("tv99"), tv.max().alias("tv_max")),
    )
    size = pl.col("d").abs()
    overall = tokens.select(
        *(size.mean().alias("mean"), tv.mean()),
        *(size.quantile(x).alias(f"q{x}") for x in (0.5, 0.95, 0.99)),
        *(r.quantile(x).alias(f"r{x}") for x in (0.01, 0.5, 0.99)),
    )
    pl.collect_all([by_bin, overall], engine="streaming")


JOBS: dict[str, Job] = {f.__name__: f for f in (summary, everything, polars)}
PLAN: Plan = (
    ("summary", "one pair, no top-K", TOKENS, None),
    ("everything", "all, no top-K", (*TOKENS, *REPEAT), 3),
    ("summary", "one pair, top-K", (*TOKENS, *TOPK), None),
    ("everything", "all, top-K", (*TOKENS, *TOPK, *REPEAT), 2),
    ("polars", "polars: bins and quantiles", ("logp_trainer",), None),
)


if __name__ == "__main__":
    main(__file__, __doc__, JOBS, PLAN, top_k=20, updates=0.0)
