"""The building blocks of checks: the sample, runs, means over prompts."""

from __future__ import annotations

from itertools import groupby, pairwise
from types import SimpleNamespace

import numpy as np
import pytest

from mismatch_cli.diagnosis.checks import heavy_tail, position_drift
from mismatch_cli.diagnosis.counts import in_runs
from mismatch_cli.diagnosis.grouped import mean_over_prompts, slope_over_prompts
from mismatch_cli.diagnosis.sample import SampleCollector
from mismatch_cli.hashing import GROUPS
from mismatch_cli.metrics.pairs import PAIRS
from mismatch_cli.trace.reader import table_to_batch


def test_runs_are_those_of_a_plain_loop(rng):
    for _ in range(50):
        lengths = rng.integers(0, 9, 12)
        offset_S1 = np.concatenate([[0], np.cumsum(lengths)])
        flag_T = rng.random(offset_S1[-1]) < 0.6
        expected: list[bool] = []
        for start, stop in pairwise(offset_S1):
            for value, group in groupby(flag_T[start:stop].tolist()):
                run = list(group)
                expected += [value and len(run) >= 3] * len(run)
        assert in_runs(flag_T, offset_S1).tolist() == expected


def test_the_sample_is_bounded_and_the_same_in_any_sharding(pools):
    table = pools["fp8-kv"].table()
    samples = []
    for pieces in (1, 7):
        collector = SampleCollector(PAIRS["mismatch"], most_tokens=2000)
        step = -(-len(table) // pieces)
        for start in range(0, len(table), step):
            collector.update(table_to_batch(table.slice(start, step).combine_chunks()))
        samples.append(collector.result())
    one, other = samples
    assert 1500 < len(one.logq_T) <= 2000
    assert one.offset_S1.tolist() == other.offset_S1.tolist()
    np.testing.assert_array_equal(one.logp_T, other.logp_T)


def test_a_mean_and_its_error_over_prompts(rng):
    """The error covers the truth when tokens of a prompt are correlated."""
    covered = 0
    for _ in range(300):
        group_N = np.repeat(np.arange(GROUPS), 20)
        value_N = rng.normal(size=GROUPS)[group_N] + rng.normal(size=len(group_N))
        mean = mean_over_prompts(value_N, group_N)
        assert mean.value == pytest.approx(value_N.mean())
        covered += abs(mean.value) < 2.04 * mean.error
    assert 0.90 < covered / 300 < 0.98


def test_too_few_prompts_have_no_error(rng):
    assert mean_over_prompts(rng.normal(size=30), np.zeros(30, dtype=int)).error == np.inf
    assert mean_over_prompts(np.zeros(0), np.zeros(0, dtype=int)).count == 0


def test_a_slope_through_the_origin(rng):
    x_N, group_N = rng.normal(size=4000), rng.integers(0, GROUPS, 4000)
    slope, error = slope_over_prompts(x_N, 0.7 * x_N + 0.1 * rng.normal(size=4000), group_N)
    assert abs(slope - 0.7) < 4 * error < 0.02


def test_only_long_responses_can_be_far_and_they_alone_set_the_median():
    """Normalised gaps of 1, one response of 9, and many short ones of 100, which would hide it."""
    lengths = [8, 20, 12, 30, 7, 7, 7, 7, 7]
    mean_S = np.array([1.0, 1.0, 9.0, 1.0, 100.0, 100.0, 100.0, 100.0, 100.0])
    response_N = np.repeat(np.arange(len(lengths)), lengths)
    sample = SimpleNamespace(
        response_T=response_N,
        kept=np.arange(len(response_N)),
        num_responses=len(lengths),
        u_N=mean_S[response_N],
    )
    assert np.flatnonzero(heavy_tail._are_far_S(sample)).tolist() == [2]
    only_short = SimpleNamespace(
        response_T=np.zeros(7, dtype=int), kept=np.arange(7), num_responses=1, u_N=np.full(7, 9.0)
    )
    assert not heavy_tail._are_far_S(only_short).any()


def test_a_gap_that_rises_with_the_position_rises_steadily(rng):
    """Beside one that rises and falls, and one that is constant."""
    position_T = np.tile(np.arange(240), 20)

    def drift(gap_by_position: np.ndarray) -> tuple[float, float, float]:
        sample = SimpleNamespace(
            position_T=position_T,
            kept=np.arange(len(position_T)),
            u_N=gap_by_position[position_T],
            group_N=np.repeat(np.arange(20), 240),
        )
        early, late, steady = position_drift._drift(sample)
        return early.value, late.value, steady

    early, late, steady = drift(np.exp(np.arange(240) / 100))
    assert early < late and steady > 0.99
    assert abs(drift(np.exp(-np.abs(np.arange(240) - 119.5) / 100))[2]) < 0.1
    assert drift(np.ones(240)) == (1.0, 1.0, 0.0)
