"""The cost of `clipstats`: CPU seconds per million tokens, compared with decoding the same columns,
and peak memory.

    python -m lab.clipstats                       # 20 million tokens, top-20: about 6 GB of disk, ten minutes
    python -m lab.clipstats --tokens 60000000     # is memory flat?
    python -m lab.clipstats --top-k 2 --only six  # six masks, on a trace that is smaller on disk

Every job runs in its own process with one thread; CPU time excludes imports. polars computes the
six masks, their counts by sign and the most frequently blocked tokens, exactly and without
intervals.
"""

from __future__ import annotations

import json
from functools import partial

import numpy as np

from lab.child import Job, Plan, main
from mismatch_cli.rules.algorithms.algorithm import Algorithm
from mismatch_cli.rules.algorithms.table import TABLE
from mismatch_cli.trace.reader import Trace

SIX = tuple(
    TABLE[name]
    for name in (
        "grpo-clip-higher",
        "minirl",
        "dppo-binary-tv",
        "dppo-binary-kl",
        "mask-0.5",
        "relax-both",
    )
)
COLUMNS = (
    "version_rollout", "version_trainer", "reward", "loss_mask", "logp_trainer", "logp_recomputed",
    "entropy_trainer",
    "advantage",
)  # fmt: skip
TOPK = ("topk_ids", "topk_logp_rollout", "topk_logp_trainer", "topk_logp_recomputed")


def clipstats(algorithms: tuple[Algorithm, ...], trace: Trace, _columns: tuple[str, ...]) -> None:
    """Everything that `clipstats` counts, to its JSON."""
    from mismatch_cli.studies.clipping import analyse_clipping

    json.dumps(analyse_clipping([trace], algorithms).to_json())


def masks(trace: Trace, columns: tuple[str, ...]) -> None:
    """Only the six masks: blocked shares and lost weight with intervals, counts by μ and
    position, blocked tokens.
    """
    from mismatch_cli.base.hashing import prompt_groups
    from mismatch_cli.metrics.clipping.breakdown import BlockedCells
    from mismatch_cli.metrics.clipping.clipping_summary import response_sums, sums_dtype
    from mismatch_cli.metrics.clipping.masked import Needs, apply_masks
    from mismatch_cli.metrics.clipping.token_table import TokenTable
    from mismatch_cli.metrics.sums import GroupSums

    needs = Needs(advantages=True, recomputed=True, top_k=0, full=False)
    sums, cells, table = (
        GroupSums(sums_dtype(len(SIX)).itemsize // 8),
        BlockedCells(len(SIX)),
        TokenTable(len(SIX)),
    )
    for batch in trace.batches(columns):
        of_slices = []
        for (judged,) in apply_masks(batch, needs, SIX, {}):
            of_slices.append(response_sums(judged))
            cells.update(judged)
            table.update(judged)
        sums.update(prompt_groups(batch.prompt_id_S), np.concatenate(of_slices))
    for number in range(len(SIX)):
        table.result(number, 0, 50), table.result(number, 1, 50)


def polars(trace: Trace, _columns: tuple[str, ...]) -> None:
    """The six masks and the blocked-token table, lazily in the streaming engine."""
    import polars as pl

    names = ("response_ids", "logp_rollout", "logp_trainer", "logp_recomputed", "advantage")
    a, q, p, again = (
        pl.col("advantage"),
        pl.col("logp_rollout"),
        pl.col("logp_trainer"),
        pl.col("logp_recomputed"),
    )
    mu, pi = q.exp(), p.exp()
    up, down = a > 0, a < 0
    kl = mu * (q - p) + (1 - mu) * ((1 - mu + 1e-8) / (1 - pi + 1e-8)).log()

    def clip(d: pl.Expr) -> pl.Expr:
        return (up & (d.exp() > 1.28)) | (down & (d.exp() < 0.8))

    masks = {
        "grpo-clip-higher": clip(p - q),
        "minirl": clip(p - again),
        "dppo-binary-tv": (up & (pi - mu > 0.15)) | (down & (mu - pi > 0.15)),
        "dppo-binary-kl": (kl > 0.05) & ((up & (pi > mu)) | (down & (pi < mu))),
        "mask-0.5": down & (mu - pi >= 0.5),
        "relax-both": clip(p - q) & (mu >= 0.1),
    }
    tokens = (
        pl.scan_parquet(trace.folder / "shard-*.parquet")
        .select(*names)
        .explode(*names)
        .select(
            "response_ids",
            up.alias("up"),
            mu.alias("mu"),
            pi.alias("pi"),
            *(m.alias(n) for n, m in masks.items()),
        )
    )
    counts = tokens.group_by("up").agg(pl.len(), *(pl.col(name).sum() for name in masks))
    tables = [
        tokens.filter(name)
        .group_by("up", "response_ids")
        .agg(pl.len(), pl.col("mu").mean(), pl.col("pi").mean())
        .sort("len", descending=True)
        .head(100)
        for name in masks
    ]
    pl.collect_all([counts, *tables], engine="streaming")


ALL = tuple(TABLE.values())
JOBS: dict[str, Job] = {
    "masks": masks,
    "six": partial(clipstats, SIX),
    "table": partial(clipstats, ALL),
    "polars": polars,
}
PLAN: Plan = (
    ("masks", "six masks and their tokens", COLUMNS, 2.5),
    ("six", "six masks, all of clipstats", COLUMNS, None),
    ("polars", "polars, six masks, tokens", COLUMNS, None),
    ("table", f"all {len(ALL)} of the table", (*COLUMNS, *TOPK), 7),
)

if __name__ == "__main__":
    main(__file__, __doc__, JOBS, PLAN, top_k=20, updates=0.15)
