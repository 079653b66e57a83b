"""Bootstrap intervals: coverage where prompts cluster, and sequence weights that no float can hold."""

from __future__ import annotations

import numpy as np
import pytest

from mismatch_cli.metrics.bootstrap import ResampledSums, SequenceWeights
from mismatch_cli.metrics.columns import COLUMNS, INDEX
from mismatch_cli.metrics.formulas import evaluate
from mismatch_cli.metrics.hashing import Prompts
from mismatch_cli.metrics.pairs import PAIRS
from mismatch_cli.metrics.summary import MismatchSummary


def _sums(abs_d_S: np.ndarray, tokens_S: np.ndarray) -> np.ndarray:
    sums_SM = np.zeros((len(abs_d_S), len(COLUMNS)))
    sums_SM[:, INDEX["abs_d"]], sums_SM[:, INDEX["supported"]] = abs_d_S, tokens_S
    return sums_SM


def test_95_percent_intervals_cover_the_truth_where_prompts_cluster() -> None:
    """60 prompts × 4 responses whose mean |d| is mostly the prompt's: 200 traces, truth 0.02."""
    rng, covered, width, naive = np.random.default_rng(0), 0, [], []
    for trial in range(200):
        prompt_mean = 0.02 * rng.gamma(4, 1 / 4, 60)
        tokens_S = rng.integers(50, 150, 240)
        mean_S = np.repeat(prompt_mean, 4) * rng.gamma(20, 1 / 20, 240)
        sums = ResampledSums(len(COLUMNS))
        sums.update(Prompts.of(np.repeat(np.arange(60), 4) + 1000 * trial, 200), _sums(mean_S * tokens_S, tokens_S))
        estimate = sums.result(evaluate, 60)["abs_d_mean"]
        covered += estimate.low <= 0.02 <= estimate.high
        width.append(estimate.high - estimate.low)
        naive.append(4 * mean_S.std() / np.sqrt(240))
    assert 0.88 <= covered / 200 <= 0.99
    assert np.mean(width) > 1.5 * np.mean(naive)  # resampling responses would be too sure of itself


def test_jackknife_covers_the_median_where_prompts_cluster(make_batch) -> None:
    """|d| = 0.02 · |normal| · gamma(4)/4: the median is 0.01133."""
    rng, covered, trials = np.random.default_rng(1), 0, 60
    truth = np.median(np.abs(rng.normal(size=10**6)) * 0.02 * rng.gamma(4, 1 / 4, 10**6))
    assert truth == pytest.approx(0.01133, abs=5e-5)
    for trial in range(trials):
        scale = np.repeat(0.02 * rng.gamma(4, 1 / 4, 64), 2)
        d = np.abs(rng.normal(size=(128, 50)) * scale[:, None]) + 1e-6
        prompt_id = [p + 1000 * trial for p in range(64) for _ in range(2)]
        mu = np.full((128, 50), -8.0)
        summary = MismatchSummary(PAIRS["mismatch"])
        summary.update(make_batch(mu.tolist(), logp_recomputed=(mu + d).tolist(), prompt_id=prompt_id))
        estimate = summary.result()["metrics"]["abs_d_p50"]
        covered += estimate["low"] <= truth <= estimate["high"]
    assert 0.87 <= covered / trials <= 0.995


def _weights(prompt_id_S: np.ndarray, log_weight_S: np.ndarray) -> SequenceWeights:
    weights = SequenceWeights(50)
    weights.update(Prompts.of(prompt_id_S, 50), log_weight_S)
    return weights


def test_sequence_weights_of_any_size() -> None:
    rng = np.random.default_rng(0)
    log_w, ids = rng.normal(size=40), np.arange(40)
    for shift in (0.0, 300.0, -2000.0, 5000.0):
        ess = _weights(ids, log_w + shift).result(40)["ess_sequence"]
        w = np.exp(log_w)
        assert ess.value == pytest.approx(w.sum() ** 2 / (40 * (w**2).sum()), rel=1e-9)
        assert 0 < ess.low <= ess.value <= ess.high
    chi2 = _weights(ids, log_w).result(40)["chi2_sequence"]
    assert chi2.value == pytest.approx(np.mean(np.exp(2 * log_w)) - 1, rel=1e-12)


def test_sequence_weights_merge_across_shifts() -> None:
    log_w, ids = np.array([1.0, -3.0, 700.0, 690.0, -np.inf, 2.0]), np.arange(6)
    whole = _weights(ids, log_w)
    for order in ([0, 1, 2], [2, 0, 1]):
        merged = SequenceWeights(50)
        for part in order:
            merged.merge(_weights(ids[2 * part : 2 * part + 2], log_w[2 * part : 2 * part + 2]))
        assert merged.shift == whole.shift
        np.testing.assert_allclose(merged.sums_R3, whole.sums_R3, rtol=1e-12)


def test_an_equal_trainer_has_full_sample_size_and_no_chi2() -> None:
    result = _weights(np.arange(20), np.zeros(20)).result(20)
    assert result["ess_sequence"].value == 1 and result["chi2_sequence"].value == 0
