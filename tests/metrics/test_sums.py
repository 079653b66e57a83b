"""Sums by prompt group: intervals of quantiles for clustered prompts, and sequence weights too
large for a float.
"""

from __future__ import annotations

import numpy as np
import pytest

from mismatch_cli.base.hashing import prompt_groups
from mismatch_cli.metrics.estimate import LARGEST_WEIGHTS
from mismatch_cli.metrics.gaps import token_gaps
from mismatch_cli.metrics.pairs import PAIRS
from mismatch_cli.metrics.sums import INDEX, SequenceWeights, token_sums
from tests.metrics.summaries import summarise


@pytest.mark.slow
def test_the_jackknife_covers_the_median_for_clustered_prompts(make_batch) -> None:
    """|d| = 0.02 · |normal| · gamma(4)/4: the median is 0.01133."""
    rng, covered, trials = np.random.default_rng(1), 0, 60
    truth = np.median(np.abs(rng.normal(size=10**6)) * 0.02 * rng.gamma(4, 1 / 4, 10**6))
    assert truth == pytest.approx(0.01133, abs=5e-5)
    for trial in range(trials):
        scale = np.repeat(0.02 * rng.gamma(4, 1 / 4, 64), 2)
        d = np.abs(rng.normal(size=(128, 50)) * scale[:, None]) + 1e-6
        prompt_id = [p + 1000 * trial for p in range(64) for _ in range(2)]
        mu = np.full((128, 50), -8.0)
        summary = summarise(
            make_batch(mu.tolist(), logp_recomputed=(mu + d).tolist(), prompt_id=prompt_id)
        )
        estimate = summary.result().metrics["abs_d_p50"]
        covered += estimate.low <= truth <= estimate.high
    assert 0.87 <= covered / trials <= 0.995


def _weights(prompt_id_S: np.ndarray, log_weight_S: np.ndarray) -> SequenceWeights:
    weights = SequenceWeights()
    weights.update(prompt_groups(prompt_id_S), log_weight_S)
    return weights


def test_sequence_weights_of_any_size_have_values_without_intervals() -> None:
    rng = np.random.default_rng(0)
    log_w, ids = 0.2 * rng.normal(size=40), np.arange(40)
    for shift in (0.0, 300.0, -2000.0, 5000.0):
        ess = _weights(ids, log_w + shift).result(40)["ess_sequence"]
        w = np.exp(log_w)
        assert ess.value == pytest.approx(w.sum() ** 2 / (40 * (w**2).sum()), rel=1e-9)
        # No valid one is known
        assert ess.low is None and ess.high is None and ess.note == LARGEST_WEIGHTS
    chi2 = _weights(ids, log_w).result(40)["chi2_sequence"]
    assert chi2.value == pytest.approx(np.mean(np.exp(2 * log_w)) - 1, rel=1e-12)


def test_weights_dominated_by_few_responses_have_no_interval() -> None:
    log_w = np.random.default_rng(0).normal(size=400)
    for estimate in _weights(np.arange(400), log_w).result(400).values():
        assert (
            estimate.value is not None and estimate.low is None and estimate.note == LARGEST_WEIGHTS
        )


def test_sequence_weights_merge_across_shifts() -> None:
    log_w, ids = np.array([1.0, -3.0, 700.0, 690.0, -np.inf, 2.0]), np.arange(6)
    whole = _weights(ids, log_w)
    for order in ([0, 1, 2], [2, 0, 1]):
        merged = SequenceWeights()
        for part in order:
            merged.merge(_weights(ids[2 * part : 2 * part + 2], log_w[2 * part : 2 * part + 2]))
        assert merged.shift == whole.shift
        np.testing.assert_allclose(merged.sums_G3, whole.sums_G3, rtol=1e-12)


def test_an_equal_trainer_has_full_sample_size_and_zero_chi2() -> None:
    result = _weights(np.arange(20), np.zeros(20)).result(20)
    assert result["ess_sequence"].value == 1 and result["chi2_sequence"].value == 0


def test_a_token_without_an_entropy_is_in_neither_its_sum_nor_its_count(make_batch) -> None:
    batch = make_batch([[-1.0] * 3], logp_recomputed=[[-1.0] * 3], entropy_trainer=[[1, np.nan, 3]])
    (gaps,) = token_gaps(batch, PAIRS["mismatch"])
    (sums_M,) = token_sums(gaps)
    assert (sums_M[INDEX["entropy"]], sums_M[INDEX["entropy_n"]]) == (4, 2)


def test_the_square_of_a_ratio_is_finite_where_float32_ends(make_batch) -> None:
    """r = e^59 = 4e25, which float32 can hold, and its square, which it cannot."""
    batch = make_batch([[-60.0, -1.0]], logp_recomputed=[[-1.0, -1.0]])
    (gaps,) = token_gaps(batch, PAIRS["mismatch"])
    (square,) = token_sums(gaps)[:, INDEX["less_1_less_1"]]
    assert square == pytest.approx(np.exp(118.0), rel=1e-4)
