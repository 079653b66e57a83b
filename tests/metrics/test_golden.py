"""The plain metrics, computed from the published formulas on seven tokens."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tests.metrics.summaries import summarise

MU = [[-0.1, -2.0, -0.5, -6.0], [-0.01, -1.0, -3.0]]
PI = [[-0.12, -1.7, -0.5, -4.5], [-0.02, -1.3, -3.2]]
GOLDEN = {
    "tv_binary_mean": 0.026874,
    "tv_binary_max": 0.095348,
    "tv_signed_max": 0.047348,  # oat prob_diff min with the opposite sign: q − p
    "tv_signed_min": -0.095348,
    "pearson": 0.994439,
    "k1": -0.181429,
    "k2": 0.176464,  # oat/tinker v2
    "k3": 0.298764,
    "chi2_token": 2.723968,
    "chi2_sequence": 16.761896,
    "mult_prob_error": 1.633294,
    "ratio_mean": 1.480192,
    "abs_d_mean": 0.332857,
    "abs_d_max": 1.5,
    "d_mean": 0.181429,
    "ratio_max": 4.481689,
    "ratio_min": 0.740818,
    "kl_binary_max": 0.021557,
    "kl_binary_mean": (0.001681 + 0.008093 + 0 + 0.004950 + 0.003053 + 0.021557 + 0.000975) / 7,
    "ratio_outside_0.8_1.25": 3 / 7,  # 1.349859, 4.481689, 0.740818
    "ratio_outside_0.8_1.28": 3 / 7,
}


@pytest.fixture(scope="module")
def metrics(make_batch) -> dict[str, float]:
    summary = summarise(make_batch(MU, logp_trainer=PI), pair="total")
    return {key: estimate.value for key, estimate in summary.result().metrics.items()}


@pytest.mark.parametrize("key", GOLDEN)
def test_published_value(metrics: dict[str, float], key: str) -> None:
    assert metrics[key] == pytest.approx(GOLDEN[key], abs=1.5e-6)


def test_the_spread_is_verls_without_ddof(metrics: dict[str, float]) -> None:
    # verl: ddof 1
    assert metrics["tv_binary_sd"] * math.sqrt(7 / 6) == pytest.approx(0.033792, abs=1e-6)


def test_by_hand_in_float64(metrics: dict[str, float]) -> None:
    mu, pi = (np.array([x for row in rows for x in row]) for rows in (MU, PI))
    d = pi - mu
    r = np.exp(d)
    assert metrics["kl_reverse_k1"] == pytest.approx(np.mean(r * d), rel=1e-6)
    assert metrics["kl_reverse_k3"] == pytest.approx(np.mean(r * d - (r - 1)), rel=1e-6)
    assert metrics["d_sd"] == pytest.approx(d.std(), rel=1e-6)
    assert metrics["ess_token"] == pytest.approx(1 / np.mean((r / r.mean()) ** 2), rel=1e-6)
    sequence = np.array([d[:4].sum(), d[4:].sum()])
    w = np.exp(sequence)
    assert w.tolist() == pytest.approx([5.929856, 0.600496], abs=2e-6)  # the ratios TRL forms
    assert metrics["ess_sequence"] == pytest.approx(1 / np.mean((w / w.mean()) ** 2), rel=1e-6)
    assert metrics["sequence_kl"] == pytest.approx(-sequence.mean(), rel=1e-6)
    assert metrics["sequence_d_sd"] == pytest.approx(sequence.std(), rel=1e-6)
    lengths = np.array([4, 3])
    slope = np.linalg.lstsq(lengths[:, None], sequence, rcond=None)[0][0]
    assert metrics["sequence_slope"] == pytest.approx(1000 * slope, rel=1e-6)
    assert metrics["length_mean"] == 3.5


def test_two_prompts_give_no_interval(make_batch) -> None:
    summary = summarise(make_batch(MU, logp_trainer=PI), pair="total")
    for key, estimate in summary.result().metrics.items():
        assert estimate.low is None and estimate.high is None, key
        assert estimate.note, key


def test_a_ratio_between_the_two_bands_is_outside_one_of_them(make_batch):
    summary = summarise(make_batch([[-1.0]], logp_trainer=[[-1.0 + math.log(1.26)]]), pair="total")
    values = {key: each.value for key, each in summary.result().metrics.items()}
    assert (values["ratio_outside_0.8_1.25"], values["ratio_outside_0.8_1.28"]) == (1, 0)
