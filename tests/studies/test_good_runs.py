"""Limits from good runs: an equally good run keeps them, a worse one does not, and the file
explains them.

The figures of docs/gate.md, in a minute: python -m tests.studies.test_good_runs 142
"""

from __future__ import annotations

import sys
import tomllib
from dataclasses import replace
from itertools import permutations
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from mismatch_cli.base.errors import MismatchError
from mismatch_cli.base.places import bundled
from mismatch_cli.metrics.estimate import NOT_MEASURED, Estimate
from mismatch_cli.metrics.gap_table import METRICS
from mismatch_cli.metrics.pair_summary import PairSummary
from mismatch_cli.metrics.pairs import PAIRS
from mismatch_cli.metrics.summary import MismatchSummary
from mismatch_cli.report.limits_file import limits_file
from mismatch_cli.studies.good_runs import GATED, MARGIN, FromRuns, limits_from
from mismatch_cli.studies.mismatch import analyse_mismatch
from mismatch_cli.trace.reader import Trace, table_to_batch
from tests.metrics.summaries import pair_summary

RESAMPLES = 20  # of a trace; each is checked against the limits of every other


def whole(name: str) -> pa.Table:
    """The rows of a bundled trace."""
    return pa.concat_tables(Trace.open(bundled("traces") / name).tables())


def resampled(table: pa.Table, rng: np.random.Generator) -> pa.Table:
    """As many prompts, drawn with replacement and renumbered: what another run might have been."""
    prompt_S = table["prompt_id"].to_numpy()
    prompts = np.unique(prompt_S)
    rows = [np.flatnonzero(prompt_S == prompt) for prompt in rng.choice(prompts, len(prompts))]
    prompt_ids = np.repeat(rng.integers(2**40, size=len(rows)), list(map(len, rows)))
    drawn = table.take(np.concatenate(rows))
    return drawn.drop_columns("prompt_id").append_column("prompt_id", pa.array(prompt_ids))


Pairs = dict[str, PairSummary]


def measured(table: pa.Table, factor: float = 1.0) -> Pairs:
    """The pairs of a run, as far as limits are derived from them, with log π `factor` times as far
    from log μ.
    """
    batch, moved = table_to_batch(table), {}
    for column in ("logp_trainer_T", "logp_recomputed_T"):
        logp_T = getattr(batch, column)
        if logp_T is not None and factor != 1:
            moved_T = batch.logp_rollout_T + factor * (logp_T - batch.logp_rollout_T)
            moved[column] = np.minimum(moved_T, 0).astype(np.float32)
    summary = MismatchSummary(PAIRS["mismatch"])
    summary.update(replace(batch, **moved))
    return {"mismatch": pair_summary(metrics=summary.estimates())}


def kept(limits: FromRuns, run: Pairs) -> bool:
    metrics = run["mismatch"].metrics
    values = [(drawn.limit, metrics[drawn.limit.metric].value) for drawn in limits.drawn]
    return all(
        x <= limit.threshold if limit.bound == "max" else x >= limit.threshold
        for limit, x in values
    )


NAMES = ("bfloat16", "fp8-kv", "float32")


def drawn_again(number: int) -> dict[str, list[Pairs]]:
    rng = np.random.default_rng(7)
    tables = {name: whole(name) for name in NAMES}
    return {
        name: [measured(resampled(table, rng)) for _ in range(number)]
        for name, table in tables.items()
    }


@pytest.fixture(scope="module")
def resamples() -> dict[str, list[Pairs]]:
    return drawn_again(RESAMPLES)


def share_kept(runs: list[Pairs]) -> float:
    """The share of all pairs of runs in which the second keeps the limits of the first."""
    limits = [limits_from([run]) for run in runs]
    pairs = permutations(range(len(runs)), 2)
    return float(np.mean([kept(limits[first], runs[second]) for first, second in pairs]))


def test_runs_of_the_same_settings_keep_them(resamples):
    """Including the smallest trace with the heaviest tail, which needs the widest margin."""
    for name, runs in resamples.items():
        assert share_kept(runs) >= 0.95, name
        assert all(kept(limits_from([run]), run) for run in runs)


