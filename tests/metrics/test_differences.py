"""Differences of two traces: the coverage of their intervals, the gain from pairing, and
equality.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from mismatch_cli.metrics.differences import (
    AT_AGREEMENT,
    NO_DIFFERENCE,
    MetricDifference,
    SummaryEstimates,
    _settled,
    change_between,
    differences,
)
from mismatch_cli.metrics.estimate import (
    EXTREME,
    FEW_DECIDE,
    FEW_PROMPTS,
    LARGEST_WEIGHTS,
    NO_SPREAD,
    NOT_MEASURED,
    Estimate,
)
from mismatch_cli.metrics.gap_table import METRICS
from mismatch_cli.rules.batch import TokenBatch
from tests.metrics.batches import make_batch
from tests.metrics.summaries import summarise

PROMPTS, SAMPLES, LENGTH = 40, 2, 25
TRUE_FACTOR = 1.3
MEAN, MEDIAN = "abs_d_mean", "abs_d_p50"


def measured(batch: TokenBatch) -> SummaryEstimates:
    return SummaryEstimates(summarise(batch))


def gaps(rng: np.random.Generator, prompt_scale_P: np.ndarray) -> np.ndarray:
    """Independent gaps whose size depends on the prompt: [responses, tokens]."""
    size_ST = np.abs(rng.normal(size=(PROMPTS * SAMPLES, LENGTH)))
    return size_ST * np.repeat(prompt_scale_P, SAMPLES)[:, None]


def of_gaps(d_ST: np.ndarray, first_prompt: int = 0) -> SummaryEstimates:
    mu_ST = np.full(d_ST.shape, -8.0)
    prompt_id = first_prompt + np.arange(len(d_ST)) // SAMPLES
    return measured(make_batch(mu_ST, logp_recomputed=(mu_ST + d_ST).ravel(), prompt_id=prompt_id))


def trials(count: int, paired: bool) -> list[dict[str, MetricDifference]]:
    """Two traces whose gaps differ by a factor of 1.3, on the same or on different prompts."""
    rng, rows = np.random.default_rng(0), []
    for trial in range(count):
        scale_P = rng.gamma(4, 0.02 / 4, PROMPTS)
        other_P = scale_P if paired else rng.gamma(4, 0.02 / 4, PROMPTS)
        first = of_gaps(gaps(rng, scale_P), 1000 * trial)
        other_ST = TRUE_FACTOR * gaps(rng, other_P)
        rows.append(differences(first, of_gaps(other_ST, 1000 * trial + 500 * (not paired))))
    return rows


@pytest.mark.slow
@pytest.mark.parametrize("paired", [True, False], ids=["same prompts", "other prompts"])
def test_intervals_cover_the_truth(paired):
    """60 pairs of traces: binomial limits around 95 %."""
    rng, rows = np.random.default_rng(1), trials(60, paired)
    d = np.abs(rng.normal(size=10**6)) * rng.gamma(4, 0.02 / 4, 10**6)
    for key, truth in ((MEAN, 0.02 * np.sqrt(2 / np.pi)), (MEDIAN, np.median(d))):
        for name, value in (("difference", (TRUE_FACTOR - 1) * truth), ("factor", TRUE_FACTOR)):
            intervals = [getattr(trial[key], name) for trial in rows]
            share = np.mean([each.low <= value <= each.high for each in intervals])
            assert share >= 0.86, (key, name)
    if paired:
        assert np.mean([trial[MEAN].more_than_noise for trial in rows]) > 0.99


def test_the_same_prompts_narrow_the_interval():
    """The same difference, with the same or with different prompts in the second trace: the
    point of pairing.
    """
    same, other = trials(10, True), trials(10, False)

    def width(rows, key):
        differences = [trial[key].difference for trial in rows]
        return np.mean([difference.high - difference.low for difference in differences])

    for key, least in ((MEAN, 2.0), (MEDIAN, 1.3)):
        assert width(other, key) > least * width(same, key), key


def test_a_trace_does_not_differ_from_itself(random_batch, take_responses):
    """In any order: only rounding is left, and rounding is not a difference."""
    batch = random_batch(3, responses=60, top_k=3)
    shuffled = take_responses(batch, np.random.default_rng(0).permutation(batch.num_responses))
    for other in (batch, shuffled):
        changes = differences(measured(batch), measured(other))
        assert list(changes) == list(METRICS)
        for key, row in changes.items():
            assert row.difference.value == 0, key
            assert row.difference.note in (NO_DIFFERENCE, EXTREME), key
            assert row.more_than_noise is None
            assert row.factor.value in (1, None), key


@pytest.mark.slow
def test_noise_exceeds_the_interval_in_one_of_twenty_means():
    """Traces that differ only by chance."""
    rng, marked = np.random.default_rng(2), 0
    for trial in range(60):
        scale_P = rng.gamma(4, 0.02 / 4, PROMPTS)
        sides = [of_gaps(gaps(rng, scale_P), 1000 * trial) for _ in range(2)]
        marked += differences(*sides)[MEAN].more_than_noise
    assert 0 < marked <= 9


def test_a_group_of_prompts_in_only_one_trace_leaves_the_other_unchanged():
    """Half of the prompts of B are in A: the same groups are left out of both."""
    rng = np.random.default_rng(3)
    scale_P = np.full(PROMPTS, 0.02)
    first_trace = of_gaps(gaps(rng, scale_P))
    second_trace = of_gaps(gaps(rng, scale_P), PROMPTS // 2)
    empty = [np.isnan(side.jackknife[MEDIAN].without_G) for side in (first_trace, second_trace)]
    assert (empty[0] != empty[1]).any()
    difference = differences(first_trace, second_trace)[MEDIAN].difference
    assert difference.low < 0 < difference.high
    assert difference.high - difference.low < 0.01


def test_a_metric_missing_in_one_trace_has_no_difference(random_batch):
    changes = differences(measured(random_batch(1, top_k=3)), measured(random_batch(1)))
    assert changes["tv_topk_mean"].difference.value is None
    assert changes["tv_topk_mean"].difference.note == NOT_MEASURED
    assert changes["tv_topk_mean"].more_than_noise is None
    assert changes["abs_d_mean"].difference.value == 0


def test_extremes_have_values_without_intervals(random_batch):
    changes = differences(measured(random_batch(1, gap=0.1)), measured(random_batch(1, gap=0.3)))
    largest = changes["abs_d_max"]
    assert (
        largest.difference.value > 0
        and largest.difference.low is None
        and largest.more_than_noise is None
    )
    assert largest.factor.value > 1 and largest.factor.low is None


def test_the_same_noise_in_both_makes_the_interval_vanish():
    """B is A with every gap 0.1 % larger: the interval of the difference is far narrower than
    those of both.
    """
    rng = np.random.default_rng(4)
    d_ST = gaps(rng, rng.gamma(4, 0.02 / 4, PROMPTS))
    first_trace, second_trace = (of_gaps(factor * d_ST) for factor in (1, 1.001))
    own, paired = (
        first_trace.estimates[MEAN],
        differences(first_trace, second_trace)[MEAN].difference,
    )
    assert 0 < paired.low < 0.001 * own.value < paired.high
    assert paired.high - paired.low < 0.01 * (own.high - own.low)


def test_each_value_keeps_its_own_reach():
    """Without correlation each end is at the root of the summed squares of the opposing reaches."""
    first_trace, second_trace = Estimate(1.0, 0.9, 1.3), Estimate(2.0, 1.6, 2.4)
    change = change_between(first_trace, second_trace, 0.0, 1.0)
    assert (change.low, change.high) == (
        pytest.approx(1 - 0.5, abs=1e-4),
        pytest.approx(1 + np.hypot(0.4, 0.1), abs=1e-4),
    )
    shared = change_between(first_trace, second_trace, 1.0, 1.0)
    assert (shared.low, shared.high) == (pytest.approx(1 - 0.3), pytest.approx(1 + 0.1))
    still = change_between(Estimate(1.0, note=NO_SPREAD), second_trace, 0.0, 1.0)
    assert (still.low, still.high) == (pytest.approx(0.6), pytest.approx(1.4))
    assert (
        change_between(Estimate(1.0, note=FEW_PROMPTS), second_trace, 0.0, 1.0).note == FEW_PROMPTS
    )
    few = Estimate(1.0, 0.9, 1.3, FEW_DECIDE)
    assert change_between(second_trace, few, 0.0, -1.0).note == FEW_DECIDE
    assert change.note is None


def test_metrics_that_few_responses_decide_have_no_interval(random_batch):
    first, other = (measured(random_batch(seed, responses=200, gap=0.01)) for seed in (1, 2))
    for key in ("chi2_sequence", "ess_sequence"):
        change = differences(first, other)[key]
        assert change.difference.note == LARGEST_WEIGHTS and change.factor.low is None


def test_a_distance_that_may_be_zero_has_a_factor_without_an_interval():
    rng, mu_ST = np.random.default_rng(5), np.full((PROMPTS * SAMPLES, LENGTH), -8.0)
    first_trace, second_trace = (of_gaps(0.01 * rng.normal(size=mu_ST.shape)) for _ in range(2))
    assert differences(first_trace, second_trace)["ratio_mean"].factor.note == AT_AGREEMENT


def test_few_prompts_have_no_interval(random_batch):
    first, other = random_batch(1, responses=8, gap=0.1), random_batch(1, responses=8, gap=0.3)
    assert all(
        row.more_than_noise is None
        for row in differences(measured(first), measured(other)).values()
    )


def test_the_factor_compares_distances_from_agreement():
    """Ratios of 1.01 and 1.02: twice as far from 1; a signed mean has no factor."""
    mu = [[-8.0, -8.0]] * 12

    def trace(ratio: float) -> SummaryEstimates:
        return measured(make_batch(mu, logp_recomputed=(np.array(mu) + np.log(ratio)).tolist()))

    changes = differences(trace(1.01), trace(1.02))
    assert changes["ratio_mean"].factor.value == pytest.approx(2, rel=1e-3)
    assert changes["d_mean"].factor.value is None
    assert changes["length_mean"].factor.value == 1
    # Nothing to divide by
    assert differences(trace(1.0), trace(1.02))["ratio_mean"].factor.value is None


def test_an_interval_that_ends_at_zero_shows_nothing():
    factor = Estimate(1.0, 1.0, 1.0)
    for low, high, shows in ((0.0, 1.0, False), (-1.0, 0.0, False), (1e-9, 1.0, True)):
        assert MetricDifference.of(Estimate(0.5, low, high), factor).more_than_noise is shows


def test_gaps_that_other_prompts_make_up_for_differ_by_0_with_an_interval():
    """The gaps of two halves of the prompts are exchanged: the mean alone is the same."""
    d_ST = np.tile(np.linspace(0.01, 0.05, PROMPTS).repeat(SAMPLES)[:, None], LENGTH)
    first, other = (of_gaps(rows_ST) for rows_ST in (d_ST, d_ST[::-1]))
    change = differences(first, other)[MEAN].difference
    assert change.value == pytest.approx(0, abs=1e-9) and change.note != NO_DIFFERENCE
    assert change.low < 0 < change.high


def test_a_factor_without_an_interval_says_why(random_batch):
    """An extreme has none, and neither has a gap that is gone."""
    first = random_batch(1, gap=0.1)
    equal = replace(first, logp_recomputed_T=first.logp_rollout_T)
    extreme = differences(measured(first), measured(random_batch(1, gap=0.3)))["abs_d_max"].factor
    assert extreme.value > 1 and extreme.note == EXTREME
    gone = differences(measured(first), measured(equal))[MEAN].factor
    assert (gone.value, gone.low, gone.note) == (0, None, "no gap: no interval")


@pytest.mark.parametrize("size", [1e-9, 1.0, 1e9])
def test_rounding_is_relative_to_the_values(size):
    """A part in 10¹⁵ is rounding at any size, a part in 10³ is not."""
    rounded, other = size * (1 + 1e-15), size * 1.001
    assert _settled(size, rounded) == size and _settled(size, other) == other
    settled_G = _settled(np.array([size, size]), np.array([rounded, other]))
    assert settled_G.tolist() == [size, other]
