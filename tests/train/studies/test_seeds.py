"""Means over seeds and their differences: which have an interval, and from which spread."""

from __future__ import annotations

import pytest

from mismatch_cli.metrics.estimate import Estimate
from mismatch_cli.train.studies.seeds import (
    NO_SPREAD,
    ONE_SEED,
    SeedDifference,
    difference,
    over_seeds,
    paired,
    seeded,
    t_quantile,
)
from tests.train.training_runs import run_of


def test_an_interval_that_ends_at_0_is_not_above_it() -> None:
    for low, is_above in ((0.0, False), (1e-9, True), (-1e-9, False), (None, False)):
        assert SeedDifference(Estimate(1.0, low, 2.0), 2).is_above is is_above


def test_a_mean_over_seeds_by_hand() -> None:
    # 1, 2, 6: variance 7, so a standard error of √(7/3), with two degrees of freedom
    estimate = over_seeds([1.0, None, 2.0, 6.0])
    half = 4.303 * (7 / 3) ** 0.5
    assert (estimate.value, estimate.low, estimate.high) == pytest.approx((3, 3 - half, 3 + half))
    assert over_seeds([]) == over_seeds([None]) == Estimate(None, note=ONE_SEED)
    assert over_seeds([0.1]) == Estimate(0.1, note=ONE_SEED)
    assert over_seeds([-0.3, -(0.1 + 0.2)]).note == NO_SPREAD


def test_a_spread_is_rounding_by_the_size_of_the_larger_side() -> None:
    large, none = [(0, 1e6), (1, 1e6 + 1e-8)], [(0, 0.0), (1, 0.0)]
    assert difference(large, none).estimate.note == NO_SPREAD
    assert difference(none, large).estimate.note == NO_SPREAD
    assert difference([(0, 1.0), (1, 1.0 + 1e-8)], none).estimate.note is None
    same, near_0 = [(None, 1e6), (None, 1e6)], [(None, 0.0), (None, 1e-8)]
    assert difference(same, near_0).estimate.note == NO_SPREAD
    assert difference(near_0, same).estimate.note == NO_SPREAD


def test_a_run_without_a_value_is_left_out() -> None:
    runs = [run_of([0.5], seed=seed) for seed in (4, 2, 7)]
    assert seeded(runs, [0.1, None, 0.0]) == [(4, 0.1), (7, 0.0)]


def test_pairs_are_of_the_seeds_that_both_have() -> None:
    own = [(3, 1.0), (1, 4.0), (1, 6.0), (None, 9.0)]
    rival = [(1, 2.0), (3, 0.5), (2, 7.0), (None, 1.0)]
    assert paired(own, rival) == {1: (5.0, 2.0), 3: (1.0, 0.5)}
    answer = difference(own, rival)
    # 3 and 0.5: mean 1.75, standard error 1.25, one degree of freedom
    half = 12.706 * 1.25
    assert answer.pairs == 2 and answer.estimate.value == pytest.approx(1.75)
    assert (answer.estimate.low, answer.estimate.high) == pytest.approx((1.75 - half, 1.75 + half))


def test_a_single_run_is_compared_with_its_partner_alone() -> None:
    for own, rival, value in (
        ([(1, 4.0)], [(1, 1.0), (2, 9.0)], 3.0),
        ([(1, 4.0), (2, 9.0)], [(1, 1.0)], 3.0),
    ):
        assert difference(own, rival) == SeedDifference(Estimate(value, note=ONE_SEED), 1)
    # Without a partner, all of the others
    alone = difference([(3, 4.0)], [(1, 1.0), (2, 9.0)])
    assert alone == SeedDifference(Estimate(-1.0, note=ONE_SEED), 0)


def test_runs_without_two_pairs_have_welchs_interval() -> None:
    # Means 18.25 and 14, variances of the means 8.0625 and 7.4, of 4 and 5 runs:
    # 15.4625² / (8.0625² / 3 + 7.4² / 4) = 6.76, rounded down
    one, other = ((12, 15, 22, 24), (6, 13, 13, 15, 23))
    answer = difference([(None, value) for value in one], [(None, value) for value in other])
    half = 2.447 * 15.4625**0.5
    estimate = answer.estimate
    assert answer.pairs == 0 and estimate.value == pytest.approx(4.25)
    assert (estimate.low, estimate.high) == pytest.approx((4.25 - half, 4.25 + half))
    # A seed that both have is a pair only beside another one
    two = difference([(1, 1.0), (None, 3.0)], [(1, 6.0), (2, 8.0)])
    half = 4.303 * 2**0.5
    assert (two.pairs, two.estimate.value) == (0, pytest.approx(-5))
    assert (two.estimate.low, two.estimate.high) == pytest.approx((-5 - half, -5 + half))
    equal = difference([(None, 2.0), (None, 2.0)], [(None, 1.0), (None, 1.0)])
    assert equal.estimate == Estimate(1.0, note=NO_SPREAD)
    # A side without spread adds no degree of freedom
    still = difference([(None, 2.0), (None, 2.0)], [(None, 6.0), (None, 7.0), (None, 11.0)])
    half = 4.303 * (7 / 3) ** 0.5
    assert (still.estimate.low, still.estimate.high) == pytest.approx((-6 - half, -6 + half))


def test_quantiles_are_exact_for_few_degrees() -> None:
    assert [t_quantile(degrees) for degrees in (1, 2, 8)] == [12.706, 4.303, 2.306]
    assert [t_quantile(degrees) for degrees in (9, 30)] == pytest.approx([2.262, 2.042], abs=0.001)