def test_a_run_with_a_larger_gap_does_not(resamples):
    """1.5 times the gap is enough; with 24 prompts and a heavy tail it takes four times."""
    for name, factor in (("bfloat16", 1.5), ("float32", 1.5), ("fp8-kv", 4.0)):
        planted = measured(whole(name), factor)
        assert not any(kept(limits_from([run]), planted) for run in resamples[name]), name


def test_a_limit_is_three_times_as_far_as_the_end_of_the_interval(resamples):
    metrics = resamples["bfloat16"][0]["mismatch"].metrics
    limits = [row.limit for row in limits_from(resamples["bfloat16"][:1]).drawn]
    drawn = {(limit.metric, limit.bound): limit.threshold for limit in limits}
    k3, ess, k1 = metrics["k3"], metrics["ess_token"], metrics["k1"]
    assert drawn["k3", "max"] == pytest.approx(k3.value * (k3.high / k3.value) ** MARGIN, rel=0.01)
    assert drawn["k1", "min"] == pytest.approx(k1.value + MARGIN * (k1.low - k1.value), rel=0.01)
    assert drawn["k1", "max"] == pytest.approx(k1.value + MARGIN * (k1.high - k1.value), rel=0.01)
    assert ess.value > ess.low > drawn["ess_token", "min"] and ("ess_token", "max") not in drawn
    assert METRICS["k1"].scale.errors and {name for name, _ in drawn} <= set(GATED)


def test_of_several_runs_the_widest_counts_and_all_keep_it(resamples):
    runs = resamples["fp8-kv"]
    together = limits_from(runs)
    assert all(kept(together, run) for run in runs)
    alone = [limits_from([run]) for run in runs]
    for drawn in together.drawn:
        same = [
            row.limit.threshold
            for limits in alone
            for row in limits.drawn
            if (row.limit.metric, row.limit.bound) == (drawn.limit.metric, drawn.limit.bound)
        ]
        assert drawn.limit.threshold == (max if drawn.limit.bound == "max" else min)(same)
        assert drawn.estimate is runs[drawn.run]["mismatch"].metrics[drawn.limit.metric]
    assert together.left_out["k3"] == "a few prompts decide it"


def test_runs_without_intervals_or_without_a_common_pair_are_refused(resamples):
    run = resamples["bfloat16"][0]
    with pytest.raises(MismatchError, match=r"have no pair in common \(mismatch; total\)"):
        limits_from([run, {"total": run["mismatch"]}])
    few = dict.fromkeys(GATED, Estimate(1.0, note="fewer"))
    # More prompts would not change what was not measured
    unmeasured = few | {"tv_topk_mean": Estimate(1.0, note=NOT_MEASURED)}
    for metrics in (few, unmeasured):
        with pytest.raises(MismatchError, match=r"to draw a limit from: fewer\. Name a run"):
            limits_from([{"mismatch": pair_summary(metrics=metrics)}])


def test_the_file_quotes_hostile_text():
    result = analyse_mismatch([Trace.open(bundled("traces") / "float32")], 0).result
    hostile, quoted = 'a"b\\c\n[limits.k3]\x1b\x7f\u202e😀', 'a"b\\c⏎[limits.k3]\\x1b\\x7f\\u202e😀'
    text = limits_file(limits_from([result.pairs]), {Path(hostile): result}, "limits.toml")
    content = tomllib.loads(text)
    assert content["about"].startswith(f"Limits that {quoted} passes")
    assert all(limit["source"].endswith(quoted) for limit in content["limits"].values())


def figures(number: int) -> None:
    for name, runs in drawn_again(number).items():
        table = whole(name)
        limits = limits_from([measured(table)])
        factor = next(
            factor for factor in np.arange(1, 10, 0.02) if not kept(limits, measured(table, factor))
        )
        share, pairs = 100 * share_kept(runs), number * (number - 1)
        print(f"{name}: {share:.2f} % of {pairs:,} pass; {factor:.2f} times the gap fails")


if __name__ == "__main__":
    figures(int(sys.argv[1]))
